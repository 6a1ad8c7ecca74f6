"""The HTTP scorer of verl-omni and deepgen_rl: a pickled dict for a pickled dict.

    {"images": [bytes, ...], "prompts": [str, ...], "metadata": {...}} -> {"scores": [float, ...]}

verl-omni asks again after 408, 429 and 5xx; any other 4xx stops with the text of "error". Bodies of errors are
unpickled too, so they are pickles always.
"""

from __future__ import annotations

from fastapi import Response

from jurybox.server.gateway.dialects.flow_grpo import MEDIA, VERSION_HEADER, read, scored
from jurybox.server.gateway.dialects.intake import Intake
from jurybox.server.gateway.dialects.pickles import dumps


async def answer(intake: Intake, body: bytes) -> Response:
    """Score a request."""
    scores = await scored(intake, await read(intake, body))
    return Response(dumps({"scores": scores.values}), 200, {VERSION_HEADER: str(scores.version)}, MEDIA)
