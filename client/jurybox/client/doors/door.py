"""What a model asks of a way to the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Outgoing(NamedTuple):
    """A ticket on its way: which engine in which of its lives, which rows, until when (ns of CLOCK_MONOTONIC)."""

    sequence: int
    engine: int
    epoch: int
    first: int
    rows: int
    submitted: int
    deadline: int
    version: int


class Answer(NamedTuple):
    """What came back for a ticket."""

    sequence: int
    code: int
    message: str
    version: int
    epoch: int


class Door(Protocol):
    """Carries tickets of one lane to engines and answers back. Not thread-safe: the model sees to that."""

    def send(self, ticket: Outgoing) -> None:
        """Send without waiting."""

    def exchange(self, ticket: Outgoing, timeout: float) -> Answer | None:
        """Send a ticket while no other is in flight and wait for its answer; None when none came in time."""

    def receive(self, timeout: float) -> Sequence[Answer]:
        """Answers that came, after at most `timeout` seconds; empty when none did."""

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """Have `arrived` called in the loop's thread whenever answers may have come."""

    def close(self) -> None:
        """Let go; tickets in flight stay unanswered."""
