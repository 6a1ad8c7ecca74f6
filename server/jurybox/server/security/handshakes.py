"""TLS handshakes that do not go on: an event loop counts them only when they are done, and so would let in any number.

The event loop of a process with TLS accepts the connections itself, for all of its doors: `WithHandshakes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Any

from jurybox.protocol.descriptors import exhausted

MOST_HANDSHAKES = 256  # of a port at once; with more, the one that began first is ended
HANDSHAKE = 10.0  # seconds
_AT_ONCE = 16  # connections that are accepted before others come first: each costs half a millisecond
_PAUSE = 0.5  # seconds until connections are accepted again after there was no descriptor for one


class TlsServer(asyncio.AbstractServer):
    """A listening socket whose connections speak TLS, in place of an event loop's own server.

    Args:
        factory: makes the protocol of a connection.
        listener: the socket.
        context: certificate and key.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        factory: Callable[[], asyncio.BaseProtocol],
        listener: socket.socket,
        context: ssl.SSLContext,
    ) -> None:
        self._loop, self._factory, self._listener, self._context = loop, factory, listener, context
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._again: asyncio.TimerHandle | None = None
        self._serving = False
        listener.setblocking(False)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The listening socket."""
        return (self._listener,) if self._serving else ()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """See `asyncio.Server`."""
        return self._loop

    def is_serving(self) -> bool:
        """See `asyncio.Server`."""
        return self._serving

    async def start_serving(self) -> None:
        """See `asyncio.Server`."""
        if not self._serving:
            self._serving = True
            self._loop.add_reader(self._listener, self._accept)

    async def serve_forever(self) -> None:
        """See `asyncio.Server`."""
        await self.start_serving()
        await self._loop.create_future()

    def close(self) -> None:
        """Accept no more, and end the handshakes; connections stay."""
        if self._serving:
            self._serving = False
            self._loop.remove_reader(self._listener)
            self._listener.close()
        if self._again is not None:
            self._again.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """See `asyncio.Server`."""
        if self._handshakes:
            await asyncio.wait(list(self._handshakes))

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                made, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if exhausted(error) or error.errno in (errno.ENOBUFS, errno.ENOMEM):
                    self._loop.remove_reader(self._listener)
                    self._again = self._loop.call_later(_PAUSE, self._listen)
                    return
                continue  # the client is gone already
            made.setblocking(False)
            with contextlib.suppress(OSError):  # it is gone
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = self._loop.create_task(self._greet(made))
            self._handshakes[handshake] = None
            handshake.add_done_callback(lambda done: self._handshakes.pop(done, None))
            if len(self._handshakes) > MOST_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()

    def _listen(self) -> None:
        self._again = None
        if self._serving:
            self._loop.add_reader(self._listener, self._accept)

    async def _greet(self, made: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory, made, ssl=self._context, ssl_handshake_timeout=HANDSHAKE
            )
        except OSError:  # also ssl.SSLError and a time-out: it does not speak TLS, or is gone
            made.close()
        except BaseException:
            made.close()
            raise


class WithHandshakes:
    """What an event loop gets in addition: its servers with TLS and a socket limit the handshakes."""

    async def create_server(self, protocol_factory: Any, *arguments: Any, **named: Any) -> Any:
        """See `asyncio.AbstractEventLoop.create_server`."""
        context, listener = named.get("ssl"), named.get("sock")
        if context is None or listener is None:
            return await super().create_server(protocol_factory, *arguments, **named)  # type: ignore[misc]
        loop: Any = self
        server = TlsServer(loop, protocol_factory, listener, context)
        if named.get("start_serving", True):
            await server.start_serving()
        return server
