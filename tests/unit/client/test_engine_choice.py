"""Which of several engines gets a lane's next ticket."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.client import engine_choice
from jurybox.client.engine_choice import EngineChoice
from jurybox.client.transports.transport import SERVING
from jurybox.protocol.scoreboard import ENGINE, EngineState


def records(*waits: int):
    made = np.zeros(len(waits), ENGINE)
    made["state"], made["expected_wait"] = SERVING, waits
    return made


def in_flight(*engines: int):
    return {number: SimpleNamespace(engine=engine) for number, engine in enumerate(engines)}


@pytest.mark.parametrize(("waits", "home", "chosen"), [
    ((10, 10, 10), 2, 2), ((10, 15, 40), 1, 1), ((10, 16, 40), 1, 0), ((-5, 0, 1), 1, 1), ((-5, 0, 1), 2, None),
])  # fmt: skip
def test_a_lane_leaves_its_engine_if_that_is_half_as_busy_again_as_the_best(waits, home, chosen):
    found = {EngineChoice(records(*waits), (), home, one=False).choose({}) for _ in range(30)}
    assert found == ({0, 1} if chosen is None else {chosen})


def test_of_good_engines_the_one_with_the_fewest_tickets_of_the_lane_is_next():
    choice = EngineChoice(records(10, 12, 99), (), 0, one=False)
    assert choice.choose(in_flight(0)) == 1 and choice.choose(in_flight(0, 1, 1, 2)) == 0


@pytest.mark.parametrize("one", [False, True])
def test_an_engine_without_the_model_is_passed_over_for_a_while_if_another_may_have_it(one, monkeypatch):
    board, now = records(10, 10, 10), [100.0]
    monkeypatch.setattr(engine_choice.time, "monotonic", lambda: now[0])
    choice = EngineChoice(board, (0, 1), 0, one=one)
    assert choice.choose({}) == 0 and choice.goes_on_without(0) and choice.choose({}) == 1
    assert not choice.goes_on_without(1), "the third is not the model's"
    assert choice.choose({}) in (0, 1), "one is asked all the same"
    board["state"][1] = EngineState.LOADING
    assert choice.choose({}) == 0
    now[0] += 2.0
    assert choice.choose({}) == 0
    board["state"] = EngineState.LOADING
    assert choice.choose({}) is None and choice.able({}) == []


def test_sessions_stay_with_their_engine_as_long_as_it_serves_and_a_lane_takes_over_the_home_of_another():
    board = records(10, 1000, 10)
    choice = EngineChoice(board, (), 1, one=True)
    assert choice.choose({}) == 1 and choice.able({}) == [1] and choice.engines == 1
    board["state"][1] = EngineState.LOADING
    other = choice.choose({})
    assert other in (0, 2)
    board["state"][1] = SERVING
    assert choice.choose({}) == other
    larger = EngineChoice(board, (), 0, one=False)
    larger.replace(choice)
    assert larger.home == 1 and larger.able({}) == [1, 2, 0]
