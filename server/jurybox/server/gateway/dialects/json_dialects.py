"""Trainers that send JSON: OpenRLHF, slime, Flow-Factory and UniRL."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import isinf
from typing import Any

from jurybox import native
from jurybox.client.juror import Passing
from jurybox.client.juror import Scores as Found
from jurybox.protocol.errors import Code, ProtocolMismatch, Refused, SpecMismatch, plain, said
from jurybox.server.gateway.dialects.intake import Intake, Request, RequestScores, listed, scalars
from jurybox.server.gateway.known_paths import HttpReply
from jurybox.server.security.limits import hold_text

MEDIA = "application/json"
_METRIC = "score"
_LONG = 4096  # characters of the shortest string that is cut out before parsing
_WRITTEN = json.JSONEncoder(allow_nan=False).encode  # json.dumps(..., allow_nan=False) creates an encoder in each call


async def openrlhf(intake: Intake, body: bytes) -> HttpReply:
    """Answer OpenRLHF's remote reward model: JSON for one sample or a whole rollout.

        {"query": [str, ...], "prompts": [str, ...], "labels": [str | null, ...]}
            -> {"rewards": [float, ...], "scores": [float, ...], "extra_logs": {"weights_version": [int, ...]}}

    The client retries five times, a second apart, when the status is not 2xx; then the sample gets the reward None. A
    client with several URLs sends empty lists to all but the first.
    """
    return await intake.answered(_openrlhf, _openrlhf_answer, body)


def _openrlhf_answer(request: Request, scores: RequestScores) -> HttpReply:
    rewards = {
        "rewards": scores.values,
        "scores": scores.values,
        "extra_logs": {**scores.parts, "weights_version": [scores.version] * request.n} if request.n else {},
    }
    return HttpReply(_WRITTEN(rewards).encode(), MEDIA)


def _openrlhf(body: bytes) -> Request:
    given = read(body)
    queries = listed(given, "query")
    columns = {"query": queries, "text": queries}
    for field, name in (("prompts", "prompt"), ("labels", "label")):
        if given.get(field) is not None:
            columns[name] = listed(given, field, len(queries))
    return Request(columns, len(queries), parameters=scalars(given))


def read(body: bytes, check: Callable[[bytes], None] | None = None) -> dict[str, Any]:
    """Parse a body that must be a JSON object; see `parsed`. Raises ProtocolMismatch, SpecMismatch."""
    try:
        given = parsed(body, check)
    except (ValueError, RecursionError) as error:
        raise ProtocolMismatch(f"the body is not JSON: {said(error, 200)}", Code.MALFORMED) from error
    if type(given) is not dict:
        raise SpecMismatch(f"expected a JSON object, came {type(given).__name__}")
    return given


def parsed(body: bytes, check: Callable[[bytes], None] | None = None) -> Any:
    """Parse JSON like json.loads, but refuse numbers that are too large for a float (ValueError).

    Long strings (pictures) are cut out before, because json.loads would examine each of their characters. What remains
    counts for the request; see `hold_text`, which raises Refused.

    Args:
        check: called with the JSON before it is parsed, without long strings; may raise an Error.
    """
    if len(body) > 2 * _LONG and json.detect_encoding(body) == "utf-8":
        rest, texts = native.json_cut(bytes(body), _LONG) or (b"", [])
        if texts:
            if check is not None:
                check(rest)
            left = iter(texts)
            with suppress(ValueError, RecursionError):  # json.loads of the whole body raises the right error
                hold_text(rest)  # those that were cut out are ASCII, no larger than the body, which is counted
                return json.loads(rest, parse_float=_finite, parse_constant=lambda _: next(left))
    if check is not None:
        check(body)
    hold_text(body)
    return _READ(body.decode(json.detect_encoding(body), "surrogatepass"))


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise ValueError(f"the number {text[:40]} is too large for a float")
    return number


_READ = json.JSONDecoder(parse_float=_finite).decode  # json.loads(..., parse_float=...) creates one in each call


def refusal(why: str, _status: int = 0, key: str = "error") -> tuple[bytes, str]:
    """Return the body of an error response, with the reason under `key`, and its media type."""
    return json.dumps({key: why}).encode(), MEDIA


unirl_refusal = partial(refusal, key="detail")


async def slime(intake: Intake, body: bytes) -> HttpReply:
    """Answer slime's remote reward model: one sample in JSON, answered by one number.

        {"prompt": str | [{"role": ..., "content": ...}, ...], "response": str, "label": str | null} -> float

    The whole body is the reward, so a sample without a score gets an error status. slime tries ten times, then stops.
    """
    return await intake.answered(_slime, lambda _, scores: versioned(scores.values[0], scores.version), body)


def versioned(answer: Any, version: int) -> HttpReply:
    """Return an answer in JSON, with the weights version in a header."""
    return HttpReply(_WRITTEN(answer).encode(), MEDIA, version=version)


def _slime(body: bytes) -> Request:
    given = read(body)
    columns = {name: [given[name]] for name in ("prompt", "response", "label") if given.get(name) is not None}
    return Request(columns, 1, parameters=scalars(given))


async def flow_factory(intake: Intake, body: bytes) -> HttpReply:
    """Answer Flow-Factory's remote reward: JSON with PNG pictures in base64.

        {"prompt": [str, ...], "image": [base64, ...], "video": null, ...} -> {"rewards": [float, ...]}
        optionally "video": [[base64, ...], ...], the frames, and "condition_images": [[base64], ...], the field source

    An "error" in a response with status 200 stops the training with its text. On any other status the client retries
    three times without a pause, and the text is lost.
    """
    return await intake.answered(
        lambda body: _flow_factory(intake, body),
        lambda _, scores: versioned({"rewards": scores.values}, scores.version),
        body,
    )


def _flow_factory(intake: Intake, body: bytes) -> Request:
    given = read(body)
    prompts = listed(given, "prompt")
    n = len(prompts)
    if given.get("condition_videos"):
        raise Refused("condition_videos is not supported: videos cannot condition a sample here", Code.UNSUPPORTED)
    pictures = {name: listed(given, name, n) for name in ("image", "video") if given.get(name) is not None}
    if not all(type(frames) is list for frames in pictures.get("video", ())):
        raise SpecMismatch("expected a list of frames for each sample in 'video'")
    if given.get("condition_images"):
        pictures["source"] = [_only_condition(one) for one in listed(given, "condition_images", n)]
    for name in ("video", "source"):
        if name in pictures and not intake.takes(name):
            came = "condition_images" if name == "source" else name
            raise Refused(
                f"{came} is no input of the model; for a model that has one, set inputs = {{INPUT = {name!r}}}",
                Code.UNSUPPORTED,
            )
    return Request({"prompt": prompts, "text": prompts}, n, pictures, parameters=scalars(given))


def _only_condition(given: Any) -> Any:
    if type(given) is not list or len(given) != 1:
        raise Refused("expected one picture for each sample in 'condition_images'", Code.UNSUPPORTED)
    return given[0]


def unirl_about(intake: Intake) -> dict[str, dict[str, Any]]:
    """Return the responses to GET /health and /rewards."""
    return {
        "/health": {"status": "ok", "rewards": {name: [_METRIC] for name in intake.rewards}},
        "/rewards": {"rewards": intake.rewards},
    }


async def unirl(intake: Intake, body: bytes) -> HttpReply:
    """Answer UniRL's reward service: JSON with pictures in base64, and results and errors for each sample.

        {"requests": [{"history": [{"text": str, "image_b64": base64, ...}, ...],
                       "required_rewards": [name, ...], "metadata": {...} | null}]}
            -> {"results": [{name: {"score": float}, ...}, ...], "errors": [{name: str}, ...]}

    A panel's members are rewards, too. The client combines all numbers of a result into one (the first, the mean or the
    greatest), so a result has only the score. It retries three times when the status is not 2xx, and stops at a sample
    with an error. The last turn is scored, as an edit of the first turn's picture if the dialect's inputs name
    "source". A path on the server's host ("video_path") is never opened.
    """
    return await intake.answered_rows(
        lambda body: _unirl(intake, body), lambda request, found: _unirl_answer(intake, request, found), body
    )


def _unirl_answer(intake: Intake, request: Request, found: Found) -> HttpReply:
    required: list[list[str]] = request.context
    scores = {name: found.parts.get(name, found) for name in intake.rewards}
    wanted = [(i, name) for i, names in enumerate(required) for name in names]
    if late := next((why for i, name in wanted if isinstance(why := scores[name][i], Passing)), ""):
        raise Refused(late, Code.NOT_READY)  # the client retries
    results: list[dict[str, Any]] = [{} for _ in required]
    errors: list[dict[str, str]] = [{} for _ in required]
    for name, column in scores.items():
        for i, score in enumerate(column):
            if not isinstance(score, str):
                results[i][name] = {_METRIC: score}
    for i, name in wanted:
        if isinstance(why := scores[name][i], str):
            errors[i][name] = plain(why, 500)
    return versioned({"results": results, "errors": errors}, found.version)


def _unirl(intake: Intake, body: bytes) -> Request:
    requests = listed(read(body), "requests")
    turns = [_last_turn(intake, request) for request in requests]
    seen = [turn.get("image_b64") is not None for turn in turns]
    if any(seen) and not all(seen):
        raise ProtocolMismatch("some samples have a picture and some none: send separate requests", Code.MALFORMED)
    texts = [turn.get("text") or "" for turn in turns]
    metadata = [json.dumps(request.get("metadata")) for request in requests]
    pictures = {"image": [turn["image_b64"] for turn in turns]} if any(seen) else {}
    if intake.takes("source"):
        pictures["source"] = [_source(request) for request in requests]
    columns = {"text": texts, "prompt": texts, "metadata": metadata}
    return Request(columns, len(turns), pictures, [request["required_rewards"] for request in requests])


def _source(request: dict[str, Any]) -> str:
    """Return the picture before the edit, which is that of the first of two turns."""
    first = request["history"][0]
    if len(request["history"]) < 2 or type(first) is not dict or type(first.get("image_b64")) is not str:
        raise ProtocolMismatch("expected two turns with image_b64, the picture before its edit first", Code.MALFORMED)
    source: str = first["image_b64"]
    return source


def _last_turn(intake: Intake, request: Any) -> dict[str, Any]:
    history = request.get("history") if type(request) is dict else None
    if type(history) is not list or not history or type(history[-1]) is not dict:
        raise ProtocolMismatch("expected requests with a history of at least one turn", Code.MALFORMED)
    required = request.get("required_rewards")
    if type(required) is not list or not required or any(name not in intake.rewards for name in required):
        came, there = plain(json.dumps(required), 200), ", ".join(intake.rewards)
        raise ProtocolMismatch(f"required_rewards is {came}, expected names of {there}", Code.MALFORMED)
    turn: dict[str, Any] = history[-1]
    if turn.get("video_b64") is not None or turn.get("video_path") is not None:
        raise ProtocolMismatch("video is not supported, expected image_b64 or text", Code.MALFORMED)
    return turn
