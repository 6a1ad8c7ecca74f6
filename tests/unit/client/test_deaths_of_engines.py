"""Which ends of engines count against a model, and what a lane tells of its engines."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.client.engine_choice import MOST_DEATHS, EngineChoice, EngineDeaths, fatal
from jurybox.client.in_flight import InFlight
from jurybox.client.transports.transport import SERVING
from jurybox.protocol.errors import Code
from jurybox.protocol.scoreboard import ENGINE, EngineState


@pytest.mark.parametrize("far", [False, True])
def test_without_a_count_each_death_of_an_engine_here_is_the_models_and_none_elsewhere(far: bool) -> None:
    deaths = EngineDeaths(None, far=far)
    assert [deaths.blames(incarnation) for incarnation in (1, 2, 1)] == [not far] * 3


def test_the_end_of_a_connection_to_elsewhere_is_no_death_whatever_is_counted() -> None:
    charged = np.array([3], np.uint32)
    deaths = EngineDeaths(charged, far=True)
    charged += 1
    assert not deaths.blames(1)


def test_a_death_is_the_models_if_its_count_has_changed_since_the_one_before() -> None:
    charged = np.array([5], np.uint32)
    deaths = EngineDeaths(charged, far=False)
    assert not deaths.blames(1), "those before the lane are others'"
    charged += 1
    assert deaths.blames(2) and deaths.blames(2), "of each ticket that was in flight with it"
    assert not deaths.blames(1) and not deaths.blames(3)
    charged += 1
    assert deaths.blames(4)
    deaths.forget()
    assert deaths.blames(5), "there is no count any more"


def test_a_ticket_that_ended_engines_is_told_so_with_its_model_and_its_rows() -> None:
    ticket = InFlight(9, 0, 3, 0, 0)
    ticket.incarnation = 7
    answer = fatal("m", ticket)
    assert (answer.sequence, answer.code, answer.version, answer.incarnation) == (9, Code.MODEL_FAILED, 0, 7)
    assert f"{MOST_DEATHS} engines died one after another with this ticket of model 'm' (3 rows)" in answer.message


@pytest.mark.parametrize(
    ("engines", "home", "one", "is_one", "count", "at_home"),
    [
        ((), 2, False, False, 3, 2),
        ((), 7, False, False, 3, 0),
        ((1,), 0, False, True, 1, 1),
        ((1, 2), 1, False, False, 2, 1),
        ((1, 2), 1, True, False, 1, 1),
        ((5,), 1, False, False, 3, 1),
    ],
)
def test_the_engines_of_a_lane_are_its_models_or_all(
    engines: tuple[int, ...], home: int, one: bool, is_one: bool, count: int, at_home: int
) -> None:
    board = np.zeros(3, ENGINE)
    board["state"] = SERVING, EngineState.LOADING, SERVING
    choice = EngineChoice(board, engines, home, one=one)
    assert (choice.one_engine, choice.engines, choice.home) == (is_one, count, at_home)
    assert choice.described() == "serving, loading, serving"
