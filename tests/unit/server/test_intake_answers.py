"""What a dialect's requests are answered when some rows have scores and others have none, and how much is asked."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from jurybox.client.juror import Passing, Scores
from jurybox.protocol.errors import Code, Refused, SpecMismatch
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.dialects.intake import AnswerForm, Intake, Request, Unscored, listed, scalars
from jurybox.server.security.pace import Turns


class Pool:
    """Threads that work at once, and count."""

    def __init__(self):
        self.works = 0

    async def run(self, work, *arguments):
        self.works += 1
        return work(*arguments)


class Scorer:
    """Gives each row the next score, and keeps what it was asked."""

    spec = None

    def __init__(self, *scores, **parts):
        self.given, self.parts, self.asked = scores, parts, None

    async def scores(self, columns, n):
        self.asked = {name: list(columns[name]) for name in columns}, n
        found = Scores(list(self.given[:n]), [7])
        found.parts = {name: Scores(list(part[:n]), [7]) for name, part in self.parts.items()}
        return found


def intake(*scores, parts=None, **options):
    made = Intake(Frontend("ipc:///nowhere", None), Pool(), Turns(), model="m", **options)
    made._scorer = Scorer(*scores, **(parts or {}))
    return made


def texts(n, **more):
    return Request({"text": [f"t{i}" for i in range(n)]}, n, **more)


async def answered(made, request):
    """What is written for a request."""
    return await made.answered(lambda _: request, lambda asked, scores: (asked.n, scores), b"{}")


def test_a_request_may_ask_for_the_reward_and_for_each_member_once():
    assert intake(reward="fine", members=["a", "fine", "b"]).rewards == ["fine", "a", "b"]
    made = intake(reward="fine", inputs={"prompt": "prompt", "image": "image"})
    assert made.rewards == ["fine"] and made.takes("prompt") and not made.takes("text")


@pytest.mark.parametrize("n", [1, 2, 257])
async def test_every_row_gets_its_score_and_large_answers_are_written_in_a_thread(n):
    made = intake(*map(float, range(n)))
    asked, scores = await answered(made, texts(n))
    assert (asked, scores.values, scores.version, dict(scores.parts)) == (n, [*map(float, range(n))], 7, {})
    assert made._pool.works == (n > 256)


async def test_a_panels_parts_come_with_its_scores_for_one_row_too():
    for n in (1, 2):
        _, scores = await answered(intake(3.0, 4.0, parts={"a": [1.0, 2.0]}), texts(n))
        assert scores.values == [3.0, 4.0][:n] and scores.parts == {"a": [1.0, 2.0][:n]}


@pytest.mark.parametrize(
    ("scores", "passing", "why"),
    [
        (["broken"], False, "1 of 1 samples have no score; sample 0: broken"),
        ([1.0, "broken", "too"], False, "2 of 3 samples have no score; sample 1: broken"),
        ([1.0, Passing("late"), "broken"], False, "2 of 3 samples have no score; sample 1: late"),
        ([1.0, Passing("late")], True, "1 of 2 samples have no score; sample 1: late"),
    ],
)
async def test_a_row_without_a_score_fails_the_request_which_may_be_asked_again_if_that_may_pass(scores, passing, why):
    with pytest.raises(Refused if passing else Unscored, match=f"^{why}$") as caught:
        await answered(intake(*scores), texts(len(scores)))
    assert caught.value.code == (Code.NOT_READY if passing else Code.ROW_FAILED)


async def test_rows_whose_picture_is_none_are_not_asked_and_keep_their_places():
    pixels = np.zeros((2, 2, 3), np.uint8)
    made = intake(1.0, 2.0, parts={"a": [0.5, 0.25]})
    found = await made.rows(texts(3, pictures={"image": [pixels, "no base64!", pixels]}))
    columns, n = made._scorer.asked
    assert n == 2 and columns["text"] == ["t0", "t2"] and all(one is pixels for one in columns["image"])
    assert [found[0], found[2]] == [1.0, 2.0] and "base64" in found[1] and found.version == 7
    assert [found.parts["a"][0], found.parts["a"][2]] == [0.5, 0.25] and found.parts["a"][1] == found[1]
    made = intake()
    found = await made.rows(texts(2, pictures={"image": ["no base64!"] * 2}))
    assert made._scorer.asked is None and all("base64" in why for why in found)


@pytest.mark.parametrize("n", [1, 2])
async def test_encoded_pictures_are_decoded_before_they_are_asked_for(n):
    (file := io.BytesIO()).name = "x.png"
    Image.new("RGB", (3, 2), (1, 2, 3)).save(file)
    text = base64.b64encode(file.getvalue()).decode()
    for way in ("rows", "answered"):
        made, request = intake(1.0, 2.0), texts(n, pictures={"image": [text] * n, "source": [text] * n})
        await (made.rows(request) if way == "rows" else answered(made, request))
        columns, _ = made._scorer.asked
        for name in ("image", "source"):
            assert [one.shape for one in columns[name]] == [(2, 3, 3)] * n
            assert columns[name][0][0, 0].tolist() == [1, 2, 3]


def test_answers_have_the_form_that_the_settings_say_or_the_usual_one():
    assert intake().form == AnswerForm() and intake(form=AnswerForm(like="tei")).form.like == "tei"


async def test_a_request_has_up_to_4096_rows():
    assert len(await intake(*[1.0] * 4096).rows(texts(4096))) == 4096
    with pytest.raises(Refused, match="a request of 4097 samples, expected at most 4096") as caught:
        await intake().rows(texts(4097))
    assert caught.value.code == Code.TOO_LARGE


def test_a_score_outside_its_range_is_none():
    for form, good, wrong in (
        (AnswerForm(), (0.0, 5.0), (-0.01, 5.01)),
        (AnswerForm(score_range=(-1.0, 1.0)), (-1.0, 1.0), (-1.01, 1.01)),
    ):
        for score in good:
            form.require_in_range(score, 5.0)
        for score in wrong:
            with pytest.raises(Unscored, match="see score_range"):
                form.require_in_range(score, 5.0)


def test_only_single_values_of_a_body_may_be_parameters():
    given = {"a": True, "b": 1, "c": 0.5, "d": "x"}
    assert scalars({**given, "e": None, "f": [1], "g": {}}) == given


def test_a_field_that_must_be_a_list_is_one_of_that_length():
    assert listed({"a": [1, 2]}, "a") == listed({"a": [1, 2]}, "a", 2) == [1, 2]
    with pytest.raises(SpecMismatch, match="expected a list in 'a', came NoneType"):
        listed({}, "a")
    with pytest.raises(SpecMismatch, match="expected 0 values in 'a', came 1"):
        listed({"a": [1]}, "a", 0)
