"""The HTTP server: uvicorn on a socket that is bound before the application starts.

Requests are parsed by httptools (llhttp, in C), which takes 0.15 ms less of a lone request than h11; by h11 where there
is no httptools. Of the two only h11 bounds what it holds, so here is what bounds the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jurybox.protocol.address import is_loopback
from jurybox.server.security.access import Access, Room
from jurybox.server.security.http import guarded
from jurybox.server.settings.endpoints import split_host

_BACKLOG = 512


class CannotListen(OSError):
    """The address cannot be bound; the message says why and which setting to change."""


def listen(address: str, setting: str = "http") -> socket.socket:
    """Bind and listen on "host:port"; port 0 takes a free port.

    Args:
        setting: whose address it is, "http", "grpc" or "dialects.NAME", for messages.

    Raises:
        CannotListen: the port is taken, or the host is not this one.
    """
    host, port = split_host(address)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # back at once after a kill
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = f"port {port} is in use by another program" if taken else error.strerror or str(error)
        name = {"http": "HTTP", "grpc": "gRPC"}.get(setting)
        if name is None:
            raise CannotListen(f"cannot listen on http://{address}: {why}; set another {setting}.port") from error
        raise CannotListen(
            f"cannot listen on {setting}://{address}: {why}; set server.{setting} to another host:port, or to '' for "
            f"no {name}"
        ) from error
    return listener


def bound_name(host: str, port: int) -> str:
    """ "host:port", with brackets for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # a Python that it has no wheel for
    HttpToolsProtocol = None  # type: ignore[assignment, misc]

_CONNECTIONS = 512  # open at once; beyond that requests are answered 503
_KEEP_ALIVE = 75  # seconds that a connection may rest between requests: longer than the clients' pools keep theirs,
# so that none sends a request just when its connection is closed (httpx 5, aiohttp 15; uvicorn would take 5)
_MOST_HEADERS = 32 << 10  # bytes of a request's line and headers
GRACE = 2  # seconds that requests in progress get when the gateway stops


_MOST_PIPELINED = 64  # requests of one connection that wait behind the one that is being answered


class _Unfit(ValueError):
    """What came is more than is taken; httptools makes an invalid request of it, which is answered 400."""


if HttpToolsProtocol is None:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        """A connection as uvicorn has it."""

        @property
        def between(self) -> bool:
            """Whether all requests were answered and nothing has come of the next."""
            conn = self.conn
            return conn.our_state is h11.IDLE and conn.their_state is h11.IDLE and not conn.trailing_data[0]

else:

    class Connection(HttpToolsProtocol):  # type: ignore[no-redef]
        """Bounds a request's line and headers, what stands around a body's parts, and the requests that wait.

        As h11 does, it wants one Host of a request of HTTP/1.1.
        """

        _cycles: tuple[Any, ...] = ()  # requests that are not answered yet
        _reading = False  # whether a request has begun and is not whole yet
        _loose = 0  # bytes since the last part of a body, or the last whole request
        _headers_bytes = 0  # of headers, and of what follows a body

        @property
        def between(self) -> bool:
            """Whether all requests were answered and nothing has come of the next."""
            return not self._reading and all(cycle.response_complete for cycle in self._cycles)

        def data_received(self, data: bytes) -> None:
            """As asyncio.Protocol. A header is told of when it is whole, so one that never ends is counted here."""
            self._loose += len(data)
            super().data_received(data)
            if self._loose > _MOST_HEADERS and not self.transport.is_closing():
                self.send_400_response("Headers too large.")

        def on_message_begin(self) -> None:
            """As httptools asks."""
            if len(self.pipeline) >= _MOST_PIPELINED:
                raise _Unfit
            self._headers_bytes, self._reading = 0, True
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            """As httptools asks."""
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            """As httptools asks."""
            self._count(len(name) + len(value) + 4)  # and what stands between them
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """As httptools asks."""
            hosts = [value for name, value in self.headers if name == b"host"]
            if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
                raise _Unfit
            super().on_headers_complete()
            self._cycles = (*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle)

        def send_400_response(self, msg: str) -> None:
            """Answer what is no request. Those before it get no answer behind this one."""
            self._forget_cycles()
            super().send_400_response(msg)

        def connection_lost(self, exc: Exception | None) -> None:
            """As asyncio.Protocol. uvicorn tells the last request alone, and the one being answered is another."""
            self._forget_cycles()
            super().connection_lost(exc)

        def _forget_cycles(self) -> None:
            for cycle in self._cycles:
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
            self._cycles = ()

        def on_body(self, body: bytes) -> None:
            """As httptools asks."""
            self._loose = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            """As httptools asks."""
            self._loose, self._reading = 0, False
            super().on_message_complete()

        def _count(self, size: int) -> None:
            self._headers_bytes += size
            if self._headers_bytes > _MOST_HEADERS:
                raise _Unfit


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers: the supervisor handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class HttpServer:
    """An HTTP server that listens from its construction; connections made before `run` are served then.

    Args:
        address: "host:port"; port 0 takes a free one.
        access: the walls before the application.
        setting: whose address it is, as `listen` has it.
        protocol: of its connections, instead of uvicorn's.
        room: for the bytes of all bodies, where the protocol accounts there as well.

    Attributes:
        bound: where it really listens.

    Raises:
        CannotListen, ValueError: the address cannot be had.
    """

    def __init__(
        self,
        address: str,
        app: ASGIApp,
        access: Access,
        setting: str = "http",
        protocol: type[asyncio.Protocol] | None = None,
        room: Room | None = None,
    ) -> None:
        self._listener = listen(address, setting)
        host, self.port = self._listener.getsockname()[:2]
        self.bound = bound_name(host, self.port)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                guarded(app, access, loopback=is_loopback(split_host(address)[0]), room=room),
                # Said, not found out: uvicorn would take what happens to be installed, and that may bound nothing.
                http=protocol or Connection,
                ws="none",
                log_config=None,  # its records go where ours go
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=GRACE,
                timeout_keep_alive=_KEEP_ALIVE,
                limit_concurrency=_CONNECTIONS,
                h11_max_incomplete_event_size=_MOST_HEADERS,
                ssl_certfile=access.tls_cert,
                ssl_keyfile=access.tls_key,
            )
        )

    async def run(self) -> bool:
        """Serve until `stop`; returns whether it served."""
        await self._uvicorn.serve(sockets=[self._listener])
        return self._uvicorn.started

    def stop(self) -> None:
        """Make `run` return, after the requests in progress or the grace period."""
        self._uvicorn.should_exit = True
