"""cosmos-rl's answers are kept for clients that lost one, and never block the next request."""

from __future__ import annotations

import asyncio
import io
import json
from urllib.parse import urlencode

import numpy as np
import pytest

from jurybox.client.juror import Scores
from jurybox.protocol.errors import Busy, Refused
from jurybox.server.gateway.dialects import cosmos


class Intake:
    """Scores everything at once."""

    reward, rewards = "fine", ["fine"]

    async def read(self, read, body):
        return read(body)

    async def rows(self, request):
        return Scores([0.5] * request.n)


def body(n: int = 1) -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.zeros((n, 2, 2, 3), np.uint8))
    told = {"prompts": ["a"] * n, "reward_fn": {"fine": 1.0}, "media_type": "image"}
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
