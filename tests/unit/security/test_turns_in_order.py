"""Turns and rests of heavy work by a clock of the test's own: who comes when, and how long each waits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests.clocks import Clock, given

from jurybox.server.security import pace as module
from jurybox.server.security.pace import _ACTIVE as ACTIVE
from jurybox.server.security.pace import HEAVY, Breaks, Debt, Turns, WorkPace


class Who:
    """Somebody who wants something."""


class Loop:
    """An event loop whose calls a test makes, and whose time is that of the clock."""

    def __init__(self, clock):
        self.clock, self.soon, self.timers = clock, [], []

    def call_soon(self, call, *arguments):
        self.soon.append(lambda: call(*arguments))

    def call_later(self, seconds, call, *arguments):
        self.timers.append((self.clock.now + seconds, lambda: call(*arguments)))

    def turns(self):
        """Make all calls that are due, and those that they add."""
        for _ in range(200):
            if self.soon:
                self.soon.pop(0)()

    def next_timer(self):
        """Let the time pass until the next timer, make its call and the others; return the seconds that passed."""
        self.timers.sort(key=lambda timer: timer[0])
        at, call = self.timers.pop(0)
        passed, self.clock.now = at - self.clock.now, at
        call()
        self.turns()
        return passed

    def timers_to_the_end(self):
        for _ in range(200):
            if not self.timers:
                return
            self.next_timer()
        raise AssertionError("it never ends")


@pytest.fixture
def clock(monkeypatch):
    return given(Clock(), monkeypatch, module)


@pytest.fixture
def loop(clock, monkeypatch):
    made = Loop(clock)
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(get_running_loop=lambda: made, Lock=asyncio.Lock))
    return made


class Heavy(Who):
    """Somebody with so many turns to do, each of which takes a while."""

    def __init__(self, turns, clock, left=1, seconds=0.01):
        self.turns, self.clock, self.left, self.seconds, self.began = turns, clock, left, seconds, []

    def go_on(self):
        self.began.append(self.clock.now)
        self.clock.now += self.seconds
        self.left -= 1
        if self.left:
            self.turns.later(self, self.seconds)


def test_a_rest_ends_when_others_have_wanted_nothing_since_it_began(loop, clock):
    pace, one, other, done = WorkPace(), Who(), Who(), []
    pace.heard(other)
    pace.debt.worked(0.1)
    pace.pay(one, lambda: done.append(clock.now))
    assert not done and loop.next_timer() == pytest.approx(ACTIVE)
    assert len(done) == 1 and not loop.timers and pace.debt.left == 0


def test_a_rest_goes_on_while_others_want_something_and_ends_when_all_is_paid(loop, clock):
    pace, one, other, done = WorkPace(), Who(), Who(), []
    pace.heard(other)
    pace.debt.worked(0.01)
    owed = pace.debt.left
    assert owed == pytest.approx(0.01 * module._LEFT)
    pace.pay(one, lambda: done.append(clock.now))
    passed = 0.0
    while not done:
        clock.now += 0.0001
        pace.heard(other)
        passed += 0.0001 + loop.next_timer()
        assert passed <= owed + module._LEAST
    assert passed == pytest.approx(owed, abs=module._LEAST)


def test_what_is_too_little_for_a_timer_is_owed_on(loop, clock):
    pace, one, other, done = WorkPace(), Who(), Who(), []
    pace.heard(other)
    pace.debt.worked(0.0002)
    pace.pay(one, lambda: done.append(clock.now))
    assert done == [100.0] and not loop.timers and pace.debt.left == pytest.approx(0.0002 * module._LEFT)


def test_a_debt_has_a_bound_and_what_work_took_elsewhere_is_owed_once(clock):
    debt = Debt()
    assert debt.left == 0 and debt.ended == float("-inf")
    debt.worked(0.01, 0.5)
    assert debt.left == pytest.approx(0.01 * module._LEFT + 0.5) and debt.ended == 100.0
    clock.now += 10.0
    assert debt.left == 0
    debt.worked(60.0)
    assert debt.left == module._MOST
    debt.forgive()
    assert debt.left == 0
    clock.now += 1.0
    debt.forgive()
    debt.worked(0.01)
    assert debt.left == pytest.approx(0.01 * module._LEFT), "nothing is saved up"


def test_work_during_a_rest_adds_to_what_is_owed(clock):
    debt = Debt()
    debt.worked(0.1)
    clock.now += 0.05
    debt.worked(0.05)
    assert debt.left == pytest.approx(0.1 * module._LEFT - 0.05 + 0.05 * (1 + module._LEFT))
    debt = Debt()
    debt.worked(0.01)
    clock.now += 0.01 * module._LEFT + 0.01 + 0.5 * module._LEAST  # a timer was late
    debt.worked(0.01)
    assert debt.left == pytest.approx(0.01 * module._LEFT - 0.5 * module._LEAST)


def test_a_call_has_its_turn_at_once_if_nobody_else_wants_anything(loop):
    turns, called = Turns(), []
    turns.after(who := Who(), 0.01, lambda: called.append("alone"))
    assert called == ["alone"] and not loop.soon and not loop.timers
    turns.heard(other := Who())
    turns.after(who, 0.01, lambda: called.append("beside another"))
    assert called == ["alone"] and loop.soon
    loop.turns()
    assert called == ["alone"] and len(loop.timers) == 1
    turns.heard(other)
    assert loop.next_timer() >= ACTIVE
    loop.timers_to_the_end()
    assert called == ["alone", "beside another"]


def test_who_has_more_to_do_comes_behind_all_others_of_that_kind(loop, clock):
    turns = Turns()
    first, second, third = (Heavy(turns, clock, left) for left in (2, 3, 1))
    for one in (first, second, third):
        turns.later(one, 0.01)
    loop.turns()
    loop.timers_to_the_end()
    began = sorted((at, name) for name, one in enumerate((first, second, third)) for at in one.began)
    assert [name for _, name in began] == [0, 1, 2, 0, 1, 1]
    assert not turns._behind and not turns._turning


def test_who_waits_for_a_turn_wants_nothing_of_others_however_long_it_waits(clock):
    pace, heavy, other = WorkPace(), Who(), Who()
    pace.heavy(heavy, waits=True)
    clock.now += 60.0
    pace.heard(heavy)
    assert pace.rest(other, 0.01) == 0
    pace.heavy(heavy)
    clock.now += module._HEAVY - 0.001
    pace.heard(heavy)
    assert pace.rest(other, 0.01) == 0
    clock.now += 0.001
    pace.heard(heavy)
    assert pace.rest(other, 0.01) == pytest.approx(0.01) and pace.rest(heavy, 0.01) == 0


def test_heavy_work_is_forgotten_with_who_did_it():
    pace, heavy = WorkPace(), Who()
    pace.heavy(heavy)
    assert len(pace._heavy) == 1
    del heavy
    assert not pace._heavy


def test_a_lanes_rest_begins_once_and_owes_what_its_engine_took(loop, clock):
    pace, gone_on = WorkPace(), []
    breaks = Breaks(pace, lambda: gone_on.append(clock.now))
    pace.heard(light := Who())
    clock.now += 0.03
    breaks.after(clock.now - 0.03, clock.now - 0.01)
    breaks.after(clock.now - 0.03, clock.now - 0.01)
    assert breaks.resting and len(loop.soon) == 1
    loop.turns()
    assert pace.debt.left == pytest.approx(0.01 * module._LEFT + 0.02)
    loop.timers_to_the_end()
    assert len(gone_on) == 1 and not breaks.resting
    breaks.after(clock.now, clock.now)
    loop.turns()
    assert len(gone_on) == 2 and not breaks.resting
    clock.now += 0.5
    breaks.heard()
    assert pace.rest(light, 0.01) == 0, "a lane with heavy tickets is no reason for others to rest"


@pytest.mark.parametrize(
    ("size", "few", "where"),
    [
        (10, HEAVY, "here"),
        (11, 10, "elsewhere"),
        (HEAVY - 1, 10, "elsewhere"),
        (HEAVY - 1, HEAVY, "here"),
        (HEAVY, 10, "alone"),
        (HEAVY, 2 * HEAVY, "alone"),
    ],
)
async def test_a_body_is_decoded_where_its_size_belongs(size, few, where, monkeypatch):
    turns, used = Turns(), []

    async def elsewhere(decode, body):
        used.append("elsewhere")
        return decode(body)

    async def alone(decode, body):
        used.append("alone")
        return decode(body)

    monkeypatch.setattr(turns, "alone", alone)
    assert await turns.decoded(len, bytes(size), few, elsewhere) == size
    assert (used or ["here"]) == [where]


async def test_whoever_waits_for_a_turn_lets_the_loop_have_one_and_may_give_up():
    turns, seen = Turns(), []
    asyncio.get_running_loop().call_soon(seen.append, "the loop's")
    await turns.wait(Who(), 0.0)
    assert seen == ["the loop's"]
    one, light = Who(), Who()
    turns.heard(light)
    waiting = asyncio.ensure_future(turns.wait(one, 0.001))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    failed, over = [], asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failed.append(context))
    turns.heard(light)
    turns.after(one, 0.001, over.set)
    await asyncio.wait_for(over.wait(), 20)
    assert not failed
