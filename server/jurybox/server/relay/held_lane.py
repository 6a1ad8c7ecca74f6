"""A lane held for a client of another host, and its tickets in flight."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray

from jurybox.client.doors.door import InFlight
from jurybox.client.lane import Lane
from jurybox.protocol.errors import MOST_TEXT, Code, Error, cut
from jurybox.protocol.wire import PACK_REPLY, PREFIX

_LONGEST_NS = 3_600_000_000_000  # an hour: no ticket waits longer


class InlineTicket(NamedTuple):
    """A ticket as it came: from which connection, and what of its record counts here."""

    sender: bytes
    sequence: int
    left: int  # ns until its deadline
    first: int  # row, counted from the lane's first
    rows: int
    version: int
    epoch: int  # of the client's connection


class HeldLane:
    """Carries tickets of one client to the engines.

    Args:
        lane: leased by the relay.
        owner: the connection whose end is the end of the lease.
    """

    def __init__(self, lane: Lane, owner: bytes, first: int, rows: int) -> None:
        self.lane = lane
        self.owner = owner
        self._first = first
        self._rows = rows
        self._in_flight: dict[int, tuple[InlineTicket, InFlight]] = {}
        self._busy = np.zeros(rows, np.bool_)
        self._row_bytes = sum(array[:1].nbytes for array in lane.outputs.values())

    @property
    def waits(self) -> bool:
        """Whether a ticket is in flight."""
        return bool(self._in_flight)

    def submit(self, ticket: InlineTicket, frames: Sequence[zmq.Frame]) -> None:
        """Copy a ticket's rows to the lane's and send it on.

        Raises:
            Error: it does not fit the lane or the model.
        """
        first, end = ticket.first, ticket.first + ticket.rows
        if not 0 < ticket.rows <= self._rows or end > self._rows:
            raise Error(f"rows {first}..{end - 1} were sent, this lane has {self._rows}", Code.REFUSED)
        if (known := self._in_flight.get(ticket.sequence)) is not None:
            if (known[0].first, known[0].rows) != (first, ticket.rows):
                raise Error(
                    f"ticket {ticket.sequence} came again with other rows: {known[0].rows} from row {known[0].first} "
                    f"came first, {ticket.rows} from row {first} now; a number is for one request",
                    Code.MALFORMED,
                )
            # Its client lost the connection and sends it again: the answer goes to where it is now.
            self._in_flight[ticket.sequence] = (ticket, known[1])
            return
        if self._busy[first:end].any():
            raise Error("some of these rows belong to a ticket that is not answered yet", Code.BUSY)
        inputs = self.lane.inputs
        if len(frames) != len(inputs):
            raise Error(f"{len(frames)} tensors came, the model takes {len(inputs)}", Code.SPEC_MISMATCH)
        start = self._first + first
        for (name, array), frame in zip(inputs.items(), frames, strict=True):
            target = array[start : start + ticket.rows]
            if len(frame) != target.nbytes:
                raise Error(
                    f"input {name!r}: {len(frame)} bytes came, {ticket.rows} rows of {array.dtype}"
                    f"{list(array.shape[1:])} have {target.nbytes}",
                    Code.SPEC_MISMATCH,
                )
            target[...] = np.frombuffer(frame.buffer, array.dtype).reshape(target.shape)
        deadline = time.monotonic_ns() + min(max(ticket.left, 1), _LONGEST_NS)
        self._busy[first:end] = True
        self._in_flight[ticket.sequence] = (
            ticket,
            self.lane.submit(start, ticket.rows, deadline, ticket.version, weakref.ref(self)),
        )

    def answers(self, has_room: Callable[[bytes, int], bool] = lambda *_: True) -> Iterator[list[Any]]:
        """What has been answered since, as frames to send.

        An answer for which its client has left no room stays in its rows, which are the client's own, until it has.
        """
        self.lane.receive_now()
        answered = [(came, sent) for came, sent in self._in_flight.values() if sent.answer is not None]
        for came, sent in answered:
            if has_room(came.sender, sent.rows * self._row_bytes):
                yield self._reply(came, sent)

    @property
    def owes(self) -> bool:
        """Whether an answer is there that has not been sent."""
        return any(sent.answer is not None for _, sent in self._in_flight.values())

    def look_after(self) -> None:
        """See whether engines and server live; raises ServerGone. What has been answered is in `answers` then."""
        self.lane.receive(0)

    def close(self) -> None:
        """Give the lane back."""
        self._in_flight.clear()
        self.lane.close()

    def _reply(self, came: InlineTicket, sent: InFlight) -> list[Any]:
        del self._in_flight[came.sequence]
        self._busy[came.first : came.first + came.rows] = False
        answer = sent.answer
        assert answer is not None
        frames: list[Any] = [came.sender, head(came, answer.code, answer.message, answer.version)]
        if answer.code == Code.OK:
            frames += [_bytes(array[sent.first : sent.first + sent.rows]) for array in self.lane.outputs.values()]
        return frames


def head(ticket: InlineTicket, code: int, message: str, version: int = 0) -> bytes:
    """The first frame of an answer."""
    return PREFIX + PACK_REPLY.pack(ticket.sequence, version, ticket.epoch, code) + cut(message, MOST_TEXT)


def _bytes(rows: NDArray[Any]) -> bytes:
    """A copy: the client may write the next ticket to these rows before the message is gone."""
    return rows.tobytes()
