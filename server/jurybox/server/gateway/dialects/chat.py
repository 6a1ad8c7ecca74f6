"""Judges behind an OpenAI chat. Flow-GRPO's UnifiedReward: one picture and one question, answered by "Final Score: X".

    POST v1/chat/completions   {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:image;..."}},
                                                          {"type": "text", "text": str}]}], ...}
        -> {"choices": [{"message": {"content": "Final Score: 3.5"}}], ...}

The client accepts X from 1 to 5 and turns anything else into 0.0. So the juror must score on that scale: another score
gets an error status, which ends the training with the reason. The client retries twice after 408, 409, 429 and 5xx. It
creates an event loop for each step and reuses its connections, which fail in the next loop, so each answer closes the
connection.

Any other chat (`judged`) is answered by the score alone, in digits. Clients read what is no number as 0, and some drop
a minus sign, so a score outside the setting `score_range`, 0 and more by default, gets an error status.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from typing import Any

from jurybox.protocol.errors import Code, ProtocolMismatch, Refused, SpecMismatch, plain
from jurybox.server.gateway.dialects.body_fields import require_chat
from jurybox.server.gateway.dialects.intake import Intake, Request, RequestScores, Unscored
from jurybox.server.gateway.dialects.json_dialects import MEDIA, read
from jurybox.server.gateway.known_paths import HttpReply

PATH = "/v1/chat/completions"
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # nothing is tokenized
_LEAST, _MOST = 1.0, 5.0
_CAPTION = "Text Caption: ["  # before the prompt, in the client's question
_CHAT = "expected messages with a content that is a text, or a list of texts and pictures (image_url)"
_SPOKEN = "expected a chat of one message with a picture (image_url) and a text"


async def unifiedreward(intake: Intake, body: bytes) -> HttpReply:
    """Answer one question.

    Raises:
        ProtocolMismatch, SpecMismatch: the request is not valid.
        Unscored: the score is outside 1 to 5.
        Error: whatever `Intake.answered` raises.
    """
    return await intake.answered(_asked, _answer, body)


def _answer(request: Request, scores: RequestScores) -> HttpReply:
    (score,) = scores.values
    if not _LEAST <= score <= _MOST:
        raise Unscored(
            f"the score is {score:g}, expected {_LEAST:g} to {_MOST:g}: the client would read anything else as 0"
        )
    answer = _completion(request.context, f"Final Score: {score:.6f}")
    return HttpReply(json.dumps(answer).encode(), MEDIA, version=scores.version, headers=(("connection", "close"),))


def created() -> int:
    """Return the time of an answer, as OpenAI's have it: seconds since 1970."""
    return int(time.time())


def _completion(model: str, content: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": created(),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": dict(USAGE),
    }


def judged(intake: Intake, given: dict[str, Any]) -> Request:
    """Return the row of a chat, whose answer is its score in digits. Raises ProtocolMismatch, SpecMismatch, Refused."""
    require_chat(given)
    model, form = plain(given.get("model") or "", 100), intake.form

    def written(scores: list[float]) -> dict[str, Any]:
        (score,) = scores
        form.require_in_range(score, math.inf)
        return _completion(model, f"{score:.{form.decimals}f}")

    return conversation(given.get("messages"))._replace(context=written)


def conversation(messages: Any) -> Request:
    """Return a chat as one row: its last text, the texts before it, all as JSON, and its picture if it has one."""
    if type(messages) is not list or not messages or not all(type(one) is dict for one in messages):
        raise ProtocolMismatch(_CHAT, Code.MALFORMED)
    told, urls = [], []
    for message in messages:
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if type(content) is str else content
        if type(parts) is not list or not all(type(part) is dict for part in parts):
            raise ProtocolMismatch(_CHAT, Code.MALFORMED)
        texts = [part.get("text") for part in parts if part.get("type") == "text"]
        pictures = [part.get("image_url") for part in parts if part.get("type") == "image_url"]
        if len(texts) + len(pictures) != len(parts) or not all(type(text) is str for text in texts):
            raise ProtocolMismatch(_CHAT, Code.MALFORMED)
        told.append({"role": message.get("role"), "content": "\n".join(texts)})
        urls += [_inline(picture) for picture in pictures]
    if len(urls) > 1:
        raise Refused(f"a chat with {len(urls)} pictures, expected at most one", Code.UNSUPPORTED)
    earlier = "\n\n".join(one["content"] for one in told[:-1])
    columns = {"text": [told[-1]["content"]], "prompt": [earlier], "chat": [json.dumps(told, ensure_ascii=False)]}
    return Request(columns, 1, {"image": urls} if urls else {})


def _inline(picture: Any) -> str:
    url = picture.get("url") if type(picture) is dict else None
    if type(url) is not str or not url.startswith("data:"):
        raise SpecMismatch(f"expected an inline picture, data:image;base64,..., came {plain(url, 50)!r}")
    return url


def refusal(why: str, _status: int = 0) -> tuple[bytes, str]:
    """Return the body of an error response, and its media type."""
    return json.dumps({"error": {"message": why, "type": "invalid_request_error"}}).encode(), MEDIA


def about(intake: Intake) -> dict[str, dict[str, Any]]:
    """Return the responses to GET /health and /v1/models."""
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "jurybox"} for name in intake.rewards]
    return {"/health": {"status": "ok"}, "/v1/models": {"object": "list", "data": models}}


def _asked(body: bytes) -> Request:
    given = read(body)
    require_chat(given)
    messages = given.get("messages")
    if type(messages) is not list or len(messages) != 1 or type(messages[0]) is not dict:
        raise ProtocolMismatch(_SPOKEN, Code.MALFORMED)
    parts = messages[0].get("content")
    if type(parts) is not list or not all(type(part) is dict for part in parts):
        raise ProtocolMismatch(_SPOKEN, Code.MALFORMED)
    texts = [part.get("text") for part in parts if part.get("type") == "text"]
    pictures = [part.get("image_url") for part in parts if part.get("type") == "image_url"]
    if len(texts) + len(pictures) != len(parts) or len(texts) != 1 or len(pictures) != 1:
        raise ProtocolMismatch(_SPOKEN, Code.MALFORMED)
    (text,), (picture,) = texts, pictures
    if type(text) is not str:
        raise ProtocolMismatch(_SPOKEN, Code.MALFORMED)
    columns = {"prompt": [_caption(text)], "text": [text]}
    return Request(columns, 1, {"image": [_inline(picture)]}, plain(given.get("model", ""), 100))


def _caption(text: str) -> str:
    """Return the prompt in the client's question, or the whole text if the question has another form."""
    start = text.find(_CAPTION)
    if start < 0 or not text.endswith("]"):
        return text
    return text[start + len(_CAPTION) : -1]
