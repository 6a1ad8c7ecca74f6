"""What a model asks of a way to the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.wire import PACK_REPLY, PREFIX, prefix_error


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


# What a Caller gives where there is no answer's code; the native core has the same.
NOT_SENT = -1
NOT_ANSWERED = -2

LOOK_AFTER = 0.1  # seconds of silence after which the board is asked what became of the engine
_HEAD = len(PREFIX) + PACK_REPLY.size


def read_reply(frame: bytes, sender: str) -> Answer:
    """The answer in a frame of wire.PACK_REPLY. Raises ProtocolMismatch, naming the sender, where it is none."""
    if len(frame) < _HEAD or frame[: len(PREFIX)] != PREFIX:
        wrong = prefix_error(frame) or f"{len(frame)} bytes"
        raise ProtocolMismatch(f"{sender} answered what is no reply: {wrong}")
    sequence, version, epoch, code = PACK_REPLY.unpack_from(frame, len(PREFIX))
    return Answer(sequence, code, frame[_HEAD:].decode(errors="replace") if code else "", version, epoch)


# An event loop, and what it is to call when answers may have come.
Watching = tuple[asyncio.AbstractEventLoop, Callable[[], None]]


def still(watching: Watching | None) -> Watching | None:
    """What watches, unless its loop has been closed: asyncio.run has returned, and the client goes on without it."""
    return watching if watching is not None and not watching[0].is_closed() else None


class CalledRow(NamedTuple):
    """A row of the arena that calls use: where its input goes, and its only output, or all of them by name."""

    first: int
    place: NDArray[Any]
    outputs: NDArray[Any] | dict[str, NDArray[Any]]

    def copied(self) -> NDArray[Any] | dict[str, NDArray[Any]]:
        """The outputs, as they are now."""
        if isinstance(self.outputs, dict):
            return {name: array.copy() for name, array in self.outputs.items()}
        return self.outputs.copy()


class Caller(Protocol):
    """Copies a row in, sends its ticket and waits LOOK_AFTER at most, while nothing else is in flight on the lane."""

    def __call__(self, row: NDArray[Any], sequence: int, seconds: float) -> Any:
        """Gives a copy of the outputs, an array or a dict of them, or as an int why there are none: a failure's code,
        NOT_SENT where the engine serves no more, NOT_ANSWERED where no answer came in time.
        """

    def message(self) -> str:
        """What the last failure said."""


class Door(Protocol):
    """Carries tickets of one lane to engines and answers back. Not thread-safe: the model sees to that.

    `send`, `exchange` and `caller` raise TooManyFiles where the way to the engine has to be opened and cannot be.
    """

    def send(self, ticket: Outgoing) -> None:
        """Send without waiting."""

    def exchange(self, ticket: Outgoing, timeout: float) -> Answer | None:
        """Send a ticket while no other is in flight and wait for its answer; None when none came in time."""

    def caller(self, row: CalledRow, engine: NDArray[Any], epoch: int) -> Caller | None:
        """What makes whole calls of one row to the only engine there is; None where there are several.

        Args:
            engine: its record of board.ENGINE, shape (1,); `epoch` is the life of it that is meant.
        """

    def receive(self, timeout: float) -> Sequence[Answer]:
        """Answers that came, after at most `timeout` seconds; empty when none did."""

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """Have `arrived` called in the loop's thread whenever answers may have come."""

    def close(self) -> None:
        """Let go; tickets in flight stay unanswered."""
