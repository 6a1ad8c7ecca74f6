"""What a connection holds is counted to the byte, and only one that leaves others no room, and stays so, is ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurybox import native
from jurybox.protocol.errors import Code, Refused
from jurybox.server.security.limits import (
    ANSWERS,
    CALLS,
    HTTP,
    OF_REQUEST,
    RECEIVED,
    SMALL,
    UNREAD,
    Charge,
    DecodedCharge,
    Watch,
    budget_of,
    hold_text,
    most_held,
    refusal,
    room_for_answer,
    sessions_share,
)

MIB = 1 << 20


@pytest.fixture
def budget():
    return native.Budget((MIB, MIB, 9), (MIB, MIB, 9))


class Connection:
    def __init__(self, budget, owes=0):
        self.account, self.silent_at, self.aborted = native.Account(budget, HTTP), [], 0
        self.account.owe(ANSWERS, owes)

    def end_silent(self, now):
        self.silent_at.append(now)

    def abort(self):
        self.aborted += 1


def test_a_charge_returns_what_it_took_and_no_more(budget):
    account = native.Account(budget, HTTP)
    account.owe(RECEIVED, 100)
    charge = Charge(budget, account)
    charge.take(1000)
    charge.take(500)
    charge.give(300)
    assert (charge.size, account.held(RECEIVED)) == (1200, 1300)
    with pytest.raises(Refused, match="this connection holds requests of 1300 bytes, of at most 1048576") as refused:
        charge.take(MIB)
    assert refused.value.code == Code.BUSY and charge.size == 1200
    charge.give()
    charge.give()
    assert (charge.size, account.held(RECEIVED), budget.held(RECEIVED)) == (0, 100, 100)


def test_a_request_that_grows_beyond_a_small_one_is_large_whatever_it_was_said_to_be(budget):
    """The last eighth is for small requests."""
    others = native.Account(budget, HTTP)
    others.owe(RECEIVED, MIB * 7 // 8 - 1000)
    charge = Charge(budget, native.Account(budget, HTTP))
    charge.take(SMALL - 10)
    with pytest.raises(Refused, match="the server holds"):
        charge.take(20)
    charge.take(10)
    charge.give()
    with pytest.raises(Refused, match="the server holds"):
        charge.take(2000, whole=2 * SMALL)


def test_a_connection_that_owes_most_and_takes_nothing_is_ended_when_there_is_no_room(budget):
    most, other = Connection(budget, MIB // 2), Connection(budget, MIB // 4)
    watch = Watch(budget, [lambda: [most], lambda: [other]])
    watch.check(0.0)
    watch.check(UNREAD - 1)
    assert not most.aborted
    most.account.give(ANSWERS, 1000)  # it has read some
    other.account.owe(ANSWERS, 1000)
    watch.check(UNREAD)
    watch.check(2 * UNREAD - 1)
    assert not most.aborted
    watch.check(2 * UNREAD)
    assert (most.aborted, other.aborted) == (1, 0)
    assert most.silent_at == other.silent_at == [0.0, UNREAD - 1, UNREAD, 2 * UNREAD - 1, 2 * UNREAD]


def test_nobody_is_ended_while_there_is_room(budget):
    most = Connection(budget, 3 * MIB // 4 - 1)
    watch = Watch(budget, [lambda: [most]])
    watch.check(0.0)
    watch.check(100.0)
    assert not most.aborted
    most.account.owe(ANSWERS, 1)
    watch.check(100.0)
    assert not most.aborted, "its time begins now"
    watch.check(100.0 + UNREAD)
    assert most.aborted == 1


def test_answers_that_are_being_computed_are_owed_by_nobody(budget):
    one = Connection(budget)
    watch = Watch(budget, [lambda: [one]])
    token = OF_REQUEST.set(Charge(budget, one.account))
    try:
        with room_for_answer(MIB // 2), room_for_answer(MIB // 4 + 1):
            watch.check(0.0)
            watch.check(2 * UNREAD)
            watch.check(4 * UNREAD)
            assert budget.held(ANSWERS) == 3 * MIB // 4 + 1
        assert not one.aborted and budget.held(ANSWERS) == 0
    finally:
        OF_REQUEST.reset(token)


@pytest.mark.parametrize(
    ("limit", "each", "in_all"), [(None, 4 * MIB, 8 * MIB), (40 * MIB, 4 * MIB, 5 * MIB), (8 * MIB, MIB, MIB)]
)
def test_a_process_holds_eight_of_the_largest_messages_or_an_eighth_of_its_memory(monkeypatch, limit, each, in_all):
    found = None if limit is None else (limit, Path("/memory.max"))
    monkeypatch.setattr("jurybox.server.security.limits.memory_limit", lambda: found)
    made = budget_of(MIB)
    assert [tuple(made.each[:2]), tuple(made.in_all[:2])] == [(each, each), (in_all, in_all)]
    assert (made.each[CALLS], made.in_all[CALLS]) == (1024, 16384)
    assert most_held(MIB) == 2 * in_all, "requests and answers"


@pytest.mark.parametrize(("share", "sessions", "most"), [(1.0, 8, 8), (0.5, 9, 4), (0.1, 8, 1), (0.0, 8, 1)])
def test_a_connection_has_its_share_of_the_sessions_and_one_at_least(share, sessions, most):
    assert sessions_share(share, sessions) == most


def test_a_refusal_says_who_holds_how_much_of_what(budget):
    account, other = native.Account(budget, HTTP), native.Account(budget, HTTP)
    account.owe(ANSWERS, 7)
    other.owe(ANSWERS, 5)
    for found, kind, says in (
        (1, ANSWERS, "this connection holds unread answers of 7 bytes, of at most 1048576 at once"),
        (2, ANSWERS, "the server holds unread answers of 12 bytes, of at most 1048576 at once"),
        (1, CALLS, "this connection holds 0 calls, of at most 9 at once"),
        (2, RECEIVED, "the server holds requests of 0 bytes, of at most 1048576 at once"),
    ):
        error = refusal(account, budget, found, kind)
        assert (error.code, says in str(error)) == (Code.BUSY, True)


@pytest.fixture
def request_of(budget):
    """The charge of the request that is answered in this task."""
    charge = Charge(budget, native.Account(budget, HTTP))
    token = OF_REQUEST.set(charge)
    yield charge
    OF_REQUEST.reset(token)


TEXT = b"x" * SMALL


@pytest.mark.parametrize(
    ("text", "times"),
    [(TEXT, 2), (TEXT[1:], 0), (TEXT[2:] + b"\\u", 8), (TEXT[2:] + "\u00e9".encode(), 8)],
)
def test_text_counts_for_what_python_takes_for_it_unless_it_is_small(request_of, text, times):
    hold_text(text)
    assert request_of.size == times * len(text)


def test_text_beyond_a_connections_share_is_too_large_and_costs_nothing(request_of):
    request_of.take(1000)
    hold_text(b"x" * ((MIB - 1000) // 2 - MIB // 8))
    size = request_of.size
    with pytest.raises(
        Refused, match=f"beside the {size} of the body, and a request may take at most 1048576"
    ) as caught:
        hold_text(b"x" * (MIB // 2))
    assert (caught.value.code, request_of.size) == (Code.TOO_LARGE, size)


def test_text_outside_of_a_request_is_not_counted():
    hold_text(TEXT * 1000)


def test_what_is_made_of_a_request_counts_for_its_connection(request_of, budget):
    made = DecodedCharge(request_of)
    made.take(1000)
    made.give(300)
    assert (made.most, request_of.account.held(RECEIVED), request_of.size) == (MIB, 700, 0)
    with pytest.raises(Refused):
        made.take(MIB)
    made.give()
    assert budget.held(RECEIVED) == 0
    nothing = DecodedCharge(None)
    nothing.take(10**12)
    nothing.give()
    assert nothing.most is None
