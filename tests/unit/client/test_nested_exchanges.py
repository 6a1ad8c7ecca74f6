"""Exchanges of a lane: what nested calls leave alone, whose answers come, and when lost tickets are looked after."""

from __future__ import annotations

import time
import weakref

import numpy as np
import pytest
from tests.unit.client.scripted import SERVING, Transport, lane_of, serving_engine

from jurybox.client.in_flight import Answer, Claim
from jurybox.client.lane import LOOK_AFTER
from jurybox.protocol.errors import Code, Timeout
from jurybox.protocol.scoreboard import ENGINE


@pytest.mark.parametrize("own_claim", [False, True])
def test_a_ticket_that_is_being_exchanged_is_not_sent_by_a_nested_call(own_claim: bool) -> None:
    """A destructor may look after the lane there, when the transport does not hold the ticket yet."""
    lane = lane_of(serving_engine(), transport := Transport())
    transport.holds = lambda ticket: False  # type: ignore[method-assign]
    sending = []

    def exchange(ticket, timeout):
        lane._look_after((ticket,))
        sending.append(ticket.sending)
        return Answer(ticket.sequence, Code.OK, "", 5, ticket.incarnation)

    transport.exchange = exchange
    claim = Claim()
    sender = weakref.ref(claim) if own_claim else None
    ticket = lane.exchange(0, 1, time.monotonic_ns() + 10**12, 0, 60.0, None, sender)
    assert sending == [True] and not transport.sent
    assert ticket.answer.version == 5 and not ticket.sending and not lane.in_flight
    lane.close()


class Answering(Transport):
    """Its exchanges do what `does` says of a ticket; `seconds` has how long each may take."""

    def __init__(self, does):
        super().__init__()
        self.does, self.seconds = does, []

    def exchange(self, ticket, timeout):
        self.seconds.append(timeout)
        self.sent.append((ticket.engine, ticket.incarnation))
        return self.does(ticket)


def test_an_exchange_looks_after_the_lane_from_time_to_time_and_has_a_deadline() -> None:
    deadlines = []
    transport = Answering(
        lambda ticket: deadlines.append(ticket.deadline) or Answer(ticket.sequence, Code.OK, "", 5, ticket.incarnation)
    )
    lane = lane_of(serving_engine(), transport)
    before = time.monotonic_ns()
    for seconds in (LOOK_AFTER / 4, 1000.0):
        assert lane.ask(0, 1, seconds).version == 5
    assert transport.seconds == [LOOK_AFTER / 4, LOOK_AFTER]
    assert deadlines[0] < before + 1000 * 10**9 <= deadlines[1]
    lane.close()


def test_an_answer_to_an_earlier_ticket_is_not_taken_for_that_of_the_exchange() -> None:
    transport = Answering(lambda ticket: Answer(ticket.sequence + 100, Code.OK, "", 4, ticket.incarnation))
    lane = lane_of(serving_engine(), transport)
    ticket = lane.exchange(0, 1, time.monotonic_ns() + 10**12, 0, 60.0)
    assert ticket.answer is None and ticket.sequence in lane.in_flight
    transport.there = [Answer(ticket.sequence, Code.OK, "", 5, ticket.incarnation)]
    assert lane.wait(ticket, time.monotonic_ns() + 10**12).version == 5
    lane.close()


def test_an_exchange_with_an_engine_that_lacks_the_model_goes_on_with_another() -> None:
    engines = np.zeros(2, ENGINE)
    engines["incarnation"], engines["state"] = (11, 22), SERVING
    transport = Answering(lambda ticket: Answer(ticket.sequence, Code.MODEL_NOT_FOUND, "no", 0, ticket.incarnation))
    lane = lane_of(engines, transport)
    ticket = lane.exchange(0, 1, time.monotonic_ns() + 10**12, 0, 60.0)
    assert ticket.answer is None and len(set(transport.sent)) == 2 == len(transport.sent)
    lane.close()


def test_nobody_wants_the_answer_of_a_call_that_is_late_even_while_its_error_is_kept() -> None:
    transport = Answering(lambda ticket: None)
    lane = lane_of(serving_engine(), transport)
    with pytest.raises(Timeout) as late:
        lane.ask(0, 1, 0.0)
    (ticket,) = lane.in_flight.values()
    assert not ticket.wanted and not ticket.sending and late.traceback
    lane.close()


def test_a_ticket_that_is_submitted_after_a_while_has_those_before_it_looked_after() -> None:
    engines = serving_engine()
    lane = lane_of(engines, transport := Transport())
    claim = Claim()
    deadline = time.monotonic_ns() + 10**12
    lane.submit(0, 1, deadline, owner=weakref.ref(claim))
    engines["incarnation"] = 22
    lane._looked = time.monotonic() + 1000.0
    lane.submit(1, 1, deadline)
    assert transport.sent == [(0, 11), (0, 22)], "they were looked after just now"
    lane._looked = 0.0
    lane.submit(2, 1, deadline)
    assert transport.sent == [(0, 11), (0, 22), (0, 22), (0, 22)]
    lane._looked = 0.0
    lane.in_flight.clear()
    lane.submit(3, 1, deadline)
    assert lane._looked == 0.0, "there was nothing to look after"
    lane.close()


@pytest.mark.parametrize("why", ["another ticket is in flight", "no engine serves"])
def test_what_cannot_be_exchanged_is_submitted(why: str) -> None:
    engines = serving_engine()
    lane = lane_of(engines, transport := Transport())
    if why == "no engine serves":
        engines["state"] = 0
    else:
        lane.submit(0, 1, time.monotonic_ns() + 10**12)
    claim = Claim()
    ticket = lane.exchange(2, 3, time.monotonic_ns() + 10**12, 4, 60.0, weakref.ref(claim))
    assert (ticket.first, ticket.rows, ticket.version, ticket.wanted) == (2, 3, 4, True)
    assert lane.in_flight[ticket.sequence] is ticket and len(transport.sent) == 2 * (why != "no engine serves")
    lane.close()
