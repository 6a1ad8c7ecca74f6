"""Requests of a model whose lane or whose rows were lost between two calls, and what is asked again on the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.serving import wait_until
from tests.unit.client.test_model import model, rows, server  # noqa: F401  fixtures
from tests.unit.client.test_steps_of_sessions import replace

from jurybox.client import ServerGone, Timeout
from jurybox.protocol.errors import StaleLease

ASKS: list[Callable[[Any], Any]] = [
    lambda asked: asked(rows(1)[0]),
    lambda asked: asked.call_reply(rows(1)[0]).outputs,
    lambda asked: asked.row_reply(rows(1)[0], 30.0).outputs.reshape(2),
    lambda asked: asked.infer(rows(3))[2],
    lambda asked: asked.infer_reply(rows(9)).outputs[8],
    lambda asked: asyncio.run(asked.infer_async(rows(3)))[2],
    lambda asked: asyncio.run(asked.infer_reply_async(rows(9))).outputs[8],
]


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("used", [False, True], ids=["first", "later"])
def test_a_request_on_a_lane_that_was_replaced_is_asked_again_on_the_next(
    model: Any,  # noqa: F811
    ask: Callable[[Any], Any],
    used: bool,
) -> None:
    if used:
        ask(model)
    replaced = model.requests.lane
    replace(replaced)
    assert ask(model).tolist() == [2, 2]
    assert model.requests.lane is not replaced


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("why", [ServerGone("it ended"), StaleLease("it was revoked")])
def test_a_request_after_its_lane_was_lost_is_made_on_another_and_not_on_rows_that_the_last_one_used(
    model: Any,  # noqa: F811
    ask: Callable[[Any], Any],
    why: Exception,
) -> None:
    ask(model)
    lost = model.requests.lane
    lost.gone = why
    assert ask(model).tolist() == [2, 2]
    assert model.requests.lane is not lost and model.requests.lane.gone is None


@pytest.mark.parametrize("n", [1, 3])
def test_rows_of_a_call_that_was_late_are_used_by_no_other_until_its_engine_has_answered(
    model: Any,  # noqa: F811
    n: int,
) -> None:
    lane = model.requests.lane
    turn = lane._transport._turn
    lane._transport._turn = lambda: False  # the engine does nothing
    with pytest.raises(Timeout):
        model(rows(1)[0], timeout=0.01) if n == 1 else model.infer(rows(n), timeout=0.01)
    assert not model.requests.kept and not model.requests.kept_many and lane.free == 6 - n
    lane._transport._turn = turn
    wait_until(lambda: lane.receive(0.1) is None and not lane.in_flight, 30, "the answer")
    assert lane.free == 6


@pytest.mark.parametrize("given", [{"x": rows(3)}, [rows(1)[0]] * 3], ids=["by name", "list of rows"])
def test_inputs_in_another_form_than_an_array_are_computed_after_a_call_with_an_array(
    model: Any,  # noqa: F811
    given: Any,
) -> None:
    for _ in range(2):
        assert model.infer(rows(3)).tolist() == [[2, 2]] * 3
        assert model.infer(given).tolist() == [[2, 2]] * 3
