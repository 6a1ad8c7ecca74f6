"""The HTTP server: uvicorn on a socket that is bound before the application starts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from jurybox.server.security.access import Access, Room
from jurybox.server.security.http import guarded
from jurybox.server.settings.endpoints import is_loopback, split_host

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


_CONNECTIONS = 512  # open at once; beyond that requests are answered 503
_MOST_HEADERS = 32 << 10  # bytes of a request's line and headers
GRACE = 2  # seconds that requests in progress get when the gateway stops


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
        app: FastAPI,
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
                http=protocol or "h11",
                ws="none",
                log_config=None,  # its records go where ours go
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=GRACE,
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
