"""Trainers' own clients find their own protocol: scores for what they send, and never a number for what has none."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import signal
import threading

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.serving import serving

MODELS = {
    name: {"factory": f"tests.reward_models:{name}", "max_batch": 64, "rows": 256, "lane_rows": 64}
    for name in ("text_length", "brightness", "brightness_and_prompt")
}
DIALECTS = {
    "flow_grpo": {"model": "brightness", "output": "score"},
    "unified": {"speaks": "flow_grpo", "model": "brightness_and_prompt", "output": "score"},
    "verl_omni": {"model": "brightness_and_prompt", "output": "score", "timeout": 5.0},
    "openrlhf": {"model": "text_length", "output": "score"},
    "slime": {"model": "text_length", "output": "score", "inputs": {"text": "response"}},
    "together": {"speaks": "slime", "model": "text_length", "output": "batch", "inputs": {"text": "response"}},
    "unirl": {"model": "brightness_and_prompt", "output": "score", "reward": "pretty"},
    "flow_factory": {"model": "brightness_and_prompt", "output": "score"},
    "nobody": {"speaks": "openrlhf", "model": "brightness"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, dialects=DIALECTS, http="127.0.0.1:0") as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    limits = httpx.Limits(max_connections=64)
    where = f"http://{server.listening('http')}/dialects"
    with httpx.Client(base_url=where, timeout=60, limits=limits) as client:
        yield client


def picture(value: int, side: int = 16, form: str = "JPEG", **options) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.full((side, side + 3, 3), value, np.uint8)).save(sink, form, **options)
    return sink.getvalue()


def pickled(http, path, body, protocol=4):
    answer = http.post(path, content=pickle.dumps(body, protocol))
    assert answer.headers["content-type"] == "application/octet-stream"
    return answer.status_code, pickle.loads(answer.content)


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("path", ["/flow_grpo", "/flow_grpo/"])
def test_flow_grpo_gets_lists_of_floats(http, path, protocol):
    images = [picture(51), picture(102, form="PNG"), picture(153, 40, "WEBP", lossless=True)] * 20
    status, answer = pickled(http, path, {"images": images}, protocol)
    assert status == 200 and type(answer["outputs"]) is list
    np.testing.assert_allclose(answer["outputs"], [0.2, 0.4, 0.6] * 20, atol=1e-3)
    assert pickled(http, path, {"images": []}) == (200, {"outputs": []})


def test_flow_grpo_prompts_come_as_arrays_of_text(http):
    body = {"images": [picture(51), picture(102)], "prompts": np.array(["a", "größer"])}
    for protocol in (4, 5):
        status, answer = pickled(http, "/unified", body, protocol)
        np.testing.assert_allclose(answer["outputs"], [1.2, 8.4], atol=1e-3)


def test_a_weights_version_comes_with_the_scores(http):
    answer = http.post("/flow_grpo", content=pickle.dumps({"images": [picture(51)]}))
    assert answer.headers["x-jurybox-weights-version"].isdigit()


def bad_pictures():
    whole = picture(51)
    size = (60_000).to_bytes(4, "big")
    png = bytearray(picture(51, form="PNG"))
    png[16:24] = size * 2
    webp = b"RIFF\x1e\0\0\0WEBPVP8X\n\0\0\0\0\0\0\0" + b"\xff\x3f\0" * 2 + bytes(20)
    return {
        "cut off": whole[: len(whole) // 2],
        "text": b"no picture",
        "empty": b"",
        "a PNG bomb": bytes(png),
        "a WebP bomb": webp,
        "a GIF": picture(51, form="GIF"),
        "black": picture(0),
        "white, whose score is NaN": picture(255),
        "larger than the model takes": picture(51, 300),
    }


@pytest.mark.parametrize("name", bad_pictures())
def test_one_bad_picture_fails_the_request_and_is_named(http, name):
    """Flow-GRPO repeats a 500 for a day and a half, and takes any body with "outputs" in it for good."""
    status, answer = pickled(http, "/flow_grpo", {"images": [picture(51), bad_pictures()[name], picture(51)]})
    assert 400 <= status < 500 and list(answer) == ["error"] and "1" in answer["error"]
    status, answer = pickled(http, "/verl_omni", {"images": [bad_pictures()[name]], "prompts": ["a"], "metadata": {}})
    assert 400 <= status < 500 and status not in (408, 429) and list(answer) == ["error"]


@pytest.mark.parametrize(
    "body",
    [b"", b"cannot decode\n", pickle.dumps(os.system), pickle.dumps([1]), pickle.dumps({"images": 1}),
     pickle.dumps({"images": [1]}), pickle.dumps({"images": [b"x"], "meta_datas": [{}], "only_strict": True}),
     b"\x80\x02Nr\xff\xff\xff\x7f.", pickle.dumps({"images": [picture(51)], "prompts": []})],
)  # fmt: skip
def test_what_is_no_request_gets_a_pickled_reason(http, body):
    for path in ("/flow_grpo", "/verl_omni", "/unified"):
        answer = http.post(path, content=body)
        assert 400 <= answer.status_code < 500
        assert list(pickle.loads(answer.content)) == ["error"]


def test_verl_omni_gets_scores(http):
    body = {"images": [picture(51)], "prompts": ["ab"], "metadata": {}}
    status, answer = pickled(http, "/verl_omni", body)
    assert status == 200 and np.allclose(answer["scores"], [2.2], atol=1e-3)
    body["prompts"] = [np.str_("abc")]  # from a column of NumPy's
    assert np.allclose(pickled(http, "/verl_omni", body)[1]["scores"], [3.2], atol=1e-3)


def test_exif_turns_a_picture_before_it_is_scored():
    from jurybox.server.gateway.dialects.intake import decoded

    tall = Image.fromarray(np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    sink = io.BytesIO()
    tall.save(sink, "PNG", exif=exif)
    np.testing.assert_array_equal(decoded(sink.getvalue()), np.rot90(np.asarray(tall), -1))
    for mode in ("L", "RGBA", "P", "CMYK", "1", "LA"):
        sink = io.BytesIO()
        tall.convert(mode).save(sink, "JPEG" if mode == "CMYK" else "PNG")
        assert decoded(sink.getvalue()).shape == (6, 4, 3)
    assert decoded(sink.getvalue(), (8, 5)).shape == (8, 5, 3)


def test_base64_is_taken_with_and_without_its_prefix():
    from jurybox.protocol.errors import SpecMismatch
    from jurybox.server.gateway.dialects.intake import encoded_bytes

    text = base64.b64encode(picture(51)).decode()
    assert encoded_bytes(text) == encoded_bytes(f"data:image;base64,{text}") == picture(51)
    for wrong in ("no base64!", "abc", None, 3, "ä"):
        with pytest.raises(SpecMismatch):
            encoded_bytes(wrong)


def test_openrlhf_samples_one_by_one_and_whole_rollouts(http):
    answer = http.post("/openrlhf", json={"query": ["abc"], "prompts": ["p"], "labels": [None]})
    assert answer.headers["content-type"] == "application/json"
    given = answer.json()
    assert given["rewards"] == given["scores"] == [3.0] and len(given["extra_logs"]["weights_version"]) == 1
    given = http.post("/openrlhf", json={"query": ["a", "größer"], "prompts": ["p", "q"], "labels": ["x", "y"]}).json()
    assert given["rewards"] == [1.0, 8.0]
    empty = http.post("/openrlhf", json={"query": [], "prompts": [], "labels": []})  # to the second URL of several
    assert (empty.status_code, empty.json()["rewards"]) == (200, [])


@pytest.mark.parametrize("text", ["bad", "nan", "x" * 3000, "breaks"])
def test_json_dialects_answer_an_error_status_for_what_has_no_score(http, text):
    for path, body in (
        ("/openrlhf", {"query": ["ok", text], "prompts": ["p", "p"], "labels": [None, None]}),
        ("/slime", {"prompt": "p", "response": text, "label": None}),
    ):
        answer = http.post(path, json=body)
        assert 400 <= answer.status_code < 500 and list(answer.json()) == ["error"]


def test_slime_gets_a_bare_number(http):
    body = {"prompt": [{"role": "user", "content": "p"}], "response": "abcd", "label": None}
    answer = http.post("/slime", json=body)
    assert (answer.status_code, answer.json(), answer.headers["content-type"]) == (200, 4.0, "application/json")
    for wrong in (b"", b"[1]", b"{", b"[" * 100_000, json.dumps({"prompt": "p"}).encode()):
        answer = http.post("/slime", content=wrong)
        assert 400 <= answer.status_code < 500 and "error" in answer.json()


def test_single_requests_of_many_callers_become_batches(http):
    seen, start = [], threading.Barrier(32)

    def one():
        start.wait(30)
        for _ in range(4):
            seen.append(http.post("/together", json={"prompt": "p", "response": "x", "label": None}).json())

    threads = [threading.Thread(target=one) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(seen) == 128 and max(seen) >= 4


def test_a_dialect_bound_to_a_model_that_does_not_fit_says_so(http):
    answer = http.post("/nobody", json={"query": ["a"], "prompts": ["p"], "labels": [None]})
    assert answer.status_code == 422 and "name the one number that is the score" in answer.json()["error"]


def test_an_engine_that_dies_is_no_score_of_zero(http, server):
    """Flow-GRPO's client repeats 503 with Retry-After; a request in flight may be answered by the next engine."""
    body = {"images": [picture(51)] * 8}
    answers = []

    def ask():
        for _ in range(10):
            answers.append(pickled(http, "/flow_grpo", body))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    os.kill(server.pids()["engine-0"], signal.SIGKILL)
    for thread in threads:
        thread.join(100)
    assert len(answers) == 40
    for status, answer in answers:
        if status == 200:
            np.testing.assert_allclose(answer["outputs"], [0.2] * 8, atol=1e-3)
        else:
            assert status == 503 and list(answer) == ["error"]
    assert any(status == 200 for status, _ in answers)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_unirl_gets_a_result_or_an_error_for_each_sample(http):
    assert http.get("/unirl/health").json()["rewards"] == {"pretty": ["score", "weights_version"]}
    assert http.get("/unirl/rewards").json() == {"rewards": ["pretty"]}

    def sample(data, text="ab", **more):
        turn = {"text": text, "image_b64": b64(data), "video_b64": None, "video_path": None, **more}
        first = {"text": text, "image_b64": b64(picture(204)), "video_b64": None, "video_path": None}
        return {"history": [first, turn], "required_rewards": ["pretty"], "metadata": None}

    good, black, broken = picture(51), picture(0), picture(51)[:200]
    answer = http.post("/unirl/score", json={"requests": [sample(one) for one in (good, black, broken, good)]})
    assert answer.status_code == 200
    results, errors = answer.json()["results"], answer.json()["errors"]
    for i in (0, 3):
        assert next(iter(results[i]["pretty"])) == "score" and errors[i] == {}
        assert abs(results[i]["pretty"]["score"] - 2.2) < 1e-3
    assert results[1] == results[2] == {}
    assert "black" in errors[1]["pretty"] and "JPEG" in errors[2]["pretty"]
    assert http.post("/unirl/score", json={"requests": []}).json() == {"results": [], "errors": []}
    for wrong in (
        {"requests": [{**sample(good), "required_rewards": ["other"]}]},
        {"requests": [sample(good, video_path="/etc/passwd")]},
        {"requests": [{"history": []}]},
        {"requests": [3]},
        {},
    ):
        answer = http.post("/unirl/score", json=wrong)
        assert 400 <= answer.status_code < 500 and list(answer.json()) == ["detail"]


def test_flow_factory_gets_rewards_or_an_error_that_it_raises(http):
    assert http.get("/flow_factory/health").status_code == 200
    body = {"prompt": ["a", "bb"], "image": [b64(picture(51, form="PNG"))] * 2, "video": None, "condition_images": None}
    answer = http.post("/flow_factory/compute", json=body)
    assert answer.status_code == 200 and np.allclose(answer.json()["rewards"], [1.2, 2.2], atol=1e-3)
    for wrong in ({"image": [b64(b"x")] * 2}, {"image": []}, {"prompt": "a"}, {"video": [["x"]]}, {"image": None}):
        answer = http.post("/flow_factory/compute", json={**body, **wrong})
        assert (answer.status_code, list(answer.json())) == (200, ["error"])
