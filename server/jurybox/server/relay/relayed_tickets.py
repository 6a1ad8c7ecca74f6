"""The lanes that the relay holds for remote clients, and their tickets."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import zmq

from jurybox import native
from jurybox.client.in_flight import InFlight
from jurybox.client.lane import Lane
from jurybox.client.transports.shm import ShmTransport, Words
from jurybox.client.transports.transport import NotSent
from jurybox.protocol import row_frames
from jurybox.protocol.control_pb2 import Lease
from jurybox.protocol.errors import MOST_TEXT, Code, Error, TooManyFiles, cut
from jurybox.protocol.wire import PACK_REPLY, PREFIX

_MOST_HEAD = 255 + len(PREFIX) + PACK_REPLY.size + MOST_TEXT  # bytes of an answer's first frames: routing id and head


_LONGEST_NS = 3_600_000_000_000  # one hour, the maximum time-out of a ticket


class InlineTicket(NamedTuple):
    """A received ticket: the routing id of its connection, and the relevant fields of its record."""

    sender: bytes
    sequence: int
    left: int  # ns until its deadline
    first: int  # its first row, relative to the lane's first row
    rows: int
    version: int
    incarnation: int  # of the client's connection


class RelayedTickets:
    """Sends the tickets of one client to the engines.

    Its tickets in flight are managed either by this object or by a native.RelayLane. The latter handles all regular
    tickets as long as none is in flight here, and hands its tickets over for any other operation on the lane.

    Args:
        lane: the lane leased by the relay.
        owner: the connection that owns the lease; the lease ends with it.
        call: the number of the control call that leased the lane.
        granted: the answer to that call.
        first: the lane's first row in the arena.
        rows: the lane's number of rows.
    """

    def __init__(self, lane: Lane, owner: bytes, call: bytes, granted: Lease, first: int, rows: int) -> None:
        self.lane = lane
        self.owner = owner
        self.call = call
        self.granted = granted
        self._first = first
        self._rows = rows
        self._in_flight: dict[int, tuple[InlineTicket, InFlight]] = {}
        self._busy = bytearray(rows)
        self._inputs = row_frames.PlainFrames(lane.columns, "inputs")
        self._outputs = row_frames.PlainFrames(lane.columns, "outputs")
        self._shm = lane.transport if isinstance(lane.transport, ShmTransport) else None
        self._this = weakref.ref(self)
        self._native: native.RelayLane | None = None
        # Its connection, and the engines that it uses, each with its incarnation.
        self._native_for: tuple[native.Zmtp, tuple[tuple[int, int], ...]] | None = None
        self._sender = b""

    @property
    def waits(self) -> bool:
        """Whether a ticket is in flight."""
        return bool(self._in_flight) or (self._native is not None and self._native.in_flight > 0)

    def connect(self, sender: bytes, link: native.Zmtp) -> bool:
        """After a `submit`: let `take_in` handle the next regular tickets of this connection.

        Returns:
            Whether anything changed: False if the rows do not have a fixed size, if no engine serves, or if `take_in`
            handles them already.
        """
        if not self._inputs or not self._outputs or self._shm is None or not (able := self.lane.able()):
            return False
        if self._native_for == (link, able):
            return False
        self._take_back()
        engines = []
        for engine, incarnation in able:
            try:
                client = self._shm.attach(engine, incarnation)
            except (TooManyFiles, NotSent):
                client = None
            if client is None:  # it is being replaced, for example
                return False
            engines.append((client, self.lane.record(engine), incarnation))
        if self._native is not None:
            self._native.close()
        memory = self._inputs.memory(), self._outputs.memory()
        self._native = native.RelayLane(link, engines, self.granted.lease, self._first, self._rows, *memory, PREFIX)
        self._native_for, self._sender = (link, able), sender
        return True

    def take_no_more(self) -> None:
        """Take over the tickets in flight from `take_in`, which does nothing from now on."""
        self._take_back()
        if self._native is not None:
            self._native.close()
        self._native = self._native_for = None

    def take_in(self) -> int:
        """Send on the regular tickets from its connection; return their number. `submit` must handle what is left."""
        return 0 if self._native is None else self._native.take_in()

    def answer(self) -> bool:
        """Send the answers to tickets of `take_in`; return False if `answers` must handle them."""
        return self._native is not None and self._native.answer()

    def stay(self, descriptors: Sequence[int], pause: float, seconds: float) -> bool:
        """Run `take_in` and `answer` in a loop for a single client; return whether its connection has other messages.

        See native.RelayLane.stay.
        """
        if self._native is None or self._native_for is None or self._shm is None or not self._native.mine:
            return False
        self._shm.quiet()
        self._native.stay(descriptors, pause, seconds)
        return self._native_for[0].arrived

    @property
    def sender(self) -> bytes:
        """The routing id of the connection that `take_in` reads."""
        return self._sender

    def _take_back(self) -> None:
        """Take over all tickets in flight from the native lane."""
        if self._native is None or self._native_for is None or not self._native.mine:
            return
        engines = self._native_for[1]
        for at, number, sequence, first, rows, version, client, submitted, deadline in self._native.hand_over():
            ticket = InFlight(number, self._first + first, rows, deadline, version)
            ticket.owner = self._this
            self.lane.adopt(ticket, *engines[at], submitted)
            came = InlineTicket(self._sender, sequence, 0, first, rows, version, client)
            self._busy[first : first + rows] = b"\1" * rows
            self._in_flight[sequence] = (came, ticket)
        self.lane.advance(self._native.number)

    def _give(self) -> None:
        """If nothing is in flight here and the engines are the same, let the native lane handle the next tickets."""
        if self._native is None or self._native_for is None or self._in_flight or self.lane.in_flight:
            return
        if self._native_for[1] == self.lane.able():
            self._native.take_over(self.lane.advance())

    def watch(self, loop: asyncio.AbstractEventLoop, words: Words, arrived: Callable[[], None]) -> None:
        """Have answers signalled to `words`, or with a transport other than shm, by `arrived` in the loop's thread."""
        if self._shm is not None:
            self._shm.tell(words)
        else:
            self.lane.watch(loop, arrived)

    def arm(self) -> bool:
        """Request a signal for the next answer; return whether one has arrived already."""
        return self._shm is not None and self._shm.arm()

    def spin(self) -> bool:
        """Spin for some microseconds; return whether an answer arrived. Use it only for a single client."""
        return self._shm is not None and self._shm.spin()

    def submit(self, ticket: InlineTicket, frames: Sequence[Any]) -> None:
        """Copy a ticket's rows to the lane and send it.

        Raises:
            Error: it does not fit the lane or the model.
        """
        self._take_back()
        try:
            self._submit(ticket, frames)
        finally:
            self._give()

    def _submit(self, ticket: InlineTicket, frames: Sequence[Any]) -> None:
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
            # Its client lost the connection and sends the ticket again: the answer goes to the newest connection, also
            # if what was sent over an earlier one arrives last.
            if ticket.incarnation >= known[0].incarnation:
                self._in_flight[ticket.sequence] = (ticket, known[1])
            return
        if any(self._busy[first:end]):
            raise Error("some of these rows belong to a ticket that is not answered yet", Code.BUSY)
        start = self._first + first
        bodies = [frame.buffer if isinstance(frame, zmq.Frame) else frame for frame in frames]
        if self._inputs:
            self._inputs.write(start, ticket.rows, bodies)
        else:
            row_frames.unpack(self.lane.columns, "inputs", start, ticket.rows, [memoryview(body) for body in bodies])
        deadline = time.monotonic_ns() + min(max(ticket.left, 1), _LONGEST_NS)
        try:
            sent = self.lane.submit(start, ticket.rows, deadline, ticket.version, self._this)
        except Exception:
            has = next((each for each in self.lane.in_flight.values() if each.first == start), None)
            if has is None:
                raise
            sent = has  # the lane's next check sends it, unless it was sent
        self._busy[first:end] = b"\1" * ticket.rows
        self._in_flight[ticket.sequence] = ticket, sent

    def answers(self, has_room: Callable[[bytes, int], bool] = lambda *_: True) -> Iterator[list[Any]]:
        """Yield new answers as frames to send.

        An answer that does not fit into its client's limit now stays in its rows, which belong to the client.
        """
        if self._native is not None and self._native.in_flight:
            self._take_back()
        self.lane.receive_now()
        answered = [(*each, each[1].answer.code) for each in self._in_flight.values() if each[1].answer is not None]
        for came, sent, code in answered:
            size = self._outputs.row_bytes * sent.rows or row_frames.size(
                self.lane.columns, "outputs", sent.first, sent.rows
            )
            if not has_room(came.sender, size + _MOST_HEAD):
                continue
            frames = self._frames(came, sent)
            # Sizes, state and reasons of failed rows add to the estimate; a message above the limit would be dropped.
            plain = self._outputs and code in (Code.OK, Code.MODEL_FAILED)
            if plain or has_room(came.sender, sum(map(len, frames))):
                self._settle(came)
                yield frames

    @property
    def owes(self) -> bool:
        """Whether an answer has not been sent yet."""
        return any(sent.answer is not None for _, sent in self._in_flight.values())

    def look_after(self) -> None:
        """Check engines and server. New answers are in `answers` afterwards. Raises ServerGone."""
        if self._native is not None and self._native.in_flight:
            same = self._native_for is not None and self._native_for[1] == self.lane.able()
            if same and not self._native.overdue():
                return  # all tickets in flight are newer than the last check
            self._take_back()
        self.lane.receive(0)

    def input_bytes(self, rows: int) -> int:
        """Return the size of the inputs of `rows` rows in bytes; 0 if it differs from row to row."""
        return self._inputs.row_bytes * rows

    def close(self) -> None:
        """Release the lane."""
        if self._native is not None:
            self._native.close()
        self._in_flight.clear()
        self._inputs.close()
        self._outputs.close()
        self.lane.close()

    def _settle(self, came: InlineTicket) -> None:
        del self._in_flight[came.sequence]
        self._busy[came.first : came.first + came.rows] = bytes(came.rows)
        self._give()

    def _frames(self, came: InlineTicket, sent: InFlight) -> list[Any]:
        answer = sent.answer
        assert answer is not None
        frames: list[Any] = [came.sender, head(came, answer.code, answer.message, answer.version)]
        if answer.code == Code.OK and self._outputs:
            frames += self._outputs.copies(sent.first, sent.rows)
        elif answer.code in (Code.OK, Code.ROW_FAILED):
            failed = answer.code != Code.OK
            rows = row_frames.packed(self.lane.columns, "outputs", sent.first, sent.rows, failed=failed)
            # Copies: the client may write the next ticket to these rows before the message is sent.
            frames += [part if type(part) is bytes else part.tobytes() for part in rows]
        elif answer.code == Code.SESSION_LOST:
            frames.append(row_frames.reasons(self.lane.columns, sent.first, sent.rows).tobytes())
        return frames


def head(ticket: InlineTicket, code: int, message: str, version: int = 0) -> bytes:
    """Return the first frame of an answer."""
    return PREFIX + PACK_REPLY.pack(ticket.sequence, version, ticket.incarnation, code) + cut(message, MOST_TEXT)
