"""The transport of lanes of a tcp:// server: tickets with their rows, sent to its relay."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jurybox.client.in_flight import LOOK_AFTER, Answer, Claim, InFlight
from jurybox.client.link import RowsHere
from jurybox.client.remote.connection import IDLE, Connection
from jurybox.client.transports.transport import (
    HEAD,
    NAMED,
    NOT_ANSWERED,
    NOT_FIT,
    NOT_SENT,
    OK,
    SERVING,
    RowPlace,
    SocketCaller,
    Transport,
    Watching,
    read_reply,
)
from jurybox.client.transports.zmq_socket import ZmqSocket
from jurybox.protocol import row_frames
from jurybox.protocol.errors import Code, Error, ProtocolMismatch
from jurybox.protocol.wire import PACK_TICKET, PREFIX

if TYPE_CHECKING:
    import asyncio

    from jurybox.native import Zmtp

_ATTEMPT_AGAIN = 0.02  # seconds to sleep in `receive` while there is no connection to wait for


class SentRows(NamedTuple):
    """The rows of a ticket, and the connection's incarnation that it was sent to."""

    first: int
    rows: int
    incarnation: int


class TcpTransport(Transport):
    """A transport to the relay of a tcp:// server.

    An answer stays with the link until it is in its rows, so an interrupted call loses none. A link that was replaced
    has lost its tickets: the lane sends them again over the new one, and the relay recognizes their sequence numbers
    and computes none twice.

    Args:
        connection: the lane's connection to the relay.
        rows: the lane's rows: inputs are read from them and outputs are written to them.
        lease: the relay's identifier of the lane.
    """

    def __init__(self, connection: Connection, rows: RowsHere, lease: int) -> None:
        self._connection = connection
        self._rows = rows
        self._lease = lease
        self._in_flight: dict[int, SentRows] = {}  # by sequence
        self._answers: dict[int, Answer] = {}  # that are in their rows, and not settled
        self._reading: dict[int, weakref.ref[Claim]] = {}  # the calls that copy an answer to its rows
        self._incarnation = connection.incarnation
        self._watching: Watching | None = None
        self._watched = -1  # descriptor that the event loop watches; it may be closed before it is unwatched
        # A weak reference, to avoid a cycle: a dropped lane must be closed at once, not by the cycle collector.
        this = weakref.ref(self)

        def renewed() -> None:
            if (transport := this()) is not None and transport._watching is not None:
                transport._watch(transport._watching)

        connection.renewed = renewed

    def send(self, ticket: InFlight) -> None:
        if (link := self._ready_for(ticket)) is None:
            return  # the lane's next check finds that the connection was replaced
        self._in_flight[ticket.sequence] = SentRows(ticket.first, ticket.rows, ticket.incarnation)
        link.send(ticket.sequence, _frames(self._lease, self._rows, ticket))
        self._sent_by(link)

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        until = time.monotonic() + timeout
        if (link := self._ready_for(ticket)) is None:
            return None
        self._in_flight[ticket.sequence] = SentRows(ticket.first, ticket.rows, ticket.incarnation)
        frames = _frames(self._lease, self._rows, ticket)
        message = link.exchange(ticket.sequence, frames, max(0.0, until - time.monotonic()))
        self._sent_by(link)
        if message is None:
            return None
        if (answer := self._read(message)) is not None:
            self.settled(answer)
        return answer

    def caller(self, place: RowPlace) -> _TcpCaller | None:
        """See Transport.caller. None over libzmq, and for rows of variable size, which need more than their bytes."""
        if (
            isinstance(self._connection.link, ZmqSocket)
            or place.input is None
            or place.extents is not None
            or place.outputs is None
            or place.rows != 1
        ):
            return None
        return _TcpCaller(self._connection, self._rows, self._lease, place, self._in_flight)

    def receive(self, timeout: float) -> Sequence[Answer]:
        self._connection.mend()
        link = self._connection.link
        if link is None or (link.broken and not link.arrived):
            if not self._answers:
                time.sleep(min(timeout, _ATTEMPT_AGAIN))
            return list(self._answers.values())
        for sequence, message in link.answers(0 if self._answers else timeout):
            if sequence in self._answers or self._reads(sequence):
                continue
            try:
                answer = self._read(message)
            except ProtocolMismatch:
                link.settled(sequence)
                raise
            if answer is not None and answer.sequence == 0:
                return [answer]
            if answer is None:
                link.settled(sequence)
        return list(self._answers.values())

    def settled(self, answer: Answer) -> None:
        self._answers.pop(answer.sequence, None)
        self._in_flight.pop(answer.sequence, None)
        if (link := self._connection.link) is not None:
            link.settled(answer.sequence)

    def holds(self, ticket: InFlight) -> bool:
        if ticket.sequence in self._answers:
            return True
        link = self._connection.link
        return ticket.incarnation == self._connection.incarnation and link is not None and link.holds(ticket.sequence)

    def is_reading(self, ticket: InFlight) -> bool:
        return self._reads(ticket.sequence)

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        earlier = self._watching
        if earlier is None or earlier.loop is not loop:
            if earlier is not None:
                self._unwatch(earlier)
            self._watching = watching = Watching(loop, arrived)
            self._watch(watching)

    def close(self) -> None:
        if self._watching is not None:
            self._unwatch(self._watching)
        self._connection.close()

    def forked(self) -> None:
        """See Transport.forked. Only this process's descriptor is closed; socket and poll set are the parent's too."""
        self._watching = None
        self._connection.close()

    def _read(self, bodies: Sequence[Any]) -> Answer | None:
        """Parse an answer and copy its outputs to their rows; return None if no call waits for it any more.

        A nested call leaves an answer that is being copied to the call that does so: it would settle it, and the rows
        could be others' before the copy is complete.
        """
        answer = read_reply(bytes(bodies[0]), "the server")
        sequence = answer.sequence
        if sequence == 0:
            return answer
        if answer.incarnation != self._connection.incarnation or (place := self._in_flight.get(sequence)) is None:
            return None
        if self._reads(sequence):
            return None
        claim = Claim()
        self._reading[sequence] = weakref.ref(claim)
        try:
            _land(answer, bodies, self._rows, place)
        finally:
            self._reading.pop(sequence, None)
        self._answers[sequence] = answer
        return answer

    def _reads(self, sequence: int) -> bool:
        return (reading := self._reading.get(sequence)) is not None and reading() is not None

    def _meant_for(self, ticket: InFlight) -> None:
        """Forget tickets of earlier incarnations: late answers to them must not be written to rows in use again."""
        if ticket.incarnation != self._incarnation:
            self._incarnation = ticket.incarnation
            for sequence in list(self._in_flight):
                if (place := self._in_flight.get(sequence)) is not None and place.incarnation != ticket.incarnation:
                    self._in_flight.pop(sequence, None)

    def _sent_by(self, link: Zmtp | ZmqSocket) -> None:
        """Look for answers in the event loop: sending cleared the edge-triggered signal of zmq.FD, maybe of one."""
        if (watching := self._watching) is not None and watching.on and isinstance(link, ZmqSocket):
            watching.tell()

    def _ready_for(self, ticket: InFlight) -> Zmtp | ZmqSocket | None:
        """Return the link if the ticket belongs to the current connection, else None."""
        connection = self._connection
        connection.mend()
        self._meant_for(ticket)
        if (link := connection.link) is not None and link.ready and link.silence >= IDLE:
            if not connection.stands():
                return None
            self._incarnation = ticket.incarnation = connection.incarnation  # the ticket was not sent before
        return connection.link if ticket.incarnation == connection.incarnation else None

    def _watch(self, watching: Watching) -> None:
        """Make the event loop watch the connection's link, instead of the one that it has replaced."""
        while True:
            self._unwatch(watching)
            if (link := self._connection.link) is None or link.broken:
                return
            descriptor = self._watched = link.descriptor
            try:
                watching.read(descriptor)
                link.watched(on=True)
            except OSError:
                if self._connection.link is link:
                    raise
            if self._connection.link is link:
                return
            watching.unread(descriptor)  # a nested call has replaced the link: this may be another's descriptor by now

    def _unwatch(self, watching: Watching) -> None:
        if self._watched >= 0:
            watching.unread(self._watched)
        self._watched = -1


class _TcpCaller(SocketCaller):
    """A caller that sends a row directly from the caller's array and returns the outputs as new arrays."""

    def __init__(
        self,
        connection: Connection,
        rows: RowsHere,
        lease: int,
        place: RowPlace,
        in_flight: dict[int, SentRows],
    ) -> None:
        super().__init__(place, connection.engines)
        self._connection = connection
        self._rows = rows
        self._lease = lease
        self._in_flight = in_flight  # shared with the transport, which receives late answers
        self._mine = SentRows(place.first, 1, place.incarnation)
        outputs: Any = place.outputs
        self._alone = type(outputs) is not dict
        named = {"": outputs} if self._alone else outputs
        self._outputs = [(name, array.dtype, array.shape, array.nbytes) for name, array in named.items()]

    def __call__(self, row: Any, sequence: int, seconds: float) -> Any:
        place, connection, link = self._place, self._connection, self._connection.link
        if self._incarnations.item(0) != place.incarnation or self._states.item(0) != SERVING:
            return NOT_SENT
        if link is None or not link.ready or row is None:
            return NOT_SENT
        if link.silence >= IDLE and not (connection.stands() and connection.link is link):
            return NOT_SENT
        if not place.takes(row):
            return NOT_FIT
        left = max(1, int(seconds * 1e9))
        self.deadline = time.monotonic_ns() + left
        ticket = PREFIX + PACK_TICKET.pack(sequence, self._lease, left, 0, 0, place.first, 1, 0, 0, place.incarnation)
        self._in_flight[sequence] = self._mine
        message = link.exchange(sequence, (ticket, row), seconds if seconds < LOOK_AFTER else LOOK_AFTER)
        if message is None:
            place.write(row)  # in case it must be sent again
            return NOT_ANSWERED
        self._in_flight.pop(sequence, None)
        reply = self._reply = bytes(message[0])
        if reply[-4:] == OK and len(reply) == HEAD and reply[:NAMED] == ticket[:NAMED]:
            return self._outputs_of(message)
        answer = read_reply(reply, "the server")
        self._message = answer.message
        if answer.sequence == 0:
            raise ProtocolMismatch(answer.message)
        _land(answer, message, self._rows, self._mine)  # stores a failed row's reason
        return answer.code

    def _outputs_of(self, message: Sequence[Any]) -> Any:
        if len(message) != len(self._outputs) + 1:
            raise ProtocolMismatch(f"{len(message) - 1} outputs came, {len(self._outputs)} were expected")
        outputs = {}
        for (name, dtype, shape, size), body in zip(self._outputs, message[1:], strict=True):
            if len(body) != size:
                raise ProtocolMismatch(f"output {name!r}: {len(body)} bytes came, {size} were expected")
            outputs[name] = np.frombuffer(body, dtype).reshape(shape).copy()
        return outputs[""] if self._alone else outputs


def _frames(lease: int, rows: RowsHere, ticket: InFlight) -> list[Any]:
    """Return the frames of a ticket: its record and its rows."""
    left = max(1, ticket.deadline - time.monotonic_ns())  # a duration, because hosts do not share a monotonic clock
    first, n = ticket.first, ticket.rows
    record = PACK_TICKET.pack(ticket.sequence, lease, left, 0, 0, first, n, 0, ticket.version, ticket.incarnation)
    return [PREFIX + record, *row_frames.packed(rows.columns, "inputs", first, n)]


def _land(answer: Answer, frames: Sequence[Any], rows: RowsHere, place: SentRows) -> None:
    """Copy the outputs of an answer, or the reasons for their lack, to their rows. Raises ProtocolMismatch."""
    bodies = [memoryview(frame) for frame in frames[1:]]
    first, n = place.first, place.rows
    try:
        if answer.code in (Code.OK, Code.ROW_FAILED):
            row_frames.unpack(rows.columns, "outputs", first, n, bodies, failed=answer.code != Code.OK)
        elif answer.code == Code.SESSION_LOST:
            row_frames.unpack_reasons(rows.columns, first, n, bodies)
    except Error as error:
        raise ProtocolMismatch(str(error)) from None
