"""What large senders and small clients get of an event loop, by a clock of its own: no machine is too busy for it.

The loop is asyncio's over a selector that has nothing to wait for: a wait moves the clock, and so does work. Its timers
have whole milliseconds, as uvloop's have.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from types import SimpleNamespace

import pytest

from jurybox.server.security import pace
from jurybox.server.security.pace import Breaks, Debt, Turns, WorkPace

SIZE = 1 << 16  # bytes of a read
SECONDS = 2.0


class _Selector(selectors.SelectSelector):
    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def select(self, timeout=None):
        assert timeout is not None, "nothing will ever happen"
        self.clock.now += max(0.0, timeout)
        return []


class Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock):
        self.clock = clock
        super().__init__(_Selector(clock))
        self._clock_resolution = 1e-9

    def time(self):
        return self.clock.now

    def call_later(self, delay, callback, *args, context=None):
        return self.exactly(max(0.001, round(delay, 3)) if delay > 0 else 0.0, callback, *args, context=context)

    def exactly(self, delay, callback, *args, context=None):
        return super().call_later(delay, callback, *args, context=context)


class Small:
    """A client that asks, waits for its answer, and thinks for a while: it needs the loop twice for each."""

    engine = SimpleNamespace(busy_until=0.0)  # which it shares with others

    def __init__(self, loop, turns, thinks, lanes):
        self.loop, self.turns, self.thinks, self.lanes, self.answers = loop, turns, thinks, lanes, 0
        loop.exactly(thinks + 0.0002, self.asks)

    def asks(self):
        self.turns.heard(self)
        self.lanes.heard(self)
        self.loop.clock.now += 0.0001
        self.loop.exactly(0.0003 + max(0.0, self.engine.busy_until - self.loop.clock.now), self.answered)

    def answered(self):
        self.loop.clock.now += 0.0001
        self.answers += 1
        self.loop.exactly(self.thinks + 0.0002, self.asks)


class Large:
    """A connection whose sender has more for every read, at once or later; read as `http_connection.Paced` does."""

    def __init__(self, loop, turns, read, after):
        self.loop, self.turns, self.read, self.after, self.reads = loop, turns, read, after, 0
        self.go_on()

    def go_on(self):
        if self.after:
            self.loop.exactly(self.after, self.came)
        else:
            self.loop.call_soon(self.came)

    def came(self):
        began = self.loop.clock.now
        self.turns.heard(self)
        self.loop.clock.now += self.read
        self.reads += 1
        self.loop.call_soon(self.had_turn, began)

    def had_turn(self, began):
        seconds = self.turns.spent(began, SIZE)
        if self.turns.rest(self, seconds) > 0:
            self.turns.later(self, seconds)
        else:
            self.go_on()


class Tickets:
    """A lane whose tickets take an engine's time, and their large answers the loop's; the next one waits already."""

    def __init__(self, loop, lanes, computes, answers):
        self.loop, self.computes, self.answers, self.number = loop, computes, answers, 0
        self.breaks = Breaks(lanes, self.sends)
        self.sends()

    def sends(self):
        self.breaks.heard()
        self.sent = self.loop.clock.now
        Small.engine.busy_until = max(self.sent, Small.engine.busy_until) + self.computes
        self.loop.exactly(Small.engine.busy_until - self.sent, self.came)

    def came(self):
        self.number += 1
        came = self.loop.clock.now
        self.loop.clock.now += self.answers
        self.breaks.after(self.sent, came)


@pytest.fixture(scope="module")
def rates():
    @functools.cache  # what is compared with is often the same
    def measured(larges, smalls, **more):
        with pytest.MonkeyPatch.context() as patch:
            return simulated(patch, larges, smalls, **more)

    def simulated(
        monkeypatch, larges, smalls, *, thinks=0.0, read=0.00005, after=0.0, paced=True, tickets=None, lanes=1
    ):
        """The reads and the answers a second of so many large senders and small clients.

        Args:
            tickets: seconds that one takes of an engine and of the loop; None: there are none.
            lanes: how many have such tickets.

        Returns:
            And the tickets a second.
        """
        clock = SimpleNamespace(now=100.0)
        monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: clock.now))
        made: list[list] = []

        async def work(loop):
            monkeypatch.setattr(Small.engine, "busy_until", 0.0)
            debt = Debt()
            turns, shared = Turns(debt), WorkPace(debt)
            made.append([Tickets(loop, shared, *tickets) for _ in range(lanes)] if tickets else [])
            if not paced:
                monkeypatch.setattr(turns, "rest", lambda *_: 0.0)
            made.append([Large(loop, turns, read, after) for _ in range(larges)])
            made.append([Small(loop, turns, thinks, shared) for _ in range(smalls)])
            over = loop.create_future()
            loop.exactly(SECONDS, over.set_result, None)
            await over

        with asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
            runner.run(work(runner.get_loop()))
        counts = [(one.number for one in made[0]), (one.reads for one in made[1]), (one.answers for one in made[2])]
        of_tickets, reads, answers = (sum(count) / SECONDS for count in counts)
        return reads, answers, of_tickets

    return measured


@pytest.mark.parametrize("after", [0.0, 0.0002])
@pytest.mark.parametrize("number", [1, 4, 40])
def test_large_senders_alone_lose_nothing(rates, number, after):
    assert (
        rates(number, 0, read=0.0003, after=after)[0]
        > 0.95 * rates(number, 0, read=0.0003, after=after, paced=False)[0]
    )


@pytest.mark.parametrize(
    ("number", "read", "after"),
    [
        pytest.param(number, read, after, marks=[pytest.mark.runs] * (read < 0.0003 and (number, after) != (1, 0.0002)))
        for number in (1, 4)
        for read in (0.00005, 0.0003)
        for after in (0.0, 0.0002)
    ],
)
def test_large_senders_beside_a_busy_client_keep_a_quarter_of_their_rate_and_it_four_fifths(rates, number, read, after):
    large, small, _ = rates(number, 1, read=read, after=after)
    assert large > 0.23 * rates(number, 1, read=read, after=after, paced=False)[0]
    assert small > 0.8 * rates(0, 1)[1]


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("thinks", [0.02, 0.05, 0.2])
def test_a_client_that_asks_now_and_then_costs_large_senders_little_and_they_cost_it_little(rates, number, thinks):
    large, small, _ = rates(number, 1, thinks=thinks, read=0.0003)
    assert large > 0.57 * rates(number, 1, thinks=thinks, read=0.0003, paced=False)[0]
    assert small > 0.85 * rates(0, 1, thinks=thinks)[1]


@pytest.mark.parametrize("thinks", [0.0, 0.002, 0.005, 0.01])
def test_forty_large_senders_leave_a_client_most_of_its_rate(rates, thinks):
    assert rates(40, 1, thinks=thinks, read=0.0003)[1] > 0.66 * rates(0, 1, thinks=thinks)[1]


@pytest.mark.parametrize("computes", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("larges", [0, 1, 40])
def test_tickets_with_large_answers_beside_large_senders_leave_a_client_half_of_its_rate(rates, larges, computes):
    """Also where it waits behind them in the engine, and cannot be heard meanwhile."""
    assert (
        rates(larges, 1, read=0.0003, tickets=(computes, 0.02))[1] > (0.45 if computes == 0.3 else 0.5) * rates(0, 1)[1]
    )


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_with_large_answers_that_share_an_engine_keep_it_busy(rates, lanes):
    assert rates(0, 0, tickets=(0.05, 0.002), lanes=lanes)[2] * 0.05 > 0.9


def test_a_lane_with_large_answers_keeps_half_of_its_rate_beside_a_busy_client(rates):
    assert rates(0, 1, tickets=(0.05, 0.002))[2] > 0.4 * rates(0, 0, tickets=(0.05, 0.002))[2]
