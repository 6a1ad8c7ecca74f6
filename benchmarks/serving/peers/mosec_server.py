"""The model behind mosec; started by contenders/mosec.py with the case and the largest batch in the environment."""

from __future__ import annotations

import os

import numpy as np
import torch
from mosec import Server, Worker

from benchmarks.serving.cases import CASES
from benchmarks.serving.models import build, packed

CASE = CASES[os.environ["BENCH_CASE"]]
BATCH = int(os.environ["BENCH_BATCH"])


class Served(Worker):  # type: ignore[misc]  # its base is untyped here
    """Raw bytes in, raw bytes out; the batch is gathered into a buffer that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self._module = build(CASE.model)
        self._staging = np.zeros((BATCH * CASE.rows, *CASE.shape), CASE.dtype)
        self._batch = torch.from_numpy(self._staging)
        packed(self._module, self._batch)

    def deserialize(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data):  # type: ignore[no-untyped-def]  # one item where the largest batch is 1, else a list
        items = [data] if BATCH == 1 else data
        rows = CASE.rows
        for i, item in enumerate(items):
            self._staging[i * rows : (i + 1) * rows] = np.frombuffer(item, CASE.dtype).reshape(rows, *CASE.shape)
        outputs = packed(self._module, self._batch[: len(items) * rows]).numpy()
        answers = [outputs[i * rows : (i + 1) * rows].tobytes() for i in range(len(items))]
        return answers[0] if BATCH == 1 else answers


if __name__ == "__main__":
    server = Server()
    server.append_worker(Served, num=1, max_batch_size=BATCH, max_wait_time=1)
    server.run()
