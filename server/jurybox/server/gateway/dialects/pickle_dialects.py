"""Trainers that send pickles: Flow-GRPO, and the HTTP scorer of verl-omni and deepgen_rl."""

from __future__ import annotations

import json
from typing import Any

from jurybox.protocol.errors import Code, Refused, SpecMismatch, plain, said
from jurybox.server.gateway.dialects.intake import Intake, Request, RequestScores, listed
from jurybox.server.gateway.dialects.pickles import dumps, loads
from jurybox.server.gateway.known_paths import HttpReply
from jurybox.server.settings.dialect_fields import JUDGED

MEDIA = "application/octet-stream"
_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")  # GenEval's tasks
_NOT_THIS_TAG = -10.0


async def flow_grpo(intake: Intake, body: bytes) -> HttpReply:
    """Answer Flow-GRPO's remote rewards: a pickled dict of JPEG pictures and prompts, for a pickled dict of scores.

        {"images": [bytes, ...]}                        -> {"outputs": [float, ...]}
        {"images": [bytes, ...], "prompts": [str, ...]} -> {"outputs": [float, ...]}
        {"images": [bytes, ...], "meta_datas": [{...}, ...], "only_strict": bool} -> as `_judged`

    The client handles only status 500, which it retries for a day and a half, and 503 with Retry-After, which it
    respects. So a request that cannot be scored gets a 4xx without "outputs" in its body, which stops the training with
    an error.
    """
    # The answer has lists, not arrays, because the client concatenates them with +=.
    return await intake.answered(
        lambda body: _asked(intake, given := read(body), given), lambda *found: _reply("outputs", *found), body
    )


def _reply(name: str, request: Request, scores: RequestScores) -> HttpReply:
    """Return an answer with the scores under `name`, or GenEval's answer if the request is of that kind."""
    if request.context is not None:
        return _judged(request.context, scores)
    return HttpReply(dumps({name: scores.values}), MEDIA, version=scores.version)


def _geneval(intake: Intake, given: dict[str, Any], extra: dict[str, Any]) -> Request:
    """Convert a GenEval request, for a panel with the members `rewards` and `strict_rewards` and the total `scores`.

    Each picture has a dict that describes what it should show. The model gets it as JSON, as the field "metadata".

    Args:
        given: the dict with "images".
        extra: the dict with "meta_datas" and "only_strict".
    """
    if missing := [name for name in JUDGED if name not in intake.rewards]:
        raise Refused(
            f"GenEval's requests ('meta_datas') need a panel with the members {' and '.join(JUDGED)}, see "
            f"docs/dialects_flow_grpo.md; {', '.join(missing)} is missing in {intake.reward!r}"
        )
    pictures = listed(given, "images")
    described = listed(extra, "meta_datas", len(pictures))
    tags = [one.get("tag") if type(one) is dict else None for one in described]
    if wrong := [tag for tag in tags if tag not in _TAGS]:
        raise SpecMismatch(
            f"expected a 'tag' in each of 'meta_datas', one of {', '.join(_TAGS)}, came {wrong[0]!r:.99}"
        )
    prompts = [str(one.get("prompt", "")) for one in described]
    try:
        metadata = [json.dumps(one) for one in described]
    except (TypeError, ValueError) as error:
        raise SpecMismatch(f"expected plain values in 'meta_datas': {said(error, 200)}") from error
    columns = {"prompt": prompts, "text": prompts, "metadata": metadata}
    return Request(columns, len(pictures), {"image": pictures}, (tags, extra.get("only_strict")))


def _judged(metadata: tuple[list[Any], Any], scores: RequestScores) -> HttpReply:
    """Return GenEval's answer. A picture's value under other tags than its own is -10, which the clients ignore.

    Args:
        metadata: the tags, and "only_strict", with which all `rewards` are 0, as in the original server.
    """
    tags, only_strict = metadata
    rewards, strict = (scores.parts.get(name, []) for name in JUDGED)
    if only_strict:
        rewards = [0.0] * len(rewards)
    groups = [
        {
            tag: [value if own == tag else _NOT_THIS_TAG for own, value in zip(tags, values, strict=True)]
            for tag in _TAGS
        }
        for values in (rewards, strict)
    ]
    answer = {
        "scores": scores.values,
        "rewards": rewards,
        "strict_rewards": strict,
        "group_rewards": groups[0],
        "group_strict_rewards": groups[1],
    }
    return HttpReply(dumps(answer), MEDIA, version=scores.version)


def read(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a pickled dict. Raises NotPlain, SpecMismatch."""
    given = loads(body)
    if type(given) is not dict:
        raise SpecMismatch(f"expected a pickled dict with 'images', came a {type(given).__name__}")
    return given


def _asked(intake: Intake, given: dict[str, Any], metadata: Any) -> Request:
    """Convert a request: pictures, with prompts if it has any; or a GenEval request, if `metadata` has "meta_datas"."""
    if type(metadata) is dict and "meta_datas" in metadata:
        return _geneval(intake, given, metadata)
    pictures, n = _pictures(intake, given)
    columns = {"prompt": listed(given, "prompts", n)} if "prompts" in given else {}
    if not all(type(prompt) is str for prompt in columns.get("prompt", ())):
        raise SpecMismatch("expected prompts of text", Code.SPEC_MISMATCH)
    return Request(columns, n, pictures)


def _pictures(intake: Intake, given: dict[str, Any]) -> tuple[dict[str, list[Any]], int]:
    """Return the pictures by field and the number of each. An edit's come as a dict of lists, one of them "edited"."""
    if type(given.get("images")) is not dict:
        pictures = listed(given, "images")
        return {"image": pictures}, len(pictures)
    came = given["images"]
    names = {"image" if name == "edited" else plain(name, 50): name for name in came}
    if unknown := [name for name in names if name != "image" and not intake.takes(name)]:
        raise Refused(
            f"an edit with the pictures {', '.join(map(repr, came))}: name {unknown[0]!r} in the dialect's inputs, or "
            "send only the edited ones",
            Code.UNSUPPORTED,
        )
    if len(names) < len(came):  # otherwise one would silently replace the other
        raise Refused(
            f"an edit with the pictures {', '.join(map(repr, came))}: expected a field for each, but two have the same "
            "('edited' is the field 'image'): rename the other one, and name it in the dialect's inputs",
            Code.UNSUPPORTED,
        )
    if not names:
        raise SpecMismatch("expected pictures, came an empty dict")
    n = len(listed(came, next(iter(came))))
    return {name: listed(came, key, n) for name, key in names.items()}, n


def refusal(why: str, _status: int = 0) -> tuple[bytes, str]:
    """Return the body of an error response, and its media type."""
    return dumps({"error": why}), MEDIA


async def verl_omni(intake: Intake, body: bytes) -> HttpReply:
    """Answer the HTTP scorer of verl-omni and deepgen_rl: a pickled dict for a pickled dict.

        {"images": [bytes, ...], "prompts": [str, ...], "metadata": {...}} -> {"scores": [float, ...]}
        the same with {"edited": [bytes, ...], NAME: [bytes, ...]} as images (deepgen_rl's edits): "edited" is the field
            image, every other must be named in the dialect's inputs
        the same with "meta_datas" and "only_strict" in the metadata (deepgen_rl's gen_eval) -> as `_judged`

    verl-omni retries after 408, 429 and 5xx; any other 4xx stops the training with the text of "error". The client
    unpickles the bodies of errors, too, so every body is a pickle.
    """
    return await intake.answered(
        lambda body: _asked(intake, given := read(body), given.get("metadata")),
        lambda *found: _reply("scores", *found),
        body,
    )
