"""Collectors that wait while the engines' answers are too far behind the publications."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.clocks import Clock, given

from jurybox.protocol.errors import Refused, ServerGone
from jurybox.protocol.weights import reader as module
from jurybox.protocol.weights.reader import WeightsReader


@pytest.fixture
def clock(monkeypatch):
    return given(Clock(1000.0), monkeypatch, module)


@pytest.fixture
def reader():
    """A reader whose engines answer with version 3 of 10, and of which each look at the owner is noted."""
    reader = WeightsReader.__new__(WeightsReader)
    reader.channel = SimpleNamespace(newest=10, name="weights")
    reader.max_lag, reader.held_back, reader.held_back_seconds, reader._looked = 4, 0, 0.0, 0.0
    reader.version, reader.looks = 3, 0
    reader._in_use = lambda: reader.version

    def looked():
        reader.looks += 1
        reader._looked = module.time.monotonic()

    reader.require_owner = looked
    return reader


@pytest.mark.parametrize(
    ("version", "max_lag", "model"), [(6, None, 4), (3, None, 0), (10, 0, 4), (3, 7, 4), (11, 0, 4)]
)
def test_nothing_is_waited_for_where_answers_are_near_enough(reader, clock, version, max_lag, model):
    reader.version, reader.max_lag = version, model
    assert reader.wait_until_fresh(max_lag=max_lag) is True
    assert (reader.held_back, reader.held_back_seconds, clock.slept) == (0, 0.0, [])


@pytest.mark.parametrize(("version", "max_lag"), [(5, None), (9, 0), (3, 6)])
def test_answers_that_stay_behind_are_waited_for_until_the_time_out(reader, clock, version, max_lag):
    reader.version = version
    assert reader.wait_until_fresh(2.0, max_lag=max_lag) is False
    assert reader.held_back == 1 and 2.0 <= reader.held_back_seconds == clock.now - 1000.0 < 2.1
    assert reader.looks > 1, "a server that is gone would never answer with newer weights"
    reader.wait_until_fresh(0.0, max_lag=max_lag)
    assert reader.held_back == 2 and reader.held_back_seconds < 2.1


def test_the_wait_ends_when_the_engines_have_caught_up(reader, clock):
    def asleep(seconds):
        clock.slept.append(seconds)
        clock.now += seconds
        if len(clock.slept) == 5:
            reader.version = 6

    module.time.sleep = asleep
    assert reader.wait_until_fresh(30.0) is True
    assert len(clock.slept) == 5 and 0 < reader.held_back_seconds < 1.0


def test_a_server_that_is_gone_ends_the_wait_which_is_counted(reader, clock):
    def gone():
        raise ServerGone("the server has ended")

    reader.require_owner = gone
    with pytest.raises(ServerGone):
        reader.wait_until_fresh(30.0)
    assert reader.held_back == 1


def test_a_channel_without_a_server_has_no_answers_to_wait_for(reader, clock):
    reader._in_use = None
    with pytest.raises(Refused, match="weights channel weights was opened without a server"):
        reader.wait_until_fresh(max_lag=0)
    assert reader.lag(4) == 6 and reader.lag(12) == 0
