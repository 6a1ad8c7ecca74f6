"""Tickets over a scripted engine: their results, in threads and loops, and for servers that forward requests."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from tests.unit.client.scripted import SIZES, SPEC, Engine, another_threads_call, lane_of, serving_engine

from jurybox.client.in_flight import LOOK_AFTER, ModelLock
from jurybox.client.ticket import Reply, Ticket, send_parts, send_rows
from jurybox.protocol.errors import Code, ModelFailed, Refused, RowFailed, ServerGone, SpecMismatch, Timeout

ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


class Later(Engine):
    """An engine whose answers come when they are let out; a loop that watches is told then."""

    def __init__(self, *codes, versions=()):
        super().__init__(*codes, versions=versions)
        self.held, self.watched = [], []

    def send(self, ticket):
        self.held.append(self._answer(ticket))

    def exchange(self, ticket, timeout):
        self.seconds.append(timeout)
        self.send(ticket)

    def receive(self, timeout):
        if not self.there:
            time.sleep(min(timeout, 0.005))
        return list(self.there)

    def let_out(self):
        self.there += self.held
        self.held.clear()
        for loop, arrived in self.watched:
            loop.call_soon_threadsafe(arrived)

    def watch(self, loop, arrived):
        self.watched.append((loop, arrived))


def far():
    return time.monotonic_ns() + 60 * 10**9


def laned(engine, spec=SPEC):
    lane = lane_of(serving_engine(), engine, spec)
    engine.columns = lane.columns
    return lane


def sent(engine, n=3, spec=SPEC, timeout=60.0, given=None):
    """A ticket for the first n of three rows."""
    lane = laned(engine, spec)
    ticket = Ticket(ModelLock("m", timeout), lane, lane.take(n))
    given = {"x": ROWS} if given is None else given
    return lane, send_rows(ticket, given, 0, far(), 4)


def test_a_ticket_has_its_result_once_and_gives_its_rows_back():
    engine = Later()
    lane, ticket = sent(engine)
    assert engine.sent == [(0, 3, 4)] and (ticket.first, ticket.rows) == (0, 3)
    assert repr(ticket) == "<Ticket of 'm', 3 rows, in flight>" and not ticket.done() and not ticket.cancelled()
    with pytest.raises(Timeout):
        ticket.result(0.01)
    assert lane.free == 5
    engine.let_out()
    assert ticket.done() and lane.free == 5 and repr(ticket) == "<Ticket of 'm', 3 rows, answered>"
    reply = ticket.result()
    assert (reply.outputs == ROWS * 10).all() and reply.version == 7 and lane.free == 8
    lane.columns.outputs["y"][:] = 0
    assert ticket.done() and ticket.result(0) is reply
    assert (reply.array == ROWS * 10).all() and reply.named == {"y": reply.array}
    assert not ticket.cancel() and ticket.done()


def test_whether_a_ticket_is_done_waits_for_no_other_threads_call():
    engine = Later()
    lane, ticket = sent(engine)
    engine.let_out()
    with another_threads_call(ticket._turns):
        assert ticket.done() is False
    assert ticket.done() is True


def test_a_reply_of_several_outputs_names_them():
    reply = Reply({"y": 1, "v": 2}, 3)
    assert reply.named == {"y": 1, "v": 2}
    with pytest.raises(SpecMismatch, match=r"outputs y, v: expected a single one; .*, reply.named\['y'\]"):
        _ = reply.array
    assert Reply([1], 3, "y").named == {"y": [1]}


@pytest.mark.parametrize("answered", [True, False])
def test_a_cancelled_ticket_frees_its_rows_once_no_engine_can_write_to_them(answered):
    engine = Later()
    lane, ticket = sent(engine)
    if answered:
        engine.let_out()
        assert ticket.done() and ticket.cancel() is False
        assert ticket.result().version == 7
        return
    request = ticket._sent
    assert ticket.cancel() and ticket.cancelled() and ticket.done() and request.owner is None
    assert repr(ticket) == "<Ticket of 'm', 3 rows, cancelled>" and lane.free == 5
    with pytest.raises(CancelledError, match="this ticket was cancelled"):
        ticket.result()
    engine.let_out()
    lane.receive_now()
    assert lane.free == 8


def test_a_failed_ticket_raises_its_error_again_and_its_rows_are_free():
    engine = Later(Code.ROW_FAILED)
    lane, ticket = sent(engine)
    lane.columns.refuse(0, 3, {2: "bad"})
    engine.let_out()
    with pytest.raises(RowFailed, match="row 2: bad") as first:
        ticket.result()
    lane.columns.refuse(0, 3, {1: "of another request"})
    assert lane.free == 8 and ticket.done() and repr(ticket) == "<Ticket of 'm', 3 rows, failed>"
    for _ in range(2):
        with pytest.raises(RowFailed, match="row 2: bad") as again:
            ticket.result()
        assert again.value is first.value


def test_a_dropped_ticket_frees_its_rows_and_nobody_wants_its_answer():
    engine = Later()
    lane, ticket = sent(engine)
    request = ticket._sent
    assert request.wanted
    del ticket
    gc.collect()
    assert not request.wanted and lane.free == 5
    engine.let_out()
    lane.receive_now()
    assert lane.free == 8


def test_rows_that_could_not_be_written_are_free():
    lane = laned(Later())
    ticket = Ticket(ModelLock("m", 1.0), lane, lane.take(3))
    with pytest.raises(KeyError) as error:  # the traceback keeps the ticket
        send_rows(ticket, {"z": ROWS}, 0, far(), 0)
    assert error.value.args == ("z",) and lane.free == 8
    unsent = Ticket(ModelLock("m", 1.0), lane, lane.take(3))
    with pytest.raises(Refused, match="this ticket was never sent: sending it was interrupted"):
        unsent.result()


def test_a_ticket_of_a_lane_that_is_gone_says_so_unless_it_was_answered():
    engine = Later()
    lane, ticket = sent(engine)
    lane.gone = ServerGone("the server died")
    assert ticket.done()
    with pytest.raises(ServerGone, match="the server died"):
        ticket.result()
    lane, ticket = sent(engine := Later())
    engine.let_out()
    lane.receive_now()
    lane.gone = ServerGone("the server died")
    assert ticket.result().version == 7
    lane, ticket = sent(engine := Later())
    engine.let_out()
    lane.receive_now()
    lane.close()
    with pytest.raises(Refused, match="was closed"):
        ticket.result()


# ---- in an event loop


async def test_an_awaited_ticket_waits_without_holding_the_lock_and_is_woken_by_its_answer():
    engine = Later()
    lane, ticket = sent(engine)
    waiting = [asyncio.ensure_future(ticket.result_async()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not ticket._turns.mine and len(engine.watched) == 1 and len(ticket._sent.waiters) == 2
    engine.let_out()
    first, second = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert first is second and (first.outputs == ROWS * 10).all()
    assert await ticket is first


async def test_an_awaited_ticket_that_is_late_keeps_its_rows_and_may_be_awaited_again():
    engine = Later()
    lane, ticket = sent(engine)
    other = ticket._sent.waiters = [(asyncio.get_running_loop(), Waiter())]
    with pytest.raises(Timeout, match="m' did not answer in time"):
        await ticket.result_async(LOOK_AFTER * 1.5)
    assert ticket._sent.waiters == other, "the others wait on"
    engine.there += engine.held  # as if the loop had missed that they came
    assert (await ticket.result_async(60)).version == 7 and lane.free == 8


async def test_an_awaited_ticket_ends_when_its_model_is_closed_or_its_engine_has_died():
    engine = Later()
    lane, ticket = sent(engine)
    waiting = asyncio.ensure_future(ticket.result_async(60))
    await asyncio.sleep(0.01)
    lane.close()
    with pytest.raises(Refused, match="was closed"):
        await waiting
    lane, ticket = sent(engine := Later())
    lane._scoreboard.server_lives = lambda: False
    with pytest.raises(ServerGone, match="the server died or was stopped with 1 tickets"):
        await ticket.result_async(60)


# ---- for servers that forward requests


class Waiter:
    """What a server sets when a request may be answered."""

    def __init__(self):
        self.set_by = None

    def done(self):
        return self.set_by is not None

    def set_result(self, value):
        self.set_by = threading.get_ident()


async def test_a_watched_ticket_sets_its_waiter_when_it_is_answered():
    engine, waiter, loop = Later(), Waiter(), asyncio.get_running_loop()
    lane, ticket = sent(engine)
    assert ticket.watched(loop, waiter, again=False) is False and len(engine.watched) == 1
    engine.let_out()
    await asyncio.sleep(0.01)
    assert waiter.set_by == threading.get_ident() and ticket.watched(loop, waiter, again=False)
    outputs, version = ticket.seen()
    assert np.shares_memory(outputs["y"], lane.columns.outputs["y"]) and (outputs["y"] == ROWS * 10).all()
    assert version == 7 and lane.free == 5
    ticket.give_up()
    assert lane.free == 8 and ticket.cancelled()


async def test_a_watched_ticket_is_looked_after_again_and_is_over_when_it_has_failed():
    engine, waiter, loop = Later(Code.MODEL_FAILED), Waiter(), asyncio.get_running_loop()
    lane, ticket = sent(engine)
    assert ticket.watched(loop, waiter, again=True) is False and not engine.watched, "that waits already"
    engine.there += engine.held
    assert ticket.watched(loop, waiter, again=True) is True
    with pytest.raises(ModelFailed, match="what it said"):
        ticket.seen()
    assert ticket.watched(loop, waiter, again=False) is True
    lane._scoreboard.server_lives = lambda: False
    lane, ticket = sent(Later())
    lane._scoreboard.server_lives = lambda: False
    with pytest.raises(ServerGone):
        ticket.watched(loop, waiter, again=True)


@pytest.mark.parametrize("brief", [0.0, 0.5])
@pytest.mark.parametrize("comes", [True, False])
def test_rows_of_several_callers_are_one_ticket_or_outputs_at_once(brief, comes):
    engine = Engine() if comes else Later()
    lane = laned(engine)
    parts = [({"x": ROWS[:1]}, 1), ({"x": ROWS[1:]}, 2)]
    lane.take(2)
    came = send_parts(turns := ModelLock("m", 60.0), lane, parts, run := lane.take(3), far(), 5, brief)
    assert engine.sent == [(run.first, 3, 5)] and engine.seconds == ([brief] if brief else [])
    assert (lane.columns.inputs["x"][run.first : run.first + 3] == ROWS).all()
    if brief and comes:
        outputs, version = came
        assert version == 7 and np.shares_memory(outputs["y"], lane.columns.outputs["y"])
        assert (outputs["y"] == ROWS * 10).all() and not lane.in_flight
        return
    assert came._turns is turns and (came._sent.deadline - time.monotonic_ns()) / 1e9 > 30 and came._sent.wanted
    if not comes:
        engine.let_out()
    assert (came.result().outputs == ROWS * 10).all()


@pytest.mark.parametrize("brief", [0.0, 0.5])
def test_an_error_of_rows_of_several_callers_is_the_tickets(brief):
    lane = laned(Engine(Code.MODEL_FAILED))
    ticket = send_parts(ModelLock("m", 60.0), lane, [({"x": ROWS}, 3)], lane.take(3), far(), 0, brief)
    with pytest.raises(ModelFailed, match="what it said"):
        ticket.result()
    assert lane.free == 8


@pytest.mark.parametrize(
    "given", [np.zeros((2, 3), np.float32), np.zeros((2, 2), np.float64), np.zeros((3, 2), np.float32)]
)
def test_rows_that_another_spec_was_made_for_are_not_sent(given):
    engine = Engine()
    lane = laned(engine)
    assert send_parts(ModelLock("m", 1.0), lane, [({"x": given}, 2)], lane.take(2), far(), 0, 0.1) is None
    assert not engine.sent
    lane = laned(engine, SIZES)
    open_rows = {"x": [given[:2]], "t": ["a"], "z": np.zeros(1, np.float32)}
    if given.dtype == np.float32 and given.shape[1] == 2:
        assert send_parts(ModelLock("m", 1.0), lane, [(open_rows, 2)], lane.take(2), far(), 0, 0.1) is None
        outputs, _ = send_parts(ModelLock("m", 1.0), lane, [(open_rows, 1)] * 2, lane.take(2), far(), 0, 0.1)
        assert lane.columns.input_extents["x"][:2].tolist() == [[2], [2]] and outputs["y"].shape[0] == 2


def test_outputs_of_a_part_go_to_their_place_among_all():
    engine = Engine(versions=[3])
    lane, ticket = sent(engine)
    lane.receive_now()
    outputs = lane.codec.room(5)
    outputs["y"][:] = -1
    assert ticket.take_into(outputs, 1) == 3 and lane.free == 8 and ticket.cancelled()
    assert outputs["y"].tolist() == [[-1, -1], *(ROWS * 10).tolist(), [-1, -1]]
