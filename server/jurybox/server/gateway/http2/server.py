"""Listening for gRPC clients in front of grpc.aio."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping

from jurybox.server.gateway.http2.front import Front, Handler
from jurybox.server.gateway.http2.relay import Relay

_TURN = 0.02  # seconds between two looks whether calls are done


def inner_address() -> str | None:
    """Where grpc.aio listens behind a front: a name without a file, so that nothing is left of a killed gateway.

    None where the platform has no such names.
    """
    return f"jurybox-gateway-{os.getpid()}-{os.urandom(8).hex()}" if sys.platform == "linux" else None


class FrontServer:
    """Every connection that clients make.

    Args:
        listener: a listening socket.
        handlers: by path, for the calls that are answered here.
        inner: abstract name of the Unix socket where all others are.
        most: bytes of a message.
    """

    def __init__(self, listener: socket.socket, handlers: Mapping[str, Handler], inner: str, most: int) -> None:
        self._listener = listener
        self._handlers = {path.encode(): handler for path, handler in handlers.items()}
        self._inner = "\0" + inner
        self._most = most
        self._fronts: set[Front] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Accept connections from now on."""
        loop = asyncio.get_running_loop()

        async def way(relay: Relay) -> None:
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            inner.setblocking(False)
            await loop.sock_connect(inner, self._inner)
            await loop.create_unix_connection(lambda: relay, sock=inner)

        self._server = await loop.create_server(
            lambda: Front(self._handlers, way, self._most, self._fronts), sock=self._listener
        )

    async def stop(self, grace: float) -> None:
        """Take no more calls, and give those in progress a grace."""
        if self._server is not None:
            self._server.close()
        for front in list(self._fronts):
            front.leave()
        for _ in range(int(grace / _TURN)):
            if not any(front.busy for front in self._fronts):
                break
            await asyncio.sleep(_TURN)
        for front in list(self._fronts):
            front.end()
