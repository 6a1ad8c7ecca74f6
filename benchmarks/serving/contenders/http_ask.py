"""A lean HTTP client for peers with HTTP only: raw bytes in a POST, over one kept-alive connection.

`http.client` and `requests` would cost more per request than some of the servers, at the peers' expense.
"""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from benchmarks.serving.cases import Case
from benchmarks.serving.contender import REQUEST_TIMEOUT, Ask, unpacked

_TOGETHER = 65536  # bytes up to which head and body go in one system call
_PAUSE = 0.05


class HttpError(Exception):
    """The server answered something else than 200."""


class HttpAsk(Ask):
    """POST of an input's bytes; the answer is the packed floats of the outputs.

    Args:
        before: of every body, the same each time; `headers`: lines more of the head, each with its line end.
    """

    def __init__(self, case: Case, port: int, path: str, before: bytes = b"", headers: str = "") -> None:
        self._case = case
        self._socket = socket.create_connection(("127.0.0.1", port), REQUEST_TIMEOUT)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/octet-stream\r\n"
            f"{headers}Content-Length: {len(before) + case.input_bytes}\r\n\r\n"
        ).encode() + before

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        self._send(inputs)
        return unpacked(self._case, self._body())

    def _send(self, inputs: NDArray[Any]) -> None:
        if inputs.nbytes <= _TOGETHER:
            self._socket.sendall(self._head + inputs.tobytes())
        else:
            self._socket.sendall(self._head, socket.MSG_MORE)
            self._socket.sendall(inputs.data)

    def _body(self) -> bytes:
        received = self._socket.recv(65536)
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += self._more()
        head = received[:end].lower()
        at = head.find(b"content-length:")
        if not head.startswith(b"http/1.1 200") or at < 0:
            raise HttpError(received[:300].decode(errors="replace"))
        length = int(head[at + 15 :].split(b"\r\n", 1)[0])
        while len(received) < end + 4 + length:
            received += self._more()
        return received[end + 4 :]

    def _more(self) -> bytes:
        part = self._socket.recv(65536)
        if not part:
            raise HttpError("the server closed the connection")
        return part

    def close(self) -> None:
        self._socket.close()


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, timeout: float, alive: Callable[[], bool]) -> None:
    """Wait until a server answers a GET with 200."""
    until = time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2.0) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass
        if not alive():
            raise RuntimeError("the server ended while starting: see the log")
        if time.monotonic() > until:
            raise TimeoutError(f"{url} did not answer within {timeout:.0f} s")
        time.sleep(_PAUSE)
