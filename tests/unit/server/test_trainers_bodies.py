"""What NeMo Gym's rows, Robometer's forms and chats become, which of them are refused, and how each is answered."""

from __future__ import annotations

import asyncio
import io
import json
import math
import pickle

import numpy as np
import pytest

from jurybox.protocol.errors import Code, Error, ModelFailed, ProtocolMismatch, Refused, SpecMismatch
from jurybox.server.gateway.dialects import body_fields, chat, nemo_gym, pickle_dialects, pickles, robometer
from jurybox.server.gateway.dialects.intake import AnswerForm, RequestScores, Unscored


class Intake:
    """Scores the rows of a request with the first of its scores, and keeps what it was asked."""

    reward, rewards = "judge", ["judge"]

    def __init__(self, *scores, parts=None, takes=(), **form):
        self.scores, self.parts, self.form = list(scores) or [0.5] * 9, parts or {}, AnswerForm(**form)
        self.takes = set(takes).__contains__
        self.request = None

    async def answered(self, asked, write, body):
        self.request = asked(body)
        return write(self.request, RequestScores(self.scores[: self.request.n], 7, self.parts))

    async def read(self, read, body):
        return read(body)


def verified(intake, given, body=None):
    path = nemo_gym.answers(intake, print)["/verify"]
    return asyncio.run(path(json.dumps(given).encode() if body is None else body))


def row(output=(), asked="why?", **more):
    return {"responses_create_params": {"input": asked}, "response": {"output": list(output)}, **more}


def said(*texts, kind="output_text", **item):
    return {"type": "message", "content": [{"type": kind, "text": text} for text in texts]} | item


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([], ""),
        ([said("a", "b"), said("c")], "abc"),
        ([said("thought", type="reasoning"), said("a")], "a"),
        ([said("no", kind="refusal"), said("a"), {"type": "message", "content": "b"}, {"type": "message"}], "a"),
    ],
)
def test_the_text_of_a_policys_answer_is_all_that_its_messages_say(output, text):
    verified(intake := Intake(), row(output))
    assert intake.request.columns["text"] == [text]


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        ("why?", "why?"),
        ([], ""),
        (None, ""),
        ([{"role": "user", "content": "first"}, {"role": "user", "content": "last"}], "last"),
        ([{"role": "user", "content": "asked"}, {"role": "system", "content": "rules"}, "odd"], "asked"),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            "ab",
        ),
        ([{"role": "system", "content": "rules"}], ""),
    ],
)
def test_the_prompt_of_a_row_is_the_last_message_of_a_user(asked, prompt):
    verified(intake := Intake(), row(asked=asked))
    assert intake.request.columns["prompt"] == [prompt]


def test_a_rows_own_columns_are_inputs_where_the_settings_name_them():
    intake = Intake(takes=["answer", "levels", "response"])
    verified(intake, row(answer="ä", levels=[1, "ö"], other="not taken"))
    assert intake.request.columns == {"text": [""], "prompt": ["why?"], "answer": ["ä"], "levels": ['[1, "ö"]']}
    assert intake.request.parameters == {"answer": "ä", "other": "not taken"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"responses_create_params": {}}, "expected an object in 'response', and"),
        (
            {"response": {"output": []}, "responses_create_params": []},
            "expected an object in 'responses_create_params'",
        ),
        ({"response": {}, "responses_create_params": {}}, "a list of objects in 'response.output'"),
        (row(["a"]), "a list of objects in 'response.output'"),
        (row([said(3)]), "expected text in every 'output_text'"),
        (row(asked=[{"role": "user", "content": [{"type": "input_text"}]}]), "expected text in every 'input_text'"),
    ],
)
def test_a_row_of_another_form_is_refused(given, why):
    with pytest.raises(ProtocolMismatch, match=why) as caught:
        verified(Intake(), given)
    assert caught.value.code == Code.MALFORMED


def test_a_row_comes_back_as_it_was_with_its_reward_behind():
    body = json.dumps(row([said("a")], reward=9.0, ids=[1, 2])).encode()
    reply = verified(Intake(0.25), None, b" " + body + b"\n")
    assert reply.body == body[:-1] + b',"reward": 0.25}' and reply.version == 7
    with pytest.raises(ProtocolMismatch, match="in UTF-8"):
        verified(Intake(), None, body.decode().encode("utf-16"))


def test_a_panels_reward_is_the_sum_of_its_weighted_parts_of_which_none_hides_a_column():
    parts, weights = {"fine": [0.5], "short": [1.0]}, {"fine": 2.0, "short": 0.25}
    reply = verified(Intake(1.25, parts=parts, weights=weights), row(short="mine"))
    answer = json.loads(reply.body)
    assert (answer["reward"], answer["fine"], answer["short"]) == (1.25, 1.0, "mine")
    assert answer["reward_components"] == {"fine": 1.0, "short": 0.25}
    with pytest.raises(ModelFailed, match=r"add up to 1\.25, its score is 1\.3"):
        verified(Intake(1.3, parts=parts, weights=weights), row())


def test_a_seed_is_read_and_answered_by_nothing():
    seeded = nemo_gym.answers(Intake(), print)["/seed_session"]
    assert asyncio.run(seeded(b'{"a": 1}')).body == b"{}"
    with pytest.raises(SpecMismatch):
        asyncio.run(seeded(b"[]"))


# ---- Robometer


def npy(shape=(2, 3, 4, 3), dtype=np.uint8):
    np.save(file := io.BytesIO(), np.arange(math.prod(shape)).astype(dtype).reshape(shape))
    return file.getvalue()


def form(parts, boundary=b"--bound", end=b"--\r\n", head=b'Content-Disposition: form-data; name="%b"'):
    """A multipart form of these parts, by name."""
    written = b"".join(boundary + b"\r\n" + head % name + b"\r\n\r\n" + part + b"\r\n" for name, part in parts.items())
    return written + boundary + end


def sample(key="v0", task="stack", kind="progress", **trajectory):
    frames = {"frames": {"__numpy_file__": key}, "task": task} | trajectory
    return json.dumps({"sample_type": kind, "trajectory": frames}).encode()


def evaluated(parts, *scores, **form_of):
    body = parts if isinstance(parts, bytes) else form(parts)
    reply = asyncio.run(robometer.robometer(intake := Intake(*scores, **form_of), body))
    return intake.request, reply


def test_videos_are_scored_in_the_order_of_their_samples_whatever_that_of_the_parts():
    parts = {b"v1": npy((1, 2, 2, 3)), b"sample_1": sample("v1", "pour"), b"sample_0": sample(), b"v0": npy()}
    request, reply = evaluated(parts | {b"use_frame_steps": b" false "}, 0.25, 1.0)
    assert request.columns == {"prompt": ["stack", "pour"], "text": ["stack", "pour"]} and request.n == 2
    first, second = request.pictures["video"]
    assert [frame.shape for frame in first] == [(3, 4, 3)] * 2 and [frame.shape for frame in second] == [(2, 2, 3)]
    np.testing.assert_array_equal(first[1], np.arange(36, 72, dtype=np.uint8).reshape(3, 4, 3))
    assert json.loads(reply.body) == {
        "outputs_progress": {"progress_pred": [[0.25], [1.0]]}, "outputs_preference": None, "outputs_success": None,
    }  # fmt: skip
    assert reply.version == 7


@pytest.mark.parametrize("score", [-0.1, 1.1])
def test_a_progress_that_the_client_would_change_is_none(score):
    parts = {b"sample_0": sample(), b"v0": npy()}
    with pytest.raises(Unscored, match="expected 0 to 1"):
        evaluated(parts, score)
    evaluated(parts, score, score_range=(-1.0, 2.0))


GOOD = {b"sample_0": sample(), b"v0": npy()}


@pytest.mark.parametrize(
    ("parts", "error", "why"),
    [
        (GOOD | {b"use_frame_steps": b"True\n"}, Refused, "expected use_frame_steps = false"),
        (GOOD | {b"sample_0": sample(kind="preference")}, Refused, "came preference"),
        (GOOD | {b"sample_0": b'{"sample_type": "progress"}'}, Refused, "with a trajectory"),
        (GOOD | {b"sample_0": sample("v1")}, ProtocolMismatch, "sample_0: expected a task, and frames"),
        (GOOD | {b"sample_0": sample(frames="v0")}, ProtocolMismatch, "sample_0: expected a task, and frames"),
        (GOOD | {b"sample_0": sample(task=None)}, ProtocolMismatch, "sample_0: expected a task, and frames"),
        (GOOD | {b"sample_0": sample(3)}, ProtocolMismatch, "sample_0: expected a task, and frames"),
        (GOOD | {b"sample_2": sample()}, ProtocolMismatch, "expected parts sample_0, sample_1"),
        ({b"v0": npy()}, ProtocolMismatch, "expected parts sample_0, sample_1"),
        (GOOD | {b"v0": npy((3, 4, 3))}, SpecMismatch, r"\(frames, height, width, 3\), came uint8 \(3, 4, 3\)"),
        (GOOD | {b"v0": npy((2, 3, 4, 1))}, SpecMismatch, r"came uint8 \(2, 3, 4, 1\)"),
        (GOOD | {b"v0": npy((0, 3, 4, 3))}, SpecMismatch, r"came uint8 \(0, 3, 4, 3\)"),
        (GOOD | {b"v0": npy(dtype=np.float32)}, SpecMismatch, "came <f4"),
        (GOOD | {b"v0": npy()[:-1]}, ProtocolMismatch, "71 bytes follow the header"),
        (GOOD | {b"v0": b"not a file"}, ProtocolMismatch, "does not begin as a .npy file"),
        (form(GOOD, b"x-bound"), ProtocolMismatch, "expected multipart/form-data"),
        (form(GOOD, b"--" + b"b" * 300), ProtocolMismatch, "expected multipart/form-data"),
        (b"--\r\n", ProtocolMismatch, "expected multipart/form-data"),
        (b"", ProtocolMismatch, "expected multipart/form-data"),
        (form(GOOD, end=b""), ProtocolMismatch, "is not complete"),
        (form(GOOD)[:-20], ProtocolMismatch, "is not complete"),
        (
            form(GOOD, head=b"X: " + b"y" * 5000 + b'\r\nContent-Disposition: a; name="%b"'),
            ProtocolMismatch,
            "complete",
        ),
        (form(GOOD, head=b"Content-Type: text/%b"), ProtocolMismatch, "has no name"),
        (form(GOOD, head=b'Content-Disposition: form-data; filename="%b"'), ProtocolMismatch, "has no name"),
    ],
)
def test_a_form_of_another_kind_is_refused_by_what_is_wrong(parts, error, why):
    with pytest.raises(error, match=why):
        evaluated(parts)


def test_the_name_of_a_part_is_found_among_other_heads():
    head = b'Content-Type: a/b; name="wrong"\r\nCONTENT-DISPOSITION : form-data; filename="x";  name=%b'
    request, _ = evaluated(form(GOOD, b"----a", head=head))
    assert request.columns["prompt"] == ["stack"]


# ---- chats

PICTURE = {"type": "image_url", "image_url": {"url": "data:image;base64,AAAA"}}


def part(text):
    return {"type": "text", "text": text}


def test_a_chat_is_one_row_with_its_last_text_those_before_and_its_picture():
    messages = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": [part("see"), PICTURE, part("this")]},
        {"role": "assistant", "content": "ä"},
    ]
    request = chat.conversation(messages)
    assert (request.columns["text"], request.columns["prompt"]) == (["ä"], ["rules\n\nsee\nthis"])
    assert json.loads(request.columns["chat"][0])[1] == {"role": "user", "content": "see\nthis"}
    assert "ä" in request.columns["chat"][0] and request.pictures == {"image": [PICTURE["image_url"]["url"]]}
    alone = chat.conversation(messages[:1])
    assert alone.columns["prompt"] == [""] and alone.pictures == {}


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (None, "expected messages with a content"),
        ([], "expected messages with a content"),
        (["hello"], "expected messages with a content"),
        ([{"role": "user"}], "expected messages with a content"),
        ([{"content": ["text"]}], "expected messages with a content"),
        ([{"content": [{"type": "audio"}]}], "expected messages with a content"),
        ([{"content": [part(None)]}], "expected messages with a content"),
        ([{"content": [PICTURE]}, {"content": [PICTURE]}], "a chat with 2 pictures, expected at most one"),
        ([{"content": [PICTURE | {"image_url": "data:image"}]}], "expected an inline picture"),
        ([{"content": [PICTURE | {"image_url": {"url": "http://x"}}]}], "expected an inline picture.*http://x"),
        ([{"content": [PICTURE | {"image_url": {"url": 3}}]}], "expected an inline picture"),
    ],
)
def test_a_chat_of_another_form_is_refused_with_what_was_expected(messages, why):
    with pytest.raises(Error, match=why):
        chat.conversation(messages)


def spoken(content, *scores, **more):
    body = json.dumps({"messages": [{"role": "user", "content": content}], "model": "judge", **more}).encode()
    reply = asyncio.run(chat.unifiedreward(intake := Intake(*scores), body))
    return intake.request, reply


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("Rate it. Text Caption: [a [red] cat]", "a [red] cat"),
        ("Text Caption: [a cat] please", "Text Caption: [a cat] please"),
        ("a cat]", "a cat]"),
    ],
)
def test_the_prompt_of_a_spoken_score_is_the_caption_in_the_question(text, prompt):
    request, reply = spoken([PICTURE, part(text)], 3.5)
    assert request.columns == {"prompt": [prompt], "text": [text]}
    answer = json.loads(reply.body)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Final Score: 3.500000"}
    assert (answer["model"], reply.version, reply.headers) == ("judge", 7, (("connection", "close"),))


@pytest.mark.parametrize("score", [1.0, 5.0])
def test_scores_at_the_ends_of_the_spoken_scale_are_said(score):
    spoken([PICTURE, part("a")], score)


@pytest.mark.parametrize("score", [0.999, 5.001])
def test_scores_beyond_the_spoken_scale_are_none(score):
    with pytest.raises(Unscored, match="expected 1 to 5"):
        spoken([PICTURE, part("a")], score)


@pytest.mark.parametrize(
    "content",
    ["a", ["a"], [PICTURE], [part("a")], [PICTURE, PICTURE, part("a")], [PICTURE, part("a"), part("b")],
     [PICTURE, part("a"), {"type": "audio"}], [PICTURE, part(None)]],
)  # fmt: skip
def test_a_question_has_one_picture_and_one_text(content):
    with pytest.raises(ProtocolMismatch, match="a chat of one message with a picture"):
        spoken(content)


def test_a_question_is_one_message():
    for messages in (None, [], ["a"], [{"content": [PICTURE, part("a")]}] * 2):
        with pytest.raises(ProtocolMismatch, match="a chat of one message"):
            spoken("", messages=messages)


def test_a_judge_says_its_score_in_digits_and_none_that_its_client_would_change():
    intake = Intake(decimals=2)
    request = chat.judged(intake, {"messages": [{"role": "user", "content": "a"}], "model": "judge"})
    answer = request.context([12.345])
    assert answer["choices"][0]["message"]["content"] in ("12.35", "12.34") and answer["model"] == "judge"
    assert answer["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    with pytest.raises(Unscored, match="expected 0 to inf"):
        request.context([-0.1])


@pytest.mark.parametrize(
    ("field", "harmless", "harmful"),
    [
        ("priority", [0, None], [1]),
        ("truncate_prompt_tokens", [-1, 0, None], [1]),
        ("dimensions", [1, None], [2]),
        ("softmax", [False, None], [True]),
        ("chat_template_kwargs", [{}, None], [{"a": 1}]),
    ],
)
def test_a_field_that_would_change_a_score_is_refused_and_what_changes_none_is_not(field, harmless, harmful):
    for value in harmless:
        body_fields.require_texts({field: value})
        body_fields.require_chat({field: value})
    for value in harmful:
        for require in (body_fields.require_texts, body_fields.require_chat):
            with pytest.raises(Refused, match=rf"^{field} = .* is not supported: ") as caught:
                require({field: value})
            assert caught.value.code == Code.UNSUPPORTED


@pytest.mark.parametrize(
    ("field", "harmless", "harmful"),
    [
        ("n", [1, None], 2),
        ("response_format", [{"type": "text"}, None], {"type": "json_object"}),
        ("stream", [False], True),
        ("guided_regex", [""], ".*"),
    ],
)
def test_a_field_that_would_change_a_chats_answer_means_nothing_for_texts(field, harmless, harmful):
    for value in harmless:
        body_fields.require_chat({field: value})
    body_fields.require_texts({field: harmful})
    with pytest.raises(Refused, match="one number in digits"):
        body_fields.require_chat({field: harmful})


# ---- pickled edits


def edited(images, takes=(), **more):
    body = pickle.dumps({"images": images, "prompts": ["a", "b"], "metadata": {}, **more})
    reply = asyncio.run(pickle_dialects.verl_omni(intake := Intake(takes=takes), body))
    return intake.request, pickles.loads(reply.body)


def test_the_pictures_of_an_edit_are_fields_by_name_and_the_edited_ones_the_image():
    request, answer = edited({"edited": [b"1", b"2"], "source": [b"3", b"4"]}, takes=["source"])
    assert request.pictures == {"image": [b"1", b"2"], "source": [b"3", b"4"]}
    assert (request.n, request.columns, answer) == (2, {"prompt": ["a", "b"]}, {"scores": [0.5, 0.5]})
    assert edited([b"1", b"2"])[0].pictures == {"image": [b"1", b"2"]}


@pytest.mark.parametrize(
    ("images", "takes", "error", "why"),
    [
        ({"edited": [b"1", b"2"], "source": [b"3", b"4"]}, [], Refused, "name 'source' in the dialect's inputs"),
        ({"edited": [b"1", b"2"], "image": [b"3", b"4"]}, [], Refused, "expected a field for each, but two have the"),
        ({}, [], SpecMismatch, "expected pictures, came an empty dict"),
        ({"edited": [b"1"]}, [], SpecMismatch, "expected 1 values in 'prompts', came 2"),
        ({"edited": [b"1", b"2"], "source": [b"3"]}, ["source"], SpecMismatch, "expected 2 values in 'source', came 1"),
        (b"1", [], SpecMismatch, "expected a list in 'images', came bytes"),
    ],
)
def test_pictures_of_an_edit_that_do_not_fit_are_refused(images, takes, error, why):
    with pytest.raises(error, match=why):
        edited(images, takes)


def test_prompts_of_an_edit_are_texts():
    with pytest.raises(SpecMismatch, match="expected prompts of text"):
        edited([b"1", b"2"], prompts=["a", 3])
