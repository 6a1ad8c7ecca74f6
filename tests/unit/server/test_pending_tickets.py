"""A ticket that was sent without a task: when it is looked at, when it ends, and that its answer comes once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.clocks import Clock, given
from tests.loops import turns

from jurybox.server.frontend import waiting_rows
from jurybox.server.frontend.waiting_rows import OVERDUE, PendingTicket


class LookedAt:
    """A ticket that answers a look with each of these, one after another, and then with the last again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.looks: list[bool] = []
        self.given_up = 0

    def watched(self, loop: asyncio.AbstractEventLoop, done: PendingTicket, *, again: bool) -> bool:
        assert loop is asyncio.get_running_loop()
        self.looks.append(again)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if answer == "told":
            done.set_result(None)
        return answer is True

    def give_up(self) -> None:
        self.given_up += 1


class Notes:
    """A coalescer that notes what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, PendingTicket]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda one: self.events.append((name, one))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of tickets, which a test sets. Their looks follow each other at once."""
    monkeypatch.setattr(waiting_rows, "LOOK_AFTER", 0.0)
    return given(Clock(), monkeypatch, waiting_rows)


def pending(*answers: Any, until: float = 100.0) -> tuple[PendingTicket, LookedAt, Notes]:
    ticket, coalescer = LookedAt(*answers), Notes()
    return PendingTicket(coalescer, ticket, until, 99.0), ticket, coalescer  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [True, RuntimeError("unreadable")])
async def test_a_ticket_is_looked_at_until_it_is_answered_and_told_once(clock: Clock, last: object) -> None:
    sent, ticket, coalescer = pending(False, False, last)
    sent.look()
    assert not sent.done() and not coalescer.events
    await turns()
    assert ticket.looks == [False, True, True] and sent.done()
    assert coalescer.events == [("on_answer", sent)]
    sent.set_result(None)
    await turns()
    assert len(coalescer.events) == 1 and len(ticket.looks) == 3 and not ticket.given_up


async def test_a_ticket_whose_answer_is_told_meanwhile_is_not_looked_at_again(clock: Clock) -> None:
    sent, ticket, coalescer = pending("told")
    sent.look()
    assert sent.done() and not coalescer.events, "its coalescer may be in the middle of sending it"
    await turns()
    assert ticket.looks == [False] and coalescer.events == [("on_answer", sent)]
    other, ticket, coalescer = pending(False)
    other.look()
    other.set_result(None)
    await turns()
    assert ticket.looks == [False] and coalescer.events == [("on_answer", other)]


async def test_a_ticket_is_ended_when_it_is_overdue_and_not_before(clock: Clock) -> None:
    sent, ticket, coalescer = pending(False)
    for now in (100.0, 100.0 + OVERDUE):
        clock.now = now
        sent.look()
    assert ticket.looks == [False, True] and not coalescer.events
    clock.now = 100.001 + OVERDUE
    sent.look()
    assert coalescer.events == [("end", sent)] and len(ticket.looks) == 2
    sent.cancel()


async def test_a_ticket_that_is_sent_late_is_looked_at_once_in_any_case(clock: Clock) -> None:
    sent, ticket, coalescer = pending(True, until=0.0)
    sent.look()
    await turns()
    assert ticket.looks == [False] and coalescer.events == [("on_answer", sent)]


@pytest.mark.parametrize("looked", [False, True])
async def test_a_cancelled_ticket_frees_its_rows_and_is_not_looked_at_again(clock: Clock, looked: bool) -> None:
    sent, ticket, coalescer = pending(False)
    if looked:
        sent.look()
    sent.cancel()
    sent.set_result(None)
    await turns()
    assert sent.done() and coalescer.events == [("forget", sent)]
    assert ticket.given_up == 1 and len(ticket.looks) == looked
