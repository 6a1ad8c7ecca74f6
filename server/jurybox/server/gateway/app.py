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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jurybox.protocol.errors import TABLE, Code, Error, ServerGone, Timeout, said
from jurybox.protocol.revision import source_revision
from jurybox.protocol.wire import PROTOCOL_VERSION, build_version
from jurybox.server.gateway.inference.lanes import MOMENT, SOON, Lanes
from jurybox.server.gateway.live import Document, StatusSource, Watching

if TYPE_CHECKING:
    from jurybox.server.gateway.robots.counters import PortCounters


async def reasons(source: StatusSource) -> list[str]:
    """Reasons why the server is not ready, models that do not answer included; empty if it is ready."""
    try:
        return not_ready(await source.status())
    except Error as error:
        return [str(error)]


def not_ready(document: dict[str, Any]) -> list[str]:
    """Reasons why the server is not ready; empty if it is.

    Ready means: it does not drain, at least one engine serves with a fresh heartbeat, every configured model is loaded,
    and none is in quarantine. A model that was put to sleep is as it should be.
    """
    reasons = []
    state = document["server"]["state"]
    if state == "draining":
        reasons.append("the server is draining")
    elif state != "serving":
        reasons += [_engine(engine) for engine in document["engines"]] or ["there is no engine"]
    for model in document["models"]:
        if model["state"] == "sleeping":
            continue  # as somebody ordered, who wakes it, too
        # One that a client has just asked for is not missed by anybody before it has come.
        if model["state"] != "ready" and (model.get("configured", True) or model["state"] != "loading"):
            why = f": {model['reason']}" if model["reason"] else ""
            reasons.append(f"model {model['name']!r} is {model['state']}{why}")
    return reasons


def _engine(engine: dict[str, Any]) -> str:
    if engine["hung"]:
        return f"engine {engine['index']} hangs: its last heartbeat is {engine['heartbeat_age']:.1f} s old"
    return f"engine {engine['index']} is {engine['state']}, restarted {engine['restarts']} times"


# Whether models answer: each has answered somebody here just now, or is asked one row.
#
# It is asked as everybody who comes through the gateway is, on the same lanes: only so does it fail when they do.
# Nobody asking, nothing runs. Where real requests are answered, none is added to them.


FRESH = 0.05  # seconds for which an answer shows that a model answers
_TIMEOUT = 2.0  # seconds a model has for the row; health checks commonly wait for 1 to 10
_SILENT_FOR = 30.0  # seconds a supervisor may be busy while its engines answer all the same
_TRIES = 3  # as a request has


class SelfTest:
    """Remembers when each model last answered, and sends a request to those that have not answered lately.

    Args:
        lanes: those that requests are answered on.
        clock: seconds, monotonic.
    """

    def __init__(self, source: StatusSource, lanes: Lanes, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._lanes = lanes
        self._clock = clock
        self._answered: dict[str, float] = {}
        self._asking: dict[str, tuple[float, asyncio.Task[str]]] = {}  # when it began, the last of each model
        self._document: Document | None = None  # the last there was, and when
        self._asked = 0.0

    def told(self, model: str, answered: bool) -> None:
        """Record that a request to that model was answered, or failed."""
        if answered:
            self._answered[model] = self._clock()
        else:
            self._answered.pop(model, None)

    async def reasons(self) -> list[str]:
        """Why the server should get no requests now; empty when every model is loaded and answers."""
        try:
            document = self._document = await self._source.status()
            self._asked = self._clock()
        except (ServerGone, Timeout) as error:
            # Who leases lanes and restarts engines is away or busy. Whoever has a lane is answered all the same.
            if self._document is None or self._clock() - self._asked >= _SILENT_FOR:
                return [str(error)]
            document = self._document
        except Error as error:
            return [str(error)]
        if document["server"]["state"] == "draining":
            return not_ready(document)
        # Asked even where the document says that no engine serves: a request waits for the next one, as this row does.
        asked = [
            model["name"]
            for model in document["models"]
            if model["state"] == "ready" or (model["state"] == "loading" and model.get("configured", True))
        ]
        silent = [why for why in await asyncio.gather(*(self.silent(name) for name in asked)) if why]
        broken = any(model["state"] not in ("ready", "loading", "sleeping") for model in document["models"])
        return not_ready(document) + silent if silent or broken or not asked else []

    async def silent(self, name: str) -> str:
        """The reason why a model does not answer; empty if it does."""
        now = self._clock()
        if now - self._answered.get(name, -FRESH) < FRESH:
            return ""
        # Who asks at nearly the same moment shares the answer. No row is shared for longer: one that was sent a second
        # ago has a second left, and its time-out says nothing about a request that is sent now.
        began, asking = self._asking.get(name, (-FRESH, None))
        if asking is None or now - began >= FRESH:
            asking = asyncio.create_task(self.ask(name))
            self._asking[name] = now, asking
        return await asyncio.shield(asking)

    async def ask(self, name: str, version: int = 0) -> str:
        """Request one row of zeros, of a weights version (0: the newest); returns the reason for a failure."""
        tries = _TRIES
        until = self._clock() + _TIMEOUT
        exchanged = until - _TIMEOUT + MOMENT  # as long as requests wait for rows that a dead gateway had
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
                    continue  # it was loaded again just now
                if error.code == Code.MODEL_NOT_FOUND and not version:
                    return ""  # it was unloaded just now
                return f"model {name!r} does not answer: {error}"
            except Exception as error:  # noqa: BLE001  a probe tells what is wrong, whatever it is
                return f"model {name!r} does not answer: {said(error)}"
            self._answered[name] = self._clock()
            return ""


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
    age: float | None  # seconds since they were adopted; null: they are those it was loaded with


class Version(BaseModel):
    """The build, and the weights versions of all models."""

    build: str
    revision: str | None
    protocol: int
    python: str
    torch: str | None
    devices: list[str]  # of the engines, in order
    server: str | None  # new at every start; null when the server does not answer
    models: dict[str, ModelVersion]


class Failure(BaseModel):
    """An error response; `code` is a name of jurybox.protocol.Code."""

    error: str
    code: str


class AnyText(JSONResponse):
    """A JSON response for arbitrary text: lone surrogates are escaped."""

    def render(self, content: Any) -> bytes:
        """As Response.render."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


class NeverCached:
    """Forbids caching of every response."""

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
    source: StatusSource,
    readiness: Callable[[], Awaitable[list[str]]] | None = None,
    routers: Sequence[APIRouter] = (),
    ports: Mapping[str, PortCounters] | None = None,
) -> FastAPI:
    """Create the application over a source of the server's status.

    Args:
        readiness: why the server is not ready; without it, what the status document says.
        routers: bring more paths.
        ports: of each port for robots, by name, what is counted there.
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
        """200 if requests would be answered; else 503 with the reasons."""
        return _health(response, await (readiness() if readiness else reasons(source)))

    @app.get("/health/live", responses=ill)
    async def live(response: Response) -> Health:
        """200 while the supervisor answers, whatever the state of its engines."""
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

    app.state.watching = Watching(source, ports)
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
