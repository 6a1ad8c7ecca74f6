"""The classic multiprocessing design: one request queue, a reply queue for each client, a shared-memory block that is
created and unlinked for every request."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.cases import CASES, Case
from benchmarks.serving.contender import REQUEST_TIMEOUT, Ask, Contender, unpacked


def serve(case_name: str, requests: Any, replies: list[Any]) -> None:
    """The server's process: take all that waits, attach each block, one forward, answer each."""
    import torch

    from benchmarks.serving.models import build, packed

    case = CASES[case_name]
    module = build(case.model)
    staging = np.zeros((max(case.max_batch, case.rows), *case.shape), case.dtype)
    batch = torch.from_numpy(staging)
    limit = len(staging) // case.rows
    packed(module, batch)
    while True:
        waiting = [requests.get()]
        try:
            while len(waiting) < limit:
                waiting.append(requests.get_nowait())
        except queue.Empty:
            pass
        for i, (_, name) in enumerate(waiting):
            block = SharedMemory(name)
            rows = np.ndarray((case.rows, *case.shape), case.dtype, block.buf)
            staging[i * case.rows : (i + 1) * case.rows] = rows
            del rows  # its buffer keeps the block from closing
            block.close()
        outputs = packed(module, batch[: len(waiting) * case.rows]).numpy()
        for i, (index, _) in enumerate(waiting):
            replies[index].put(outputs[i * case.rows : (i + 1) * case.rows].tobytes())


class ClassicAsk(Ask):
    """A block and two queues."""

    def __init__(self, case: Case, index: int, requests: Any, reply: Any) -> None:
        self._case = case
        self._index = index
        self._requests = requests
        self._reply = reply

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        block = SharedMemory(create=True, size=inputs.nbytes)
        np.ndarray(inputs.shape, inputs.dtype, block.buf)[...] = inputs
        self._requests.put((self._index, block.name))
        body = self._reply.get(timeout=REQUEST_TIMEOUT)
        block.close()
        block.unlink()
        return unpacked(self._case, body)


class Classic(Contender):
    title = "classic multiprocessing"

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests = context.Queue()
        self._replies = [context.Queue() for _ in range(self.clients)]
        self._server = context.Process(target=serve, args=(self.case.name, self._requests, self._replies), daemon=True)
        self._server.start()
        ask = ClassicAsk(self.case, 0, self._requests, self._replies[0])
        shape = self.case.shape if self.case.single else (self.case.rows, *self.case.shape)
        ask(np.zeros(shape, self.case.dtype))

    def endpoint(self, index: int) -> tuple[Any, Any]:
        return self._requests, self._replies[index]

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> ClassicAsk:
        return ClassicAsk(case, index, *endpoint)

    def stop(self) -> None:
        self._server.terminate()
        self._server.join()
