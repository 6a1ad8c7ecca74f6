"""Each form of a request to a reward model becomes rows, and the scores an answer of the same form."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.protocol.errors import Error, SpecMismatch
from jurybox.server.gateway.dialects import reward_model
from jurybox.server.gateway.dialects.intake import RequestScores

SCORES = [0.5, 2.0, 1.0]


class Intake:
    """Scores the rows of a request with the first of SCORES, and keeps them."""

    reward, rewards = "judge", ["judge"]

    def __init__(self, like=""):
        self.form, self.requests = SimpleNamespace(like=like), []

    async def answered(self, asked, write, body):
        request = asked(body)
        self.requests.append(request)
        return write(request, RequestScores(SCORES[: request.n], 7))


def ask(path, like="", **given):
    """The rows that a request became, and its answer without what is new in each."""
    intake = Intake(like)
    reply = asyncio.run(reward_model.answers(intake, print)[path](json.dumps(given).encode()))
    (request,) = intake.requests
    assert (reply.status, reply.version, request.parameters) == (
        200, 7, {name: value for name, value in given.items() if type(value) in (bool, int, float, str)},
    )  # fmt: skip
    answer = json.loads(reply.body)
    for one in answer if isinstance(answer, list) else [answer]:
        for name in ("id", "created"):
            if isinstance(one, dict):
                one.pop(name, None)
    return {**request.columns, **request.pictures}, answer


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
def test_pairs_are_scored_one_to_one_or_the_first_with_each_of_the_others(path, names):
    for first, second, pairs in (
        ("q", ["a", "b"], (["q", "q"], ["a", "b"])),
        (["q"], "a", (["q"], ["a"])),
        (["q", "r"], ["a", "b"], (["q", "r"], ["a", "b"])),
    ):
        rows, answer = ask(path, **dict(zip(names, (first, second), strict=True)))
        assert rows == {"query": pairs[0], "document": pairs[1]}
        assert answer["object"] == "list"
        assert answer["data"] == [{"index": i, "object": "score", "score": SCORES[i]} for i in range(len(pairs[0]))]
    for first, second in ((["q", "r"], "a"), (["q", "r"], ["a", "b", "c"])):
        with pytest.raises(SpecMismatch, match="expected as many of both, or one and several"):
            ask(path, **dict(zip(names, (first, second), strict=True)))


@pytest.mark.parametrize(("top", "best"), [(None, [1, 2, 0]), (0, [1, 2, 0]), (1, [1]), (2, [1, 2]), (9, [1, 2, 0])])
def test_documents_are_ranked_best_first_in_the_form_of_the_library(top, best):
    given = {"query": "q", "documents": ["a", {"text": "b"}, "c"]} | ({} if top is None else {"top_n": top})
    rows, answer = ask("/rerank", **given, model="mine")
    assert rows == {"query": ["q"] * 3, "document": ["a", "b", "c"]}
    assert answer == {
        "model": "mine",
        "usage": {"total_tokens": 0},
        "results": [{"index": i, "document": {"text": "abc"[i]}, "relevance_score": SCORES[i]} for i in best],
    }
    _, answer = ask("/v1/rerank", "sglang", **given)
    assert answer == [{"index": i, "score": SCORES[i], "document": "abc"[i], "meta_info": {}} for i in best]


@pytest.mark.parametrize("text", [None, False, True])
def test_tei_gets_its_texts_back_where_it_asks_for_them(text):
    given = {} if text is None else {"return_text": text}
    _, answer = ask("/rerank", query="q", texts=["a", "b"], **given)
    assert answer == [{"index": i, "score": SCORES[i], **({"text": "ab"[i]} if text else {})} for i in (1, 0)]


@pytest.mark.parametrize(
    ("inputs", "rows", "single"),
    [
        ("a", {"text": ["a"]}, True),
        (["a", "b"], {"query": ["a"], "document": ["b"]}, True),
        (["a", "b", "c"], {"text": ["a", "b", "c"]}, False),
        ([["a"], ["b"]], {"text": ["a", "b"]}, False),
        ([["a", "b"], ["c", "d"]], {"query": ["a", "c"], "document": ["b", "d"]}, False),
        ([["a", "b"]], {"query": ["a"], "document": ["b"]}, False),
    ],
)
def test_tei_predicts_one_text_or_pair_or_a_list_of_them(inputs, rows, single):
    found, answer = ask("/predict", inputs=inputs)
    assert found == rows
    each = [[{"score": score, "label": "LABEL_0"}] for score in SCORES[: len(next(iter(rows.values())))]]
    assert answer == (each[0] if single else each)


def test_texts_are_classified_in_vllms_form_and_in_sglangs():
    rows, answer = ask("/classify", input=["a", "b"])
    assert rows == {"text": ["a", "b"]}
    assert answer["data"] == [{"index": i, "label": None, "num_classes": 1, "probs": [SCORES[i]]} for i in (0, 1)]
    for text, several in (("a", False), (["a"], True)):
        rows, answer = ask("/v1/classify", text=text)
        assert rows == {"text": ["a"]} and isinstance(answer, list) == several
        (one,) = answer if several else [answer]
        assert one["embedding"] == [0.5] and one["meta_info"]["prompt_tokens"] == 0


def test_a_score_is_a_vector_of_one_number_as_floats_or_base64():
    packed = base64.b64encode(np.array([0.5], "<f4").tobytes()).decode()
    for form, vector in ((None, [0.5]), ("float", [0.5]), ("base64", packed)):
        given = {} if form is None else {"encoding_format": form}
        _, answer = ask("/v1/embeddings", input="a", **given)
        assert answer["data"] == [{"index": 0, "object": "embedding", "embedding": vector}]
        _, answer = ask("/pooling", input="a", **given)
        assert answer["data"] == [{"index": 0, "object": "pooling", "data": [vector]}]
    assert ask("/pooling", "lmdeploy", input="a")[1]["data"] == [{"index": 0, "object": "pooling", "data": 0.5}]


@pytest.mark.parametrize("path", ["", "/v1/score/evaluation"])
def test_llama_factory_gets_its_scores_alone(path):
    assert ask(path, messages=["a", "b"]) == ({"text": ["a", "b"]}, {"scores": [0.5, 2.0]})


def test_kserves_instances_are_texts_or_objects_with_the_same_fields():
    path = "/v1/models/judge:predict"
    assert ask(path, instances=["a", "b"]) == ({"text": ["a", "b"]}, {"predictions": [0.5, 2.0]})
    rows, _ = ask(path, instances=[{"prompt": "p", "image": {"b64": "AAAA"}}, {"prompt": "q", "image": "BBBB"}])
    assert rows == {"prompt": ["p", "q"], "image": ["AAAA", "BBBB"]}
    for wrong in (["a", {"text": "b"}, {"prompt": "c"}], [{"a": "x"}, {"b": "x"}], [7], [{"a": "x"}, "b"]):
        with pytest.raises(SpecMismatch, match="all texts, or objects with the same fields"):
            ask(path, instances=wrong)


@pytest.mark.parametrize(
    ("path", "given", "why"),
    [
        ("/classify", {"input": "a", "messages": []}, "expected one of 'input', 'text' and 'messages', came input and"),
        ("/classify", {"input": [1, 2]}, "in 'input', came token ids"),
        ("/classify", {"input": [[1]]}, "in 'input', came token ids"),
        ("/classify", {"input": {"a": 1}}, "in 'input', came dict"),
        ("/classify", {}, "in 'input', came NoneType"),
        ("/classify", {"text": "a", "image_data": "x"}, "image_data is not supported"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format 'int8': expected"),
        ("/rerank", {"query": ["q"], "documents": ["a"]}, "expected a text in 'query', came list"),
        ("/rerank", {"query": "q", "documents": "a"}, "expected a list in 'documents', came str"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n -1: expected a whole number"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": "1"}, "top_n 1: expected a whole number"),
        ("/predict", {"inputs": [["a"], ["b", "c"]]}, "expected texts in 'inputs', or pairs, and not both"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, "expected texts in 'inputs', or pairs, and not both"),
        ("/predict", {"inputs": 7}, "expected a list in 'inputs', came int"),
        ("", {"messages": [7]}, "in 'messages', came token ids"),
    ],
)
def test_a_request_of_another_form_is_refused(path, given, why):
    with pytest.raises(Error, match=why):
        ask(path, **given)


def test_an_answer_names_its_request_and_model():
    def whole(**given):
        reply = asyncio.run(reward_model.answers(Intake(), print)["/score"](json.dumps(given).encode()))
        return json.loads(reply.body)

    pair = {"text_1": "a", "text_2": "b"}
    assert (whole(**pair, request_id="mine", model="m")["id"], whole(**pair, model="m")["model"]) == ("mine", "m")
    assert whole(**pair, request_id=7)["id"].startswith("score-")
    assert whole(**pair)["model"] == ""


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "BadRequestError"), (499, "BadRequestError"), (500, "InternalServerError")]
)
def test_a_refusal_is_written_as_vllm_does(status, kind):
    body, media = reward_model.refusal("why", status)
    assert json.loads(body) == {"error": {"message": "why", "type": kind, "param": None, "code": status}}
    assert media == "application/json"
