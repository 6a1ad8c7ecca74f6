"""Flow-GRPO's remote rewards: a pickled dict of JPEG pictures, and prompts, for a pickled dict of scores.

    {"images": [bytes, ...]}                        -> {"outputs": [float, ...]}
    {"images": [bytes, ...], "prompts": [str, ...]} -> {"outputs": [float, ...]}

The client looks at no status but 500, which it repeats for a day and a half, and at 503 with Retry-After, which it
obeys. So what cannot be scored is answered with a 4xx whose body has no "outputs": its training stops, and says so.
"""

from __future__ import annotations

from typing import Any

from fastapi import Response

from jurybox.protocol.errors import Code, Refused, SpecMismatch
from jurybox.server.gateway.dialects.intake import Intake, Scores, listed
from jurybox.server.gateway.dialects.pickles import dumps, loads

MEDIA = "application/octet-stream"
VERSION_HEADER = "X-Jurybox-Weights-Version"


async def answer(intake: Intake, body: bytes) -> Response:
    """Score a request."""
    given = await read(intake, body)
    if "meta_datas" in given:
        raise Refused("GenEval's requests ('meta_datas') are not served: its judgements are more than one score")
    scores = await scored(intake, given)
    # Lists, not arrays: the client adds them up with +=.
    return Response(dumps({"outputs": scores.values}), 200, {VERSION_HEADER: str(scores.version)}, MEDIA)


async def read(intake: Intake, body: bytes) -> dict[str, Any]:
    """The dict that came pickled. Raises NotPlain, SpecMismatch."""
    given = await intake.off_loop(loads, body)
    if type(given) is not dict:
        raise SpecMismatch(f"expected a pickled dict with 'images', came a {type(given).__name__}")
    return given


async def scored(intake: Intake, given: dict[str, Any]) -> Scores:
    """The scores of the pictures that came, with the prompts where there are any."""
    pictures = listed(given, "images")
    n = len(pictures)
    columns = {"prompt": listed(given, "prompts", n)} if "prompts" in given else {}
    if not all(type(prompt) is str for prompt in columns.get("prompt", ())):
        raise SpecMismatch("expected prompts of text", Code.SPEC_MISMATCH)
    return await intake.score(columns, n, pictures=pictures)


def refusal(why: str) -> tuple[bytes, str]:
    """A body that says why there is no score, and its media type."""
    return dumps({"error": why}), MEDIA
