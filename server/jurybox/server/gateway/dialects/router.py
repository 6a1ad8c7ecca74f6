"""The HTTP routes of the dialects: /dialects/NAME, bound to a model by [dialects.NAME] of the configuration.

A dialect can also have its own port, where / is what /dialects/NAME is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI, HTTPException, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from jurybox.protocol.errors import TABLE, Code, Error, ModelFailed, said
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.threads import ThreadPool
from jurybox.server.gateway.app import NeverCached
from jurybox.server.gateway.dialects import (
    chat,
    cosmos,
    json_dialects,
    nemo_gym,
    pickle_dialects,
    reward_model,
    robometer,
)
from jurybox.server.gateway.dialects.intake import AnswerForm, Intake
from jurybox.server.gateway.known_paths import ANSWERED, NEVER_CACHED, Endpoint, HttpReply
from jurybox.server.logs import Log, LogLimiter
from jurybox.server.security.doors import RETRY_AFTER, Doors, refusal
from jurybox.server.security.http import DATA_ONLY, Refusal, body_of
from jurybox.server.security.pace import Turns


@dataclass(frozen=True, slots=True)
class Dialect:
    """The implementation of a dialect.

    Attributes:
        answers: called with the dialect's intake and a function that logs reasons; returns the functions that answer
            request bodies, by path below the dialect's own.
        refusal: returns the body of an error response of a status, and its media type.
        status: status of an error that a retry does not help; 0: a 4xx that depends on the error.
        about: returns the JSON responses to GET requests, by path.
    """

    answers: Callable[[Intake, Callable[[str], None]], Mapping[str, Endpoint]]
    refusal: Callable[[str, int], tuple[bytes, str]]
    status: int = 0
    about: Callable[[Intake], Mapping[str, Any]] = lambda _: {"/health": {"status": "ok"}}


def _at(
    path: str, answer: Callable[[Intake, bytes], Awaitable[HttpReply]]
) -> Callable[[Intake, Callable[[str], None]], Mapping[str, Endpoint]]:
    return lambda intake, _: {path: lambda body: answer(intake, body)}


_DIALECTS = {
    "flow_grpo": Dialect(_at("", pickle_dialects.flow_grpo), pickle_dialects.refusal),
    "verl_omni": Dialect(_at("", pickle_dialects.verl_omni), pickle_dialects.refusal),
    "openrlhf": Dialect(_at("", json_dialects.openrlhf), json_dialects.refusal),
    "slime": Dialect(_at("", json_dialects.slime), json_dialects.refusal),
    # Its client raises the text of an error with status 200, and retries after any other without reporting the text.
    "flow_factory": Dialect(_at("/compute", json_dialects.flow_factory), json_dialects.refusal, status=200),
    "unirl": Dialect(_at("/score", json_dialects.unirl), json_dialects.unirl_refusal, about=json_dialects.unirl_about),
    "unifiedreward": Dialect(_at(chat.PATH, chat.unifiedreward), chat.refusal, about=chat.about),
    "reward_model": Dialect(reward_model.answers, reward_model.refusal, about=reward_model.about),
    "nemo_gym": Dialect(nemo_gym.answers, json_dialects.unirl_refusal, about=nemo_gym.about),
    "robometer": Dialect(
        _at("/evaluate_batch_npy", robometer.robometer), json_dialects.unirl_refusal, about=robometer.about
    ),
    "cosmos": Dialect(lambda intake, log: cosmos.Cosmos(intake, log).answers(), cosmos.refusal),
}
# Temporary errors: the server is busy, or an engine is starting. A retry may succeed.
_PASSING = (Code.BUSY, Code.TIMEOUT, Code.SERVER_GONE, Code.NOT_READY, Code.DRAINING)


class DialectPaths:
    """ASGI middleware that answers POST requests to the dialects' paths without the cost of the application's routing.

    Args:
        app: the application, which gets all other requests.
        endpoints: the dialects' endpoints, by path.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; see the ASGI specification."""
        post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        scope[DATA_ONLY] = True
        try:
            reply = await endpoint(await body_of(receive))
        except ClientDisconnect:
            return
        if (learn := scope.get(ANSWERED)) is not None:
            learn(endpoint)
        headers = [*((name.encode(), value.encode()) for name, value in reply.fields()), NEVER_CACHED]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})


class DialectRoutes(NamedTuple):
    """The applications of all dialects.

    Attributes:
        paths: the routes of all dialects, for `create_app`.
        endpoints: the endpoints for `DialectPaths`, by path.
        refusals: write the refusals of bodies that the dialects do not receive, by path.
        ports: the applications of the dialects with their own port, with their refusals, by name.
        intakes: the intakes of all dialects.
        reports: logs why there was no reward; flush it every second.
    """

    paths: APIRouter
    endpoints: dict[str, Endpoint]
    refusals: dict[str, Refusal]
    ports: dict[str, tuple[ASGIApp, dict[str, Refusal]]]
    intakes: list[Intake]
    reports: LogLimiter


def applications(
    dialects: Mapping[str, Mapping[str, Any]],
    frontend: Frontend,
    log: Log,
    doors: Doors | None = None,
    turns: Turns | None = None,
) -> DialectRoutes:
    """Create the routes and applications of the dialects.

    Args:
        dialects: the settings in [dialects.NAME], by name, with `members` where the model is a panel.
        frontend: computes the rows.
        log: receives the reasons for missing scores.
        doors: if they have closed, a request that is cancelled is answered with a refusal.
        turns: of the process's doors.
    """
    doors, turns = doors or Doors(), turns or Turns()
    late = frontend.lanes.timeouts
    paths = APIRouter(tags=["dialects"])
    endpoints: dict[str, Endpoint] = {}
    refusals: dict[str, Refusal] = {}
    ports: dict[str, tuple[ASGIApp, dict[str, Refusal]]] = {}
    intakes: list[Intake] = []
    pool, reports = ThreadPool(), LogLimiter(log.warning)
    for name, settings in dialects.items():
        size = settings["resize"]
        intake = Intake(
            frontend,
            pool,
            turns,
            reward=settings["reward"] or settings["model"],
            members=tuple(members := settings.get("members", {})),
            form=AnswerForm(settings["like"], settings["score_range"], settings["decimals"], members),
            size=tuple(size) if size else None,
            model=settings["model"],
            inputs=settings["inputs"],
            output=settings["output"],
            timeout=settings["timeout"],
            priority=settings["priority"],
        )
        intakes.append(intake)
        dialect = _DIALECTS[settings["speaks"] or name]
        report = _reporter(reports, name)
        answers = dialect.answers(intake, report)
        refused = partial(_refusal, dialect, report)
        ends = partial(_answered, name, dialect, log, report, doors, partial(late.update, [settings["model"]]))
        answered = {path: partial(ends, answer) for path, answer in answers.items()}
        its = _add(paths, f"/dialects/{name}", name, dialect, intake, answered)
        endpoints |= its
        refusals |= dict.fromkeys(its, refused)
        if settings["port"] is not None:
            own = APIRouter()
            its = _add(own, "", name, dialect, intake, answered)
            app = FastAPI(openapi_url=None)
            app.add_middleware(NeverCached)
            app.include_router(own)
            ports[name] = DialectPaths(app, its), dict.fromkeys(its, refused)
    return DialectRoutes(paths, endpoints, refusals, ports, intakes, reports)


def _add(
    paths: APIRouter, base: str, name: str, dialect: Dialect, intake: Intake, answered: Mapping[str, Endpoint]
) -> dict[str, Endpoint]:
    for path, document in dialect.about(intake).items():

        def about(document: Any) -> Callable[[], Any]:
            return lambda: document

        paths.add_api_route(base + path, about(document), methods=["GET"], response_model=None, name=f"{name}{path}")

    endpoints: dict[str, Endpoint] = {}
    for path, endpoint in answered.items():
        endpoints |= {base + path or "/": endpoint, f"{base}{path}/": endpoint}
        if base + path:
            paths.add_api_route(base + path, _answered_before, methods=["POST"], name=f"dialect {name}{path}")
        paths.add_api_route(f"{base}{path}/", _answered_before, methods=["POST"], include_in_schema=False)
    return endpoints


async def _answered_before() -> Response:
    # `DialectPaths` answers these requests. Their routes are for /openapi.json, and for status 405 to other methods.
    raise HTTPException(404)


async def _answered(
    name: str,
    dialect: Dialect,
    log: Log,
    report: Callable[[str], None],
    doors: Doors,
    late: Callable[[], None],
    answer: Endpoint,
    body: bytes,
) -> HttpReply:
    try:
        return await answer(body)
    except Error as error:
        failure = error
        if error.code == Code.TIMEOUT:
            late()
    except asyncio.CancelledError:
        if not doors.closed:
            raise
        failure = refusal()  # the server ends
    except Exception as error:  # some clients retry a 500 for a day and a half
        log.error("a dialect failed", dialect=name, error=said(error), exc_info=error)
        failure = ModelFailed(f"the gateway failed at this request ({said(error, 200)}); its log says more")
    return _refused(dialect, report, failure)


def _refused(dialect: Dialect, report: Callable[[str], None], failure: Error) -> HttpReply:
    report(said(failure, 300))
    if failure.code in _PASSING:
        return HttpReply(*dialect.refusal(said(failure, 1000), 503), 503, headers=(("retry-after", RETRY_AFTER),))
    known = TABLE[failure.code].http
    status = dialect.status or (known if known < 500 else 422)
    return HttpReply(*dialect.refusal(said(failure, 1000), status), status)


def _refusal(
    dialect: Dialect, report: Callable[[str], None], failure: Error
) -> tuple[int, list[tuple[str, str]], bytes]:
    reply = _refused(dialect, report, failure)
    return reply.status, reply.fields(), reply.body


def _reporter(reports: LogLimiter, name: str) -> Callable[[str], None]:
    """Return a function that logs why there was no reward, once a second at most: clients cause any number of these."""
    return lambda why: reports("no reward", dialect=name, reason=why)
