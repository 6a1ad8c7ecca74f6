"""Dialects answer trainers' own clients in their protocols: with scores or an error, never with an invented score."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import re
import signal
import socket
import threading
from http.client import HTTPResponse
from pathlib import Path

import httpx
import numpy as np
import pytest
import requests
from PIL import Image
from tests.serving import serving, wait_until

MODELS = {
    name: {"factory": f"tests.reward_models:{name}", "max_batch": 64, "rows": 640, "lane_rows": 64}
    for name in ("text_length", "brightness", "brightness_and_prompt", "judged", "changed", "frames")
}
MODELS["large_brightness"] = {
    "factory": "tests.reward_models:large_brightness", "max_batch": 4, "rows": 32, "lane_rows": 4,
}  # fmt: skip
DIALECTS = {
    "flow_grpo": {"model": "brightness", "output": "score", "port": 0},
    "cosmos": {"model": "brightness_and_prompt", "output": "score", "reward": "fine", "port": 0},
    "panelled": {"speaks": "unirl", "model": "both", "reward": "both"},
    "unified": {"speaks": "flow_grpo", "model": "brightness_and_prompt", "output": "score"},
    "verl_omni": {"model": "brightness_and_prompt", "output": "score", "timeout": 5.0},
    "openrlhf": {"model": "text_length", "output": "score"},
    "slime": {"model": "text_length", "output": "score", "inputs": {"text": "response"}},
    "together": {"speaks": "slime", "model": "text_length", "output": "batch", "inputs": {"text": "response"}},
    "unirl": {"model": "brightness_and_prompt", "output": "score", "reward": "pretty"},
    "flow_factory": {"model": "brightness_and_prompt", "output": "score"},
    "geneval": {"speaks": "flow_grpo", "model": "geneval"},
    "gen_eval": {"speaks": "verl_omni", "model": "geneval"},
    "edits": {"speaks": "unirl", "model": "changed", "output": "score", "inputs": {"source": "source"}},
    "edited": {"speaks": "verl_omni", "model": "changed", "output": "score", "inputs": {"source": "source"}},
    "factory": {"speaks": "flow_factory", "model": "changed", "output": "score", "inputs": {"source": "source"}},
    "films": {"speaks": "flow_factory", "model": "frames", "output": "score", "inputs": {"video": "video"}},
    "unifiedreward": {"model": "brightness_and_prompt", "output": "score"},
    "large": {"speaks": "flow_grpo", "model": "large_brightness", "output": "score"},
}

PANELS = """
[panels.lengths.members]
short = {weight = 1, model = "text_length", output = "score"}
long = {weight = 10, model = "text_length", output = "score"}
[panels.both.members]
bright = {weight = 0.5, model = "brightness", output = "score"}
prompted = {weight = 2, model = "brightness_and_prompt", output = "score"}
[panels.geneval.members]
scores = {weight = 1, model = "judged", output = "graded"}
rewards = {weight = 0, model = "judged", output = "right"}
strict_rewards = {weight = 0, model = "judged", output = "strict"}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, MODELS, dialects=DIALECTS, http="127.0.0.1:0", more=PANELS) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    limits = httpx.Limits(max_connections=64)
    url = f"http://{server.listening('http')}/dialects"
    with httpx.Client(base_url=url, timeout=60, limits=limits) as client:
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


def test_flow_grpo_prompts_are_arrays_of_text(http):
    body = {"images": [picture(51), picture(102)], "prompts": np.array(["a", "größer"])}
    for protocol in (4, 5):
        status, answer = pickled(http, "/unified", body, protocol)
        np.testing.assert_allclose(answer["outputs"], [1.2, 8.4], atol=1e-3)


def judged(count, tag):
    return {"tag": tag, "prompt": "a", "include": [{"class": "cat", "count": count, "color": "red"}]}


@pytest.mark.parametrize("only_strict", [True, False])
def test_a_panel_gives_genevals_five_judgements(http, only_strict):
    """A sample's value is under its own tag; the other tags have -10, which both clients leave out."""
    images, metas = [picture(102), picture(153)], [judged(1, "counting"), judged(2, "colors")]
    flow_grpo = {"images": images, "meta_datas": metas, "only_strict": only_strict}
    deepgen = {
        "images": images,
        "prompts": ["a", "b"],
        "metadata": {"meta_datas": metas, "only_strict": only_strict},
    }
    for path, body in (("/geneval", flow_grpo), ("/gen_eval", deepgen)):
        status, answer = pickled(http, path, body)
        assert status == 200, answer
        assert {type(value) for value in answer.values()} == {list, dict}
        np.testing.assert_allclose(answer["scores"], [1.4, 2.6], atol=1e-3)
        expected = [0.0, 0.0] if only_strict else [1.0, 1.0]
        assert (answer["rewards"], answer["strict_rewards"]) == (expected, [0.0, 1.0])
        assert len(answer["group_rewards"]) == len(answer["group_strict_rewards"]) == 6
        assert answer["group_strict_rewards"]["colors"] == [-10.0, 1.0]
        assert answer["group_rewards"]["counting"] == [expected[0], -10.0]
        assert answer["group_rewards"]["position"] == [-10.0, -10.0]


def test_geneval_is_never_answered_by_a_score_that_did_not_see_the_metadata(http):
    metadata = [judged(1, "counting")]
    for path, body, reason in (
        ("/flow_grpo", {"meta_datas": metadata}, "a panel with the members rewards and strict_rewards"),
        ("/verl_omni", {"metadata": {"meta_datas": metadata}, "prompts": ["a"]}, "a panel with the members"),
        ("/geneval", {"meta_datas": [judged(1, "shapes")]}, "expected a 'tag'"),
        ("/geneval", {"meta_datas": metadata * 2}, "expected 1 values"),
        ("/geneval", {"meta_datas": [{**metadata[0], "include": b"x"}]}, "expected plain values"),
    ):
        status, answer = pickled(http, path, {"images": [picture(51)], **body})
        assert 400 <= status < 500 and list(answer) == ["error"] and reason in answer["error"]


def test_scores_carry_a_weights_version(http):
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


@pytest.mark.parametrize("own_port", [False, True])
def test_a_body_that_is_too_large_gets_a_pickled_error(server, own_port):
    where = server.listening("dialects")["flow_grpo"] if own_port else server.listening("http")
    host, port = where.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        path = "/" if own_port else "/dialects/flow_grpo"
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 30}\r\n\r\n".encode())
        answer = HTTPResponse(connection)
        answer.begin()
        status, error = answer.status, pickle.loads(answer.read())
    assert status == 413 and list(error) == ["error"] and "max_message_mib" in error["error"]


@pytest.mark.parametrize("name", bad_pictures())
def test_one_bad_picture_fails_the_request_and_is_named(http, name):
    """Flow-GRPO's client retries a 500 for a day and a half, and accepts any body that contains "outputs"."""
    status, answer = pickled(http, "/flow_grpo", {"images": [picture(51), bad_pictures()[name], picture(51)]})
    assert 400 <= status < 500 and list(answer) == ["error"] and "sample 1:" in answer["error"]
    status, answer = pickled(http, "/verl_omni", {"images": [bad_pictures()[name]], "prompts": ["a"], "metadata": {}})
    assert 400 <= status < 500 and status not in (408, 429) and list(answer) == ["error"]


@pytest.mark.parametrize(
    "body",
    [b"", b"cannot decode\n", pickle.dumps(os.system), pickle.dumps([1]), pickle.dumps({"images": 1}),
     pickle.dumps({"images": [1]}), pickle.dumps({"images": [b"x"], "meta_datas": [{}], "only_strict": True}),
     b"\x80\x02Nr\xff\xff\xff\x7f.", pickle.dumps({"images": [picture(51)], "prompts": []})],
)  # fmt: skip
def test_an_invalid_request_gets_a_pickled_error(http, body):
    for path in ("/flow_grpo", "/verl_omni", "/unified"):
        answer = http.post(path, content=body)
        assert 400 <= answer.status_code < 500
        assert list(pickle.loads(answer.content)) == ["error"]


def test_verl_omni_gets_scores(http):
    body = {"images": [picture(51)], "prompts": ["ab"], "metadata": {}}
    status, answer = pickled(http, "/verl_omni", body)
    assert status == 200 and np.allclose(answer["scores"], [2.2], atol=1e-3)
    body["prompts"] = [np.str_("abc")]  # an element of a NumPy column
    assert np.allclose(pickled(http, "/verl_omni", body)[1]["scores"], [3.2], atol=1e-3)


def test_decoding_pictures_reuses_memory(http, server):
    """Mapping new memory for each picture costs as much as decoding it: 800 pages for this one."""

    def page_faults() -> int:
        return int(Path(f"/proc/{server.pids()['gateway']}/stat").read_text().rsplit(")", 1)[1].split()[7])

    def ask(times: int) -> None:
        for _ in range(times):
            assert pickled(http, "/large", {"images": [large]})[0] == 200

    sink = io.BytesIO()
    Image.fromarray(np.full((512, 512, 3), 51, np.uint8)).save(sink, "JPEG")
    large = sink.getvalue()
    ask(10)
    before = page_faults()
    ask(50)
    assert page_faults() - before < 50 * 50


def test_exif_rotates_a_picture_before_it_is_scored():
    from jurybox.server.frontend.pictures import decoded

    tall = Image.fromarray(np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    sink = io.BytesIO()
    tall.save(sink, "PNG", exif=exif)
    np.testing.assert_array_equal(decoded(sink.getvalue()), np.rot90(np.asarray(tall), -1))
    for mode in ("L", "RGBA", "P", "CMYK", "1", "LA"):
        sink = io.BytesIO()
        tall.convert(mode).save(sink, "JPEG" if mode == "CMYK" else "PNG")
        assert decoded(sink.getvalue()).shape == (6, 4, 3)
    assert decoded(sink.getvalue(), (8, 5)).shape == (8, 5, 3)


def test_base64_is_accepted_with_and_without_its_prefix():
    from jurybox.protocol.errors import SpecMismatch
    from jurybox.server.frontend.pictures import encoded_bytes

    text = base64.b64encode(picture(51)).decode()
    assert encoded_bytes(text) == encoded_bytes(f"data:image;base64,{text}") == picture(51)
    for wrong in ("no base64!", "abc", None, 3, "ä"):
        with pytest.raises(SpecMismatch):
            encoded_bytes(wrong)


def test_openrlhf_samples_one_by_one_and_whole_rollouts(http):
    answer = http.post("/openrlhf", json={"query": ["abc"], "prompts": ["p"], "labels": [None]})
    assert answer.headers["content-type"] == "application/json"
    reply = answer.json()
    assert reply["rewards"] == reply["scores"] == [3.0] and len(reply["extra_logs"]["weights_version"]) == 1
    reply = http.post("/openrlhf", json={"query": ["a", "größer"], "prompts": ["p", "q"], "labels": ["x", "y"]}).json()
    assert reply["rewards"] == [1.0, 8.0]
    empty = http.post("/openrlhf", json={"query": [], "prompts": [], "labels": []})  # for the second of several URLs
    assert (empty.status_code, empty.json()["rewards"]) == (200, [])


@pytest.mark.parametrize("text", ["bad", "nan", "x" * 3000, "breaks"])
def test_json_dialects_answer_an_error_status_if_there_is_no_score(http, text):
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
    batch_sizes, start = [], threading.Barrier(32)

    def ask(text):
        return http.post("/together", json={"prompt": "p", "response": text, "label": None}).json()

    def caller():
        if start.wait(30) == 0:
            ask("slow")
        for _ in range(4):
            batch_sizes.append(ask("x"))

    threads = [threading.Thread(target=caller) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(batch_sizes) == 128 and max(batch_sizes) >= 4


def test_a_killed_engine_causes_no_score_of_zero(http, server):
    """Flow-GRPO's client retries a 503 with Retry-After; a request in flight may be answered by the next engine."""
    body = {"images": [picture(51)] * 8}
    answers, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            answers.append(pickled(http, "/flow_grpo", body))

    def right():
        return sum(status == 200 for status, _ in answers)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: right() > 4, 60, "answers of the first engine")
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
        killed = right()
        wait_until(lambda: right() > killed + 8, 60, "answers of the next engine, too")
    finally:
        stop.set()
        for thread in threads:
            thread.join(100)
    for status, answer in answers:
        if status == 200:
            np.testing.assert_allclose(answer["outputs"], [0.2] * 8, atol=1e-3)
        else:
            assert status == 503 and list(answer) == ["error"]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_unirl_gets_a_result_or_an_error_for_each_sample(http):
    assert http.get("/unirl/health").json()["rewards"] == {"pretty": ["score"]}
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
        assert list(results[i]["pretty"]) == ["score"] and errors[i] == {}
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


def test_an_edit_is_scored_with_its_source_and_never_without(http):
    """The source comes from UniRL's first turn, deepgen_rl's dict of lists or Flow-Factory's conditions."""
    source, edited = picture(51, form="PNG"), picture(153, form="PNG")
    turns = [{"text": "a", "image_b64": b64(one)} for one in (source, edited)]

    def unirl(*histories):
        samples = [{"history": history, "required_rewards": ["changed"]} for history in histories]
        return http.post("/edits/score", json={"requests": samples})

    for n in (1, 3):
        results = unirl(*[turns] * n).json()["results"]
        np.testing.assert_allclose([one["changed"]["score"] for one in results], [0.4] * n, atol=1e-3)
        body = {"images": {"source": [source] * n, "edited": [edited] * n}, "prompts": ["a"] * n, "metadata": {}}
        status, answer = pickled(http, "/edited", body)
        assert status == 200 and np.allclose(answer["scores"], [0.4] * n, atol=1e-3)
        body = {"prompt": ["a"] * n, "image": [b64(edited)] * n, "condition_images": [[b64(source)]] * n}
        answer = http.post("/factory/compute", json=body).json()
        assert np.allclose(answer["rewards"], [0.4] * n, atol=1e-3), answer
    broken = unirl(turns, [{**turns[0], "image_b64": b64(b"x")}, turns[1]]).json()
    assert abs(broken["results"][0]["changed"]["score"] - 0.4) < 1e-3
    assert broken["results"][1] == {} and "JPEG" in broken["errors"][1]["changed"]
    assert "two turns" in unirl(turns[1:]).json()["detail"]
    images = {"source": [source], "edited": [edited]}
    for path, given, reason in (
        ("/verl_omni", images, "name 'source'"),
        ("/edited", {"edited": [edited], "mask": [source]}, "name 'mask'"),
        ("/edited", {**images, "source": []}, "expected 0 values"),
        ("/edited", {"source": [source]}, "image"),
        ("/edited", {**images, "image": [source]}, "'edited' is the field 'image'"),
        ("/edited", {"image": [source], **images}, "'edited' is the field 'image'"),
        ("/edited", [edited], "source"),
        ("/edited", {}, "empty"),
    ):
        status, answer = pickled(http, path, {"images": given, "prompts": ["a"], "metadata": {}})
        assert 400 <= status < 500 and reason in answer["error"], (given, answer)
    body = {"prompt": ["a"], "image": [b64(edited)]}
    for path, more, reason in (
        ("/flow_factory", {"condition_images": [[b64(source)]]}, "inputs = {INPUT = 'source'}"),
        ("/flow_factory", {"condition_videos": [[[b64(source)]]]}, "condition_videos"),
        ("/factory", {"condition_images": [[b64(source)] * 2]}, "one picture"),
        ("/factory", {"condition_images": [{"picture": b64(source)}]}, "one picture"),
        ("/factory", {}, "source"),
    ):
        answer = http.post(f"{path}/compute", json={**body, **more})
        assert answer.status_code == 200 and reason in answer.json()["error"], answer.json()


def test_flow_factory_sends_videos_as_frames(http):
    film = [b64(picture(value, form="PNG")) for value in (51, 153)]
    for videos in ([film], [film, film[:1], film * 2]):
        answer = http.post(
            "/films/compute", json={"prompt": ["a"] * len(videos), "video": videos, "image": None}
        ).json()
        expected = [len(one) + (0.2 if len(one) == 1 else 0.4) for one in videos]
        np.testing.assert_allclose(answer["rewards"], expected, atol=1e-3)
    tall = b64(picture(51, 32, form="PNG"))
    for wrong, reason in (
        ([film, [*film, b64(b"x")]], "frame 2"),
        ([[]], "without frames"),
        ([[film[0], tall]], "of one size"),
        ([[film]], "frame 0"),
        (["x"], "a list of frames"),
    ):
        body = {"prompt": ["a"] * len(wrong), "video": wrong, "image": None}
        answer = http.post("/films/compute", json=body).json()
        assert list(answer) == ["error"] and reason in answer["error"], answer
    answer = http.post("/flow_factory/compute", json={"prompt": ["a"], "video": [film], "image": None}).json()
    assert "inputs = {INPUT = 'video'}" in answer["error"]


def chat(prompt: str, data: bytes, **more) -> dict:
    """A body as Flow-GRPO's client of UnifiedReward sends it through the OpenAI library."""
    url = f"data:image;base64,{b64(data)}"
    question = f"<image>\nJudge.\nText Caption: [{prompt}]"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return {"model": "U-7b", "messages": [{"role": "user", "content": content}], "temperature": 0, **more}


def test_unifiedreward_answers_a_sentence_that_its_client_parses(http):
    path = "/unifiedreward/v1/chat/completions"
    for prompt, score in (("ab", 2.2), ("[a]", 3.2)):
        answer = http.post(path, json=chat(prompt, picture(51, form="PNG"))).json()
        (found,) = re.findall(r"Final Score:\s*([1-5](?:\.\d+)?)", answer["choices"][0]["message"]["content"])
        assert abs(float(found) - score) < 5e-3
    good = chat("ab", picture(51))
    content = good["messages"][0]["content"]
    for wrong in (
        chat("", picture(51)),  # the score is 0.2, which its client would read as 0.0
        chat("abcdef", picture(51)),  # the score is 6.2; its client would read 6 and more as 0.0, too
        chat("ab", picture(0)),
        chat("ab", b"x"),
        {**good, "messages": []},
        {**good, "messages": good["messages"] * 2},
        {**good, "messages": [{"content": "text"}]},
        {**good, "messages": [{"content": content[:1]}]},
        {**good, "messages": [{"content": [*content, {"type": "audio"}]}]},
        {
            **good,
            "messages": [{"content": [{**content[0], "image_url": {"url": "http://127.0.0.1/a.png"}}, content[1]]}],
        },
        {},
    ):
        answer = http.post(path, json=wrong)
        assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"], answer.text
    assert http.get("/unifiedreward/v1/models").json()["data"][0]["id"] == "brightness_and_prompt"


def cosmos_body(pictures: np.ndarray, **more) -> bytes:
    """A body as cosmos-rl's client writes it."""
    sink = io.BytesIO()
    np.save(sink, pictures)
    fields = {"prompts": ["ab"] * len(pictures), "reward_fn": {"fine": 1.0, "off": 0.0}, "media_type": "image", **more}
    return json.dumps(fields).encode("utf-8") + b"\n" + sink.getvalue()


def pull_scores(http, key, reward="fine", base="/cosmos"):
    """Poll for the scores, as the client does, until they are there."""
    for _ in range(20):
        answer = http.post(f"{base}/pull", data={"uuid": key, "type": reward})
        if answer.status_code == 200:
            return answer.json()
    raise AssertionError(answer.text)


def flat(*values: int) -> np.ndarray:
    return np.stack([np.full((16, 20, 3), value, np.uint8) for value in values])


# Its client's headers without a token.
COSMOS = {"Content-Type": "application/octet-stream", "Authorization": "Bearer "}
# What the client sent for one picture of 1 x 2 pixels, byte for byte.
RECORDED = (
    b'{"prompts": ["ab"], "reward_fn": {"fine": 1.0}, "media_type": "image", "video_infos": [{"video_fps": 16.0}]}\n'
    b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 2, 3), }"
    + b" " * 52 + b"\n" + b"\x33" * 6
)  # fmt: skip


def test_cosmos_sends_pictures_and_polls_for_their_scores(http):
    answer = requests.post(f"{http.base_url}cosmos/enqueue", data=RECORDED, headers=COSMOS, timeout=30)
    key = answer.json()["uuid"]
    answer = pull_scores(http, key)
    assert np.allclose(answer["scores"]["fine"], [2.2], atol=1e-3) and answer["type"] == "fine"
    assert {type(answer[name]) for name in ("duration", "decoded_duration")} == {str}
    assert pull_scores(http, key)["scores"] == answer["scores"]  # again, as a client does that lost the answer
    key = http.post("/cosmos/enqueue", content=cosmos_body(flat(51, 0, 102))).json()["uuid"]
    scores = pull_scores(http, key)["scores"]["fine"]
    assert np.isnan(scores[1]) and np.allclose([scores[0], scores[2]], [2.2, 2.4], atol=1e-3)
    assert http.post("/cosmos/ping", data={"info_data": "x"}).status_code == 200


def test_cosmos_gets_nan_if_all_samples_fail_and_400_for_unknown_requests(http):
    key = http.post("/cosmos/enqueue", content=cosmos_body(np.zeros((2, 300, 300, 3), np.uint8))).json()["uuid"]
    assert np.isnan(pull_scores(http, key)["scores"]["fine"]).tolist() == [True, True]
    for form in ({"uuid": "none", "type": "fine"}, {"uuid": key, "type": "other"}, {}):
        answer = http.post("/cosmos/pull", data=form)
        assert (answer.status_code, list(answer.json())) == (400, ["message"])


def test_cosmos_requests_that_cannot_be_scored_get_no_uuid(http):
    objects, sink = np.array([None], object), io.BytesIO()
    np.save(sink, objects, allow_pickle=True)
    huge = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (99999, 99999, 99999, 3), }"
    line = RECORDED.partition(b"\n")[0] + b"\n"
    for body in (
        b"", b"{}\n", b"\n", RECORDED[:-1], RECORDED + b"\0", line + sink.getvalue(), line + huge.ljust(128) + b"\n",
        line + b"\x93NUMPY\x01\x00\x08\x00" + b"(" * 8, line + b"no file", line + b"\x80\x04N.",
        cosmos_body(flat(51), media_type="latent"), cosmos_body(flat(51), reward_fn={"other": 1.0}),
        cosmos_body(flat(51), reward_fn=3), cosmos_body(flat(51), prompts=[]),
        cosmos_body(flat(51).astype(np.float32)), cosmos_body(flat(51)[0]),
    ):  # fmt: skip
        answer = http.post("/cosmos/enqueue", content=body)
        assert 400 <= answer.status_code < 500 and list(answer.json()) == ["message"], (body[:80], answer.text)


def test_another_method_at_a_dialects_path_is_not_allowed_and_another_path_not_found(server, http):
    for path in ("/flow_grpo", "/flow_grpo/", "/unirl/score", "/cosmos/enqueue/"):
        for method in ("GET", "PUT", "HEAD"):
            answer = http.request(method, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST"), (method, path)
    for path in ("/flow_grpo%0A", "/unirl", "/nothing"):
        assert http.post(path, content=b"{}").status_code == 404, path
    document = httpx.get(f"http://{server.listening('http')}/openapi.json", timeout=60).json()
    assert list(document["paths"]["/dialects/unirl/score"]) == ["post"]


def test_a_dialect_has_its_own_port_with_the_gateways_access_checks(server):
    with server.connect() as client:
        addresses = client.status()["server"]["dialects"]
    assert set(addresses) == {"flow_grpo", "cosmos"} and all(one.startswith("127.0.0.1:") for one in addresses.values())
    with httpx.Client(base_url=f"http://{addresses['flow_grpo']}", timeout=60) as own:
        answer = own.post("/", content=pickle.dumps({"images": [picture(51)]}))
        assert np.allclose(pickle.loads(answer.content)["outputs"], [0.2], atol=1e-3)
        assert own.get("/health").status_code == 200
        assert own.get("/status").status_code == 404
        assert [own.get("/").status_code, own.put("/").headers["allow"]] == [405, "POST"]
        assert own.post("/", content=b"", headers={"Host": "example.com"}).status_code == 421
        assert own.post("/", content=b"", headers={"Origin": "http://example.com"}).status_code == 403
    with httpx.Client(base_url=f"http://{addresses['cosmos']}", timeout=60) as own:
        key = own.post("/enqueue", content=RECORDED).json()["uuid"]
        assert np.allclose(pull_scores(own, key, base="")["scores"]["fine"], [2.2], atol=1e-3)


# What its client sent for one picture of 1 x 2 pixels and two rewards, byte for byte except for the picture.
UNIRL = (
    b'{"requests": [{"history": [{"text": "ab", "image_b64": "%s"}], "required_rewards": ["bright", "prompted"], '
    b'"metadata": {"index": 1}}]}'
)


def test_unirl_gets_several_rewards_at_once_with_one_number_each(http):
    """UniRL can average all values under a reward's name, so the score must be the only one."""
    assert set(http.get("/panelled/health").json()["rewards"]) == {"both", "bright", "prompted"}
    answer = http.post("/panelled/score", content=UNIRL % b64(picture(51)).encode(), headers={"Content-Type": "x/y"})
    (rewards,) = answer.json()["results"]
    assert answer.json()["errors"] == [{}] and "x-jurybox-weights-version" in answer.headers
    assert np.allclose([rewards["bright"]["score"], rewards["prompted"]["score"]], [0.2, 2.2], atol=1e-3)
    assert [list(one) for one in rewards.values()] == [["score"]] * 3
    (errors,) = http.post("/panelled/score", content=UNIRL % b64(picture(0)).encode()).json()["errors"]
    assert set(errors) == {"bright", "prompted"}


def test_a_panel_gives_scores_by_name_and_no_total_if_a_member_has_none(http):
    image = [b64(picture(51)), b64(picture(0))]  # the brightness of the second one fails

    def sample(one, *names):
        return {"history": [{"text": "ab", "image_b64": one}], "required_rewards": list(names) or ["both"]}

    requests_ = [sample(image[0]), sample(image[1]), sample(image[0], "bright")]
    answer = http.post("/panelled/score", json={"requests": requests_}).json()
    scores = {name: one["score"] for name, one in answer["results"][0].items()}
    assert set(scores) == {"both", "bright", "prompted"}
    assert np.allclose([scores["bright"], scores["prompted"]], [0.2, 2.2], atol=1e-3)
    assert np.isclose(scores["both"], 0.5 * scores["bright"] + 2 * scores["prompted"])
    assert answer["results"][1] == {} and "bright: a black picture" in answer["errors"][1]["both"]
    assert answer["errors"][2] == {} and answer["results"][2]["bright"]["score"] == scores["bright"]


def test_a_panel_answers_the_open_inference_protocol_too(server):
    def ask(*texts, parameters=None):
        body = {
            "inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}],
            "parameters": parameters or {},
        }
        return client.post("/v2/models/lengths/infer", json=body)

    with httpx.Client(base_url=f"http://{server.listening('http')}", timeout=60) as client:
        metadata = client.get("/v2/models/lengths").json()
        assert [one["name"] for one in metadata["inputs"]] == ["text"]
        assert [one["name"] for one in metadata["outputs"]] == ["score", "short", "long"]
        values = {one["name"]: one["data"] for one in ask("abc", "x").json()["outputs"]}
        assert values["short"] == [3.0, 1.0] and np.allclose(values["score"], [33.0, 11.0])
        assert client.get("/v2/models/lengths/ready").status_code == 200
        assert ask("abc", "bad").status_code >= 400
        answer = ask("abc", "bad", "nan", parameters={"row_errors": True}).json()
        assert set(json.loads(answer["parameters"]["row_errors"])) == {"1", "2"}
        scores = {one["name"]: one["data"] for one in answer["outputs"]}["score"]
        assert np.allclose(scores[0], 33.0) and scores[1] in (None, "NaN") and scores[2] in (None, "NaN")
