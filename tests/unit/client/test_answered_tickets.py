"""Tickets whose answer is there already, was lost with their lane, or is waited for by several."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.client.scripted import Engine
from tests.unit.client.test_ticket import ROWS, Later, Waiter, far, laned, sent

from jurybox.client.in_flight import ModelLock
from jurybox.client.ticket import Ticket, send_parts
from jurybox.protocol.errors import Refused, Timeout


def test_a_result_that_has_arrived_is_returned_although_no_time_is_left() -> None:
    engine = Later()
    lane, ticket = sent(engine)
    with pytest.raises(Timeout):
        ticket.result(0)
    engine.let_out()
    assert ticket.result(0).version == 7 and lane.free == 8


def test_a_ticket_that_was_answered_is_done_also_if_its_server_has_died_since() -> None:
    engine = Later()
    lane, ticket = sent(engine)
    engine.let_out()
    lane.receive_now()
    lane._scoreboard.server_lives = lambda: False
    assert ticket.done() and lane.gone is None
    assert (ticket.result().outputs == ROWS * 10).all()


async def test_all_who_watch_a_ticket_are_told_of_its_answer() -> None:
    engine, waiters, loop = Later(), [Waiter(), Waiter()], asyncio.get_running_loop()
    lane, ticket = sent(engine)
    for waiter in waiters:
        assert ticket.watched(loop, waiter, again=False) is False
    engine.let_out()
    await asyncio.sleep(0)
    lane.receive_now()
    assert [waiter.done() for waiter in waiters] == [True, True]


async def test_who_watches_and_who_awaits_a_ticket_are_both_told_of_its_answer() -> None:
    engine, waiter, loop = Later(), Waiter(), asyncio.get_running_loop()
    _, ticket = sent(engine)
    assert ticket.watched(loop, waiter, again=False) is False
    waiting = asyncio.ensure_future(ticket.result_async(60))
    await asyncio.sleep(0)
    engine.let_out()
    assert (await asyncio.wait_for(waiting, 60)).version == 7 and waiter.done()


def test_outputs_of_a_lane_that_a_nested_call_has_closed_are_not_taken_for_those_of_no_rows() -> None:
    class Closing(Engine):
        """A destructor closes the lane while the answer comes."""

        def exchange(self, ticket: Any, timeout: float) -> Any:
            answer = super().exchange(ticket, timeout)
            lane.close()
            return answer

    lane = laned(Closing())
    came = send_parts(ModelLock("m", 60.0), lane, [({"x": ROWS}, 3)], lane.take(3), far(), 0, 0.5)
    assert type(came) is Ticket
    for ask in (came.result, came.seen):
        with pytest.raises(Refused, match="was closed: get it again"):
            ask()
