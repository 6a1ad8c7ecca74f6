"""Reward models behind the address of vLLM, SGLang, LMDeploy, TEI, KServe (V1) or LLaMA-Factory: a number for a text.

The path and the form of a request say which of them its client expects; where two answer the same request differently,
the setting `like` does. All numbers are the juror's own: no sigmoid or softmax is applied, and a request that asks for
one is refused (body_fields.py). The names of models in requests are echoed and not looked at.

A text is one of `input`, `text`, `inputs`, `messages` (LLaMA-Factory) or `instances`; a pair is a query and a document;
a chat has its last message as the text, those before it as the prompt, and is a whole as JSON. None of these protocols
can say that one text has no score, so then the whole request gets an error status.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from jurybox.protocol.errors import Code, Refused, SpecMismatch, plain
from jurybox.server.gateway.dialects import chat
from jurybox.server.gateway.dialects.body_fields import require_texts
from jurybox.server.gateway.dialects.intake import Intake, Request, RequestScores, listed, scalars
from jurybox.server.gateway.dialects.json_dialects import MEDIA, read, versioned
from jurybox.server.gateway.known_paths import Endpoint, HttpReply

_PAIRS = (
    ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"),
)  # fmt: skip
_MEDIA = ("image_data", "video_data", "audio_data", "input_ids")  # of SGLang, beside a text
Numbers = list[float]


def answers(intake: Intake, _log: Callable[[str], None]) -> Mapping[str, Endpoint]:
    """Return the functions that answer a request body, by path."""
    forms: dict[str, Callable[[Intake, dict[str, Any]], Request]] = {
        "": _llama_factory,
        "/v1/score/evaluation": _llama_factory,
        "/classify": _classify,
        "/v1/classify": _classify,
        "/pooling": _pooling,
        "/v1/embeddings": _embeddings,
        "/score": _score,
        "/v1/score": _score,
        "/rerank": _rerank,
        "/v1/rerank": _rerank,
        "/v2/rerank": _rerank,
        "/predict": _predict,
        f"/v1/models/{intake.reward}:predict": _kserve,
        chat.PATH: chat.judged,
    }
    return {path: partial(_answered, intake, form) for path, form in forms.items()}


def about(intake: Intake) -> dict[str, dict[str, Any]]:
    """Return the responses to GET /health, and to /v1/models as OpenAI and KServe have it."""
    models = chat.about(intake)
    models["/v1/models"]["models"] = intake.rewards
    return {**models, f"/v1/models/{intake.reward}": {"name": intake.reward, "ready": True}}


def refusal(why: str, status: int) -> tuple[bytes, str]:
    """Return the body of an error response as vLLM writes it, and its media type."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return json.dumps({"error": {"message": why, "type": kind, "param": None, "code": status}}).encode(), MEDIA


async def _answered(intake: Intake, form: Callable[[Intake, dict[str, Any]], Request], body: bytes) -> HttpReply:
    def asked(body: bytes) -> Request:
        given = read(body)
        require_texts(given)
        return form(intake, given)._replace(parameters=scalars(given))

    return await intake.answered(asked, _written, body)


def _written(request: Request, scores: RequestScores) -> HttpReply:
    return versioned(request.context(scores.values), scores.version)


def _texts(given: Any, what: str) -> list[str]:
    """Return one text or a list of them. Raises SpecMismatch."""
    texts = [given] if type(given) is str else given
    if type(texts) is list and all(type(text) is str for text in texts):
        return texts
    numbers = type(texts) is list and any(type(one) in (int, list) for one in texts)
    came = "token ids, whose tokenizer is not known here" if numbers else type(texts).__name__
    raise SpecMismatch(f"expected a text or a list of texts in {what!r}, came {came}")


def _items(given: dict[str, Any], what: str = "input") -> Request:
    """Return the texts of `input`, or the chat of `messages`. Raises SpecMismatch, Refused."""
    ways = [name for name in ("input", "text", "messages") if given.get(name) is not None]
    if len(ways) > 1:  # one of them would be left unscored, and nobody told
        raise SpecMismatch(f"expected one of 'input', 'text' and 'messages', came {' and '.join(ways)}")
    if media := [name for name in _MEDIA if given.get(name)]:
        raise Refused(f"{media[0]} is not supported: expected texts, and pictures in 'messages'", Code.UNSUPPORTED)
    if given.get("messages") is not None:
        return chat.conversation(given["messages"])
    texts = _texts(given.get(what), what)
    return Request({"text": texts}, len(texts))


def _pairs(first: list[str], second: list[str]) -> Request:
    if len(first) == 1 != len(second):
        first = first * len(second)
    if len(first) != len(second):
        raise SpecMismatch(f"{len(first)} texts and {len(second)}: expected as many of both, or one and several")
    return Request({"query": first, "document": second}, len(first))


def _listing(kind: str, given: dict[str, Any], data: list[dict[str, Any]]) -> dict[str, Any]:
    asked = given.get("request_id")
    return {
        "id": plain(asked, 100) if type(asked) is str else f"{kind}-{uuid.uuid4().hex}",
        "object": "list",
        "created": chat.created(),
        "model": plain(given.get("model") or "", 100),
        "data": [{"index": i, **one} for i, one in enumerate(data)],
        "usage": dict(chat.USAGE),
    }


def _packed(given: dict[str, Any], score: float) -> list[float] | str:
    """Return the vector of one number, as floats or as OpenAI's base64 of float32."""
    form = given.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise SpecMismatch(f"encoding_format {plain(form, 50)!r}: expected 'float' or 'base64'")
    return [score] if form == "float" else base64.b64encode(np.array([score], "<f4").tobytes()).decode()


def _classify(intake: Intake, given: dict[str, Any]) -> Request:
    if "text" not in given:
        one = {"label": None, "num_classes": 1}
        return _items(given)._replace(
            context=lambda scores: _listing("classify", given, [{**one, "probs": [score]} for score in scores])
        )

    def native(scores: Numbers) -> Any:  # SGLang's own form: a list for a list, an object for one text
        found = [{"embedding": [score], "meta_info": {"id": uuid.uuid4().hex, "prompt_tokens": 0}} for score in scores]
        return found if type(given["text"]) is list else found[0]

    return _items(given, "text")._replace(context=native)


def _pooling(intake: Intake, given: dict[str, Any]) -> Request:
    lmdeploy = intake.form.like == "lmdeploy"

    def written(scores: Numbers) -> Any:
        data = [score if lmdeploy else [_packed(given, score)] for score in scores]
        return _listing("pool", given, [{"object": "pooling", "data": one} for one in data])

    return _items(given)._replace(context=written)


def _embeddings(_intake: Intake, given: dict[str, Any]) -> Request:
    return _items(given)._replace(
        context=lambda scores: _listing(
            "embd", given, [{"object": "embedding", "embedding": _packed(given, score)} for score in scores]
        )
    )


def _score(_intake: Intake, given: dict[str, Any]) -> Request:
    names = next((pair for pair in _PAIRS if all(name in given for name in pair)), _PAIRS[0])
    first, second = (_texts(given.get(name), name) for name in names)
    return _pairs(first, second)._replace(
        context=lambda scores: _listing("score", given, [{"object": "score", "score": score} for score in scores])
    )


def _rerank(intake: Intake, given: dict[str, Any]) -> Request:
    """Cohere's, Jina's and vLLM's form; with `texts` TEI's; SGLang's where the setting says so."""
    tei = "texts" in given
    query, documents = given.get("query"), listed(given, "texts" if tei else "documents")
    documents = [one.get("text") if type(one) is dict else one for one in documents]
    if type(query) is not str:
        raise SpecMismatch(f"expected a text in 'query', came {type(query).__name__}")
    request = _pairs([query], _texts(documents, "documents"))
    top = given.get("top_n") or len(documents)
    if type(top) is not int or top < 0:
        raise SpecMismatch(f"top_n {plain(top, 50)}: expected a whole number")

    def written(scores: Numbers) -> Any:
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:top]
        if tei:
            text = given.get("return_text") is True
            return [{"index": i, "score": scores[i], **({"text": documents[i]} if text else {})} for i in best]
        if intake.form.like == "sglang":
            return [{"index": i, "score": scores[i], "document": documents[i], "meta_info": {}} for i in best]
        results = [{"index": i, "document": {"text": documents[i]}, "relevance_score": scores[i]} for i in best]
        about = {"id": f"rerank-{uuid.uuid4().hex}", "model": plain(given.get("model") or "", 100)}
        return {**about, "usage": {"total_tokens": 0}, "results": results}

    return request._replace(context=written)


def _predict(_intake: Intake, given: dict[str, Any]) -> Request:
    """TEI's: one text, a pair in a list of two, or a list of lists of one or two."""
    inputs = given.get("inputs")
    single = type(inputs) is str or (type(inputs) is list and len(inputs) == 2 and type(inputs[0]) is str)
    items = [inputs] if single else listed(given, "inputs")
    items = [[one] if type(one) is str else one for one in items]
    sizes = {len(_texts(one, "inputs")) for one in items}
    if not sizes <= {1} and not sizes <= {2}:
        raise SpecMismatch("expected texts in 'inputs', or pairs, and not both")
    columns = [list(column) for column in zip(*items, strict=True)]
    names = ("query", "document") if len(columns) == 2 else ("text",)

    def written(scores: Numbers) -> Any:
        found = [[{"score": score, "label": "LABEL_0"}] for score in scores]
        return found[0] if single else found

    return Request(dict(zip(names, columns, strict=False)), len(items), context=written)


def _llama_factory(_intake: Intake, given: dict[str, Any]) -> Request:
    texts = _texts(given.get("messages"), "messages")
    return Request({"text": texts}, len(texts), context=lambda scores: {"scores": scores})


def _kserve(_intake: Intake, given: dict[str, Any]) -> Request:
    """KServe's V1: an instance is a text, or an object of fields, of which pictures are {"b64": ...}."""
    instances = listed(given, "instances")
    rows = [{"text": one} if type(one) is str else one for one in instances]
    names = set(rows[0]) if rows and type(rows[0]) is dict else set()
    if not all(type(row) is dict and set(row) == names for row in rows):
        raise SpecMismatch("expected instances that are all texts, or objects with the same fields")
    columns = {name: [row[name] for row in rows] for name in names}
    pictures = {}
    if "image" in columns:
        pictures["image"] = [one.get("b64") if type(one) is dict else one for one in columns.pop("image")]
    for name, values in columns.items():
        _texts(values, name)
    return Request(columns, len(rows), pictures, lambda scores: {"predictions": scores})
