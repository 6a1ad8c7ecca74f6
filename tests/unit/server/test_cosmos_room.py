"""How much cosmos-rl's requests may hold while they are scored, and which of their rewards are looked for."""

from __future__ import annotations

import asyncio
import io
import json
import math
from urllib.parse import urlencode

import numpy as np
import pytest
from tests.loops import turns

from jurybox.client.juror import Scores
from jurybox.protocol.errors import Busy, Code, ProtocolMismatch, SpecMismatch
from jurybox.server.gateway.dialects import cosmos

PICTURE = 2 * 2 * 3  # bytes


class Judge:
    """Scores requests when it may, and keeps them."""

    reward, rewards = "fine", ["fine", "short"]

    def __init__(self):
        self.asked, self.may = [], asyncio.Event()

    async def read(self, read, body):
        return read(body)

    async def rows(self, request):
        self.asked.append(request)
        await self.may.wait()
        found = Scores([0.5] * request.n, [7])
        found.parts = {"short": [0.25] * request.n}
        return found


@pytest.fixture
def judge():
    return Judge()


@pytest.fixture
def answers(judge):
    """The functions that answer bodies, by path."""
    return cosmos.Cosmos(judge, print).answers()


def body(n=1, **told):
    sink = io.BytesIO()
    np.save(sink, np.zeros((n, 2, 2, 3), np.uint8))
    line = {"prompts": ["a"] * n, "reward_fn": {"fine": 1.0}, "media_type": "image", **told}
    return json.dumps(line).encode() + b"\n" + sink.getvalue()


async def test_a_request_is_being_scored_when_its_trainer_gets_its_number(judge, answers):
    reply = await answers["/enqueue"](body(2))
    assert [request.n for request in judge.asked] == [2] and reply.status == 200
    judge.may.set()
    form = urlencode({"uuid": json.loads(reply.body)["uuid"], "type": "short"}).encode()
    pulled = await answers["/pull"](form)
    told = json.loads(pulled.body)
    assert told["scores"] == {"fine": [0.5, 0.5], "short": [0.25, 0.25]} and told["type"] == "short"
    assert (told["weights_version"], pulled.version) == (7, 7)
    assert json.loads((await answers["/ping"](b"")).body) == {"status": "ok"}


async def test_a_trainer_that_asks_early_waits_a_while_for_its_scores(judge, answers, monkeypatch):
    key = json.loads((await answers["/enqueue"](body())).body)["uuid"]
    form = urlencode({"uuid": key}).encode()
    pulling = asyncio.create_task(answers["/pull"](form))
    await turns()
    assert not pulling.done()
    monkeypatch.setattr(cosmos, "_HOLD", 0.0)
    reply = await answers["/pull"](form)
    assert (reply.status, json.loads(reply.body)) == (400, {"message": "the scores are not available yet"})
    judge.may.set()
    assert (await asyncio.wait_for(pulling, 30)).status == 200


async def test_pictures_that_are_being_scored_have_a_most_of_bytes_of_which_one_request_may_have_more(
    judge, answers, monkeypatch
):
    monkeypatch.setattr(cosmos, "_MOST_WAITING", 5 * PICTURE)
    await answers["/enqueue"](body(2))
    await answers["/enqueue"](body(3))
    for n in (1, 9):
        with pytest.raises(Busy, match=f"2 requests with {5 * PICTURE} bytes of pictures are held: ask again later"):
            await answers["/enqueue"](body(n))
    judge.may.set()
    await turns()
    await answers["/enqueue"](body(9))  # what was scored counts no more, and alone it may be as large as a body
    judge.may.clear()
    await turns()
    await answers["/enqueue"](body(9))
    with pytest.raises(Busy, match=f"4 requests with {9 * PICTURE} bytes of pictures are held"):
        await answers["/enqueue"](body(1))
    judge.may.set()


@pytest.mark.parametrize(
    ("rewards", "unknown"),
    [
        ({"fine": "1", "short": None}, None),
        ({"other": "1"}, "other"),
        ({"other": None}, "other"),
        ({"other": False}, "other"),
        ({"other": -0.0}, None),
        ({"fine": 1, "other": 1e-9}, "other"),
    ],
)
async def test_a_reward_is_looked_for_unless_its_weight_is_a_number_that_adds_nothing(judge, answers, rewards, unknown):
    judge.may.set()
    if unknown is None:
        assert (await answers["/enqueue"](body(reward_fn=rewards))).status == 200
    else:
        with pytest.raises(SpecMismatch, match=f"unknown reward '{unknown}', expected one of fine, short"):
            await answers["/enqueue"](body(reward_fn=rewards))


async def test_the_first_line_is_the_json_even_if_it_is_empty(judge, answers, monkeypatch):
    with pytest.raises(ProtocolMismatch, match="the body is not JSON"):
        await answers["/enqueue"](b"\n" + body())
    monkeypatch.setattr(cosmos, "_MOST_LINE", 100)
    sent = body(prompts=["a" * 100])
    for wrong in (sent, b"a" * 99, b""):
        with pytest.raises(ProtocolMismatch, match="came no line of less than 100 bytes"):
            await answers["/enqueue"](wrong)


async def test_of_answers_that_were_read_only_the_oldest_make_room(judge, answers, monkeypatch):
    monkeypatch.setattr(cosmos, "_MOST_KEPT", 16)
    judge.may.set()
    forms = []
    for _ in range(17):
        reply = await answers["/enqueue"](body())
        forms.append(urlencode({"uuid": json.loads(reply.body)["uuid"]}).encode())
        await answers["/pull"](forms[-1])
    assert [(await answers["/pull"](form)).status for form in forms] == [400] * 2 + [200] * 15


async def test_an_answer_is_kept_for_exactly_ten_minutes(judge):
    now = [100.0]
    answers = cosmos.Cosmos(judge, print, lambda: now[0]).answers()
    judge.may.set()
    form = urlencode({"uuid": json.loads((await answers["/enqueue"](body())).body)["uuid"]}).encode()
    for seconds, status in ((600.0, 200), (0.001, 400)):
        now[0] += seconds
        await answers["/enqueue"](body())
        assert (await answers["/pull"](form)).status == status


@pytest.mark.parametrize("error", [Busy("full"), ZeroDivisionError("by zero")])
async def test_a_request_that_failed_has_no_scores_and_no_version(judge, answers, error):
    async def rows(_request):
        raise error

    judge.rows = rows
    form = urlencode({"uuid": json.loads((await answers["/enqueue"](body(2))).body)["uuid"]}).encode()
    reply = await answers["/pull"](form)
    told = json.loads(reply.body)
    assert str(told["scores"]) == str({"fine": [math.nan] * 2, "short": [math.nan] * 2})
    assert told["weights_version"] == reply.version == 0


@pytest.mark.parametrize("file", [b"", b"PNG" * 50, b"\x93NUMPY\x01\x00\xff\xff{}"])
async def test_what_is_no_file_of_numpy_is_refused_with_what_was_expected(answers, file):
    with pytest.raises(ProtocolMismatch, match="expected a line of JSON and a .npy file of uint8") as refused:
        await answers["/enqueue"](body().partition(b"\n")[0] + b"\n" + file)
    assert refused.value.code == Code.MALFORMED


@pytest.mark.parametrize(("cut", "more", "why"), [(1, b"", "11 bytes follow"), (0, b"x", "13 bytes follow")])
async def test_the_pictures_fill_the_body(answers, cut, more, why):
    sent = body()
    with pytest.raises(ProtocolMismatch, match=f"{why} the header of"):
        await answers["/enqueue"](sent[: len(sent) - cut] + more)


async def test_of_several_values_of_a_form_the_last_one_counts(judge, answers):
    judge.may.set()
    key = json.loads((await answers["/enqueue"](body())).body)["uuid"]
    form = urlencode([("uuid", "x"), ("uuid", key), ("type", "other"), ("type", "fine")]).encode()
    assert (await answers["/pull"](form)).status == 200
    for nothing in (b"", b"uuid=&type=", b"\xff"):
        reply = await answers["/pull"](nothing)
        assert reply.status == 400 and "no request '' is known here" in json.loads(reply.body)["message"]
