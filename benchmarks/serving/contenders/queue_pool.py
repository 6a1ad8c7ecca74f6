"""The classic multiprocessing design: one request queue, and for each client a reply queue and a block of shared memory
that is created once. Only a client's number passes the queues; rows and answers are in its block."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.cases import CASES, Case
from benchmarks.serving.contender import REQUEST_TIMEOUT, Ask, Contender


class Block:
    """A client's request and, behind it, the answer to it, as arrays on shared memory."""

    def __init__(self, case: Case, name: str) -> None:
        self._memory = SharedMemory(name)
        self.rows: NDArray[Any] = np.ndarray((case.rows, *case.shape), case.dtype, self._memory.buf)
        self.answer: NDArray[np.float32] = np.ndarray(
            (case.rows, case.output_width), np.float32, self._memory.buf, _answer_at(case)
        )

    def close(self) -> None:
        del self.rows, self.answer  # their buffers keep the memory from closing
        self._memory.close()


def _answer_at(case: Case) -> int:
    """Bytes before the answer, a whole number of cache lines."""
    return -(-case.input_bytes // 64) * 64


def serve(case_name: str, names: list[str], requests: Any, replies: list[Any]) -> None:
    """The server's process: take all that waits, one forward, answer each."""
    import torch

    from benchmarks.serving.models import build, packed

    case = CASES[case_name]
    module = build(case.model)
    blocks = [Block(case, name) for name in names]
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
        for i, index in enumerate(waiting):
            staging[i * case.rows : (i + 1) * case.rows] = blocks[index].rows
        outputs = packed(module, batch[: len(waiting) * case.rows]).numpy()
        for i, index in enumerate(waiting):
            blocks[index].answer[...] = outputs[i * case.rows : (i + 1) * case.rows]
            replies[index].put(True)


class PoolAsk(Ask):
    """A block and two queues."""

    def __init__(self, case: Case, index: int, name: str, requests: Any, reply: Any) -> None:
        self._case = case
        self._index = index
        self._block = Block(case, name)
        self._requests = requests
        self._reply = reply

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        self._block.rows[...] = inputs
        self._requests.put(self._index)
        self._reply.get(timeout=REQUEST_TIMEOUT)
        return self._case.split(self._block.answer.copy())

    def close(self) -> None:
        self._block.close()


class QueuePool(Contender):
    title = "classic queue pool, a shared block a client"

    def start(self) -> None:
        case, context = self.case, multiprocessing.get_context("spawn")
        size = _answer_at(case) + 4 * case.rows * case.output_width
        self._blocks = [SharedMemory(create=True, size=size) for _ in range(self.clients)]
        self._requests = context.Queue()
        self._replies = [context.Queue() for _ in range(self.clients)]
        names = [block.name for block in self._blocks]
        self._server = context.Process(
            target=serve, args=(case.name, names, self._requests, self._replies), daemon=True
        )
        self._server.start()
        ask = self.client(case, 0, self.endpoint(0))
        ask(np.zeros(case.shape if case.single else (case.rows, *case.shape), case.dtype))
        ask.close()

    def endpoint(self, index: int) -> tuple[str, Any, Any]:
        return self._blocks[index].name, self._requests, self._replies[index]

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> PoolAsk:
        return PoolAsk(case, index, *endpoint)

    def stop(self) -> None:
        self._server.terminate()
        self._server.join()
        for block in self._blocks:
            block.close()
            block.unlink()
