"""A gateway that does what it is told, and who calls it over HTTP/2 lines of our own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc

from jurybox import native
from jurybox.client.remote.http2_calls import Http2Calls, Http2Started

CALL, MESSAGE, GONE = 0, 1, 4  # events of native.GrpcConnection
HOLD, CUT, DRAIN = "hold", "cut", "drain"


class Fail(NamedTuple):
    """How a call ends that does not succeed."""

    status: int
    details: str
    trailing: tuple[tuple[str, str], ...]


BUSY = Fail(14, "not now", ())


class Peer:
    """A connection of the gateway."""

    def __init__(self, gateway: Gateway, accepted: socket.socket) -> None:
        budget = native.Budget((1 << 30, 1 << 30, 1000), (1 << 30, 1 << 30, 1000))
        self.http2 = native.GrpcConnection(1 << 30, 1 << 16, 100, native.Account(budget, 0))
        self.gateway, self.socket, self.lock = gateway, accepted, threading.RLock()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while data := self.socket.recv(1 << 16):
                with self.lock:
                    self.heard(data)
        self.socket.close()

    def heard(self, data: bytes) -> None:
        events = self.http2.feed(data, len(data))
        while self.http2.more:
            events += self.http2.feed(b"", 0)
        for event in events:
            assert event is not None
            kind, call, value = event
            if kind == CALL:
                self.gateway.paths.append(bytes(value[0]).decode())
                self.gateway.metadata.append(dict(self.http2.metadata(call)))
            elif kind == MESSAGE:
                self.http2.taken(call, len(value))
                self.gateway.asked.append(bytes(value))
                self.do(call, bytes(value), self.gateway.answers(bytes(value)))
            elif kind == GONE:
                self.gateway.gone.append(call)
        self.flush()

    def do(self, call: int, message: bytes, what: Any) -> None:
        if what == HOLD:
            self.gateway.held.append((self, call, message))
        elif what == CUT:
            raise EOFError
        elif isinstance(what, Fail):
            self.http2.finish(call, what.status, what.details, what.trailing)
        else:
            if what == DRAIN:
                self.http2.drain()
            self.http2.send(call, b"to " + message)
            self.http2.finish(call, 0, "", ())

    def answer(self, call: int, message: bytes, what: Any = None) -> None:
        with self.lock:
            self.do(call, message, what)
            self.flush()

    def flush(self) -> None:
        while data := self.http2.outgoing():
            self.socket.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Gateway:
    """Answers each call as the next of `script` says, or with "to " and its message."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.asked: list[bytes] = []
        self.paths: list[str] = []
        self.metadata: list[dict[bytes, bytes]] = []
        self.held: list[tuple[Peer, int, bytes]] = []
        self.gone: list[int] = []
        self.peers: list[Peer] = []
        self.listen()

    def listen(self, port: int = 0) -> None:
        self.socket = socket.create_server(("127.0.0.1", port))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, args=(self.socket,), daemon=True).start()

    def accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.peers.append(Peer(self, listening.accept()[0]))
                self.peers[-1].thread.start()

    def answers(self, message: bytes) -> Any:
        return self.script.pop(0) if self.script else None

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def cut(self) -> None:
        for peer in self.peers:
            peer.close()

    def give_up(self, *, asks: bool) -> None:
        """Cut all connections, perhaps after a question whether the client is still there, and forget them."""
        for peer in self.peers:
            if asks:
                with peer.lock:
                    peer.http2.ping()
                    peer.flush()
            peer.close()
            peer.thread.join(30)
        self.peers.clear()

    def deaf(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def close(self) -> None:
        self.deaf()
        self.cut()
        for peer in self.peers:
            if peer.thread.ident:
                peer.thread.join(30)


class Started:
    """The calls of a lane, and how they ended."""

    def __init__(self, calls: Http2Calls) -> None:
        self.calls: Http2Started = calls.started()
        self.ended: dict[bytes, Any] = {}

    def start(self, request: bytes, timeout: float = 30.0) -> None:
        self.calls.start(request, timeout, lambda outcome: self.ended.__setitem__(request, outcome))

    def wait_for(self, *requests: bytes) -> list[Any]:
        until = time.monotonic() + 30
        while not all(request in self.ended for request in requests):
            assert time.monotonic() < until
            self.calls.wait(1.0)
        return [self.ended[request] for request in requests]


def ways(calls: Http2Calls, started: Started) -> list[Callable[[bytes], Any]]:
    """Both ways to make a call, which raise its failure."""

    def later(request: bytes) -> Any:
        started.start(request)
        (outcome,) = started.wait_for(request)
        if isinstance(outcome, grpc.RpcError):
            raise outcome
        return outcome

    return [lambda request: calls.ask(request, 30.0), later]
