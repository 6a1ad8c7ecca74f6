"""Whom the next batch of a group waits for, for how long, and when it gives up; and the same of half of the quick."""

from __future__ import annotations

import pytest

from jurybox.server.frontend.returns import QuickHalf, WholeGroup
from jurybox.server.security.access import ClientConnection

FIXED = 0.02  # seconds that a batch of a group costs, whatever its rows


class Group:
    """A group by a clock of the test's own, which knows the cost of its batches."""

    def __init__(self, most=8, engines=1, **options):
        self.now = 100.0
        self.rule = WholeGroup(most, engines, clock=lambda: self.now, **options)
        for rows in (1, 8, 1, 8):
            self.rule.took(rows, FIXED)

    def answers(self, *clients):
        self.rule.took(1, FIXED)
        for client in clients:
            self.rule.answered(client)

    def come_back(self, *clients, after=0.001):
        self.now += after
        for client in clients:
            assert self.rule.arrived(client) is False

    def quick(self, *clients):
        """Let clients return at once, and answer them again."""
        self.answers(*clients)
        self.come_back(*clients)
        self.answers(*clients)

    def waits_in_vain(self, client):
        """Whether a batch waits for a client, which does not come in time and then returns at once again."""
        self.quick(client)
        waited = self.rule.wait(1) > 0
        self.now += FIXED + 0.001
        assert self.rule.wait(1) == 0
        self.rule.arrived(client)
        return waited


def test_a_client_that_nobody_knows_is_neither_waited_for_nor_waits():
    group = Group()
    group.answers(None)
    group.come_back(None)
    group.answers(None)
    assert group.rule.wait(1) == 0
    connections = [ClientConnection(("127.0.0.1", 4000)) for _ in range(16)]
    made = half()
    ask_again(made, connections)
    for one in connections:
        made.answered(one)
    made.arrived(connections[0], 60.0, 1)
    assert made.wait(1) > 0
    assert made.arrived(None, 60.0, 2) is False, "the rule is asked anew whether the others wait for more"


def test_a_batch_waits_for_the_last_one_that_was_answered():
    group = Group()
    group.quick("a", "b")
    group.now += 0.004
    group.rule.arrived("a")
    group.rule.answered("a")
    assert group.rule.wait(1) == pytest.approx(FIXED)
    group.now += 0.005
    assert group.rule.wait(1) == pytest.approx(FIXED - 0.005)


@pytest.mark.parametrize(("after", "waits"), [(0.001, True), (FIXED - 0.001, True), (FIXED + 0.001, False)])
def test_a_client_that_took_longer_than_a_batch_costs_is_not_waited_for(after, waits):
    group = Group()
    group.answers("a")
    group.come_back("a", after=after)
    group.answers("a")
    assert (group.rule.wait(0) > 0) is waits
    group.come_back("a", after=0.001)
    group.answers("a")
    assert group.rule.wait(0) > 0, "it was quick, if only now"
    group.come_back("a", after=FIXED + 0.001)
    group.answers("a")
    assert group.rule.wait(0) == 0, "and is so no more"


def test_who_was_answered_before_the_last_batch_comes_back_like_all_others():
    group = Group()
    group.answers("a")
    group.now += 0.001
    group.answers("b")
    group.come_back("a")
    group.answers("a")
    assert group.rule.wait(1) > 0


def test_nobody_is_waited_for_while_nobody_is_away():
    group = Group()
    for computing in range(3):
        assert group.rule.wait(1, computing) == 0


def test_a_client_that_has_left_is_forgotten():
    group = Group()
    group.quick("a")
    group.rule.left("a")
    group.answers("a")  # of a request that was under way
    assert group.rule.wait(1) == 0
    group.rule.left("a")
    group.come_back("a")
    group.answers("a")
    assert group.rule.wait(1) == 0, "nobody knows when it was answered"
    group.rule.left("nobody")


@pytest.mark.parametrize(
    ("most", "engines", "waiting", "computing", "waits"),
    [
        (8, 1, 1, 0, True),
        (2, 1, 1, 0, True),
        (2, 1, 2, 0, False),
        (8, 2, 2, 0, False),
        (8, 2, 2, 1, False),
        (8, 2, 2, 2, True),
        (8, 2, 1, 1, True),
    ],
)
def test_a_batch_waits_for_its_engines_part_of_all_who_wait_are_away_or_are_computed(
    most, engines, waiting, computing, waits
):
    group = Group(most, engines)
    group.quick("a")
    assert (group.rule.wait(waiting, computing) > 0) is waits


def test_a_batch_does_not_wait_if_all_would_be_back_only_after_it_could_have_been_computed():
    group = Group()
    group.answers("a", "b")
    group.come_back("a", after=0.012)
    group.come_back("b", after=0.006)
    group.answers("a", "b")
    assert group.rule.wait(0) > 0, "two are back within 18 ms"
    assert group.rule.wait(1) == 0, "three are not"


def test_after_three_waits_in_vain_there_are_none_until_twenty_batches_later():
    group = Group()
    assert [group.waits_in_vain("a") for _ in range(4)] == [True, True, True, False]
    for _ in range(14):
        group.answers()
    assert not group.waits_in_vain("a")
    for _ in range(8):
        group.answers()
    assert group.waits_in_vain("a")


def test_waits_for_those_who_come_make_up_for_others():
    group = Group()
    for _ in range(8):
        assert group.waits_in_vain("a")
        for _ in range(4):
            group.quick("a")
            assert group.rule.wait(1) > 0
            group.come_back("a")


def test_who_answers_is_told_how_long_each_request_has_waited():
    told = []
    Group(waited=told.append).rule.went(lambda: [0.5, 0.25])
    assert told == [[0.5, 0.25]]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def half():
    """The rule of quick halves, on two cores, where a batch costs 100 us and 10 us more for each row."""
    made = QuickHalf(2, Clock())
    for number in range(200):
        rows = 1 + number % 4
        made.took(rows, 100e-6 + rows * 10e-6)
    return made


def ask_again(made, clients):
    for client in clients:
        made.answered(client)
    made._clock.now += 0.0005
    for client in clients:
        made.arrived(client, 60.0, 1)


def test_a_wait_that_is_asked_about_again_goes_on_for_the_rest_of_its_time():
    made, clients = half(), [ClientConnection(("127.0.0.1", 4000)) for _ in range(16)]
    ask_again(made, clients)
    for client in clients:
        made.answered(client)
    whole = made.wait(1)
    made._clock.now += 0.001
    assert made.wait(2) == pytest.approx(whole - 0.001)


def test_waits_for_a_half_that_comes_make_up_for_those_in_vain():
    """One in five is in vain."""
    made, clients = half(), [ClientConnection(("127.0.0.1", 4000)) for _ in range(16)]
    for turn in range(60):
        for _ in range(2):  # after a wait in vain they are quick again
            ask_again(made, clients)
        for client in clients:
            made.answered(client)
        wait = made.wait(1)
        assert wait > 0
        if turn % 5:
            for client in clients:
                made.arrived(client, 60.0, 8)
            assert made.wait(8) == 0
        else:
            made._clock.now += wait + 1e-6
            assert made.wait(1) == 0
