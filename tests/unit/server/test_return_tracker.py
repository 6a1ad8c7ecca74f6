"""Which clients the next ticket waits for; waits are short, and clients that do not return are not waited for."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.server.frontend.coalescer import RequestCoalescer
from jurybox.server.frontend.returns import QuickHalf, Returns, WholeGroup
from jurybox.server.security.access import ClientConnection

HERE, ELSEWHERE = ("127.0.0.1", 4000), ("192.0.2.7", 4000)
SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})
ROW = {"x": np.ones((1, 2), np.float32)}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def tracker(cores=2, fixed=True):
    """Return a tracker that knows what a ticket costs: 100 us and 10 more for each row, or 50 us for each row."""
    clock = Clock()
    made = QuickHalf(cores, clock)
    for number in range(200):
        rows = 1 + number % 4
        made.took(rows, (100e-6 if fixed else 0) + rows * (10e-6 if fixed else 50e-6))
    return made, clock


def connections(n=16, address=HERE):
    return [ClientConnection(address) for _ in range(n)]


def ask_again(made, clock, clients, after=0.0005):
    """Answer all clients, and let all ask again: those that do so soon enough are quick."""
    for client in clients:
        made.answered(client)
    clock.now += after
    for client in clients:
        made.arrived(client, 60.0, 1)


def one_of_them_asks(made, clients):
    """Answer all clients, and let the first ask again."""
    for client in clients:
        made.answered(client)
    return made.arrived(clients[0], 60.0, 1)


@pytest.mark.parametrize(("n", "enough"), [(16, 8), (9, 5), (8, 4), (6, 2)])
def test_a_ticket_waits_for_half_of_the_quick_clients(n, enough):
    made, clock = tracker()
    clients = connections(n)
    ask_again(made, clock, clients)
    assert not one_of_them_asks(made, clients)  # there is no wait in progress
    assert 0 < made.wait(1) <= 0.002
    for waiting in range(2, enough):
        assert made.arrived(clients[waiting - 1], 60.0, waiting) and made.wait(waiting) > 0
    assert not made.arrived(clients[enough - 1], 60.0, enough) and made.wait(enough) == 0


@pytest.mark.parametrize(("cores", "address"), [(2, HERE), (16, HERE), (2, ELSEWHERE)])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_costly_ticket_waits_for_all_prompt_clients_and_for_half_its_fixed_cost_at_most(cores, address, n):
    clock = Clock()
    made = QuickHalf(cores, clock)
    for number in range(200):
        rows = 1 + number % 4
        made.took(rows, 0.005 + rows * 0.001)
    clients = connections(n, address)
    ask_again(made, clock, clients, 0.002)
    one_of_them_asks(made, clients)
    assert made.wait(1) == pytest.approx(0.0025, rel=0.05)
    for waiting in range(2, n):
        assert made.arrived(clients[waiting - 1], 60.0, waiting) and made.wait(waiting) > 0
    assert not made.arrived(clients[n - 1], 60.0, n) and made.wait(n) == 0
    ask_again(made, clock, clients, 0.003)  # later than half of the fixed cost
    one_of_them_asks(made, clients)
    assert made.wait(1) == 0
    ask_again(made, clock, clients, 0.002)
    one_of_them_asks(made, clients)
    assert made.wait(1) > 0
    clock.now += 0.0026
    assert made.wait(1) == 0, "one does not come: it is not waited for again until it was prompt"
    one_of_them_asks(made, clients)
    assert made.wait(1) == 0


def test_of_batches_of_one_size_the_cost_counts_as_fixed_until_one_of_all_shows_it():
    clock = Clock()
    made = QuickHalf(2, clock)
    clients = connections(6)
    for _ in range(100):
        made.took(3, 0.009)
    ask_again(made, clock, clients, 0.002)
    one_of_them_asks(made, clients)
    assert made.wait(1) > 0, "two halves in turn would never show it"
    for _ in range(200):
        made.took(3, 0.009)
        made.took(6, 0.018)
    clock.now += 1
    ask_again(made, clock, clients, 0.0005)
    one_of_them_asks(made, clients)
    assert made.wait(1) == 0, "all of it is for its rows"


@pytest.mark.parametrize("cores", [2, 16])
def test_two_groups_in_turn_become_one_though_a_ticket_once_seemed_to_cost_by_its_rows(cores):
    """Neither group ever shows the fixed cost: each sends three rows, and the estimate would stay as it is."""
    clock = Clock()
    made = QuickHalf(cores, clock)
    for rows in [3] * 100 + [1, 2, 3, 4, 5, 6] * 40:
        made.took(rows, 0.04 * rows)  # the machine was busy
    for _ in range(600):
        made.took(3, 0.12)
    clients = connections(6)
    ask_again(made, clock, clients, 0.002)
    one_of_them_asks(made, clients)
    assert made.wait(1) > 0


def test_the_first_tickets_of_a_slow_model_show_no_cost_of_their_rows():
    """Their durations are cut, since one alone could be an accident: three rows that seem to take longer than one."""
    made = QuickHalf(16, Clock())
    for number in range(40):
        made.took(min(6, 1 + number), 0.12)
    assert made._prompt == pytest.approx(0.06, rel=0.01)


@pytest.mark.parametrize(("after", "expected"), [(0.0005, 0.002), (0.002, 0.004), (0.008, 0.005)])
def test_a_wait_takes_twice_as_long_as_clients_do_within_limits(after, expected):
    made, clock = tracker()
    clients = connections()
    for _ in range(20):
        ask_again(made, clock, clients, after)
    one_of_them_asks(made, clients)
    assert made.wait(1) == pytest.approx(expected, rel=0.15)


def test_a_timer_that_fires_a_moment_early_ends_the_wait():
    made, clock = tracker()
    clients = connections()
    ask_again(made, clock, clients)
    one_of_them_asks(made, clients)
    clock.now += made.wait(1) - 0.0004
    assert made.wait(1) == 0


@pytest.mark.parametrize("why", ["cores", "host", "slow", "cost", "few"])
def test_a_ticket_does_not_wait(why):
    made, clock = tracker(cores=4 if why == "cores" else 2, fixed=why != "cost")
    clients = connections(5 if why == "few" else 16, ELSEWHERE if why == "host" else HERE)
    for _ in range(3):
        ask_again(made, clock, clients, after=0.05 if why == "slow" else 0.0005)
    one_of_them_asks(made, clients)
    assert made.wait(1) == 0


def test_clients_that_stay_away_are_waited_for_once_until_they_were_quick_again():
    made, clock = tracker()
    clients = connections()
    ask_again(made, clock, clients)
    one_of_them_asks(made, clients)
    clock.now += made.wait(1) + 1e-6
    assert made.wait(1) == 0
    made.answered(clients[0])
    made.arrived(clients[0], 60.0, 1)
    assert made.wait(1) == 0
    ask_again(made, clock, clients)
    one_of_them_asks(made, clients)
    assert made.wait(1) > 0


def test_there_are_few_waits_if_they_are_often_in_vain_and_now_and_then_one_for_clients_that_have_changed():
    """Clients ask twice and then step their environment, again and again."""
    made, clock = tracker()
    clients, waits = connections(), 0
    for _ in range(200):
        ask_again(made, clock, clients)
        one_of_them_asks(made, clients)
        if wait := made.wait(1):
            waits += 1
            clock.now += wait + 1e-6
            assert made.wait(1) == 0
        clock.now += 0.02
    assert 3 < waits < 50  # three in vain are too many


def test_a_request_with_a_short_time_out_does_not_wait():
    made, clock = tracker()
    clients = connections()
    ask_again(made, clock, clients)
    one_of_them_asks(made, clients)
    assert made.wait(1) > 0 and made.arrived(clients[1], 60.0, 2)
    assert not made.arrived(clients[2], 0.05, 3) and made.wait(3) == 0


def test_connections_that_ended_are_not_kept():
    made, clock = tracker()
    for _ in range(3000):
        ask_again(made, clock, [client := ClientConnection(HERE)])
        made.answered(client)
    assert len(made._away) <= 1024


def asks(made, *clients):
    """Whether one client counts as alone after each request."""
    return [(made.arrived(client, 60.0, 1), made.alone)[1] for client in clients]


def test_a_client_is_alone_from_its_sixth_request_in_a_row_on():
    made, _ = tracker()
    one, other = connections(2)
    assert asks(made, *[one] * 7) == [False] * 5 + [True] * 2
    assert asks(made, other, *[one] * 6) == [False] * 6 + [True]
    assert asks(made, None, one) == [False, False]
    assert asks(made, *[None] * 9) == [False] * 9, "it is not known who they are"


@pytest.mark.parametrize("cores", [2, 16])
def test_the_loop_blocks_for_a_brief_ticket_of_a_lone_client_or_where_quick_ones_share_the_cores(cores):
    made, clock = tracker(cores=cores)
    one, other = connections(2)
    assert not made.may_block(1), "nobody has asked"
    asks(made, *[one] * 6)
    assert made.may_block(1) and not made.may_block(2)
    asks(made, other)
    assert not made.may_block(1)
    ask_again(made, clock, [other])
    assert made.may_block(1) == made.may_block(2) == (cores == 2)
    asks(made, None)
    assert not made.may_block(1)


def test_the_loop_does_not_block_while_tickets_take_longer_and_one_that_was_slow_says_little():
    made = QuickHalf(2, Clock())
    (one,) = connections(1)
    asks(made, *[one] * 6)
    assert made.may_block(1)
    made.took(1, 0.0004)
    made.took(1, 60.0)
    assert made.may_block(1)
    for _ in range(2):
        made.took(1, 0.001)
    assert not made.may_block(1)
    for _ in range(4):
        made.took(1, 0.0001)
    assert made.may_block(1)


def test_after_a_block_in_vain_sixteen_tickets_go_without():
    made, _ = tracker()
    (one,) = connections(1)
    asks(made, *[one] * 6)
    made.blocked_in_vain()
    assert [made.may_block(1) for _ in range(18)] == [False] * 16 + [True] * 2


def test_with_many_cores_only_long_tickets_tell_what_one_costs():
    for cores, seconds, known in ((16, 100e-6, False), (2, 100e-6, True), (16, 0.05, True)):
        made = QuickHalf(cores, Clock())
        for number in range(50):
            made.took(1 + number % 4, seconds)
        assert (made.fixed > 0) == known


def test_a_rule_that_waits_for_nobody_says_so():
    made = Returns()
    assert not made.arrived(None, 60.0, 1) and made.wait(1) == 0.0 and not made.may_block(1)
    assert (made.alone, made.sends_ahead, made.fixed) == (False, False, 0.0)
    assert WholeGroup(8).sends_ahead and not QuickHalf(2).sends_ahead


class Sent:
    """A ticket that is answered in the loop's next iteration."""

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


async def test_a_slow_model_without_a_fixed_cost_gets_requests_at_once(monkeypatch):
    """Its tickets take some milliseconds for each row, so a wait would save nothing."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    clock = Clock()
    monkeypatch.setattr("jurybox.server.frontend.coalescer.time", SimpleNamespace(monotonic=clock))
    coalescer = RequestCoalescer(Lane(), 8)
    for number in range(200):
        rows, answer = 1 + number % 4, Answer()
        late = coalescer.put({"x": np.ones((rows, 2), np.float32)}, rows, 60.0, 0, answer)
        await asyncio.sleep(0)  # it is sent
        clock.now += 0.005 * rows
        while not answer.done():
            assert coalescer.busy
            await asyncio.sleep(0)
        late.over()
    clock.now, made, clients = 0.0, coalescer._returns, connections()
    made._clock = clock
    ask_again(made, clock, clients)
    one_of_them_asks(made, clients)
    assert made.wait(1) == 0


@pytest.mark.parametrize("missing", [0, 1, 10])
async def test_every_request_is_answered_whether_or_not_the_others_come(missing, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    coalescer = RequestCoalescer(Lane(), 8)
    made = coalescer._returns
    for number in range(200):
        made.took(1 + number % 4, 100e-6 + (1 + number % 4) * 10e-6)
    clients = connections(12)
    for turn in range(20):
        asking = clients if turn < 10 else clients[missing:]
        answers = [Answer() for _ in asking]
        began = time.monotonic()
        lates = [
            coalescer.put(ROW, 1, 60.0, 0, answer, None, client) for client, answer in zip(asking, answers, strict=True)
        ]
        while not all(answer.done() for answer in answers):
            assert time.monotonic() - began < 10
            await asyncio.sleep(0)
        for late, answer in zip(lates, answers, strict=True):
            late.over()
            np.testing.assert_array_equal(answer.result[0]["y"], 2 * ROW["x"])
    assert not coalescer.busy
