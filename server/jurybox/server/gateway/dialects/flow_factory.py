"""Flow-Factory's remote reward: JSON with PNG pictures in base64.

    {"prompt": [str, ...], "image": [base64, ...], "video": null, ...} -> {"rewards": [float, ...]}

An "error" that comes with status 200 stops its training with our text; any other status is repeated three times without
a pause, and its text is lost.
"""

from __future__ import annotations

import json

from fastapi import Response

from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway.dialects.flow_grpo import VERSION_HEADER
from jurybox.server.gateway.dialects.intake import Intake, listed
from jurybox.server.gateway.dialects.openrlhf import MEDIA, read

_NOT_SERVED = ("video", "condition_images", "condition_videos")


async def answer(intake: Intake, body: bytes) -> Response:
    """Score a request."""
    given = await intake.off_loop(read, body)
    prompts = listed(given, "prompt")
    if others := [name for name in _NOT_SERVED if given.get(name)]:
        raise Refused(f"{', '.join(others)} came: pictures and prompts alone are scored here", Code.UNSUPPORTED)
    pictures = listed(given, "image", len(prompts)) if given.get("image") is not None else None
    scores = await intake.score({"prompt": prompts, "text": prompts}, len(prompts), pictures=pictures)
    rewards = json.dumps({"rewards": scores.values}, allow_nan=False)
    return Response(rewards, 200, {VERSION_HEADER: str(scores.version)}, MEDIA)
