"""HTTP in the gateway's process: uvicorn on a socket of ours, ended when the gateway says so."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from jurybox.server.gateway.listening import bound_name, listen

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

    Attributes:
        bound: where it really listens.

    Raises:
        CannotListen, ValueError: the address cannot be had.
    """

    def __init__(self, address: str, app: FastAPI) -> None:
        self._listener = listen(address)
        host, self.port = self._listener.getsockname()[:2]
        self.bound = bound_name(host, self.port)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,  # its records go where ours go
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=GRACE,
            )
        )

    async def run(self) -> bool:
        """Serve until `stop`; gives whether it ever served."""
        await self._uvicorn.serve(sockets=[self._listener])
        return self._uvicorn.started

    def stop(self) -> None:
        """Let `run` end, after the requests in progress or the grace."""
        self._uvicorn.should_exit = True
