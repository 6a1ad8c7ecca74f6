"""The server's status for the gateway, and the live page: snapshots once a second, streamed to browsers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from jurybox.client import Error, Server, ServerGone, Timeout, connect
from jurybox.protocol.errors import Code, Refused, said
from jurybox.server.gateway.metrics import exposition
from jurybox.server.watch.history import History
from jurybox.server.watch.sample import ScoreboardReader, Snapshot

if TYPE_CHECKING:
    from jurybox.server.gateway.robots.counters import PortCounters

Document = dict[str, Any]

_MARGIN = 0.5  # seconds: the client gives up first, and knows better why


class StatusSource(Protocol):
    """A source of the server's status."""

    async def status(self, *, fresh: bool = False) -> Document:
        """The status document of jurybox.server.status; `fresh`: made after this call.

        Raises Error, such as ServerGone, when there is none.
        """
        ...


class ClientSource(StatusSource):
    """Gets the status through the client, in a single thread.

    An answer, or the lack of one, is kept for a moment, so that many probes cost the server as much as one.

    Args:
        address: the server's.
        timeout: seconds the server has for an answer.
        keep: seconds an answer is good for.
    """

    def __init__(self, address: str, *, timeout: float = 1.0, keep: float = 0.1) -> None:
        self._address = address
        self._timeout = timeout
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="status")
        self._connection: Server | None = None  # belongs to the thread
        self._question: asyncio.Future[Document] | None = None
        self._answered = 0.0

    async def status(self, *, fresh: bool = False) -> Document:
        question = self._question
        if fresh or question is None or (question.done() and time.monotonic() - self._answered >= self._keep):
            question = asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
            question.add_done_callback(self._note)
            self._question = question
        try:
            # Shielded: who gives up must not cancel the question of the others.
            return await asyncio.wait_for(asyncio.shield(question), self._timeout + _MARGIN)
        except TimeoutError as error:
            if isinstance(error, Error):
                raise
            raise Timeout(f"the server at {self._address} did not answer within {self._timeout} s") from error

    async def close(self) -> None:
        """Close the connection."""
        self._thread.submit(self._drop)
        self._thread.shutdown(wait=False)

    def _note(self, question: asyncio.Future[Document]) -> None:
        self._answered = time.monotonic()
        if not question.cancelled():
            question.exception()  # seen, whether or not anybody still waits for it

    def _ask(self) -> Document:
        """In the thread: get the status; after a failure the next call uses a new connection."""
        try:
            if self._connection is None:
                self._connection = connect(self._address, timeout=self._timeout)
            return self._connection.status()
        except ServerGone:
            self._drop()
            raise

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


_PAGE = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/live.css": ("live.css", "text/css; charset=utf-8"),
    "/page/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/page/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The page loads nothing but its own files and talks to nobody but this server; nobody may put it in a frame.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Watching:
    """The routes, and what to close at the end.

    Args:
        ports: of each port for robots, by name, what is counted there.

    Attributes:
        router: to be included in an application.
    """

    def __init__(self, source: StatusSource, ports: Mapping[str, PortCounters] | None = None) -> None:
        self._watch = Watch(source, ports)
        self._broadcast = Broadcast(self._watch)
        self.router = APIRouter()
        self.router.add_api_route("/metrics", self._metrics, response_class=Response, summary="For Prometheus")
        self.router.add_api_route("/events", self._events, response_class=Response, include_in_schema=False)
        for path, (file, media_type) in _FILES.items():
            self._serve(path, _PAGE / file, media_type)

    def close(self) -> None:
        """End all streams and close the scoreboard."""
        self._broadcast.close()
        self._watch.close()

    def _serve(self, path: str, file: Path, media_type: str) -> None:
        body = file.read_bytes()

        async def page() -> Response:
            return Response(body, media_type=media_type, headers=PAGE_HEADERS)

        self.router.add_api_route(path, page, response_class=Response, include_in_schema=False)

    async def _metrics(self, request: Request) -> Response:
        """Counters, gauges and histograms in Prometheus's text format, or OpenMetrics where that is accepted."""
        body, content_type = exposition(await self._watch.snapshot(), request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    async def _events(self) -> Response:
        self._broadcast.require_room()
        return StreamingResponse(self._until_left(), media_type="text/event-stream", headers=PAGE_HEADERS)

    async def _until_left(self) -> AsyncIterator[str]:
        stream = self._broadcast.stream()
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()


_NAMES_FOR = 1.0  # seconds a status document is good for: it tells the names, the scoreboard tells the numbers
_SILENT_FOR = 30.0  # seconds a supervisor may owe the next one; then it is no longer busy, but hangs
INTERVAL = 0.4  # seconds between two documents of the stream
_MOST_WATCHERS = 64


class Watch:
    """Snapshots of the server: the status at most once a second, the rest from the scoreboard."""

    def __init__(self, source: StatusSource, ports: Mapping[str, PortCounters] | None = None) -> None:
        self._source = source
        self._ports = ports
        self._reader = ScoreboardReader()
        self._document: Document | None = None
        self._asked = 0.0

    async def snapshot(self) -> Snapshot:
        """Take a snapshot.

        Raises:
            ServerGone, Timeout: no server answers, and none lives that has lately.
        """
        if self._document is None or time.monotonic() - self._asked >= _NAMES_FOR:
            try:
                self._document = await self._source.status()
                self._asked = time.monotonic()
            except (ServerGone, Timeout):
                # The client calls gone who died and who had no core for a second alike. The scoreboard knows better:
                # its owner's lock says whether it lives, and then it tells the truth, under the names it had.
                if self._document is None or time.monotonic() - self._asked >= _SILENT_FOR:
                    raise
        try:
            return self._reader.read(self._document, self._ports)
        except ServerGone:
            self._document = None
            raise

    def close(self) -> None:
        """Close the scoreboard."""
        self._reader.close()


class Broadcast:
    """One sampling task for all watching clients; it runs while there is one.

    Who reads slowly misses documents, and holds nobody up.
    """

    def __init__(self, watch: Watch, interval: float = INTERVAL) -> None:
        self._watch = watch
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
        """Raises Refused if the maximum number of clients watch."""
        if self._watchers >= _MOST_WATCHERS:
            raise Refused(f"{_MOST_WATCHERS} live pages are open, which is all there may be: close one", Code.BUSY)

    async def stream(self) -> AsyncGenerator[str]:
        """Server-sent events (WHATWG HTML, 9.2): `sample` with a document, `gone` with a reason if there is none."""
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
        """End all streams, so that an open page does not delay the end of the gateway."""
        self._closed = True
        self._changed.set()

    async def _run(self) -> None:
        history = History()
        while not self._closed:
            began = time.monotonic()
            try:
                document = history.add(await self._watch.snapshot())
                self._tell("sample", json.dumps(document, separators=(",", ":")))
            except Exception as error:  # noqa: BLE001  who watches is told, and the next look may go well
                self._tell("gone", json.dumps({"reason": said(error)}))
            await asyncio.sleep(max(0.05, self._interval - (time.monotonic() - began)))

    def _tell(self, event: str, data: str) -> None:
        # One event is made for all watchers. sse-starlette (3.7.0) makes it anew for each: 0.3 ms for a document of
        # 20 kB, which for 64 watchers is 5 % of a core, and it looks into uvicorn's signal handlers to end streams,
        # which `close` ends here. It would replace the next line.
        self._latest = f"event: {event}\ndata: {data}\n\n"
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
