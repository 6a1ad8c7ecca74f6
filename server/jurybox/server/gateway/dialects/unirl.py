"""UniRL's reward service: JSON with pictures in base64, several samples a request, each with its own result or error.

    {"requests": [{"history": [{"text": str, "image_b64": base64, ...}, ...], "required_rewards": [name], ...}, ...]}
        -> {"results": [{name: {"score": float, "weights_version": int}}, ...], "errors": [{name: str}, ...]}

The client takes a reward's first number. It tries three times what is not 2xx, and stops at a sample with an error.
Scored is the last turn; a file's name on the server's host ("video_path") is never opened.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import Response

from jurybox.client.rewards import Passing
from jurybox.protocol.errors import Code, ProtocolMismatch, Refused, plain
from jurybox.server.gateway.dialects.intake import Intake, listed
from jurybox.server.gateway.dialects.openrlhf import MEDIA, read

_METRICS = ["score", "weights_version"]


def about(intake: Intake) -> dict[str, dict[str, Any]]:
    """What /health and /rewards say."""
    return {
        "/health": {"status": "ok", "rewards": {intake.reward: _METRICS}},
        "/rewards": {"rewards": [intake.reward]},
    }


async def answer(intake: Intake, body: bytes) -> Response:
    """Score a request."""
    given = await intake.off_loop(read, body)
    turns = [_last_turn(intake, request) for request in listed(given, "requests")]
    seen = [turn.get("image_b64") is not None for turn in turns]
    if any(seen) and not all(seen):
        raise ProtocolMismatch("some samples came with a picture and some without: send them apart", Code.MALFORMED)
    texts = [turn.get("text") or "" for turn in turns]
    pictures = [turn["image_b64"] for turn in turns] if any(seen) else None
    found, version = await intake.rows({"text": texts, "prompt": texts}, len(turns), pictures=pictures)
    if late := next((score for score in found if isinstance(score, Passing)), ""):
        raise Refused(late, Code.NOT_READY)  # worth another try
    name = intake.reward
    results: list[dict[str, Any]] = []
    errors: list[dict[str, str]] = []
    for score in found:
        failed = isinstance(score, str)
        results.append({} if failed else {name: {"score": score, "weights_version": version}})
        errors.append({name: plain(score, 500)} if failed else {})
    return Response(json.dumps({"results": results, "errors": errors}, allow_nan=False), media_type=MEDIA)


def _last_turn(intake: Intake, request: Any) -> dict[str, Any]:
    history = request.get("history") if type(request) is dict else None
    if type(history) is not list or not history or type(history[-1]) is not dict:
        raise ProtocolMismatch("expected requests with a history of at least one turn", Code.MALFORMED)
    required = request.get("required_rewards")
    if required != [intake.reward]:
        told = plain(json.dumps(required), 200)
        raise ProtocolMismatch(f"rewards {told} are required, expected [{intake.reward!r}]", Code.MALFORMED)
    turn: dict[str, Any] = history[-1]
    if turn.get("video_b64") is not None or turn.get("video_path") is not None:
        raise ProtocolMismatch("video is not scored here, expected image_b64 or text", Code.MALFORMED)
    return turn


def refusal(why: str) -> tuple[bytes, str]:
    """A body that says why there is no answer, and its media type."""
    return json.dumps({"detail": why}).encode(), MEDIA
