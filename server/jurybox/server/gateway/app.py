"""The HTTP application: health, version and status."""

from __future__ import annotations

import json
import platform
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jurybox.client import Error
from jurybox.protocol.errors import TABLE, Code, said
from jurybox.protocol.wire import PROTOCOL_VERSION, build_version
from jurybox.server.gateway.health import reasons
from jurybox.server.gateway.source import StatusSource
from jurybox.server.gateway.watching import Watching
from jurybox.server.revision import source_revision

_UNAVAILABLE = 503


class Health(BaseModel):
    """Whether the server is well; `reasons` says why it is not."""

    status: str  # ok, unavailable
    reasons: list[str] = []


class ModelVersion(BaseModel):
    """Which weights a model computes with."""

    state: str
    version: int
    newest: int
    digest: str
    age: float | None  # seconds since they were adopted; null: they are those it was loaded with


class Version(BaseModel):
    """What runs here."""

    build: str
    revision: str | None
    protocol: int
    python: str
    torch: str | None
    devices: list[str]  # of the engines, in order
    server: str | None  # new at every start; null when the server does not answer
    models: dict[str, ModelVersion]


class Failure(BaseModel):
    """Why there is no answer; `code` is a name of jurybox.protocol.Code."""

    error: str
    code: str


class AnyText(JSONResponse):
    """JSON of whatever text a model, a file or a client came with: half a surrogate pair is said by its escape."""

    def render(self, content: Any) -> bytes:
        """As Response.render."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


class NeverCached:
    """Says of every answer that it is true for this moment only."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI asks."""

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Cache-Control"] = "no-store"
            await send(message)

        await self._app(scope, receive, send_marked)


def create_app(
    source: StatusSource, readiness: Callable[[], Awaitable[list[str]]] | None = None, routers: Sequence[APIRouter] = ()
) -> FastAPI:
    """The application over whatever gives the server's status.

    Args:
        readiness: why the server is not ready; without it, what the status document says.
        routers: bring more paths.
    """
    app = FastAPI(
        title="Jurybox",
        version=build_version(),
        docs_url=None,  # FastAPI's pages would load their scripts from a foreign host
        redoc_url=None,
        default_response_class=AnyText,
    )

    app.add_middleware(NeverCached)

    @app.exception_handler(Error)
    async def failed(_request: Request, error: Error) -> JSONResponse:
        row = TABLE.get(error.code)
        return AnyText({"error": said(error), "code": error.code.name}, row.http if row else 500)

    @app.exception_handler(Exception)
    async def broke(_request: Request, error: Exception) -> JSONResponse:
        # Its traceback is in the log; who asked gets a sentence all the same.
        why = f"the gateway failed at this request ({said(error, 200)}); its log says more"
        return AnyText({"error": why, "code": Code.MODEL_FAILED.name}, 500)

    failures: dict[int | str, dict[str, Any]] = {_UNAVAILABLE: {"model": Failure}, 504: {"model": Failure}}
    ill: dict[int | str, dict[str, Any]] = {_UNAVAILABLE: {"model": Health}}

    @app.get("/health", responses=ill)
    @app.get("/health/ready", responses=ill)
    async def ready(response: Response) -> Health:
        """200 when requests would be answered; 503 with the reasons when not."""
        return _health(response, await (readiness() if readiness else reasons(source)))

    @app.get("/health/live", responses=ill)
    async def live(response: Response) -> Health:
        """200 while the supervisor answers, whatever its engines do."""
        try:
            await source.status()
        except Error as error:
            return _health(response, [str(error)])
        return _health(response, [])

    @app.get("/version")
    async def versions() -> Version:
        """The build, and which weights every model computes with."""
        try:
            document: dict[str, Any] | None = await source.status()
        except Error:
            document = None
        return _version(document)

    @app.get("/status", responses=failures)
    async def status() -> dict[str, Any]:
        """The status document, as `jurybox status --json` prints it."""
        return await source.status()

    app.state.watching = Watching(source)
    app.include_router(app.state.watching.router)
    for router in routers:
        app.include_router(router)
    return app


def _health(response: Response, why: list[str]) -> Health:
    if why:
        response.status_code = _UNAVAILABLE
    return Health(status="unavailable" if why else "ok", reasons=why)


def _version(document: dict[str, Any] | None) -> Version:
    return Version(
        build=build_version(),
        revision=source_revision(),
        protocol=PROTOCOL_VERSION,
        python=platform.python_version(),
        torch=_installed("torch"),
        devices=[engine["device"] for engine in document["engines"]] if document else [],
        server=document["server"]["id"] if document else None,
        models={
            model["name"]: ModelVersion(
                state=model["state"], **{key: model["weights"][key] for key in ("version", "newest", "digest", "age")}
            )
            for model in (document["models"] if document else ())
        },
    )


def _installed(distribution: str) -> str | None:
    """A package's version from its metadata: importing torch would cost the gateway seconds and memory."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
