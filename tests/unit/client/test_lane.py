"""How a lane handles answers and engines that die, over a scripted transport."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.client.scripted import SERVING, SPEC, Transport, lane_of, serving_engine

from jurybox.client.call_rows import CallRow
from jurybox.client.in_flight import UNSENT, Answer, Claim, InFlight
from jurybox.client.lane import Lane
from jurybox.client.link import ControlLink
from jurybox.client.row_allocator import RowAllocator
from jurybox.client.transports.transport import NOT_ANSWERED, NotSent, RowPlace
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import (
    Busy,
    Code,
    Error,
    ProtocolMismatch,
    Refused,
    ServerGone,
    SessionLost,
    StaleLease,
    Timeout,
    TooManyFiles,
)
from jurybox.protocol.scoreboard import ENGINE


def test_the_answer_of_a_dead_engine_is_not_taken_for_that_of_its_successor():
    """Its successor writes to the same rows by then, and perhaps with weights of another version."""
    engines = np.zeros(2, ENGINE)
    engines["incarnation"], engines["state"][0] = (11, 22), SERVING
    arena = SimpleNamespace(columns=Columns.here(SPEC, 8), close=lambda: None)
    transport = Transport()
    scoreboard = SimpleNamespace(engines=engines, server_lives=lambda: True)
    lane = Lane("m", scoreboard, arena, transport, 1, 0, 8, lambda: None)
    deadline = time.monotonic_ns() + 10**11
    ticket = lane.submit(0, 2, deadline)
    engines["incarnation"][0], engines["state"] = 0, (0, SERVING)
    lane._look_after((ticket,))
    assert transport.sent == [(0, 11), (1, 22)]
    transport.there = [Answer(ticket.sequence, Code.OK, "", 5, 11)]  # read only now
    lane.receive_now()
    assert ticket.answer is None and ticket.sequence in lane.in_flight
    transport.there = [Answer(ticket.sequence, Code.OK, "", 6, 22)]
    assert lane.wait(ticket, deadline).version == 6
    lane.close()


@pytest.mark.parametrize("charged_to_it", [True, False])
def test_only_deaths_that_are_charged_to_its_model_count_for_a_ticket(charged_to_it):
    """Otherwise a request that kills engines fails those of other models that were in flight with it."""
    engines, deaths = np.zeros(1, ENGINE), np.zeros(1, np.uint32)
    engines["incarnation"], engines["state"] = 1, SERVING
    arena = SimpleNamespace(columns=Columns.here(SPEC, 8), close=lambda: None)
    transport = Transport()
    scoreboard = SimpleNamespace(engines=engines, server_lives=lambda: True)
    lane = Lane("m", scoreboard, arena, transport, 1, 0, 8, lambda: None, charged=deaths)
    tickets = [lane.submit(0, 1, time.monotonic_ns() + 10**11), lane.submit(1, 1, time.monotonic_ns() + 10**11)]
    for death in range(2, 5):
        deaths += charged_to_it
        engines["incarnation"] = death
        lane._look_after(tickets)
    assert [ticket.answer is not None for ticket in tickets] == [charged_to_it] * 2
    if charged_to_it:
        assert "3 engines died one after another" in tickets[0].answer.message
    else:
        assert transport.sent[-1] == (0, 4)
    lane.close()


@pytest.mark.parametrize(
    ("said", "late", "told"),
    [
        (Busy("no rows are free"), True, Busy),
        (Refused("is loading", Code.NOT_READY), True, Timeout),
        (Busy("no rows are free"), False, ServerGone),
        (None, True, ServerGone),
    ],
)
def test_a_wait_for_rows_ends_with_its_reason_even_if_the_last_answer_is_late(monkeypatch, said, late, told):
    """Only a server that never answered, or has ended meanwhile, counts as gone."""
    answers = [] if said is None else [said]
    deadline = time.monotonic() + (0.2 if late else 60.0)

    def call(self, timeout, **request):
        if answers:
            raise answers.pop()
        if late:
            time.sleep(timeout)
        raise ServerGone("no answer")

    monkeypatch.setattr(ControlLink, "_call", call)
    with pytest.raises(Error) as caught:
        ControlLink(lambda wires: None)._grant("m", 4, deadline, 0.2)
    assert type(caught.value) is told


@pytest.mark.parametrize("seconds", [0.05, 20.0])
def test_a_wait_that_a_signal_ended_early_goes_on_until_the_deadline(seconds):
    """At a signal, a native call returns before its time-out; what is left of it is waited for by the lane."""
    waited = []

    def wait(ticket, deadline):
        waited.append(deadline)
        return Answer(ticket.sequence, int(Code.OK), "", 1, 0)

    def call(row, sequence, seconds):
        call.deadline = time.monotonic_ns() + int(seconds * 1e9)
        return NOT_ANSWERED

    nothing = SimpleNamespace(inputs={}, outputs={}, input_extents={})
    lane = SimpleNamespace(
        columns=nothing,
        codec=SimpleNamespace(spec=nothing),
        one_engine=True,
        choose_engine=lambda: 0,
        caller=lambda place, engine: (call, 1),
        in_flight={},
        numbers=itertools.count(1),
        wait=wait,
    )
    before = time.monotonic_ns()
    assert CallRow(lane, RowAllocator(0, 1).take(1), single=True).ask(None, seconds) == {}
    assert waited == [call.deadline] and waited[0] >= before + int(seconds * 1e9)


def test_tickets_of_a_lane_are_spread_over_engines_that_are_equally_busy():
    engines = np.zeros(3, ENGINE)
    engines["incarnation"], engines["state"], engines["expected_wait"] = (11, 22, 33), SERVING, (100, 140, 900)
    arena = SimpleNamespace(columns=Columns.here(SPEC, 8), close=lambda: None)
    scoreboard = SimpleNamespace(engines=engines, server_lives=lambda: True)
    transport = Transport()
    lane = Lane("m", scoreboard, arena, transport, 1, 0, 8, lambda: None)
    deadline = time.monotonic_ns() + 10**11
    first, second, *_ = [lane.submit(at, 1, deadline) for at in range(4)]
    assert first.engine == 0, "the lane's own engine, as no other ticket is in flight"
    assert sorted(ticket.engine for ticket in lane.in_flight.values()) == [0, 0, 1, 1]
    assert lane.submit(4, 1, deadline).engine == 0
    assert lane.choose_engine() == 1, "the other one has one ticket less now"
    assert lane.submit(5, 1, deadline).engine == 1
    transport.there = [Answer(second.sequence, Code.OK, "", 5, 22)]
    lane.receive_now()
    assert lane.choose_engine() == 1
    engines["expected_wait"][2] = 120
    assert lane.choose_engine() == 2
    lane.close()


def test_a_ticket_that_a_nested_call_settles_while_it_is_looked_for_is_not_sent_again():
    """An engine would compute it once more, and write to rows that may be others' by then."""
    engines = np.zeros(2, ENGINE)
    engines["incarnation"], engines["state"] = (11, 22), SERVING
    arena = SimpleNamespace(columns=Columns.here(SPEC, 8), close=lambda: None)
    transport = Transport()
    lane = Lane(
        "m", SimpleNamespace(engines=engines, server_lives=lambda: True), arena, transport, 1, 0, 8, lambda: None
    )
    deadline = time.monotonic_ns() + 10**11

    def settled(ticket):
        transport.there = [Answer(ticket.sequence, Code.OK, "", 5, ticket.incarnation)]
        lane.receive_now()

    ticket = lane.submit(0, 2, deadline)
    transport.holds = lambda of: settled(of) or False
    lane._look_after((ticket,))
    assert len(transport.sent) == 1 and ticket.answer.version == 5

    ticket = lane.submit(0, 2, deadline)
    engines["incarnation"][0] = 33  # its engine is gone, but its answer was there
    lane.choose_engine = lambda: settled(ticket) or 1
    lane._look_after((ticket,))
    assert len(transport.sent) == 2 and ticket.answer.version == 5
    lane.close()


def test_a_ticket_that_a_call_is_sending_is_left_to_it():
    engines = serving_engine()
    arena = SimpleNamespace(columns=Columns.here(SPEC, 8), close=lambda: None)
    transport = Transport()
    lane = Lane(
        "m", SimpleNamespace(engines=engines, server_lives=lambda: True), arena, transport, 1, 0, 8, lambda: None
    )
    sent = transport.send
    transport.holds = lambda of: (of.engine, of.incarnation) in transport.sent

    def send(ticket):
        lane._look_after((ticket,))  # as a nested call does: the transport does not have it yet
        sent(ticket)

    transport.send = send
    ticket = lane.submit(0, 2, time.monotonic_ns() + 10**11)
    assert len(transport.sent) == 1 and ticket.sequence in lane.in_flight
    lane.close()


def test_a_larger_lane_keeps_the_engine_of_the_one_that_it_replaces_if_that_computes_its_model():
    engines = np.zeros(3, ENGINE)
    engines["state"] = SERVING
    before = lane_of(engines, Transport(), home=2)
    for able, chosen in (((0, 1, 2), 2), ((1,), 1)):
        lane = lane_of(engines, Transport(), engines=able)
        lane.replace(before)
        assert lane.choose_engine() == chosen
        lane.close()
    before.close()


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("sent", [False, True])
def test_a_time_out_tells_where_the_ticket_is(far, sent):
    """Asking again helps only if it was sent."""
    engines = np.zeros(1, ENGINE)
    engines["state"] = SERVING if sent else 0
    lane = lane_of(engines, Transport(), far=far)
    with pytest.raises(Timeout) as late:
        lane.wait(lane.submit(0, 2, 0), 0)
    told = "its server is busy, or the network" if far else "is at engine 0"
    assert (told if sent else "was not sent: no engine serves") in str(late.value)
    lane.close()


def test_the_wait_of_an_engine_that_another_process_has_overwritten_does_not_keep_a_lane_from_engines():
    engines = np.zeros(3, ENGINE)
    engines["state"], engines["expected_wait"] = SERVING, (-100, 0, 900)
    lane = lane_of(engines, Transport(), home=1)
    assert lane.choose_engine() == 1
    engines["expected_wait"] = (-100, -50, -10)
    assert lane.choose_engine() == 1
    lane.close()


def test_other_code_begins_with_the_lanes_own_engine_and_goes_on_with_the_next():
    engines = np.zeros(4, ENGINE)
    engines["incarnation"], engines["state"] = (11, 22, 33, 44), SERVING
    lane = lane_of(engines, Transport(), home=2)
    assert lane.able() == ((2, 33), (3, 44), (0, 11), (1, 22))
    engines["state"][2] = 0
    assert lane.able() == ((3, 44), (0, 11), (1, 22))
    lane.close()


def test_a_number_that_other_code_has_used_is_never_used_again():
    engines = np.zeros(1, ENGINE)
    engines["state"] = SERVING
    lane = lane_of(engines, Transport())
    own = lane.submit(0, 1, time.monotonic_ns() + 10**11).sequence
    given = lane.advance()
    assert own < given < lane.advance(given + 5)
    assert lane.advance(given + 100) > given + 100
    assert lane.submit(1, 1, time.monotonic_ns() + 10**11).sequence > given + 101
    lane.close()


@pytest.mark.parametrize("state", [None, {"total": TensorSpec("float32", (2,))}])
def test_a_lane_leaves_an_engine_that_does_not_have_its_model(state):
    """It is idle, so it seems to have the shortest wait. With sessions, too: they begin on another engine."""
    spec = SPEC if state is None else ModelSpec("m", SPEC.inputs, SPEC.outputs, state=state)
    engines = np.zeros(2, ENGINE)
    engines["incarnation"], engines["state"], engines["expected_wait"] = (11, 22), SERVING, (0, 900)
    transport = Transport()
    lane = lane_of(engines, transport, spec)
    ticket = lane.submit(0, 2, time.monotonic_ns() + 10**11)
    transport.there = [Answer(ticket.sequence, Code.MODEL_NOT_FOUND, "", 0, 11)]
    lane.receive_now()
    assert transport.sent == [(0, 11), (1, 22)] and ticket.answer is None
    assert lane.choose_engine() == 1 and lane.able() == ((1, 22),)
    transport.there = [Answer(ticket.sequence, Code.MODEL_NOT_FOUND, "", 0, 22)]
    lane.receive_now()
    assert ticket.answer.code == Code.MODEL_NOT_FOUND, "no engine has it"
    lane.close()


def test_a_ticket_whose_answer_was_lost_has_its_whole_time_again():
    engines = serving_engine()
    transport = Transport()
    lane = lane_of(engines, transport)
    ticket = lane.submit(0, 2, time.monotonic_ns() + 10**9)
    ticket.submitted -= 10**10
    ticket.deadline -= 10**10
    given = ticket.deadline - ticket.submitted
    transport.holds = lambda of: False
    before = time.monotonic_ns()
    lane._look_after((ticket,))
    assert len(transport.sent) == 2
    assert before + given <= ticket.deadline <= time.monotonic_ns() + given
    lane.close()


def test_a_ticket_for_which_there_was_no_room_is_sent_with_the_next_answer():
    engines = serving_engine()
    transport, room = Transport(), [True, False, True]
    send = transport.send

    def send_if_there_is_room(ticket):
        if not room.pop(0):
            raise NotSent("it is full")
        send(ticket)

    transport.send = send_if_there_is_room
    lane = lane_of(engines, transport)
    first, second = (lane.submit(at, 1, time.monotonic_ns() + 10**11) for at in range(2))
    assert second.engine == UNSENT and "it is full" in lane.why_late(second)
    transport.there = [Answer(first.sequence, Code.OK, "", 5, 11)]
    lane.receive_now()
    assert second.engine == 0 and len(transport.sent) == 2
    lane.close()


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("how", ["closed", "collected"])
def test_a_lane_lets_go_of_its_lock_once_and_last_and_returns_its_lease_unless_that_is_lost(lost, how):
    """Whoever gets the lock writes to the rows; a lease that is lost may be another's by now."""
    told, transport, engines = [], Transport(), np.zeros(1, ENGINE)
    transport.close = lambda: told.append("transport")
    arena = SimpleNamespace(columns=Columns.here(SPEC, 8), close=lambda: told.append("arena"))
    scoreboard = SimpleNamespace(engines=engines, server_lives=lambda: not lost)
    lane = Lane(
        "m", scoreboard, arena, transport, 1, 0, 8, lambda: told.append("lease"), leave=lambda: told.append("lock")
    )
    if lost:
        with pytest.raises(ServerGone, match="with 0 tickets of 'm' in flight"):
            lane.look_after()
    if how == "closed":
        for _ in range(2):
            lane.close()
    del lane
    gc.collect()
    assert told == ["lease"] * (how == "closed" and not lost) + ["transport", "arena", "lock"]


def test_nothing_is_sent_on_a_lane_that_was_closed_and_the_error_says_what_to_do():
    engines, transport = np.zeros(1, ENGINE), Transport()
    engines["state"] = SERVING
    lane = lane_of(engines, transport)
    lane.close()
    deadline = time.monotonic_ns() + 10**11
    for send in (lambda: lane.submit(0, 1, deadline), lambda: lane.exchange(0, 1, deadline, 0, 1.0)):
        with pytest.raises(Refused, match="'m' was closed: get it again from the server"):
            send()
    assert not transport.sent and not lane.in_flight


class OneByOne(Transport):
    """As Transport, and does what it is told when it is to send: returns an answer's code, or raises."""

    def __init__(self, *does):
        super().__init__()
        self.does = list(does)

    def exchange(self, ticket, timeout):
        self.sent.append((ticket.engine, ticket.incarnation))
        if isinstance(does := self.does.pop(0), Exception):
            raise does
        return None if does is None else Answer(ticket.sequence, does, "why", 5, ticket.incarnation)


@pytest.mark.parametrize("because", [TooManyFiles("no more files"), NotSent("it is full")])
def test_a_ticket_that_could_not_be_sent_at_once_is_sent_by_the_next_check(because):
    engines = serving_engine()
    transport = OneByOne(because)
    lane = lane_of(engines, transport)
    claim = Claim()
    ticket = lane.exchange(2, 3, time.monotonic_ns() + 10**11, 4, 0.1, weakref.ref(claim))
    assert ticket.engine == UNSENT and str(because) in lane.why_late(ticket) and not ticket.sending
    assert lane.asked(4, 1) and not lane.asked(5, 3) and not lane.asked(0, 2), "its rows are in use"
    lane.look_after()
    assert ticket.engine == 0 and transport.sent == [(0, 11)] * 2
    assert (ticket.first, ticket.rows, ticket.version) == (2, 3, 4)
    lane.close()


def test_an_answer_that_comes_at_once_leaves_nothing_in_flight_whatever_it_says():
    lane = lane_of(serving_engine(), OneByOne(Code.OK, Code.MODEL_FAILED))
    for code in (Code.OK, Code.MODEL_FAILED):
        answer = lane.ask(0, 1, 1.0)
        assert (answer.code, answer.version) == (code, 5) and not lane.in_flight
    lane.close()


def test_a_wait_ends_where_a_call_that_it_is_nested_in_reads_the_answer():
    """That call goes on only after this one, which would wait for ever."""
    lane = lane_of(serving_engine(), transport := Transport())
    ticket = lane.submit(0, 1, deadline := time.monotonic_ns() + 10**12)
    transport.is_reading = lambda of: of is ticket
    with pytest.raises(Busy, match="is reading the answer to this ticket: .* after that call"):
        lane.wait(ticket, deadline)
    assert not lane.may_free_rows() and not lane.wait_for_rows(deadline)
    transport.is_reading = lambda of: False
    assert lane.may_free_rows() and lane.wait_for_rows(deadline) and not lane.wait_for_rows(0)
    transport.there = [Answer(ticket.sequence, Code.OK, "", 5, 11)]
    assert lane.wait_for_rows(deadline) and ticket.answer is not None and lane.free == 8
    assert lane.wait(ticket, deadline).version == 5
    assert not lane.may_free_rows() and not lane.wait_for_rows(deadline), "nothing is in flight"
    lane.close()


def test_an_answer_without_a_number_is_an_error_once_the_others_are_settled():
    """It says that the server could not read a message; kept, it would be the answer to every later call."""
    lane = lane_of(serving_engine(), transport := Transport())
    ticket = lane.submit(0, 1, time.monotonic_ns() + 10**11)
    transport.there = [
        Answer(0, Code.PROTOCOL_MISMATCH, "speak my version", 0, 0),
        Answer(ticket.sequence, Code.OK, "", 5, 11),
    ]
    with pytest.raises(ProtocolMismatch, match="speak my version"):
        lane.receive_now()
    assert ticket.answer.version == 5 and not lane.in_flight and not transport.there
    lane.receive_now()
    lane.close()


def test_a_stale_lease_ends_the_lane_with_the_servers_reason():
    lane = lane_of(serving_engine(), transport := Transport())
    ticket = lane.submit(0, 1, time.monotonic_ns() + 10**11)
    transport.there = [Answer(ticket.sequence, Code.STALE_LEASE, "it was revoked", 0, 11)]
    lane.receive_now()
    with pytest.raises(StaleLease, match="it was revoked"):
        lane.submit(0, 1, time.monotonic_ns() + 10**11)
    lane.close()


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_a_lost_ticket_is_sent_again_only_if_somebody_wants_it_or_the_server_may_still_have_it(far, wanted):
    """Rows of a ticket that nobody wants are free, unless a relay beyond a broken connection may still compute it."""
    lane = lane_of(engines := serving_engine(), transport := Transport(), far=far)
    claim = Claim()
    ticket = lane.submit(0, 3, time.monotonic_ns() + 10**11, owner=weakref.ref(claim))
    if not wanted:
        del claim
    engines["incarnation"] = 22
    lane.look_after()
    sent_again = wanted or far
    assert transport.sent == [(0, 11), (0, 22)][: 1 + sent_again]
    assert (ticket.sequence in lane.in_flight) == sent_again and lane.free == (5 if sent_again else 8)
    engines["state"] = 0
    never_sent = lane.submit(5, 3, time.monotonic_ns() + 10**11)
    lane.look_after()
    assert never_sent.sequence not in lane.in_flight
    lane.close()


def test_a_ticket_that_was_answered_when_ctrl_c_came_is_not_in_flight_for_ever():
    lane = lane_of(serving_engine(), transport := Transport())
    ticket = lane.submit(0, 1, time.monotonic_ns() + 10**11)
    ticket.answer = Answer(ticket.sequence, Code.OK, "", 5, 11)
    lane.look_after()
    assert not lane.in_flight and lane.free == 8 and len(transport.sent) == 1
    lane.close()


def test_where_no_native_caller_can_be_opened_for_lack_of_files_there_is_none():
    engines = np.zeros(2, ENGINE)
    engines["incarnation"], engines["state"] = (11, 22), SERVING
    lane = lane_of(engines, transport := Transport())
    places = []
    transport.caller = lambda place: places.append(place) or "caller"
    assert lane.caller(RowPlace(0, 1, None, None, None, None), 1) == ("caller", 22)
    assert (places[0].number, places[0].incarnation, places[0].engine["incarnation"].tolist()) == (1, 22, [22])

    def caller(place):
        raise TooManyFiles("no more files")

    transport.caller = caller
    row = CallRow(lane, lane.take(1), single=True)
    transport.exchange = lambda ticket, timeout: Answer(ticket.sequence, Code.OK, "", 5, ticket.incarnation)
    row.lane.columns.outputs["y"][0] = 7
    assert row.ask(np.ones(2, np.float32), 1.0).tolist() == [7, 7], "the lane itself asks"
    lane.close()


def test_whoever_waits_for_rows_is_told_of_those_that_are_given_back_and_of_those_that_are_answered():
    lane = lane_of(serving_engine(), transport := Transport())
    held = lane.take(2)

    async def wait():
        given, answered = lane.row_waiter(), lane.row_waiter()
        assert lane.rows_awaited
        lane.give(held)
        assert given.done() and answered.done() and not lane.rows_awaited
        ticket = lane.submit(0, 1, time.monotonic_ns() + 10**11)
        answered = lane.row_waiter()
        transport.there = [Answer(ticket.sequence, Code.OK, "", 5, 11)]
        lane.receive_now()
        assert answered.done() and not lane.rows_awaited

    asyncio.run(wait())
    lane.close()


@pytest.mark.parametrize(("failed", "more"), [(3, ""), (4, "; and 1 more"), (8, "; and 5 more")])
def test_an_error_of_rows_tells_of_the_first_three_and_how_many_others_failed(failed, more):
    engines = np.zeros(1, ENGINE)
    lane = lane_of(engines, Transport())
    lane.columns.reasons[:] = 0
    for row in range(failed):
        lane.columns.fail(row, f"wrong {row}")
    lane.columns.outputs["y"][:] = 3
    error = lane.failure(Answer(1, Code.ROW_FAILED, "", 6, 11), 0, 8)
    assert str(error) == f"{failed} of 8 rows of 'm' failed: row 0: wrong 0; row 1: wrong 1; row 2: wrong 2{more}"
    assert error.errors == {row: f"wrong {row}" for row in range(failed)} and error.version == 6
    assert error.outputs.tolist() == [[3.0, 3.0]] * 8
    lost = lane.failure(Answer(1, Code.SESSION_LOST, "lost", 6, 11), 0, 8)
    assert type(lost) is SessionLost and lost.sessions == list(range(failed)) and str(lost) == "lost"
    assert type(lane.failure(Answer(1, Code.BUSY, "full", 6, 11), 0, 8)) is Busy
    lane.close()


def test_a_ticket_that_other_code_has_sent_is_answered_and_looked_after_like_the_lanes_own():
    engines = np.zeros(2, ENGINE)
    engines["incarnation"], engines["state"] = (11, 22), SERVING
    lane = lane_of(engines, transport := Transport())
    ticket = InFlight(lane.advance(), 3, 2, time.monotonic_ns() + 10**11, 0)
    lane.adopt(ticket, 1, 22, 77)
    assert lane.free == 6 and (ticket.engine, ticket.incarnation, ticket.submitted) == (1, 22, 77)
    transport.there = [Answer(ticket.sequence, Code.OK, "", 5, 22)]
    lane.receive_now()
    assert ticket.answer.version == 5 and lane.free == 8
    lane.close()
