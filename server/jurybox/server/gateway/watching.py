"""The routes for whoever watches: `/metrics` for Prometheus, `/` for people, `/events` behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from jurybox.server.gateway.metrics.collector import exposition
from jurybox.server.gateway.source import StatusSource
from jurybox.server.gateway.watch import Broadcast, Watch

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
    """The routes, and what must end with them.

    Attributes:
        router: to be included in an application.
    """

    def __init__(self, source: StatusSource) -> None:
        self._watch = Watch(source)
        self._broadcast = Broadcast(self._watch)
        self.router = APIRouter()
        self.router.add_api_route("/metrics", self._metrics, response_class=Response, summary="For Prometheus")
        self.router.add_api_route("/events", self._events, response_class=Response, include_in_schema=False)
        for path, (file, media_type) in _FILES.items():
            self._serve(path, _PAGE / file, media_type)

    def close(self) -> None:
        """End every stream and let go of the board."""
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
