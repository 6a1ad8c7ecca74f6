"""Requests in flight, whom they wake, and the lock that serializes the threads and event loops of a model."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from tests.serving import wait_until
from tests.unit.client.scripted import another_threads_call

from jurybox.client.in_flight import UNSENT, Claim, InFlight, ModelLock, wake
from jurybox.protocol.errors import Busy, Refused, Timeout
from jurybox.protocol.locks import LONGEST, mark_serving


@pytest.fixture
def other_loop():
    """An event loop that runs in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def test_a_calls_deadline_is_its_time_out_or_the_models_from_now():
    lock, now = ModelLock("m", 2.0), time.monotonic_ns()
    assert (lock.seconds(None), lock.seconds(-3.0), lock.seconds(4.0)) == (2.0, 0.0, 4.0)
    for given, least in ((None, 2), (5.0, 5), (-1.0, 0), (math.inf, int(LONGEST))):
        assert now + least * 10**9 <= lock.deadline(given) <= time.monotonic_ns() + least * 10**9


def test_a_ticket_is_wanted_and_being_sent_as_long_as_those_who_do_so_live():
    ticket = InFlight(5, 2, 3, 77, 4)
    assert (ticket.sequence, ticket.first, ticket.rows, ticket.deadline, ticket.version) == (5, 2, 3, 77, 4)
    assert (ticket.engine, ticket.incarnation, ticket.deaths, ticket.submitted) == (UNSENT, 0, 0, 0)
    assert not ticket.wanted and not ticket.sending
    owner, sender = Claim(), Claim()
    ticket.owner, ticket.sender = weakref.ref(owner), weakref.ref(sender)
    assert ticket.wanted and ticket.sending
    with ticket.being_sent() as mine:
        assert mine is False, "another call is sending it"
    assert ticket.sending, "and goes on with it"
    with ticket.being_sent(mine=True) as mine:
        assert mine is True
    assert ticket.sending
    del owner, sender
    gc.collect()
    assert not ticket.wanted and not ticket.sending
    with ticket.being_sent() as mine:
        assert mine is True and ticket.sending
        with ticket.being_sent() as again:
            assert again is False
    assert not ticket.sending


async def test_waiters_are_woken_in_the_threads_of_their_loops_and_those_of_closed_loops_are_left(other_loop):
    here, threads = asyncio.get_running_loop(), []
    mine, done, away = here.create_future(), here.create_future(), other_loop.create_future()
    away.add_done_callback(lambda _: threads.append(threading.get_ident()))
    done.set_result(None)
    closed = asyncio.new_event_loop()
    orphan = closed.create_future()
    closed.close()
    wake([(here, done), (closed, orphan), (other_loop, away), (here, mine)])
    assert mine.done(), "at once in this loop"
    assert await asyncio.to_thread(wait_until, away.done, 60) is None
    assert threads and threads[0] != threading.get_ident() and not orphan.done()


class WatchedLane:
    """A lane that counts how often it is told to receive and to watch."""

    def __init__(self):
        self.watched_by, self.gone, self.received, self.arrived = None, None, 0, []

    def watch(self, loop, arrived):
        self.arrived.append(arrived)

    def receive_now(self):
        self.received += 1


async def test_a_lane_is_watched_once_by_each_loop_and_what_has_arrived_is_received_at_once():
    turns, lane, loop = ModelLock("m", 1.0), WatchedLane(), asyncio.get_running_loop()
    for received in (1, 2):
        turns.watch(lane, loop)
        assert len(lane.arrived) == 1 and lane.received == received and lane.watched_by is loop
    lane.arrived[0]()
    assert lane.received == 3
    lane.gone = Refused("it was closed")
    lane.arrived[0]()
    assert lane.received == 3, "there is nothing to receive on a lane that is gone"
    lane.gone, lane.watched_by = None, asyncio.new_event_loop()
    lane.watched_by.close()
    turns.watch(lane, loop)
    assert len(lane.arrived) == 2, "asyncio.run has returned, and another one has begun"


async def test_a_lane_that_cannot_be_watched_now_is_received_from_and_watched_by_a_later_call(monkeypatch):
    turns, lane, loop = ModelLock("m", 1.0), WatchedLane(), asyncio.get_running_loop()
    lane.watched_by = asyncio.new_event_loop()
    lane.watched_by.close()

    def watch(loop, arrived):
        raise Busy("no thread that waits for answers could be started")

    with monkeypatch.context() as patch:
        patch.setattr(lane, "watch", watch)
        turns.watch(lane, loop)
    assert lane.received == 1 and lane.watched_by is None, "the other loop, which is watched no more, must ask anew"
    turns.watch(lane, loop)
    assert lane.received == 2 and lane.watched_by is loop and len(lane.arrived) == 1


async def test_answers_that_arrive_in_another_threads_call_are_received_after_it():
    turns, lane, loop = ModelLock("m", 1.0), WatchedLane(), asyncio.get_running_loop()
    turns.watch(lane, loop)
    with another_threads_call(turns):
        lane.arrived[0]()
        await asyncio.sleep(0.02)
        assert lane.received == 1
    await asyncio.to_thread(wait_until, lambda: lane.received == 2, 60)


@pytest.mark.parametrize("collected", ["turns", "lane"])
async def test_what_a_loop_watches_is_kept_alive_by_nobody_else(collected):
    turns, lane = ModelLock("m", 1.0), WatchedLane()
    turns.watch(lane, asyncio.get_running_loop())
    (arrived,) = lane.arrived
    lane.arrived.clear()
    if collected == "turns":
        gone = weakref.ref(turns)
        del turns
    else:
        gone = weakref.ref(lane)
        del lane
    gc.collect()
    assert gone() is None
    arrived()
    assert collected == "lane" or lane.received == 1


def test_a_thread_that_serves_models_waits_for_no_other_threads_call():
    turns = ModelLock("m", 1.0)
    assert not turns.mine and turns.run(lambda: turns.mine, 0) is True and not turns.mine
    with another_threads_call(turns):
        with pytest.raises(Timeout, match="another thread's call of 'm' did not end in time"):
            turns.run(lambda: None, time.monotonic_ns())
        with ThreadPoolExecutor(1, initializer=mark_serving) as server:
            asked = server.submit(turns.run, lambda: None, turns.deadline(60.0))
            with pytest.raises(Refused, match="another thread's call of 'm' is under way, and may need this one"):
                asked.result(60)
        began = time.monotonic()
        with pytest.raises(Timeout, match="another thread's call of 'm' did not end in time"):
            asyncio.run(turns.alone(lambda: None, time.monotonic_ns() + 10**7))
        assert time.monotonic() - began >= 0.01
        turns.anew()
        assert turns.run(lambda: SimpleNamespace(made=True), 0).made, "in a forked child the lock is nobody's"


@pytest.mark.parametrize("how", ["thread", "loop"])
def test_a_call_goes_on_once_another_threads_has_ended_and_has_its_result(how):
    turns = ModelLock("m", 60.0)

    async def ask():
        asyncio.get_running_loop().call_soon(let_go.set)
        return await turns.alone(lambda: "mine", turns.deadline(None))

    with another_threads_call(turns) as let_go:
        if how == "loop":
            assert asyncio.run(ask()) == "mine"
        else:
            threading.Timer(0.01, let_go.set).start()
            assert turns.run(lambda: "mine", turns.deadline(None)) == "mine"
    assert asyncio.run(turns.alone(lambda: "at once", 0)) == "at once"
