"""The HTTP routes of the dialects: /dialects/NAME, bound to a model by [dialects.NAME] of the configuration."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from jurybox.protocol.errors import TABLE, Code, Error, ModelFailed, said
from jurybox.server.gateway.dialects import json_dialects, pickle_dialects
from jurybox.server.gateway.dialects.intake import Intake
from jurybox.server.logs import Log


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a dialect answers.

    Attributes:
        answer: what a body is answered with.
        refusal: a body that says why there is no answer, and its media type.
        path: under the dialect's own, of its requests.
        status: of a refusal that asking again does not help; 0: that of the error, 4xx.
        about: the names of rewards as a GET of "health" and "rewards" tells them.
    """

    answer: Callable[[Intake, bytes], Awaitable[Response]]
    refusal: Callable[[str], tuple[bytes, str]]
    path: str = ""
    status: int = 0
    about: Callable[[Intake], dict[str, dict[str, Any]]] = lambda _: {"/health": {"status": "ok"}}


_DIALECTS = {
    "flow_grpo": Dialect(pickle_dialects.flow_grpo, pickle_dialects.refusal),
    "verl_omni": Dialect(pickle_dialects.verl_omni, pickle_dialects.refusal),
    "openrlhf": Dialect(json_dialects.openrlhf, json_dialects.refusal),
    "slime": Dialect(json_dialects.slime, json_dialects.refusal),
    # Its client raises the text of an error that comes with 200, and repeats anything else without it.
    "flow_factory": Dialect(json_dialects.flow_factory, json_dialects.refusal, "/compute", status=200),
    "unirl": Dialect(json_dialects.unirl, json_dialects.unirl_refusal, "/score", about=json_dialects.unirl_about),
}
# The server is busy, or an engine is starting: the same request may be answered a moment later.
_PASSING = (Code.BUSY, Code.TIMEOUT, Code.SERVER_GONE, Code.NOT_READY, Code.DRAINING)
_AGAIN = "2"  # seconds


def router(dialects: Mapping[str, Mapping[str, Any]], address: str, log: Log) -> APIRouter:
    """The routes of all dialects, for `create_app`.

    Args:
        dialects: settings by name, as [dialects.NAME] has them.
        address: the server's.
    """
    paths = APIRouter(tags=["dialects"])
    pool = ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="pictures")
    for name, settings in dialects.items():
        size = settings["resize"]
        intake = Intake(
            pool,
            address,
            reward=settings["reward"] or settings["model"],
            size=tuple(size) if size else None,
            model=settings["model"],
            inputs=settings["inputs"],
            output=settings["output"],
            timeout=settings["timeout"],
        )
        _add(paths, name, settings["speaks"] or name, intake, log)
    return paths


def _add(paths: APIRouter, name: str, speaks: str, intake: Intake, log: Log) -> None:
    dialect = _DIALECTS[speaks]
    base = f"/dialects/{name}"

    for path, told in dialect.about(intake).items():

        def about(told: dict[str, Any]) -> Callable[[], dict[str, Any]]:
            return lambda: told

        paths.add_api_route(base + path, about(told), methods=["GET"], response_model=None, name=f"{name}{path}")

    @paths.post(base + dialect.path, name=f"dialect {name}")
    @paths.post(f"{base}{dialect.path}/", include_in_schema=False)
    async def asked(request: Request) -> Response:
        try:
            return await dialect.answer(intake, await request.body())
        except ClientDisconnect:
            raise
        except Error as error:
            failure = error
        except Exception as error:  # a client of these may take 500 for a reason to ask for a day and a half
            log.error("a dialect failed", dialect=name, error=said(error), exc_info=error)
            failure = ModelFailed(f"the gateway failed at this request ({said(error, 200)}); its log says more")
        log.warning("no reward", dialect=name, reason=said(failure, 300))
        body, media = dialect.refusal(said(failure, 1000))
        if failure.code in _PASSING:
            return Response(body, 503, {"Retry-After": _AGAIN}, media)
        status = TABLE[failure.code].http
        return Response(body, dialect.status or (status if status < 500 else 422), media_type=media)
