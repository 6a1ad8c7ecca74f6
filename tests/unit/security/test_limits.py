"""What a connection holds is counted to the byte, and only one that leaves others no room, and stays so, is ended."""

from __future__ import annotations

import pytest

from jurybox import native
from jurybox.protocol.errors import Code, Refused
from jurybox.server.security.limits import (
    ANSWERS,
    HTTP,
    OF_REQUEST,
    RECEIVED,
    SMALL,
    UNREAD,
    Charge,
    Watch,
    room_for_answer,
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
