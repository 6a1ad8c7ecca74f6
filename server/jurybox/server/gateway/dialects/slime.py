"""slime's remote reward model: one sample in JSON for one number.

    {"prompt": str | [{"role": ..., "content": ...}, ...], "response": str, "label": str | null} -> float

The whole body is the reward, so it can say nothing else, and a sample without a score gets an error status: slime asks
ten times, then stops.
"""

from __future__ import annotations

import json

from fastapi import Response

from jurybox.server.gateway.dialects.flow_grpo import VERSION_HEADER
from jurybox.server.gateway.dialects.intake import Intake
from jurybox.server.gateway.dialects.openrlhf import MEDIA, read


async def answer(intake: Intake, body: bytes) -> Response:
    """Score a request."""
    given = await intake.off_loop(read, body)
    columns = {name: [given[name]] for name in ("prompt", "response", "label") if given.get(name) is not None}
    scores = await intake.score(columns, 1)
    headers = {VERSION_HEADER: str(scores.version)}
    return Response(json.dumps(scores.values[0], allow_nan=False), 200, headers, MEDIA)
