"""The HTTP application: health, version, status and metrics, from the server's status document."""

from __future__ import annotations

import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jurybox import native
from jurybox.protocol.errors import TABLE, Code, Error, plain, said
from jurybox.protocol.revision import source_revision
from jurybox.protocol.wire import PROTOCOL_VERSION, build_version
from jurybox.server.frontend.readiness import reasons
from jurybox.server.frontend.source import StatusSource
from jurybox.server.gateway.known_paths import to_json
from jurybox.server.gateway.live import LiveRoutes
from jurybox.server.security.doors import RETRY_AFTER
from jurybox.server.security.pace import Turns
from jurybox.server.watch.runs import RunFolders

if TYPE_CHECKING:
    from jurybox.server.gateway.robots.counters import PortCounters


_UNAVAILABLE = 503


class Health(BaseModel):
    """The health of the server; `reasons` if it is not healthy."""

    status: str  # ok, unavailable
    reasons: list[str] = []


class ModelVersion(BaseModel):
    """The weights that a model computes with."""

    state: str
    version: int
    newest: int
    digest: str
    age: float | None  # seconds since they were adopted; null: the model was loaded with them


class Version(BaseModel):
    """The build, and the weights versions of all models."""

    build: str
    revision: str | None
    protocol: int
    python: str
    torch: str | None
    devices: list[str]  # of the engines, in order
    server: str | None  # the server's id, new at every start; null when the server does not answer
    models: dict[str, ModelVersion]


class Failure(BaseModel):
    """An error response; `code` is a name of jurybox.protocol.Code."""

    error: str
    code: str


class AnyText(JSONResponse):
    """A JSON response for arbitrary text: lone surrogates are escaped."""

    def render(self, content: Any) -> bytes:
        """Encode the content; see `Response.render`."""
        return to_json(content)


class NeverCached:
    """ASGI middleware that forbids caching of every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and mark its responses; see the ASGI specification."""

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Cache-Control"] = "no-store"
            await send(message)

        await self._app(scope, receive, send_marked)


def create_app(
    source: StatusSource,
    readiness: Callable[[], Awaitable[list[str]]] | None = None,
    routers: Sequence[APIRouter] = (),
    ports: Mapping[str, PortCounters] | None = None,
    timeouts: Mapping[str, int] | None = None,
    budget: native.Budget | None = None,
    turns: Turns | None = None,
    runs: Path | None = None,
) -> FastAPI:
    """Create the application over a source of the server's status.

    Args:
        source: source of the server's status.
        readiness: returns why the server is not ready; by default the status document decides.
        routers: further routes.
        ports: the counters of each port for robots, by name.
        timeouts: the number of requests that were not answered in time, by model.
        budget: what the process holds for its clients.
        turns: of the process's doors.
        runs: folder of the trainings that the live page shows; None: none.
    """
    app = FastAPI(
        title="Jurybox",
        version=build_version(),
        docs_url=None,  # FastAPI's pages would load their scripts from another host
        redoc_url=None,
        default_response_class=AnyText,
    )

    app.add_middleware(NeverCached)

    @app.exception_handler(Error)
    async def failed(_request: Request, error: Error) -> JSONResponse:
        row = TABLE.get(error.code)
        again = {"Retry-After": RETRY_AFTER} if error.code in (Code.BUSY, Code.DRAINING) else None
        return AnyText({"error": said(error), "code": error.code.name}, row.http if row else 500, again)

    @app.exception_handler(Exception)
    async def broke(_request: Request, error: Exception) -> JSONResponse:
        # The log has the traceback; the client gets an error message all the same.
        why = f"the gateway failed at this request ({said(error, 200)}); its log says more"
        return AnyText({"error": why, "code": Code.MODEL_FAILED.name}, 500)

    @app.exception_handler(ClientDisconnect)
    async def hung_up(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody receives it: the client hung up within its request

    @app.exception_handler(HTTPException)
    async def unserved(request: Request, error: HTTPException) -> Response:
        path = plain(request.url.path, 80)
        if error.status_code != 405:
            why = f"{error.detail}: {request.method} {path}"
            return AnyText({"error": why, "code": Code.MODEL_NOT_FOUND.name}, error.status_code)
        allowed = ", ".join(_methods_of((app.router, app.state.watching.router, *routers), request.scope))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": allowed})
        why = f"{request.method} {path} is not served: expected {allowed}"
        return AnyText({"error": why, "code": Code.UNSUPPORTED.name}, 405, {"Allow": allowed})

    failures: dict[int | str, dict[str, Any]] = {_UNAVAILABLE: {"model": Failure}, 504: {"model": Failure}}
    ill: dict[int | str, dict[str, Any]] = {_UNAVAILABLE: {"model": Health}}

    @app.get("/health", responses=ill)
    @app.get("/health/ready", responses=ill)
    @app.get("/healthz", responses=ill, include_in_schema=False)  # as Kubernetes' own components name them
    @app.get("/readyz", responses=ill, include_in_schema=False)
    async def ready(response: Response) -> Health:
        """Return 200 if requests would be answered, else 503 with the reasons."""
        return _health(response, await (readiness() if readiness else reasons(source)))

    @app.get("/health/live", responses=ill)
    @app.get("/livez", responses=ill, include_in_schema=False)
    async def live(response: Response) -> Health:
        """Return 200 while the supervisor answers, whatever the state of its engines."""
        try:
            await source.status()
        except Error as error:
            return _health(response, [str(error)])
        return _health(response, [])

    @app.get("/version")
    async def versions() -> Version:
        """Return the build, and the weights version of every model."""
        try:
            document: dict[str, Any] | None = await source.status()
        except Error:
            document = None
        return _version(document)

    @app.get("/status", responses=failures)
    async def status() -> dict[str, Any]:
        """Return the status document, as `jurybox status --json` prints it."""
        return await source.status()

    app.state.watching = LiveRoutes(source, ports, timeouts, budget, turns, None if runs is None else RunFolders(runs))
    app.include_router(app.state.watching.router)
    for router in routers:
        app.include_router(router)
    return app


def _methods_of(routers: Sequence[APIRouter], scope: Scope) -> list[str]:
    """Return the methods that a path takes, over all routes."""
    routes = [route for router in routers for route in router.routes if isinstance(route, Route)]
    methods = {method for route in routes if route.matches(scope)[0] != Match.NONE for method in route.methods or ()}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


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
    """Return a package's version from its metadata: importing torch would cost the gateway seconds and memory."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
