"""cosmos-rl's answers are kept for clients that lost one, and never block the next request."""

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
from jurybox.protocol.errors import Busy, Refused, SpecMismatch
from jurybox.server.gateway.dialects import cosmos


class Intake:
    """Scores everything at once."""

    reward, rewards = "fine", ["fine"]

    async def read(self, read, body):
        return read(body)

    async def rows(self, request):
        return Scores([0.5] * request.n)


def body(n: int = 1, told=None, pictures=None) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.zeros((n, 2, 2, 3), np.uint8) if pictures is None else pictures)
    told = {"prompts": ["a"] * n, "reward_fn": {"fine": 1.0}, "media_type": "image", **(told or {})}
    return json.dumps(told).encode() + b"\n" + sink.getvalue()


def asked(n: int, *, read: bool) -> None:
    async def run() -> None:
        served = cosmos.Cosmos(Intake(), lambda _: None)
        for _ in range(n):
            key = json.loads((await served.enqueue(body())).body)["uuid"]
            await asyncio.sleep(0)
            if read:
                form = urlencode({"uuid": key, "type": "fine"}).encode()
                assert (await served.pull(form)).status == (await served.pull(form)).status == 200
            assert len(served._jobs) <= 16

    asyncio.run(run())


def test_answers_that_were_read_make_room_for_new_requests(monkeypatch):
    """A trainer sends a picture a request: thousands in the ten minutes for which answers are kept."""
    monkeypatch.setattr(cosmos, "_MOST_KEPT", 16)
    asked(100, read=True)


def test_unread_answers_are_not_dropped_for_new_requests(monkeypatch):
    monkeypatch.setattr(cosmos, "_MOST_KEPT", 16)
    with pytest.raises(Busy, match="16 requests"):
        asked(17, read=False)


async def test_a_request_of_too_many_pictures_gets_no_uuid():
    """Its client would poll for an hour and then get only NaN."""
    served = cosmos.Cosmos(Intake(), lambda _: None)
    await served.enqueue(body(4096))
    with pytest.raises(Refused, match="4097 samples, expected at most 4096"):
        await served.enqueue(body(4097))


async def served_one(scores=None, clock=lambda: 0.0):
    """Return a service with one request, what pulls its answer, and what was logged."""
    intake = Intake()
    if scores is not None:
        intake.rows = scores
    served = cosmos.Cosmos(intake, (said := []).append, clock)
    key = json.loads((await served.enqueue(body(2))).body)["uuid"]

    async def pull(reward="fine", key=key):
        return await served.pull(urlencode({"uuid": key, "type": reward}).encode())

    return served, pull, said


async def test_scores_are_given_as_often_as_they_are_asked_for_and_by_their_name_or_none():
    served, pull, said = await served_one()
    for reward in ("fine", ""):
        reply = await pull(reward)
        answer = json.loads(reply.body)
        assert (reply.status, answer["scores"], answer["type"]) == (200, {"fine": [0.5, 0.5]}, "fine")
        assert (answer["input_info"], answer["decoded_duration"]) == ({"shape": [2]}, "0.000")
    for asked_for, why in (
        (pull("other"), "unknown reward 'other', expected one of fine"),
        (pull(key="x"), "no request 'x'"),
    ):
        reply = await asked_for
        assert reply.status == 400 and why in reply.body.decode()
    assert json.loads((await served.ping(b"")).body) == {"status": "ok"} and not said


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (Refused("no room"), "no room"),
        (ZeroDivisionError("by zero"), "the gateway failed: ZeroDivisionError: by zero"),
        (None, "1 of 2 sam"),
    ],
)
async def test_rows_without_a_score_are_nan_and_the_log_says_why(error, why):
    async def rows(_request):
        if error is not None:
            raise error
        return Scores([0.5, "it is dark"])

    _, pull, said = await served_one(rows)
    scores = json.loads((await pull()).body)["scores"]["fine"]
    assert [math.isnan(score) for score in scores] == [error is not None, True]
    (line,) = said
    assert why in line and (error is not None or "it is dark" in line)


async def test_scores_that_are_not_there_yet_are_asked_for_again(monkeypatch):
    monkeypatch.setattr(cosmos, "_HOLD", 0.0)
    go = asyncio.Event()

    async def rows(request):
        await go.wait()
        return Scores([0.5] * request.n)

    _, pull, _ = await served_one(rows)
    reply = await pull()
    assert (reply.status, b"not available yet" in reply.body) == (400, True)
    go.set()
    await turns()
    assert (await pull()).status == 200


@pytest.mark.parametrize(
    ("told", "pictures", "error", "why"),
    [
        ({"media_type": "video"}, None, Refused, 'expected media_type "image", came "video"'),
        ({"reward_fn": ["fine"]}, None, SpecMismatch, "expected a dict of names and weights in 'reward_fn', came list"),
        ({"reward_fn": {"other": 1.0}}, None, SpecMismatch, "unknown reward 'other', expected one of fine"),
        ({"reward_fn": {"other": True}}, None, SpecMismatch, "unknown reward 'other', expected one of fine"),
        ({"prompts": ["a", "b"]}, None, SpecMismatch, "expected 1 values in 'prompts', came 2"),
        ({}, np.zeros((2, 2, 3), np.uint8), SpecMismatch, r"came uint8 \(2, 2, 3\)"),
        ({}, np.zeros((1, 2, 2, 4), np.uint8), SpecMismatch, r"came uint8 \(1, 2, 2, 4\)"),
        ({}, np.zeros((1, 2, 2, 3), np.int8), SpecMismatch, r"came \|i1"),
        ({}, np.asfortranarray(np.zeros((1, 2, 2, 3), np.uint8)), SpecMismatch, r"came \|u1"),
    ],
)
async def test_a_request_of_another_form_gets_no_uuid(told, pictures, error, why):
    served = cosmos.Cosmos(Intake(), lambda _: None)
    with pytest.raises(error, match=why):
        await served.enqueue(body(told=told, pictures=pictures))


async def test_rewards_that_weigh_nothing_are_not_looked_for():
    served = cosmos.Cosmos(Intake(), lambda _: None)
    assert (await served.enqueue(body(told={"reward_fn": {"fine": 1.0, "other": 0, "third": -1.0}}))).status == 200


async def test_answers_are_kept_for_ten_minutes_and_longer_while_they_are_computed():
    now, go = [0.0], asyncio.Event()

    async def rows(request):
        await go.wait()
        return Scores([0.5] * request.n)

    served, pull, _ = await served_one(rows, lambda: now[0])
    now[0] = 601.0
    await served.enqueue(body())
    go.set()
    await turns()
    assert (await pull()).status == 200, "it was being computed when its time was over"
    now[0] = 599.0
    await served.enqueue(body())
    assert (await pull()).status == 200
    now[0] = 600.5
    await served.enqueue(body())
    reply = await pull()
    assert (reply.status, b"answers are kept for 600 s" in reply.body) == (400, True)
