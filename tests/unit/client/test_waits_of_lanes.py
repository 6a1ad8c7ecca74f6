"""What a lane looks after while it waits, and what an interrupted or nested call leaves to it."""

from __future__ import annotations

import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.client.scripted import SERVING, Transport, lane_of, serving_engine

from jurybox.client.in_flight import UNSENT, Answer, Claim
from jurybox.client.lane import LOOK_AFTER
from jurybox.client.transports.transport import NotSent
from jurybox.protocol.errors import Code, Refused, ServerGone, TooManyFiles
from jurybox.protocol.scoreboard import ENGINE


def later() -> int:
    return time.monotonic_ns() + 10**12


def test_a_ticket_whose_sending_ctrl_c_ended_is_looked_after_even_while_its_error_is_kept() -> None:
    lane = lane_of(serving_engine(), transport := Transport())
    send = transport.send

    def interrupt(ticket: Any) -> None:
        raise KeyboardInterrupt

    transport.send = interrupt  # type: ignore[method-assign]
    owner = Claim()
    with pytest.raises(KeyboardInterrupt) as kept:
        lane.submit(0, 2, later(), owner=weakref.ref(owner))
    transport.send, transport.holds = send, lambda ticket: False  # type: ignore[method-assign]
    (ticket,) = lane.in_flight.values()
    assert not ticket.sending and kept.traceback
    lane.look_after()
    assert transport.sent == [(0, 11)]
    lane.close()


@pytest.mark.parametrize("how", ["submit", "exchange"])
def test_a_call_that_is_nested_in_the_sending_of_the_only_ticket_waits_for_no_rows(how: str) -> None:
    """That ticket is sent only after the nested call."""
    lane = lane_of(serving_engine(), transport := Transport())
    may: list[bool] = []

    def nested(ticket: Any, timeout: float = 0.0) -> Answer:
        may.append(lane.may_free_rows())
        may.append(lane.wait_for_rows(later()))
        return Answer(ticket.sequence, Code.OK, "", 5, ticket.incarnation)

    transport.is_reading = lambda ticket: False  # type: ignore[attr-defined]
    transport.send = transport.exchange = nested  # type: ignore[attr-defined, method-assign, assignment]
    if how == "submit":
        lane.submit(0, 2, later())
        assert lane.may_free_rows(), "it is sent now"
    else:
        lane.exchange(0, 2, later(), 0, 60.0)
    assert may == [False, False]
    lane.close()


@pytest.mark.parametrize("answers", [False, True])
def test_lost_tickets_are_looked_for_from_time_to_time_also_while_others_are_answered(answers: bool) -> None:
    engines = serving_engine()
    lane = lane_of(engines, transport := Transport())
    owner = Claim()
    lost, other = (lane.submit(at, 1, later(), owner=weakref.ref(owner)) for at in range(2))

    def receive(looked: float) -> int:
        """Look at the transport once; return how often the lost ticket has been sent in all."""
        lane._looked = looked
        transport.there = [Answer(other.sequence, Code.OK, "", 5, 11)] if answers else []
        lane.receive(0.0)
        return transport.sent.count((0, 22))

    engines["incarnation"] = 22
    other.incarnation = 11
    assert receive(time.monotonic() + 1000.0) == 0, "they were looked for just now"
    assert receive(time.monotonic() - 0.75 * LOOK_AFTER) == 1 + (not answers)
    assert lost.incarnation == 22
    lane.close()


def test_a_lane_whose_last_ticket_was_just_answered_has_nothing_to_look_for() -> None:
    lane = lane_of(serving_engine(), transport := Transport())
    ticket = lane.submit(0, 1, later())
    transport.there = [Answer(ticket.sequence, Code.OK, "", 5, 11)]
    lane._looked = 0.0
    lane.receive(0.0)
    assert lane._looked == 0.0 and ticket.answer is not None
    lane.receive(0.0)
    assert lane._looked > 0.0, "nothing came: the server may be gone"
    lane.close()


def test_a_wait_ends_when_its_server_has_died() -> None:
    lives = [True]
    engines = serving_engine()
    lane = lane_of(engines, transport := Transport())
    lane._scoreboard = SimpleNamespace(engines=engines, server_lives=lambda: lives[0])  # type: ignore[assignment]
    transport.is_reading = lambda ticket: False  # type: ignore[attr-defined]
    ticket = lane.submit(0, 1, later())
    lives[0] = False
    with pytest.raises(ServerGone, match="with 1 tickets of 'm' in flight; the next call reconnects"):
        lane.wait(ticket, later())
    with pytest.raises(ServerGone):
        lane.submit(1, 1, later())
    lane.close()


def test_a_ticket_that_no_engine_could_take_is_sent_to_the_first_that_serves() -> None:
    engines = np.zeros(2, ENGINE)
    engines["incarnation"] = 11, 22
    lane = lane_of(engines, transport := Transport())
    owner = Claim()
    ticket = lane.submit(0, 1, deadline := later(), owner=weakref.ref(owner))
    lane.look_after()
    assert not transport.sent and ticket.sequence in lane.in_flight
    engines["state"][1] = SERVING
    lane.look_after()
    assert transport.sent == [(1, 22)] and ticket.deadline == deadline and ticket.deaths == 0
    lane.close()


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_ticket_with_which_three_engines_died_fails_and_one_with_fewer_is_sent_again(deaths: int) -> None:
    engines = serving_engine()
    lane = lane_of(engines, transport := Transport())
    owner = Claim()
    ticket = lane.submit(0, 1, later(), owner=weakref.ref(owner))
    for death in range(deaths):
        engines["incarnation"] = 22 + death
        lane.look_after()
    assert ticket.deaths == deaths and len(transport.sent) == min(1 + deaths, 3)
    if deaths == 3:
        assert ticket.answer is not None and ticket.answer.code == Code.MODEL_FAILED and not lane.in_flight
    else:
        assert ticket.answer is None
    lane.close()


class Full(Transport):
    """Raises what `does` says of each ticket that is to be sent, in order; None: it is sent."""

    def __init__(self, *does: Exception | None) -> None:
        super().__init__()
        self.does = list(does)

    def send(self, ticket: Any) -> None:
        if self.does and (error := self.does.pop(0)) is not None:
            raise error
        super().send(ticket)


def test_a_ticket_without_room_is_sent_with_the_next_answer_although_a_later_one_had_no_files() -> None:
    transport = Full(None, NotSent("it is full"), TooManyFiles("no more files"))
    lane = lane_of(serving_engine(), transport)
    first, second, third = (lane.submit(at, 1, later()) for at in range(3))
    transport.there = [Answer(first.sequence, Code.OK, "", 5, 11)]
    lane.receive_now()
    assert [second.engine, third.engine] == [0, 0] and len(transport.sent) == 3
    lane.close()


def test_a_ticket_without_room_that_another_call_is_sending_is_left_to_it() -> None:
    transport = Full(None, NotSent("it is full"))
    lane = lane_of(serving_engine(), transport)
    first, second = (lane.submit(at, 1, later()) for at in range(2))
    claim = Claim()
    second.sender = weakref.ref(claim)
    transport.there = [Answer(first.sequence, Code.OK, "", 5, 11)]
    lane.receive_now()
    assert second.engine == UNSENT and len(transport.sent) == 1
    lane.close()


@pytest.mark.parametrize("why", ["its engine died", "its answer was lost"])
def test_only_a_ticket_whose_answer_was_lost_in_this_process_has_its_time_again(why: str) -> None:
    engines = serving_engine()
    lane = lane_of(engines, transport := Transport())
    owner = Claim()
    ticket = lane.submit(0, 1, later(), owner=weakref.ref(owner))
    ticket.submitted -= 10**10
    before = ticket.deadline
    if why == "its engine died":
        engines["incarnation"] = 22
    else:
        transport.holds = lambda ticket: False  # type: ignore[method-assign]
    lane.look_after()
    assert len(transport.sent) == 2 and (ticket.deadline == before) == (why == "its engine died")
    lane.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_forked_child_has_neither_the_rows_nor_the_tickets_of_its_parent(lost: bool) -> None:
    told: list[str] = []
    charged, engines = np.zeros(1, np.uint32), serving_engine()
    lane = lane_of(engines, transport := Transport(), charged=charged, leave=lambda: told.append("lock"))
    transport.forked = lambda: told.append("forked")  # type: ignore[attr-defined]
    transport.close = lambda: told.append("closed")  # type: ignore[method-assign]
    held = lane.take(2)
    lane.submit(2, 2, later())
    lane._row_waiters.append((None, None))  # type: ignore[arg-type]
    if lost:
        lane.gone = ServerGone("it ended")
    boards = [weakref.ref(charged), weakref.ref(engines)]
    del charged, engines
    lane._after_fork_in_child()
    told_of = "it ended" if lost else "these rows of 'm' were taken before a fork, and belong to the parent"
    with pytest.raises(ServerGone if lost else Refused, match=told_of):
        lane.submit(0, 1, later())
    assert lane.free == 8 and not lane.in_flight and not lane.rows_awaited and not lane.columns.inputs
    gc.collect()
    assert [board() for board in boards] == [None, None], "the scoreboard is unmapped"
    lane.give(held)
    lane.close()
    del lane
    gc.collect()
    assert told == ["forked"], "the lock is the parent's"
