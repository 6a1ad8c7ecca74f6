"""The yardstick: a plain ZeroMQ ROUTER loop with the payloads in the messages.

A good implementation with only ZeroMQ and torch: batch while busy, reused buffers, no copy of large messages inside
ZeroMQ. No leases, no deadlines, no restarts, no several models, no metrics.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.cases import CASES, Case
from benchmarks.serving.contender import REQUEST_TIMEOUT, Ask, Contender, unpacked
from benchmarks.serving.contenders.http_ask import free_port

_LARGE = 65536  # bytes; below it ZeroMQ's copying is cheaper than keeping track of who owns the memory


def serve(case_name: str, address: str) -> None:
    """The server's process: receive all that waits, one forward, answer each."""
    import torch
    import zmq

    from benchmarks.serving.models import build, packed

    case = CASES[case_name]
    module = build(case.model)
    rows = case.rows
    row_bytes = case.input_bytes // rows
    staging = np.zeros((max(case.max_batch, rows), *case.shape), case.dtype)
    table, batch = staging.view(np.uint8).reshape(len(staging), -1), torch.from_numpy(staging)
    limit = len(staging) // rows
    copy = case.input_bytes < _LARGE
    width = case.output_width * 4 * rows
    packed(module, batch)

    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address)
    while True:
        socket.poll()
        peers: list[bytes | zmq.Frame] = []
        try:
            while len(peers) < limit:
                peer, body = socket.recv_multipart(zmq.NOBLOCK, copy)
                at = len(peers) * rows
                data: Any = body if isinstance(body, bytes) else body.buffer
                table[at : at + rows] = np.frombuffer(data, np.uint8).reshape(rows, row_bytes)
                peers.append(peer)
        except zmq.Again:
            pass
        if not peers:
            continue
        outputs = packed(module, batch[: len(peers) * rows]).numpy().data.cast("B")
        for i, peer in enumerate(peers):
            socket.send_multipart((peer, outputs[i * width : (i + 1) * width]))


class PlainAsk(Ask):
    """A DEALER socket: one message there, one back."""

    def __init__(self, case: Case, address: str) -> None:
        import zmq

        self._case = case
        self._copy = case.input_bytes < _LARGE
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(REQUEST_TIMEOUT * 1000))
        self._socket.connect(address)

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        self._socket.send(inputs.data, 0, self._copy)
        return unpacked(self._case, self._socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


class PlainZmq(Contender):
    title = "plain ZeroMQ"
    packages = ("pyzmq",)

    def start(self) -> None:
        self._address = self.address()
        context = multiprocessing.get_context("spawn")
        self._server = context.Process(target=serve, args=(self.case.name, self._address), daemon=True)
        self._server.start()
        ask = PlainAsk(self.case, self._address)
        one = np.zeros((self.case.rows, *self.case.shape), self.case.dtype)
        ask(one)
        ask.close()

    def address(self) -> str:
        return f"ipc://{self.folder}/plain"

    def endpoint(self, index: int) -> str:
        return self._address

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> PlainAsk:
        return PlainAsk(case, endpoint)

    def stop(self) -> None:
        self._server.terminate()
        self._server.join()


class PlainZmqTcp(PlainZmq):
    title = "plain ZeroMQ over TCP"

    def address(self) -> str:
        return f"tcp://127.0.0.1:{free_port()}"
