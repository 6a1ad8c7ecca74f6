"""NeMo Gym's resources server: verifies what a policy answered, and gives the row back with its reward.

    POST /seed_session  a row of the dataset -> {}
    POST /verify        the row and "response", an object of OpenAI's Responses API
        -> the same body with "reward": float, and with a panel "reward_components": {name: float}, whose sum it is

The answer's text is all `output_text` of its messages. The body is given back byte for byte, because the trainer takes
its token ids from it. The agent turns an error status into a typed failure; a reward of 0 would be learned from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from jurybox.protocol.errors import Code, ModelFailed, ProtocolMismatch
from jurybox.server.gateway.dialects.intake import Intake, Request, RequestScores, scalars
from jurybox.server.gateway.dialects.json_dialects import MEDIA, read
from jurybox.server.gateway.known_paths import Endpoint, HttpReply

_OWN = ("responses_create_params", "response")


def answers(intake: Intake, _log: Callable[[str], None]) -> Mapping[str, Endpoint]:
    """Return the functions that answer a request body, by path."""

    async def verify(body: bytes) -> HttpReply:
        return await intake.answered(
            lambda body: _row(intake, body), lambda request, scores: _rewarded(intake, request, scores), body
        )

    async def seeded(body: bytes) -> HttpReply:
        await intake.read(read, body)
        return HttpReply(b"{}", MEDIA)

    return {"/verify": verify, "/seed_session": seeded}


def about(_intake: Intake) -> dict[str, Any]:
    """Return the responses to GET / (liveness), /health and /reverify_mode."""
    return {"/health": {"status": "ok"}, "/reverify_mode": "stateless"}


def _row(intake: Intake, body: bytes) -> Request:
    given = read(body)
    if wrong := [name for name in _OWN if type(given.get(name)) is not dict]:
        raise ProtocolMismatch(f"expected an object in {wrong[0]!r}, and in 'responses_create_params'", Code.MALFORMED)
    columns = {
        "text": [_said(given["response"].get("output"), "output_text")],
        "prompt": [_asked(given["responses_create_params"].get("input"))],
    }
    for name, value in given.items():
        if name not in _OWN and intake.takes(name):
            columns[name] = [value if type(value) is str else json.dumps(value, ensure_ascii=False)]
    body = body.strip()
    if body[:1] + body[-1:] != b"{}":
        raise ProtocolMismatch("expected JSON in UTF-8", Code.MALFORMED)
    return Request(columns, 1, context=(body, given.keys()), parameters=scalars(given))


def _said(items: Any, kind: str) -> str:
    """Return the texts of a kind in all messages, concatenated."""
    if type(items) is not list or not all(type(item) is dict for item in items):
        raise ProtocolMismatch("expected a list of objects in 'response.output'", Code.MALFORMED)
    found: list[Any] = []
    for item in items:
        if item.get("type") == "message" and type(parts := item.get("content")) is list:
            found += [part.get("text") for part in parts if type(part) is dict and part.get("type") == kind]
    if not all(type(text) is str for text in found):
        raise ProtocolMismatch(f"expected text in every {kind!r}", Code.MALFORMED)
    return "".join(found)


def _asked(given: Any) -> str:
    """Return the last message of a user: of a text, or of a list of messages."""
    if type(given) is str:
        return given
    messages = given if type(given) is list else []
    users = [one for one in messages if type(one) is dict and one.get("role") == "user"]
    content = users[-1].get("content") if users else ""
    if type(content) is str:
        return content
    return _said([{"type": "message", "content": content}], "input_text")


def _rewarded(intake: Intake, request: Request, scores: RequestScores) -> HttpReply:
    """Write the reward into the request's body, which is an object; a later key replaces an earlier one of its name."""
    (reward,) = scores.values
    body, names = request.context
    added: dict[str, Any] = {"reward": reward}
    if scores.parts:
        parts = {name: intake.form.weights[name] * part[0] for name, part in scores.parts.items()}
        if not math.isclose(sum(parts.values()), reward, rel_tol=1e-5, abs_tol=1e-6):
            raise ModelFailed(f"the panel's members add up to {sum(parts.values())!r}, its score is {reward!r}")
        told = {name: part for name, part in parts.items() if name not in names}  # for metrics
        added = {**told, "reward": sum(parts.values()), "reward_components": parts}  # it compares them
    rest = json.dumps(added, allow_nan=False).encode()[1:]
    return HttpReply(body[:-1] + b"," + rest, MEDIA, version=scores.version)
