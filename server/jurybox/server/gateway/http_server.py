"""HTTP in the gateway's process: uvicorn on a socket of ours, ended when the gateway says so."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from jurybox.server.endpoints import is_loopback, split_host
from jurybox.server.gateway.listening import bound_name, listen
from jurybox.server.security.access import Access
from jurybox.server.security.http import guarded

_CONNECTIONS = 512  # open at once; beyond that requests are answered 503
_MOST_HEADERS = 32 << 10  # bytes of a request's line and headers
GRACE = 2  # seconds that requests in progress get when the gateway stops


class _Uvicorn(uvicorn.Server):
    """uvicorn without a say over signals: what a terminal's Ctrl-C means is the supervisor's to decide."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class HttpServer:
    """Listens from its construction on: whoever connects before `run` is answered then.

    Args:
        address: "host:port"; port 0 takes a free one.
        access: the walls before the application.

    Attributes:
        bound: where it really listens.

    Raises:
        CannotListen, ValueError: the address cannot be had.
    """

    def __init__(self, address: str, app: FastAPI, access: Access) -> None:
        self._listener = listen(address)
        host, self.port = self._listener.getsockname()[:2]
        self.bound = bound_name(host, self.port)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                guarded(app, access, loopback=is_loopback(split_host(address)[0])),
                # Said, not found out: uvicorn would take what happens to be installed, and that may bound nothing.
                http="h11",
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
        """Serve until `stop`; gives whether it ever served."""
        await self._uvicorn.serve(sockets=[self._listener])
        return self._uvicorn.started

    def stop(self) -> None:
        """Let `run` end, after the requests in progress or the grace."""
        self._uvicorn.should_exit = True
