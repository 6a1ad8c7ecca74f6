"""The server's status for the gateway, and the live page: snapshots of the server, streamed to browsers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from jurybox import native
from jurybox.client import ModelNotFound, ServerGone, Timeout
from jurybox.protocol.errors import Code, Refused, said
from jurybox.server.frontend.source import Document, StatusSource
from jurybox.server.gateway.metrics import exposition, format_of
from jurybox.server.security.http import HEAD
from jurybox.server.security.pace import Turns
from jurybox.server.watch.history import History
from jurybox.server.watch.runs import RunFolders
from jurybox.server.watch.sample import ScoreboardReader, Snapshot

if TYPE_CHECKING:
    from jurybox.server.gateway.robots.counters import PortCounters

_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/live.css": ("live.css", "text/css; charset=utf-8"),
    "/page/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/page/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The page loads only its own files, connects only to this server, and cannot be embedded in a frame.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LiveRoutes:
    """The routes of the live page and of the metrics. Call `close` at the end.

    Args:
        source: source of the server's status.
        ports: the counters of each port for robots, by name.
        timeouts: the number of requests that were not answered in time, by model.
        budget: what the process holds for its clients.
        turns: of the process's doors.
        runs: trainings that are shown; None: none.

    Attributes:
        router: the routes, for an application to include.
    """

    def __init__(
        self,
        source: StatusSource,
        ports: Mapping[str, PortCounters] | None = None,
        timeouts: Mapping[str, int] | None = None,
        budget: native.Budget | None = None,
        turns: Turns | None = None,
        runs: RunFolders | None = None,
    ) -> None:
        self._runs = runs
        self._watch = Snapshots(source, ports, timeouts, budget)
        self._scrapes = Scrapes(self._watch, turns or Turns())
        self._broadcast = Broadcast(self._watch, runs=runs)
        self.router = APIRouter()
        self.router.add_api_route("/metrics", self._metrics, response_class=Response, summary="For Prometheus")
        self.router.add_api_route("/events", self._events, response_class=Response, include_in_schema=False)
        self.router.add_api_route("/runs/film", self._film, response_class=Response, include_in_schema=False)
        for path, (file, media_type) in _FILES.items():
            self._serve(path, _PAGE / file, media_type)

    def close(self) -> None:
        """End all streams and close the scoreboard."""
        self._broadcast.close()
        self._scrapes.close()
        self._watch.close()

    def _serve(self, path: str, file: Path, media_type: str) -> None:
        body = file.read_bytes()

        async def page() -> Response:
            return Response(body, media_type=media_type, headers=PAGE_HEADERS)

        self.router.add_api_route(path, page, response_class=Response, include_in_schema=False)

    async def _metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus's text format, or in OpenMetrics format where that is accepted."""
        body, content_type = await self._scrapes.scrape(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    async def _events(self, request: Request) -> Response:
        if HEAD in request.scope:  # the stream would not end
            return Response(media_type="text/event-stream", headers=PAGE_HEADERS)
        self._broadcast.require_room()
        return StreamingResponse(self._until_left(), media_type="text/event-stream", headers=PAGE_HEADERS)

    async def _film(self, name: str = "") -> Response:
        """Return the newest film of a training."""
        film = None if self._runs is None else await asyncio.to_thread(self._runs.film, name)
        if film is None:
            why = f"there is no film of {name!r}: expected a run that the page shows, which was begun with film = true"
            raise ModelNotFound(why)
        return Response(film, media_type="video/webm", headers=PAGE_HEADERS)

    async def _until_left(self) -> AsyncIterator[str]:
        stream = self._broadcast.stream()
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()


_NAMES_FOR = 1.0  # seconds for which a status document is used: it has the names, the scoreboard has the numbers
_SILENT_FOR = 30.0  # seconds after which a supervisor without a new document counts as hung, not as busy
INTERVAL = 0.4  # seconds between two documents of the stream
_MOST_WATCHERS = 64


class Snapshots:
    """Snapshots of the server: the status at most once a second, the rest from the scoreboard."""

    def __init__(
        self,
        source: StatusSource,
        ports: Mapping[str, PortCounters] | None = None,
        timeouts: Mapping[str, int] | None = None,
        budget: native.Budget | None = None,
    ) -> None:
        self._source = source
        self._ports = ports
        self._timeouts = timeouts
        self._budget = budget
        self._reader = ScoreboardReader()
        self._document: Document | None = None
        self._asked = 0.0

    async def snapshot(self) -> Snapshot:
        """Take a snapshot.

        Raises:
            ServerGone, Timeout: the server does not answer, and its scoreboard cannot be used instead: it has no living
                owner, or the last document is too old.
        """
        if self._document is None or time.monotonic() - self._asked >= _NAMES_FOR:
            try:
                self._document = await self._source.status()
                self._asked = time.monotonic()
            except (ServerGone, Timeout):
                # The client cannot tell a server that died from one that got no CPU time for a second. The scoreboard
                # can: its owner's lock shows whether the server lives. If so, the scoreboard is valid, with the names
                # of the last document.
                if self._document is None or time.monotonic() - self._asked >= _SILENT_FOR:
                    raise
        try:
            return self._reader.read(self._document, self._ports, self._timeouts, self._budget)
        except ServerGone:
            self._document = None
            raise

    def close(self) -> None:
        """Close the scoreboard."""
        self._reader.close()


class Scrapes:
    """The metrics as text, which takes as long as twenty other requests: all who ask meanwhile get the next one."""

    def __init__(self, watch: Snapshots, turns: Turns) -> None:
        self._watch = watch
        self._turns = turns
        self._next: dict[str, asyncio.Task[tuple[bytes, str]]] = {}  # by content type; none of them has begun
        self._took, self._ended = 0.0, float("-inf")  # the last one: seconds, and when (s of the monotonic clock)

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics, as they are now or later, and their content type. Raises what `Snapshots.snapshot` does.

        Args:
            accept: the value of a request's Accept header.
        """
        content_type = format_of(accept)
        if (text := self._next.get(content_type)) is None:
            text = self._next[content_type] = asyncio.create_task(self._text(content_type, accept))
            text.add_done_callback(lambda done: done.cancelled() or done.exception())  # all may have given up
        return await asyncio.shield(text)

    def close(self) -> None:
        """End those that wait for their turn."""
        for text in self._next.values():
            text.cancel()

    async def _text(self, content_type: str, accept: str) -> tuple[bytes, str]:
        try:
            if (owed := self._ended + self._took - time.monotonic()) > 0:
                await self._turns.wait(self, owed)
        finally:
            del self._next[content_type]  # whoever asks from now on may have seen more than this one will tell
        snapshot = await self._watch.snapshot()
        began = time.monotonic()
        try:
            return exposition(snapshot, accept)
        finally:
            self._ended = time.monotonic()
            self._took = self._ended - began


class Broadcast:
    """One sampling task for all watching clients, which runs while there is a client.

    A client that reads slowly misses documents, and does not delay the others.
    """

    def __init__(self, watch: Snapshots, interval: float = INTERVAL, runs: RunFolders | None = None) -> None:
        self._watch = watch
        self._runs = runs
        self._interval = interval
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._latest = ""
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def watchers(self) -> int:
        """The number of watching clients."""
        return self._watchers

    def require_room(self) -> None:
        """Raise Refused if the maximum number of clients watch."""
        if self._watchers >= _MOST_WATCHERS:
            raise Refused(f"{_MOST_WATCHERS} live pages are open, which is the maximum: close one", Code.BUSY)

    async def stream(self) -> AsyncGenerator[str]:
        """Yield server-sent events (WHATWG HTML, 9.2): `sample` with a document, or `gone` with the reason for none."""
        self._watchers += 1
        try:
            if self._task is None:
                self._latest = ""
                self._task = asyncio.create_task(self._run())
            if self._latest:
                yield self._latest
            while not self._closed:
                await self._changed.wait()
                yield self._latest
        finally:
            self._watchers -= 1
            if self._watchers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    def close(self) -> None:
        """End all streams, so that an open page does not delay the gateway's shutdown."""
        self._closed = True
        self._changed.set()

    async def _run(self) -> None:
        history = History()
        while not self._closed:
            began = time.monotonic()
            try:
                document = history.add(await self._watch.snapshot())
                document["runs"] = [] if self._runs is None else await asyncio.to_thread(self._runs.document)
                self._tell("sample", json.dumps(document, separators=(",", ":")))
            except Exception as error:  # noqa: BLE001  clients get the error, and the next snapshot may succeed
                self._tell("gone", json.dumps({"reason": said(error)}))
            await asyncio.sleep(max(0.05, self._interval - (time.monotonic() - began)))

    def _tell(self, event: str, data: str) -> None:
        # One event is formatted for all watchers. sse-starlette (3.7.0) would replace the next line, but it formats the
        # event for each watcher, 0.3 ms for a document of 20 kB (5 % of a core for 64 watchers), and it hooks into
        # uvicorn's signal handlers to end streams, which `close` does here.
        self._latest = f"event: {event}\ndata: {data}\n\n"
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
