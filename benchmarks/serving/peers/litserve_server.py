"""The model behind LitServe; started by contenders/litserve.py with the case and the port in the environment."""

# Not `from __future__ import annotations`: LitServe reads those of decode_request as they stand.
import os
from typing import Annotated

import litserve
import numpy as np
import torch
from fastapi import Body, Response

from benchmarks.serving.cases import CASES
from benchmarks.serving.models import build, packed

CASE = CASES[os.environ["BENCH_CASE"]]
BATCH = max(1, CASE.max_batch // CASE.rows)
# Without a wait its batch loop never sleeps and takes a core from the others; a millisecond lets it.
WAIT = float(os.environ.get("BENCH_LITSERVE_WAIT", "0.001"))


class Served(litserve.LitAPI):  # type: ignore[misc]  # its base is untyped here
    """Raw bytes in, raw bytes out; the batch is gathered into a buffer that is kept."""

    def setup(self, device: str) -> None:
        self._module = build(CASE.model)
        self._staging = np.zeros((BATCH * CASE.rows, *CASE.shape), CASE.dtype)
        self._batch = torch.from_numpy(self._staging)
        packed(self._module, self._batch)

    def decode_request(self, request: Annotated[bytes, Body()]) -> bytes:
        return request

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return list(inputs)

    def predict(self, items: list[bytes]) -> list[bytes]:
        rows = CASE.rows
        for i, item in enumerate(items):
            self._staging[i * rows : (i + 1) * rows] = np.frombuffer(item, CASE.dtype).reshape(rows, *CASE.shape)
        outputs = packed(self._module, self._batch[: len(items) * rows]).numpy()
        return [outputs[i * rows : (i + 1) * rows].tobytes() for i in range(len(items))]

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        return output

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="application/octet-stream")


if __name__ == "__main__":
    api = Served(max_batch_size=BATCH, batch_timeout=WAIT)
    server = litserve.LitServer(api, accelerator="cpu", fast_queue=True, timeout=30)
    server.run(
        host="127.0.0.1",
        port=int(os.environ["BENCH_PORT"]),
        num_api_servers=1,
        log_level="error",
        generate_client_file=False,
    )
