"""The HTTP server: uvicorn on a socket that is bound before the application starts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from jurybox import native
from jurybox.protocol.address import is_loopback
from jurybox.server.gateway.http_connection import KEEP_ALIVE, Paced
from jurybox.server.gateway.http_parsers import MOST_HEADERS, Connection
from jurybox.server.security.access import Access
from jurybox.server.security.doors import Doors
from jurybox.server.security.http import Refusal, guarded
from jurybox.server.security.limits import Limited
from jurybox.server.security.pace import Turns
from jurybox.server.settings.endpoints import bound_name, listen, split_host

GRACE = 0.5  # seconds that answers get to be sent when the gateway stops
_LOOK = 0.005  # seconds between two looks whether they are


class _OneASecond(logging.Filter):
    """Lets one record of each text pass in a second: a stranger can cause any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        now, text = time.monotonic(), str(record.msg)
        if record.levelno > logging.WARNING or now - self._last.get(text, -1.0) >= 1.0:
            self._last[text] = now
            return True
        return False


logging.getLogger("uvicorn.error").addFilter(_OneASecond())


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, since the supervisor handles signals, and without pauses at its end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ends = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def end(self) -> None:
        self.should_exit = True
        self._ends.set()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter = (counter + 1) % 864_000
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), 0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections. Requests without an answer are cancelled, which `Doorkeeper` reports to their clients.

        The supervisor has had the doors closed before, and what was accepted answered.
        """
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        for task in list(state.tasks):
            task.cancel()
        until = asyncio.get_running_loop().time() + GRACE
        while (state.connections or state.tasks) and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)


class HttpServer:
    """An HTTP server that listens from its construction on; `run` also serves connections made before it.

    Args:
        address: "host:port"; port 0 selects a free one.
        app: the ASGI application.
        access: access control in front of the application.
        setting: the setting that the address comes from; see `listen`.
        protocol: class of the connections, instead of `Connection`.
        budget: that of the process; None: one of the server's own.
        refusals: write the refusals of bodies, by path; see `guarded`.
        doors: what comes after they have closed is refused.
        turns: shared with other doors.

    Attributes:
        bound: the address that it really listens on.

    Raises:
        CannotListen, ValueError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        app: ASGIApp,
        access: Access,
        setting: str = "server.http",
        protocol: type[asyncio.Protocol] | None = None,
        budget: native.Budget | None = None,
        refusals: Mapping[str, Refusal] | None = None,
        doors: Doors | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._listener = listen(address, setting)
        host, self.port = self._listener.getsockname()[:2]
        self.bound = bound_name(host, self.port)
        budget = budget or access.budget()
        kind = protocol or Connection
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                guarded(
                    app,
                    access,
                    loopback=is_loopback(split_host(address)[0]),
                    budget=budget,
                    refusals=refusals,
                    doors=doors,
                ),
                # Explicit: uvicorn would choose a protocol by what is installed, and that one may have no limits.
                http=type(kind.__name__, (Paced, kind), {"budget": budget, "turns": turns or Turns()}),
                ws="none",
                log_config=None,  # uvicorn's records go to Jurybox's handlers
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE,
                h11_max_incomplete_event_size=MOST_HEADERS,
                ssl_certfile=access.tls_cert,
                ssl_keyfile=access.tls_key,
            )
        )

    def connections(self) -> Iterable[Limited]:
        """Return the connections, for `limits.Watch`."""
        return tuple(self._uvicorn.server_state.connections)  # type: ignore[arg-type]

    async def run(self) -> bool:
        """Serve until `stop` is called, and return whether the server started."""
        await self._uvicorn.serve(sockets=[self._listener])
        return self._uvicorn.started

    def stop(self) -> None:
        """Make `run` return: requests in progress are refused, and all connections closed."""
        self._uvicorn.end()

    @property
    def busy(self) -> bool:
        """Whether a request is in progress that does more than read."""
        connections: Any = self._uvicorn.server_state.connections
        return any(connection.in_progress for connection in list(connections))
