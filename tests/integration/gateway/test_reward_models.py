"""Reward models behind other servers' addresses: each path answers in its own form, and never without a score."""

from __future__ import annotations

import base64
import io
import json
import struct

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.serving import serving

MODELS = {
    name: {"factory": f"tests.reward_models:{name}", "max_batch": 64, "rows": 640, "lane_rows": 64}
    for name in ("text_length", "pair", "brightness_and_prompt", "frames")
}
DIALECTS = {
    "texts": {"speaks": "reward_model", "model": "text_length", "output": "score", "port": 0},
    "lmdeploy": {"speaks": "reward_model", "model": "text_length", "output": "score", "like": "lmdeploy"},
    "pairs": {"speaks": "reward_model", "model": "pair", "reward": "ranker"},
    "sglang": {"speaks": "reward_model", "model": "pair", "like": "sglang"},
    "judge": {
        "speaks": "reward_model", "model": "text_length", "output": "score", "score_range": [1.0, 10.0], "decimals": 0,
    },
    "pictures": {"speaks": "reward_model", "model": "brightness_and_prompt", "output": "score",
                 "inputs": {"prompt": "text"}},
    "gym": {"speaks": "nemo_gym", "model": "text_length", "output": "score"},
    "labelled": {"speaks": "nemo_gym", "model": "text_length", "output": "score", "inputs": {"text": "expected"}},
    "panelled": {"speaks": "nemo_gym", "model": "both"},
    "robometer": {"model": "frames", "output": "score", "score_range": [0.0, 4.0]},
}  # fmt: skip
PANELS = """
[panels.both.members]
short = {weight = 0.1, model = "text_length", output = "score"}
long = {weight = -10, model = "text_length", output = "score"}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("s"), MODELS, dialects=DIALECTS, http="127.0.0.1:0", more=PANELS) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=f"http://{server.listening('http')}/dialects", timeout=60) as client:
        yield client


def answered(http, path, body):
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-jurybox-weights-version"].isdigit()
    return reply.json()


@pytest.mark.parametrize("path", ["/texts/classify", "/texts/v1/classify"])
def test_classify_as_vllm_has_it(http, path):
    asked = {"model": "rm", "input": ["ab", "größer"], "use_activation": False, "request_id": "r1", "priority": 0}
    reply = answered(http, path, asked)
    assert (reply["id"], reply["object"], reply["model"]) == ("r1", "list", "rm")
    assert [(one["index"], one["probs"], one["num_classes"], one["label"]) for one in reply["data"]] == [
        (0, [2.0], 1, None), (1, [8.0], 1, None),
    ]  # fmt: skip
    assert reply["usage"].keys() >= {"prompt_tokens", "total_tokens", "completion_tokens"}
    # verl reads data[-1]["probs"][-1] of one text.
    assert answered(http, path, {"model": "rm", "input": "abc"})["data"][-1]["probs"][-1] == 3.0
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": [{"type": "text", "text": "four"}]}]
    assert answered(http, path, {"messages": chat})["data"][0]["probs"] == [4.0]


def test_classify_as_sglang_has_it(http):
    found = answered(http, "/texts/classify", {"model": "rm", "text": ["ab", "abcd"]})
    assert [one["embedding"][0] for one in found] == [2.0, 4.0] and all("meta_info" in one for one in found)
    assert answered(http, "/texts/classify", {"text": "abc"})["embedding"] == [3.0]


def test_pooling_and_embeddings(http):
    asked = {"model": "rm", "input": ["ab", "abc"]}
    assert [one["data"][-1][0] for one in answered(http, "/texts/pooling", asked)["data"]] == [2.0, 3.0]
    assert [one["data"] for one in answered(http, "/lmdeploy/pooling", asked)["data"]] == [2.0, 3.0]
    reply = answered(http, "/texts/v1/embeddings", {"model": "rm", "input": "abcd"})
    assert reply["data"] == [{"index": 0, "object": "embedding", "embedding": [4.0]}]
    packed = answered(http, "/texts/v1/embeddings", {"input": "abcd", "encoding_format": "base64"})
    assert struct.unpack("<f", base64.b64decode(packed["data"][0]["embedding"])) == (4.0,)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")]
)
def test_score_of_pairs(http, names):
    def scores(first, second):
        return [
            one["score"]
            for one in answered(http, "/pairs/v1/score", dict(zip(names, (first, second), strict=True)))["data"]
        ]

    assert scores("a", "bb") == [102.0]
    assert scores("a", ["bb", "bbb"]) == [102.0, 103.0]
    assert scores(["a", "aa"], ["b", "bb"]) == [101.0, 202.0]
    assert http.post("/pairs/score", json=dict(zip(names, (["a", "b"], ["c"] * 3), strict=True))).status_code == 422


def test_rerank_in_each_form(http):
    asked = {"model": "rm", "query": "q", "documents": ["bb", "b", "bbb"]}
    reply = answered(http, "/pairs/v2/rerank", asked)
    assert [(one["index"], one["relevance_score"]) for one in reply["results"]] == [(2, 103.0), (0, 102.0), (1, 101.0)]
    assert reply["results"][0]["document"] == {"text": "bbb"}
    assert len(answered(http, "/pairs/rerank", {**asked, "top_n": 2})["results"]) == 2
    bare = answered(http, "/sglang/v1/rerank", asked)
    assert (bare[0]["index"], bare[0]["score"], bare[0]["document"]) == (2, 103.0, "bbb")
    tei = answered(http, "/pairs/rerank", {"query": "q", "texts": ["b", "bb"], "return_text": True})
    assert tei == [{"index": 1, "score": 102.0, "text": "bb"}, {"index": 0, "score": 101.0, "text": "b"}]
    assert "text" not in answered(http, "/pairs/rerank", {"query": "q", "texts": ["b"]})[0]


def test_predict_as_tei_has_it(http):
    assert answered(http, "/texts/predict", {"inputs": "abc"}) == [{"score": 3.0, "label": "LABEL_0"}]
    several = answered(http, "/texts/predict", {"inputs": [["a"], ["bb"]], "raw_scores": True})
    assert [[one["score"] for one in found] for found in several] == [[1.0], [2.0]]
    assert answered(http, "/pairs/predict", {"inputs": ["a", "bb"]})[0]["score"] == 102.0
    both = answered(http, "/pairs/predict", {"inputs": [["a", "bb"], ["aa", "b"]]})
    assert [found[0]["score"] for found in both] == [102.0, 201.0]


def test_kserves_first_version(http):
    assert answered(http, "/texts/v1/models/text_length:predict", {"instances": ["a", "bb"]}) == {
        "predictions": [1.0, 2.0]
    }
    asked = {"instances": [{"query": "a", "document": "bb"}]}
    assert answered(http, "/pairs/v1/models/ranker:predict", asked) == {"predictions": [102.0]}
    assert http.get("/pairs/v1/models/ranker").json() == {"name": "ranker", "ready": True}
    models = http.get("/pairs/v1/models").json()
    assert models["models"] == ["ranker"] == [one["id"] for one in models["data"]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 3), ("use_activation", True), ("softmax", True), ("truncate_prompt_tokens", 16), ("dimensions", 2),
        ("chat_template", "{{ messages }}"), ("add_generation_prompt", True), ("mm_processor_kwargs", {"size": 8}),
        ("lora_path", "other"), ("max_tokens_per_doc", 9),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/texts/classify", {"input": "abc"}),
        ("/texts/classify", {"text": ["abc"]}),
        ("/texts/pooling", {"input": "abc"}),
        ("/texts/v1/embeddings", {"input": "abc"}),
        ("/texts/predict", {"inputs": "abc"}),
        ("/texts", {"messages": ["abc"]}),
        ("/texts/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
        ("/pairs/score", {"text_1": "a", "text_2": "b"}),
        ("/pairs/v2/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(http, path, body, field, value):
    reply = http.post(path, json={**body, field: value})
    assert 400 <= reply.status_code < 500
    assert reply.json()["error"]["message"].startswith(f"{field} = ")


def test_fields_that_change_no_number_are_accepted(http):
    harmless = {
        "model": "rm", "user": "me", "priority": 0, "truncate_prompt_tokens": -1, "use_activation": None,
        "softmax": False, "add_special_tokens": False, "cache_salt": "x", "padding": True, "mm_processor_kwargs": {},
        "dimensions": 1, "truncate": True, "raw_scores": False, "encoding_format": "float",
    }  # fmt: skip
    assert answered(http, "/texts/classify", {"input": "abc", **harmless})["data"][0]["probs"] == [3.0]
    more = {"temperature": 0.0, "max_tokens": 8, "n": 1, "stream": False, "response_format": {"type": "text"}}
    asked = chat("abc", **{**harmless, **more, "model": "judge-1"})
    assert answered(http, "/judge/v1/chat/completions", asked)["choices"][0]["message"]["content"] == "3"


@pytest.mark.parametrize("path", ["", "/", "/v1/score/evaluation"])
def test_llama_factorys_rewards(http, path):
    assert answered(http, "/texts" + path, {"model": "model", "messages": ["ab", "abc"]}) == {"scores": [2.0, 3.0]}


def chat(*texts, **more):
    return {"model": "judge-1", "messages": [{"role": "user", "content": text} for text in texts], **more}


def test_a_judge_answers_a_chat_with_digits(http):
    reply = answered(http, "/judge/v1/chat/completions", chat("you are a judge", "abcd", temperature=0))
    assert reply["model"] == "judge-1" and reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "4"}
    reply = answered(http, "/texts/v1/chat/completions", chat("abcd"))
    assert reply["choices"][0]["message"]["content"] == "4.000000"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (chat("x" * 11), "the score is 11, expected 1 to 10"),
        (chat("abc", stream=True), "stream = True is not supported: the answer is one number"),
        (chat("abc", n=2), "n = 2 is not supported"),
        (chat("abc", response_format={"type": "json_object"}), "response_format = {'type': 'json_object'} is"),
        (chat("abc", logprobs=True), "logprobs = True is not supported"),
        (chat("abc", tools=[{"type": "function"}]), "tools = [{'type': 'function'}] is not supported"),
        (chat("abc", priority=-1), "priority = -1 is not supported"),
        ({"messages": []}, "expected messages"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "expected messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "expected messages"),
    ],
)
def test_a_judge_never_says_what_a_client_would_read_as_zero(http, body, reason):
    reply = http.post("/judge/v1/chat/completions", json=body)
    assert 400 <= reply.status_code < 500 and reason in reply.json()["error"]["message"]


def test_a_judge_sees_the_picture_of_a_chat(http):
    sink = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), 51, np.uint8)).save(sink, "PNG")
    url = "data:image/png;base64," + base64.b64encode(sink.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "ab"}]
    asked = {"messages": [{"role": "user", "content": parts}]}
    content = answered(http, "/pictures/v1/chat/completions", asked)["choices"][0]["message"]["content"]
    assert float(content) == pytest.approx(2.2, abs=1e-3)
    for wrong in (parts * 2, [{"type": "image_url", "image_url": {"url": "http://elsewhere/a.png"}}, parts[1]]):
        reply = http.post("/pictures/v1/chat/completions", json={"messages": [{"role": "user", "content": wrong}]})
        assert 400 <= reply.status_code < 500


PATHS = {
    "/texts/classify": {"input": ["ok", "TEXT"]}, "/texts/pooling": {"input": ["ok", "TEXT"]},
    "/texts/v1/embeddings": {"input": "TEXT"}, "/texts/predict": {"inputs": [["ok"], ["TEXT"]]},
    "/texts": {"messages": ["ok", "TEXT"]}, "/texts/v1/chat/completions": chat("TEXT"),
    "/texts/v1/models/text_length:predict": {"instances": ["ok", "TEXT"]},
    "/gym/verify": {"responses_create_params": {"input": "x"}, "response": {"output": [
        {"type": "message", "content": [{"type": "output_text", "text": "TEXT"}]}]}},
}  # fmt: skip


@pytest.mark.parametrize("text", ["bad", "nan", "x" * 3000, "breaks"])
@pytest.mark.parametrize("path", PATHS)
def test_a_text_without_a_score_fails_the_whole_request(http, path, text):
    """verl raises a 4xx at once; after any other status it would ask sixteen times."""
    reply = http.post(path, content=json.dumps(PATHS[path]).replace("TEXT", text))
    assert 400 <= reply.status_code < 500
    error = reply.json().get("error") or reply.json()
    assert error.get("message") or error.get("detail")
    if "error" in reply.json():
        assert error["code"] == reply.status_code


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/texts/classify", {"input": [1, 2, 3]}, "token ids"),
        ("/texts/classify", {"input": [[1, 2], [3]]}, "token ids"),
        ("/texts/classify", {"input": None}, "expected a text or a list of texts in 'input'"),
        ("/texts/classify", {}, "expected a text or a list of texts in 'input'"),
        ("/texts/classify", {"input": "a", "text": "b"}, "expected one of 'input', 'text' and 'messages'"),
        ("/texts/pooling", {"input": "a", "messages": [{"role": "user", "content": "b"}]}, "came input and messages"),
        ("/texts/classify", {"text": "a", "image_data": "iVBORw0KGgo="}, "image_data is not supported"),
        ("/pairs/rerank", {"query": ["a", "b"], "documents": ["c"]}, "expected a text in 'query', came list"),
        ("/texts/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format 'int8'"),
        ("/texts/score", {"text_1": "a", "text_2": "b"}, "expected a column 'text'"),
        ("/pairs/classify", {"input": "a"}, "expected a column 'query'"),
        ("/pairs/rerank", {"query": "a", "documents": "b"}, "expected a list in 'documents'"),
        ("/pairs/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/pairs/predict", {"inputs": [["a"], ["b", "c"]]}, "texts in 'inputs', or pairs"),
        ("/pairs/v1/models/ranker:predict", {"instances": [{"query": "a"}, "b"]}, "with the same fields"),
        ("/texts/classify", [], "expected a JSON object"),
    ],
)
def test_a_wrong_request_is_told_what_was_expected(http, path, body, reason):
    reply = http.post(path, json=body)
    assert 400 <= reply.status_code < 500 and reason in reply.json()["error"]["message"], reply.text


def gym(text, **columns):
    output = [
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}],
         "prompt_token_ids": list(range(1000)), "generation_log_probs": [-0.1234567890123] * 100},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "!"}]},
    ]  # fmt: skip
    asked = {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "tools": None}
    return {"responses_create_params": asked, "response": {"id": "r", "output": output}, **columns}


def test_nemo_gym_gets_its_row_back_with_the_reward(http):
    row = gym("abc", uuid="u1", options=[1, 2])
    assert http.post("/gym/seed_session", json={"responses_create_params": {}}).json() == {}
    assert answered(http, "/gym/verify", row) == {**row, "reward": 4.0}
    assert http.get("/gym/reverify_mode").json() == "stateless"
    again = {**row, "reward": 0.0}
    assert answered(http, "/gym/verify", again)["reward"] == 4.0
    assert answered(http, "/labelled/verify", {**row, "expected": "four!"})["reward"] == 5.0
    assert answered(http, "/labelled/verify", {**row, "expected": [1, 2]})["reward"] == 6.0  # as JSON
    assert "expected a column 'expected'" in http.post("/labelled/verify", json=row).json()["detail"]


def test_nemo_gyms_components_add_up_to_the_reward_and_overwrite_no_column(http):
    row = gym("abc", long="kept")
    reply = answered(http, "/panelled/verify", row)
    assert reply["reward_components"] == pytest.approx({"short": 0.4, "long": -40.0})
    assert reply["reward"] == sum(reply["reward_components"].values()) == pytest.approx(-39.6)
    assert (reply["short"], reply["long"]) == (pytest.approx(0.4), "kept")


def film(n, value):
    sink = io.BytesIO()
    np.save(sink, np.full((n, 8, 8, 3), value, np.uint8))
    return sink.getvalue()


def robometer(*films, **more):
    data, files = dict(more), {}
    for i, content in enumerate(films):
        key = f"sample_{i}_trajectory_frames"
        trajectory = {"frames": {"__numpy_file__": key}, "frames_shape": [1], "task": "pick", "id": str(i)}
        data[f"sample_{i}"] = json.dumps({"sample_type": "progress", "trajectory": trajectory})
        files[key] = (f"{key}.npy", content, "application/octet-stream")
    return {"data": data, "files": files}


def test_robometers_videos(http):
    reply = http.post("/robometer/evaluate_batch_npy", **robometer(film(3, 51), film(2, 102), use_frame_steps="false"))
    assert reply.status_code == 200, reply.text
    found = reply.json()
    np.testing.assert_allclose(found["outputs_progress"]["progress_pred"], [[3.2], [2.4]], atol=1e-3)
    assert http.get("/robometer/health").json()["status"] == "healthy"


@pytest.mark.parametrize(
    "form",
    [
        robometer(film(3, 51), use_frame_steps="true"),
        robometer(film(3, 51)[:200]),
        robometer(b"no array"),
        {"data": {**robometer(film(3, 51))["data"], "sample_2": "{}"}, "files": robometer(film(3, 51))["files"]},
        robometer(film(3, 51), film(0, 0)),
        {"data": {"sample_0": "{}"}, "files": {"a": b""}},
        {"content": b"--x\r\nno form"},
        {"content": b""},
    ],
)
def test_a_video_without_a_score_fails_the_request(http, form):
    """Its client reads a missing list as 0."""
    reply = http.post("/robometer/evaluate_batch_npy", **form)
    assert 400 <= reply.status_code < 500 and reply.json()["detail"]


def test_on_a_port_of_its_own_a_dialects_paths_are_those_of_the_original(server):
    where = server.listening("dialects")["texts"]
    with httpx.Client(base_url=f"http://{where}", timeout=60) as client:
        for path in ("/classify", "/v1/classify"):
            assert client.post(path, json={"input": "abc"}).json()["data"][0]["probs"] == [3.0]
        assert client.get("/health").status_code == client.get("/v1/models").status_code == 200
