"""The dialects' paths: each on /dialects/NAME, bound to a model by [dialects.NAME] of the configuration."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from jurybox.protocol.errors import TABLE, Code, Error, ModelFailed, said
from jurybox.server.gateway.dialects import flow_grpo, openrlhf, slime, verl_omni
from jurybox.server.gateway.dialects.intake import Intake
from jurybox.server.logs import Log

# A dialect: how it answers a body, and how it says that there is no answer (status, text).
_ANSWERS: dict[str, Callable[[Intake, bytes], Awaitable[Response]]] = {
    "flow_grpo": flow_grpo.answer,
    "verl_omni": verl_omni.answer,
    "openrlhf": openrlhf.answer,
    "slime": slime.answer,
}
_REFUSALS: dict[str, Callable[[str], tuple[bytes, str]]] = {
    "flow_grpo": flow_grpo.refusal,
    "verl_omni": flow_grpo.refusal,
    "openrlhf": openrlhf.refusal,
    "slime": openrlhf.refusal,
}
# The server is busy, or an engine is starting: the same request may be answered a moment later.
_PASSING = (Code.BUSY, Code.TIMEOUT, Code.SERVER_GONE, Code.NOT_READY, Code.DRAINING)
_AGAIN = "2"  # seconds


def router(dialects: Mapping[str, Mapping[str, Any]], address: str, log: Log) -> APIRouter:
    """The paths of all dialects, for `create_app`.

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
            size=tuple(size) if size else None,
            model=settings["model"],
            inputs=settings["inputs"],
            output=settings["output"],
            timeout=settings["timeout"],
        )
        _add(paths, name, settings["speaks"] or name, intake, log)
    return paths


def _add(paths: APIRouter, name: str, speaks: str, intake: Intake, log: Log) -> None:
    answer, refusal = _ANSWERS[speaks], _REFUSALS[speaks]

    @paths.post(f"/dialects/{name}", name=f"dialect {name}")
    @paths.post(f"/dialects/{name}/", include_in_schema=False)
    async def asked(request: Request) -> Response:
        try:
            return await answer(intake, await request.body())
        except ClientDisconnect:
            raise
        except Error as error:
            failure = error
        except Exception as error:  # a client of these may take 500 for a reason to ask for a day and a half
            log.error("a dialect failed", dialect=name, error=said(error), exc_info=error)
            failure = ModelFailed(f"the gateway failed at this request ({said(error, 200)}); its log says more")
        log.warning("no reward", dialect=name, reason=said(failure, 300))
        body, media = refusal(said(failure, 1000))
        if failure.code in _PASSING:
            return Response(body, 503, {"Retry-After": _AGAIN}, media)
        status = TABLE[failure.code].http
        return Response(body, status if status < 500 else 422, media_type=media)
