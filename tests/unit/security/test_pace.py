"""Heavy work leaves at least half of the event loop's time to others, and loses nothing if there are none."""

from __future__ import annotations

import asyncio
import time

import pytest

from jurybox.server.security import pace as module
from jurybox.server.security.pace import Breaks, Pace


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_who_works_alone_does_not_rest(clock):
    pace, one = Pace(), object()
    for _ in range(3):
        pace.heard(one)
        clock[0] += 0.01
        assert pace.rest(one, 0.01) == 0


def test_who_works_beside_others_rests_as_long_as_it_worked(clock):
    pace, one, other = Pace(), object(), object()
    pace.heard(other)
    pace.heard(one)
    clock[0] += 0.03
    assert pace.rest(one, 0.03) == 0.03
    assert pace.rest(other, 0.03) == 0.03  # either of them
    clock[0] += 1.0
    assert pace.rest(one, 0.03) == 0  # the other has gone


def test_a_rest_ends_soon_however_long_the_work_was(clock):
    pace, one, other = Pace(), object(), object()
    pace.heard(other)
    clock[0] += 60
    assert pace.rest(one, 60.0) == 0.1


def test_after_each_rest_the_work_goes_on_once():
    async def work():
        gone_on = asyncio.Event()
        pace, times = Pace(), []
        breaks = Breaks(pace, lambda: (times.append(time.monotonic()), gone_on.set()))
        pace.heard(object())
        began = time.monotonic() - 0.02
        breaks.after(began)
        breaks.after(began)
        assert breaks.resting
        await asyncio.wait_for(gone_on.wait(), 20)
        assert not breaks.resting
        assert times[0] - began >= 0.04
        await asyncio.sleep(0.05)
        assert len(times) == 1

    asyncio.run(work())
