"""The HTTP application: health, version, status and metrics, from the server's status document."""

from __future__ import annotations

import asyncio
import json
import platform
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
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
from jurybox.protocol.errors import TABLE, Code, Error, ServerGone, Timeout, plain, said
from jurybox.protocol.revision import source_revision
from jurybox.protocol.wire import PROTOCOL_VERSION, build_version
from jurybox.server.frontend.lanes import MOMENT, SOON, Lanes
from jurybox.server.gateway.live import Document, LiveRoutes, StatusSource
from jurybox.server.security.doors import RETRY_AFTER
from jurybox.server.security.pace import Turns

if TYPE_CHECKING:
    from jurybox.server.gateway.robots.counters import PortCounters


async def reasons(source: StatusSource) -> list[str]:
    """Return why the server is not ready, according to its status document; empty if it is ready."""
    try:
        return not_ready(await source.status())
    except Error as error:
        return [str(error)]


def not_ready(document: dict[str, Any]) -> list[str]:
    """Return why the server is not ready, from its status document; empty if it is ready.

    The server is ready when it is not draining, at least one engine serves with a fresh heartbeat, every configured
    model is loaded, and no model is in quarantine. A sleeping model does not count against readiness.
    """
    reasons = []
    state = document["server"]["state"]
    if state == "draining":
        reasons.append("the server is draining")
    elif state != "serving":
        reasons += [_engine(engine) for engine in document["engines"]] or ["there is no engine"]
    for model in document["models"]:
        if model["state"] == "sleeping":
            continue  # a client put it to sleep on purpose
        # A model that is being loaded at a client's request is not missing: only configured ones are required.
        if model["state"] != "ready" and (model.get("configured", True) or model["state"] != "loading"):
            why = f": {model['reason']}" if model["reason"] else ""
            reasons.append(f"model {model['name']!r} is {model['state']}{why}")
    return reasons


def _engine(engine: dict[str, Any]) -> str:
    if engine["hung"]:
        return f"engine {engine['index']} hangs: its last heartbeat is {engine['heartbeat_age']:.1f} s old"
    return f"engine {engine['index']} is {engine['state']}, restarted {engine['restarts']} times"


# A readiness check tests whether each model answers: it has answered a request recently, or it is sent a probe of one
# row.
#
# Probes use the same lanes as requests through the gateway, so that they fail when those fail. No probe is sent without
# a check, nor to a model that has just answered a real request.


FRESH = 0.05  # seconds during which a model that has answered needs no probe
_TIMEOUT = 2.0  # seconds to answer a probe; health checks commonly wait for 1 to 10
_SILENT_FOR = 30.0  # seconds that the supervisor may be unresponsive while its engines still answer
_TRIES = 3  # as many as for a request


class SelfTest:
    """A readiness check that remembers when each model last answered, and probes those that have not lately.

    Args:
        source: source of the server's status.
        lanes: the lanes that requests use.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, source: StatusSource, lanes: Lanes, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._lanes = lanes
        self._clock = clock
        self._answered: dict[str, float] = {}
        self._asking: dict[str, tuple[float, asyncio.Task[str]]] = {}  # the last probe of each model, and its start
        self._document: Document | None = None  # the last one received, at the time `_asked`
        self._asked = 0.0

    def record(self, model: str, answered: bool) -> None:
        """Record whether a request to that model was answered or failed."""
        if answered:
            self._answered[model] = self._clock()
        else:
            self._answered.pop(model, None)

    async def reasons(self) -> list[str]:
        """Return why the server should get no requests now; empty if every model is loaded and answers."""
        try:
            document = self._document = await self._source.status()
            self._asked = self._clock()
        except (ServerGone, Timeout) as error:
            # The supervisor, which leases lanes and restarts engines, is gone or busy. Requests on lanes that are
            # already leased are answered without it.
            if self._document is None or self._clock() - self._asked >= _SILENT_FOR:
                return [str(error)]
            document = self._document
        except Error as error:
            return [str(error)]
        if document["server"]["state"] == "draining":
            return not_ready(document)
        # Probe even if no engine serves according to the document: the probe, like a request, waits for the next one.
        asked = [model["name"] for model in document["models"] if _should_answer(model)]
        silent = [why for why in await asyncio.gather(*(self.silent(name) for name in asked)) if why]
        broken = any(model["state"] not in ("ready", "loading", "sleeping") for model in document["models"])
        return not_ready(document) + silent if silent or broken or not asked else []

    async def silent(self, name: str) -> str:
        """Return why a model does not answer; empty if it does."""
        now = self._clock()
        if now - self._answered.get(name, -FRESH) < FRESH:
            return ""
        # Checks at nearly the same time share a probe. An older probe is not shared: one that was sent a second ago
        # times out in a second, which says nothing about a request that is sent now.
        began, asking = self._asking.get(name, (-FRESH, None))
        if asking is None or now - began >= FRESH:
            asking = asyncio.create_task(self.ask(name))
            self._asking[name] = now, asking
        return await asyncio.shield(asking)

    async def ask(self, name: str, version: int = 0) -> str:
        """Request one row of zeros, and return why it failed; empty if it was answered.

        Args:
            version: of the weights; 0: the newest.
        """
        tries = _TRIES
        until = self._clock() + _TIMEOUT
        exchanged = until - _TIMEOUT + MOMENT  # requests wait as long for the rows of a gateway that died
        while True:
            held = None
            try:
                held = await self._lanes.hold(name, trying=True)
                await self._lanes.probe(held, until - self._clock(), version)
            except Error as error:
                if held is None and error.code == Code.BUSY and self._clock() < exchanged:
                    await asyncio.sleep(SOON)
                    continue
                tries -= 1
                if error.code == Code.STALE_LEASE and tries:
                    continue  # the model has just been reloaded
                if error.code == Code.MODEL_NOT_FOUND and not version and await self._was_unloaded(name):
                    return ""
                return f"model {name!r} does not answer: {error}"
            except Exception as error:  # noqa: BLE001  a probe reports every kind of failure
                return f"model {name!r} does not answer: {said(error)}"
            self._answered[name] = self._clock()
            return ""

    async def _was_unloaded(self, name: str) -> bool:
        """Return whether a model that an engine does not know need not answer: otherwise that engine fails requests."""
        try:
            document = await self._source.status(fresh=True)
        except Error:
            return False
        return not any(model["name"] == name and _should_answer(model) for model in document["models"])


def _should_answer(model: dict[str, Any]) -> bool:
    """Return whether requests to a model of the status document should be answered, perhaps by the next engine."""
    return model["state"] == "ready" or (model["state"] == "loading" and bool(model.get("configured", True)))


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
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


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
        again = {"Retry-After": RETRY_AFTER} if error.code == Code.DRAINING else None
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

    app.state.watching = LiveRoutes(source, ports, timeouts, budget, turns)
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
