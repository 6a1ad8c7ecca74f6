"""OpenRLHF's remote reward model: JSON for JSON, one sample or a whole rollout.

    {"query": [str, ...], "prompts": [str, ...], "labels": [str | null, ...]}
        -> {"rewards": [float, ...], "scores": [float, ...], "extra_logs": {"weights_version": [int, ...]}}

Whatever is not 2xx is tried five times, a second apart; then the sample goes on with reward None. A client of several
URLs sends the second and further ones empty lists.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import Response

from jurybox.protocol.errors import Code, ProtocolMismatch, SpecMismatch, said
from jurybox.server.gateway.dialects.intake import Intake, listed

MEDIA = "application/json"


async def answer(intake: Intake, body: bytes) -> Response:
    """Score a request."""
    given = await intake.off_loop(read, body)
    queries = listed(given, "query")
    n = len(queries)
    columns = {"query": queries, "text": queries}
    for field, name in (("prompts", "prompt"), ("labels", "label")):
        if given.get(field) is not None:
            columns[name] = listed(given, field, n)
    scores = await intake.score(columns, n)
    rewards = {
        "rewards": scores.values,
        "scores": scores.values,
        "extra_logs": {"weights_version": [scores.version] * n} if n else {},
    }
    return Response(json.dumps(rewards, allow_nan=False), media_type=MEDIA)


def read(body: bytes) -> dict[str, Any]:
    """The JSON object that came. Raises ProtocolMismatch, SpecMismatch."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolMismatch(f"the body is no JSON: {said(error, 200)}", Code.MALFORMED) from error
    if type(given) is not dict:
        raise SpecMismatch(f"expected a JSON object, came {type(given).__name__}")
    return given


def refusal(why: str) -> tuple[bytes, str]:
    """A body that says why there is no score, and its media type."""
    return json.dumps({"error": why}).encode(), MEDIA
