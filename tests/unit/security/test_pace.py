"""Heavy work leaves most of the event loop's time to others, and loses nothing if there are none."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from jurybox.server.gateway.http_connection import ConnectionTransport, Paced
from jurybox.server.gateway.process import _loop
from jurybox.server.security import pace as module
from jurybox.server.security.pace import _ACTIVE as ACTIVE
from jurybox.server.security.pace import HEAP, HEAVY, Breaks, Debt, Turns, WorkPace, joined


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def active(monkeypatch):
    """Whoever was heard counts as active, also if a loaded machine runs nobody for a while."""
    monkeypatch.setattr(module, "_ACTIVE", 60.0)


class Somebody:
    """Who wants something."""


def test_who_works_alone_does_not_rest(clock):
    pace, one = WorkPace(), Somebody()
    for _ in range(3):
        pace.heard(one)
        clock[0] += 0.01
        assert pace.rest(one, 0.01) == 0


def test_who_works_beside_others_rests_as_long_as_it_worked(clock):
    pace, one, other = WorkPace(), Somebody(), Somebody()
    pace.heard(other)
    pace.heard(one)
    clock[0] += 0.03
    since = clock[0]
    assert pace.rest(one, 0.03) == pace.rest(other, 0.03) == pytest.approx(ACTIVE)  # either of them
    clock[0] += 1.001 * ACTIVE
    assert pace.rest(one, 0.03 - ACTIVE, since) == 0  # the other has wanted nothing since
    pace.heard(other)
    clock[0] += ACTIVE / 2
    assert pace.rest(one, 0.03 - ACTIVE, since) == pytest.approx(ACTIVE / 2)
    assert pace.rest(one, ACTIVE / 4, since) == ACTIVE / 4
    clock[0] += 1.0
    assert pace.rest(one, 0.03) == 0  # the other has gone


def test_who_has_the_memory_of_one_that_is_gone_is_somebody_else(clock):
    pace, earlier = WorkPace(), Somebody()
    pace.heard(earlier)
    where = id(earlier)
    del earlier
    later = Somebody()
    if id(later) != where:
        pytest.skip("the interpreter has put it elsewhere")
    pace.heard(later)
    clock[0] += 0.01
    assert pace.rest(later, 0.01) > 0, "the earlier one was active just now"


def test_a_rest_ends_soon_however_long_the_work_was(monkeypatch):
    async def work():
        times = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda seconds, *_: times.append(seconds))
        pace, one = WorkPace(), Somebody()
        breaks = Breaks(pace, lambda: None)
        pace.heard(one)
        breaks._rest(time.monotonic() - 61.0, time.monotonic() - 60.0)
        assert 1.0 < pace.debt.left <= 2.0
        return times

    assert asyncio.run(work()) == [pytest.approx(ACTIVE)]


def test_after_each_rest_the_work_goes_on_once(active):
    async def work():
        gone_on = asyncio.Event()
        pace, times = WorkPace(), []
        breaks = Breaks(pace, lambda: (times.append(time.monotonic()), gone_on.set()))
        pace.heard(Somebody())
        began = time.monotonic() - 0.02
        breaks.after(began, began)
        breaks.after(began, began)
        assert breaks.resting
        await asyncio.wait_for(gone_on.wait(), 20)
        assert not breaks.resting
        assert times[0] - began >= 0.04
        await asyncio.sleep(0.05)
        assert len(times) == 1

    asyncio.run(work())


class Heavy:
    """Somebody with so many turns to do, each of which takes 5 ms."""

    def __init__(self, turns, name, left, order):
        self.turns, self.name, self.left, self.order = turns, name, left, order
        turns.later(self, 0.0)

    def go_on(self):
        self.order.append((self.name, time.monotonic()))
        time.sleep(0.005)
        self.left -= 1
        if self.left:
            self.turns.later(self, 0.005)


class Reading(Heavy):
    """Somebody who only begins to read in its turn, and works when something was read."""

    def __init__(self, turns, name, left, order, seconds):
        self.seconds = seconds
        super().__init__(turns, name, left, order)

    def go_on(self):
        asyncio.get_running_loop().call_soon(self.read)

    def read(self):
        began = time.monotonic()
        time.sleep(self.seconds)
        took = time.monotonic() - began
        self.order.append((began, took))
        self.left -= 1
        if self.left:
            self.turns.later(self, took)


class Light:
    pass


async def turns_of(number, *, beside):
    """Return the order of twelve turns of so many, the time that each left before the next one, and what it should."""
    turns, order, light, rests = Turns(), [], Light(), []
    rest = turns._pace.rest
    turns._pace.rest = lambda *asked: rests.append(rest(*asked)) or rests[-1]
    heavy = [Heavy(turns, name, 12 // number, order) for name in range(number)]
    until = time.monotonic() + 60
    while len(order) < 12 and time.monotonic() < until:
        for one in [light] if beside else heavy:
            turns.heard(one)
        await asyncio.sleep(0)
    left = [after[1] - before[1] - 0.005 for before, after in itertools.pairwise(order)]
    return [name for name, _ in order], left, rests[1:]  # the first had nobody before it


@pytest.mark.parametrize("number", [1, 3])
def test_many_with_more_to_do_take_turns_and_leave_others_more_than_twice_the_time_that_they_take(number, active):
    order, left, _ = asyncio.run(turns_of(number, beside=True))
    assert order == [*range(number)] * (12 // number)
    assert sum(left) >= 11 * 0.0125 and min(left) >= 0.011, "also after one that has caught up"


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("seconds", [0.0003, 0.004])
def test_turns_of_any_length_of_any_number_leave_more_than_twice_the_time_that_they_take(number, seconds, active):
    """Also turns too short for a timer, and work that is done while another one rests."""
    turns_in_all = round(0.08 / seconds) // number * number

    async def work():
        turns, order, light = Turns(), [], Light()
        turns.heard(light)
        began = time.monotonic()
        for name in range(number):
            Reading(turns, name, turns_in_all // number, order, seconds)
        while len(order) < turns_in_all and time.monotonic() - began < 60:
            turns.heard(light)
            await asyncio.sleep(0)
        return order

    with asyncio.Runner(loop_factory=_loop) as runner:
        order = runner.run(work())
    worked = sum(took for _, took in order[:-number])
    assert order[-1][0] - order[0][0] > 3.3 * worked


def test_short_pieces_of_heavy_work_add_up_to_a_rest(active):
    async def work():
        pace, gone_on, worked, left = WorkPace(), asyncio.Event(), 0.0, 0.0
        breaks = Breaks(pace, gone_on.set)
        for _ in range(100):
            pace.heard(gone_on)
            gone_on.clear()
            began = time.monotonic()
            time.sleep(0.0002)  # noqa: ASYNC251  it is work
            breaks.after(began, began)
            worked += (over := time.monotonic()) - began
            await asyncio.wait_for(gone_on.wait(), 20)
            left += time.monotonic() - over
        return left / worked

    with asyncio.Runner(loop_factory=_loop) as runner:
        assert runner.run(work()) > 1.5


def test_who_has_more_to_do_does_not_rest_for_others_of_that_kind(active):
    order, _, rests = asyncio.run(turns_of(3, beside=False))
    assert order == [0, 1, 2] * 4
    assert rests and set(rests) == {0.0}


def test_lanes_with_heavy_tickets_do_not_rest_for_each_other(clock):
    pace, light = WorkPace(), Light()
    one, other = Breaks(pace, list), Breaks(pace, list)
    for heavy in (one, other):
        pace.heavy(heavy)
        heavy.heard()
    assert pace.rest(one, 0.01) == pace.rest(other, 0.01) == 0
    pace.heard(light)
    assert pace.rest(one, 0.01) == pace.rest(other, 0.01) == 0.01


def test_who_was_heard_before_others_work_has_not_gone(clock):
    debt = Debt()
    for turns, shares in ((Turns(debt), True), (Turns(), False)):
        turns.heard(light := Light())
        clock[0] += 2 * ACTIVE  # in which nobody can be heard
        debt.worked(2 * ACTIVE)
        assert (turns.rest(Light(), 0.0001) > 0) == shares
        del light


def test_who_no_longer_has_much_to_do_counts_again(clock):
    turns, one, other = Turns(), Light(), Light()
    turns.rest(one, 0.01)
    turns.heard(one)
    assert turns.rest(other, 0.01) == 0
    clock[0] += 1.0
    turns.heard(one)
    assert turns.rest(other, 0.01) > 0


def test_work_for_several_at_once_counts_once(clock):
    turns = Turns()
    clock[0] = 101.0
    assert turns.spent(100.5, 0) == 0.5
    assert turns.spent(100.2, 0) == pytest.approx(0.3)
    assert turns.spent(100.6, 0) == 0.0
    clock[0] = 103.0
    assert turns.spent(102.0, 10**9) == pytest.approx(1.3)
    clock[0] = 104.0
    assert turns.spent(100.0, 0) == pytest.approx(2.2)
    assert turns.spent(100.0, 0) == 0.0


class Beneath:
    reads, ended = True, False

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        assert not self.ended
        self.reads = True

    def is_closing(self):
        return self.ended


class Reader:
    """A protocol that holds up the event loop for 10 ms with what it reads."""

    def data_received(self, data):
        time.sleep(0.01)


def upload(size, *, others, pauses=False, ends=False, ahead=False):
    """A read of so many bytes.

    Returns:
        How long the connection was to rest then, s; 0.0 if it did not. How long it did. Whether it reads afterwards.
    """

    async def work():
        turns, light, gone_on, rests = Turns(), Light(), asyncio.Event(), [0.0]
        rest = turns.rest
        turns.rest = lambda *asked: rests.append(rest(*asked)) or rests[-1]

        class Connection(Paced, Reader):
            sends_ahead = ahead

            def go_on(self):
                super().go_on()
                gone_on.set()

        connection = Connection()
        connection.turns = turns
        beneath = Beneath()
        connection.transport = ConnectionTransport(beneath, lambda: None)
        if others:
            turns.heard(light)
        connection.data_received(bytes(size))
        began = time.monotonic()
        if pauses:
            connection.transport.pause_reading()
        beneath.ended = ends
        if not beneath.reads:
            await asyncio.wait_for(gone_on.wait(), 60)
        took, reads = time.monotonic() - began, beneath.reads
        if pauses:
            connection.transport.resume_reading()
            assert beneath.reads
        return rests[-1], took, reads

    return asyncio.run(work())


def test_a_large_upload_rests_after_each_read_while_others_want_something(active):
    rest, took, reads = upload(HEAP, others=True)
    assert took >= rest >= 0.01 and reads
    for rest, _, reads in (upload(HEAP, others=False), upload(HEAP - 1, others=True)):
        assert rest == 0 and reads


def test_a_connection_that_sends_ahead_rests_after_each_read_however_small(active):
    for others in (True, False):
        rest, took, reads = upload(1, others=others, ahead=True)
        assert (took >= rest >= 0.01 if others else rest == 0) and reads


def test_the_end_of_a_rest_reads_only_if_the_protocol_wants_it_and_the_connection_is_open(active):
    for how in ({"pauses": True}, {"ends": True}):
        rest, took, reads = upload(HEAP, others=True, **how)
        assert took >= rest >= 0.01 and not reads


def test_calls_that_hold_the_gil_come_one_at_a_time_and_leave_others_time(active):
    """However many ask for them at once; they also do so if one fails."""

    def works(fails):
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        if fails:
            raise ValueError("it failed")
        return time.monotonic() - 0.02, time.monotonic()

    async def ask(turns, fails):
        try:
            return await turns.alone(works, fails)
        except ValueError:
            return None

    async def work(*, beside):
        turns = Turns()
        if beside:
            turns.heard(light)
        began = time.monotonic()
        times = await asyncio.gather(*(ask(turns, number == 1) for number in range(4)))
        return [one for one in times if one], time.monotonic() - began

    light = Light()
    times, took = asyncio.run(work(beside=True))
    assert len(times) == 3 and took > 4 * 2.6 * 0.02
    assert all(after[0] - before[1] > 0.02 for before, after in itertools.pairwise(times))
    times, _ = asyncio.run(work(beside=False))
    assert len(times) == 3


def test_the_pieces_of_a_large_body_are_joined_in_a_thread(monkeypatch):
    async def work(pieces):
        began, threads = [], asyncio.to_thread
        monkeypatch.setattr(asyncio, "to_thread", lambda *call: (began.append(1), threads(*call))[1])
        assert await joined(pieces) == b"".join(pieces)
        return len(began)

    assert asyncio.run(work([b"x"])) == asyncio.run(work([b"x", b"y"])) == asyncio.run(work([])) == 0
    assert asyncio.run(work([bytes(HEAVY), b"x"])) == 1
