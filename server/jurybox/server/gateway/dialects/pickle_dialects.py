"""Trainers that send pickles: Flow-GRPO, and the HTTP scorer of verl-omni and deepgen_rl."""

from __future__ import annotations

from typing import Any

from fastapi import Response

from jurybox.protocol.errors import Code, Refused, SpecMismatch
from jurybox.server.gateway.dialects.intake import VERSION_HEADER, Intake, Scores, listed
from jurybox.server.gateway.dialects.pickles import dumps, loads

MEDIA = "application/octet-stream"


async def flow_grpo(intake: Intake, body: bytes) -> Response:
    """Flow-GRPO's remote rewards: a pickled dict of JPEG pictures, and prompts, for a pickled dict of scores.

        {"images": [bytes, ...]}                        -> {"outputs": [float, ...]}
        {"images": [bytes, ...], "prompts": [str, ...]} -> {"outputs": [float, ...]}

    The client looks at no status but 500, which it repeats for a day and a half, and at 503 with Retry-After, which it
    obeys. So what cannot be scored is answered with a 4xx whose body has no "outputs": its training stops, and says so.
    """
    given = await read(intake, body)
    if "meta_datas" in given:
        raise Refused("GenEval's requests ('meta_datas') are not served: its judgements are more than one score")
    scores = await scored(intake, given)
    # Lists, not arrays: the client adds them up with +=.
    return Response(dumps({"outputs": scores.values}), 200, {VERSION_HEADER: str(scores.version)}, MEDIA)


async def read(intake: Intake, body: bytes) -> dict[str, Any]:
    """Parse a body that must be a pickled dict. Raises NotPlain, SpecMismatch."""
    given = await intake.off_loop(loads, body)
    if type(given) is not dict:
        raise SpecMismatch(f"expected a pickled dict with 'images', came a {type(given).__name__}")
    return given


async def scored(intake: Intake, given: dict[str, Any]) -> Scores:
    """Score the pictures of a request, with their prompts if it has any."""
    pictures = listed(given, "images")
    n = len(pictures)
    columns = {"prompt": listed(given, "prompts", n)} if "prompts" in given else {}
    if not all(type(prompt) is str for prompt in columns.get("prompt", ())):
        raise SpecMismatch("expected prompts of text", Code.SPEC_MISMATCH)
    return await intake.score(columns, n, pictures=pictures)


def refusal(why: str) -> tuple[bytes, str]:
    """The body of an error response, and its media type."""
    return dumps({"error": why}), MEDIA


async def verl_omni(intake: Intake, body: bytes) -> Response:
    """The HTTP scorer of verl-omni and deepgen_rl: a pickled dict for a pickled dict.

        {"images": [bytes, ...], "prompts": [str, ...], "metadata": {...}} -> {"scores": [float, ...]}

    verl-omni asks again after 408, 429 and 5xx; any other 4xx stops with the text of "error". Bodies of errors are
    unpickled too, so they are pickles always.
    """
    scores = await scored(intake, await read(intake, body))
    return Response(dumps({"scores": scores.values}), 200, {VERSION_HEADER: str(scores.version)}, MEDIA)
