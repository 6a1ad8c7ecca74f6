"""Whose next request the next ticket waits for, and that nobody waits long, or for those who do not come."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.server.gateway.inference.coalescer import RequestCoalescer
from jurybox.server.gateway.inference.return_tracker import ReturnTracker
from jurybox.server.security.access import ClientConnection

HERE, ELSEWHERE = ("127.0.0.1", 4000), ("192.0.2.7", 4000)
SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})
ROW = {"x": np.ones((1, 2), np.float32)}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def returning(cores=2, fixed=True):
    """Some that know what a ticket costs: 100 us, and 10 more for each row; or 50 for each row alone."""
    clock = Clock()
    made = ReturnTracker(cores, clock)
    for number in range(200):
        rows = 1 + number % 4
        made.took(rows, (100e-6 if fixed else 0) + rows * (10e-6 if fixed else 50e-6))
    return made, clock


def ask_again(made, clock, clients, after=0.0005):
    """All of them are answered, and ask again: who is back at once is quick."""
    for client in clients:
        made.answered(client)
    clock.now += after
    for client in clients:
        made.arrived(client, 60.0, 1)


def one_of_them_asks(made, clients):
    """All of them are answered, and the first asks again."""
    for client in clients:
        made.answered(client)
    return made.arrived(clients[0], 60.0, 1)


def test_a_ticket_waits_for_half_of_the_clients_that_come_back_at_once():
    made, clock = returning()
    four = [ClientConnection(HERE) for _ in range(4)]
    ask_again(made, clock, four)
    assert not one_of_them_asks(made, four)  # no wait goes on yet
    assert 0 < made.wait(1) <= 0.002
    assert not made.arrived(four[1], 60.0, 2) and made.wait(2) == 0


@pytest.mark.parametrize(("after", "expected"), [(0.0005, 0.002), (0.002, 0.004), (0.008, 0.005)])
def test_a_wait_takes_twice_as_long_as_clients_do_within_limits(after, expected):
    made, clock = returning()
    eight = [ClientConnection(HERE) for _ in range(8)]
    for _ in range(20):
        ask_again(made, clock, eight, after)
    one_of_them_asks(made, eight)
    assert made.wait(1) == pytest.approx(expected, rel=0.15)


def test_a_timer_that_fires_a_moment_early_ends_the_wait():
    made, clock = returning()
    four = [ClientConnection(HERE) for _ in range(4)]
    ask_again(made, clock, four)
    one_of_them_asks(made, four)
    clock.now += made.wait(1) - 0.0004
    assert made.wait(1) == 0


@pytest.mark.parametrize("why", ["cores", "host", "slow", "cost", "lone"])
def test_nobody_is_waited_for(why):
    made, clock = returning(cores=4 if why == "cores" else 2, fixed=why != "cost")
    some = [ClientConnection(ELSEWHERE if why == "host" else HERE) for _ in range(1 if why == "lone" else 4)]
    for _ in range(3):
        ask_again(made, clock, some, after=0.05 if why == "slow" else 0.0005)
    one_of_them_asks(made, some)
    assert made.wait(1) == 0


def test_who_stays_away_is_waited_for_once_until_it_was_quick_again():
    made, clock = returning()
    four = [ClientConnection(HERE) for _ in range(4)]
    ask_again(made, clock, four)
    one_of_them_asks(made, four)
    clock.now += made.wait(1) + 1e-6
    assert made.wait(1) == 0
    made.answered(four[0])
    made.arrived(four[0], 60.0, 1)
    assert made.wait(1) == 0
    ask_again(made, clock, four)
    one_of_them_asks(made, four)
    assert made.wait(1) > 0


def test_where_waits_are_often_in_vain_there_are_none():
    """Clients that ask twice and then step their environment, each time."""
    made, clock = returning()
    four, waits = [ClientConnection(HERE) for _ in range(4)], 0
    for _ in range(200):
        ask_again(made, clock, four)
        one_of_them_asks(made, four)
        if wait := made.wait(1):
            waits += 1
            clock.now += wait + 1e-6
            assert made.wait(1) == 0
        clock.now += 0.02
    assert 1 <= waits < 50


def test_who_is_in_a_hurry_waits_for_nobody():
    made, clock = returning()
    eight = [ClientConnection(HERE) for _ in range(8)]
    ask_again(made, clock, eight)
    one_of_them_asks(made, eight)
    assert made.wait(1) > 0 and made.arrived(eight[1], 60.0, 2)
    assert not made.arrived(eight[2], 0.05, 3) and made.wait(3) == 0


def test_connections_that_ended_are_not_kept():
    made, clock = returning()
    for _ in range(3000):
        ask_again(made, clock, [client := ClientConnection(HERE)])
        made.answered(client)
    assert len(made._away) <= 1024


class Sent:
    """A ticket that is answered when the loop turns."""

    def __init__(self, rows):
        self.outputs = {"y": rows * 2}

    def watched(self, loop, waiter, *, again):
        loop.call_soon(waiter.set_result, None)
        return False

    def seen(self):
        return self.outputs, 7

    def give_up(self):
        pass


class Lane:
    name, spec = "m", SPEC

    def __init__(self):
        self.tickets = []

    def submit_parts(self, parts, deadline, version, brief=0.0):
        self.tickets.append(len(parts))
        return Sent(np.concatenate([arrays["x"] for arrays, _ in parts]))

    def room(self):
        return 8

    def look(self):
        pass


class Answer:
    def __init__(self):
        self.result = None

    def done(self):
        return self.result is not None

    def set_result(self, result):
        self.result = result

    set_exception = set_result


async def test_a_slow_model_without_a_fixed_cost_is_asked_at_once(monkeypatch):
    """Its tickets take some milliseconds for each row: all that is won by waiting is waiting."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    clock = Clock()
    monkeypatch.setattr("jurybox.server.gateway.inference.coalescer.time", SimpleNamespace(monotonic=clock))
    together = RequestCoalescer(Lane(), 8)
    for number in range(200):
        rows, answer = 1 + number % 4, Answer()
        late = together.put({"x": np.ones((rows, 2), np.float32)}, rows, 60.0, 0, answer)
        await asyncio.sleep(0)  # it is sent
        clock.now += 0.005 * rows
        while not answer.done():
            assert together.busy
            await asyncio.sleep(0)
        late.cancel()
    clock.now, made, four = 0.0, together._returning, [ClientConnection(HERE) for _ in range(4)]
    made._clock = clock
    ask_again(made, clock, four)
    one_of_them_asks(made, four)
    assert made.wait(1) == 0


@pytest.mark.parametrize("missing", [0, 1, 3])
async def test_every_request_is_answered_whether_or_not_the_others_come(missing, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    lane = Lane()
    together = RequestCoalescer(lane, 8)
    made = together._returning
    for number in range(200):
        made.took(1 + number % 4, 100e-6 + (1 + number % 4) * 10e-6)
    four = [ClientConnection(HERE) for _ in range(4)]
    for turn in range(20):
        asked = four if turn < 10 else four[missing:]
        answers = [Answer() for _ in asked]
        began = time.monotonic()
        lates = [
            together.put(ROW, 1, 60.0, 0, answer, None, client) for client, answer in zip(asked, answers, strict=True)
        ]
        while not all(answer.done() for answer in answers):
            assert time.monotonic() - began < 10
            await asyncio.sleep(0)
        for late, answer in zip(lates, answers, strict=True):
            late.cancel()
            np.testing.assert_array_equal(answer.result[0]["y"], 2 * ROW["x"])
    assert not together.busy
