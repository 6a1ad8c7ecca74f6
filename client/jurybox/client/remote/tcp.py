"""A connection to a tcp:// server: control calls, and lanes through its relay, tickets with their rows behind them."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from jurybox.client.control import Control, Wires
from jurybox.client.in_flight import LOOK_AFTER, Answer, InFlight
from jurybox.client.lane import Lane
from jurybox.client.link import ControlLink, RowsHere, spec_of
from jurybox.client.remote.connection import IDLE, Connection, DirectConnection, Keys, new_identity, open_socket
from jurybox.client.transports.direct import HEAD, can_dial
from jurybox.client.transports.transport import (
    NOT_ANSWERED,
    NOT_FIT,
    NOT_SENT,
    RowPlace,
    SocketCaller,
    Transport,
    Watching,
    read_reply,
)
from jurybox.protocol import row_frames
from jurybox.protocol.control_pb2 import ControlReply, Lease, ReleaseRequest
from jurybox.protocol.errors import Code, Error, ProtocolMismatch, ServerGone
from jurybox.protocol.scoreboard import EngineState
from jurybox.protocol.spec import ModelSpec
from jurybox.protocol.wire import PACK_TICKET, PREFIX

if TYPE_CHECKING:
    import asyncio

    from jurybox.native import Zmtp

_ATTEMPT_AGAIN = 0.02  # seconds to let pass where there is no connection to wait for
_OK = bytes(4)
_NAMED = len(PREFIX) + 8  # bytes of a reply: the prefix and the sequence
_SERVING = int(EngineState.SERVING)
_ATTEMPT = 3.0  # seconds for one connection of those tried until the first answer


class TcpLink(ControlLink):
    """Lanes are the relay's, held for this client as long as its connection stands.

    Args:
        address: tcp://host:port.
        keys: CURVE keys; None: in the open.
        timeout: seconds to wait for a server that is still starting.
    """

    def __init__(self, address: str, keys: Keys | None, timeout: float) -> None:
        self._address = address
        self._keys = keys
        self._left: deque[ReleaseRequest] = deque()  # leases of lanes that were lost without a word
        super().__init__(self._control_anew())
        self._greet_first(timeout)

    def lease(self, name: str, rows: int, timeout: float) -> tuple[Lane, ModelSpec, int]:
        deadline = time.monotonic() + timeout
        with self._lock:
            lease = self._grant(name, rows, deadline, timeout)
            request = ReleaseRequest(lane=lease.lane, lease=lease.lease)
            left = self._left
            try:
                spec = spec_of(lease.model)
                memory = RowsHere(spec, lease.rows)
                assert self._wires is not None
                connection: Connection | DirectConnection
                transport: TcpTransport | DirectTcpTransport
                if self._keys is None and can_dial(self._address):
                    connection = DirectConnection(self._address)
                    transport = DirectTcpTransport(connection, memory, lease.lease)
                else:
                    connection = Connection(self._wires.context, self._address, self._keys)
                    transport = TcpTransport(connection, memory, lease.lease)
                lane = Lane(
                    name,
                    connection,
                    memory,
                    transport,
                    lease.lease,
                    0,
                    lease.rows,
                    lambda: self._release(request),
                    leave=lambda: left.append(request),
                    far=True,
                )
            except BaseException:
                left.append(request)
                raise
        return lane, spec, lease.model.max_batch

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        self._left = deque()
        self._open_control = self._control_anew()

    def _control_anew(self) -> Callable[[Wires], Control]:
        """One identity for all its sockets, since leases are the client's that bears it; another in a forked child."""
        address, keys, identity, left = self._address, self._keys, new_identity(), self._left

        def unwanted(lease: Lease) -> None:
            left.append(ReleaseRequest(lane=lease.lane, lease=lease.lease))

        return lambda wires: Control(
            wires.context, address, lambda: open_socket(wires.context, address, keys, identity), far=unwanted
        )

    def _release(self, request: ReleaseRequest) -> None:
        # Unanswered, the server still notices when the connection ends.
        with contextlib.suppress(Error):
            if not self._closed:
                self._control.call(1.0, release=request)

    def _call(self, timeout: float, **request: Any) -> ControlReply:
        while self._left:
            self._release(self._left[0])
            self._left.popleft()
        return super()._call(timeout, **request)

    def _greet(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while True:
            try:
                self._call(min(_ATTEMPT, max(0.1, until - time.monotonic())), hello=self.hello())
                return
            except ServerGone:
                if time.monotonic() < until:
                    continue  # over a new connection: one whose handshake failed while the server started is no use
                asked = "with these keys" if self._keys else "without keys: if the server has some, give its public one"
                raise ServerGone(
                    f"no answer from {self._address} within {timeout:.1f} s: is a server running there that listens "
                    f"with server.tcp? It was asked {asked} (server_key, client_key)"
                ) from None


class _RelayTransport(Transport):
    """To the relay of a tcp:// server.

    Args:
        rows: where tickets find their inputs and answers leave their outputs.
        lease: the relay's name for the lane.
    """

    def __init__(self, connection: Connection | DirectConnection, rows: RowsHere, lease: int) -> None:
        self._rows = rows
        self._lease = lease
        self._in_flight: dict[int, tuple[int, int]] = {}  # sequence -> (first row, rows), of this incarnation
        self._incarnation = connection.incarnation
        self._watching: Watching | None = None

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        earlier = self._watching
        if earlier is None or earlier.loop is not loop:
            if earlier is not None:
                self._unwatch(earlier)
            self._watching = watching = Watching(loop, arrived)
            self._watch(watching)

    def _watch(self, watching: Watching) -> None:
        """Have the loop read the connection."""
        raise NotImplementedError

    def _unwatch(self, watching: Watching) -> None:
        """No longer, since it is about to be closed."""
        raise NotImplementedError

    def _meant_for(self, ticket: InFlight) -> None:
        """What was sent over an earlier connection may be answered, to others' rows."""
        if ticket.incarnation != self._incarnation:
            self._in_flight.clear()
            self._incarnation = ticket.incarnation


class TcpTransport(_RelayTransport):
    """Over libzmq.

    A message has several frames, each sent and taken in by a call of its own. So whatever breaks off in the midst of
    one, such as a KeyboardInterrupt, costs the connection: the lane sends its tickets again over the next, and the
    relay, which knows them by their numbers, computes none twice.
    """

    def __init__(self, connection: Connection, rows: RowsHere, lease: int) -> None:
        super().__init__(connection, rows, lease)
        self._connection = connection
        self._watched = -1  # descriptor that the loop reads

    def send(self, ticket: InFlight) -> None:
        self._mend()
        self._meant_for(ticket)
        if ticket.incarnation != self._connection.incarnation:
            return  # it broke just now: the lane's next look finds that
        parts = _frames(self._lease, self._rows, ticket)
        self._connection.torn = True
        try:
            self._connection.socket.send_multipart(parts, zmq.NOBLOCK)
            self._in_flight[ticket.sequence] = (ticket.first, ticket.rows)
        except zmq.Again:
            pass  # nothing moves any more: the lane's next look finds the connection broken
        self._connection.torn = False
        if (watching := self._watching) is not None and watching.on:
            # Sending reads the socket's signal, and with it perhaps the news of an answer.
            watching.tell()

    def receive(self, timeout: float) -> Sequence[Answer]:
        self._mend()
        socket = self._connection.socket
        if timeout and not socket.poll(int(timeout * 1000 + 0.999)):
            return ()
        answers: list[Answer] = []
        while True:
            self._connection.torn = True
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._connection.torn = False
                return answers
            try:
                answer = self._read(frames)
            except ProtocolMismatch:
                self._connection.torn = False
                raise
            self._connection.torn = False
            if answer is not None:
                answers.append(answer)

    def holds(self, ticket: InFlight) -> bool:
        return ticket.incarnation == self._incarnation and ticket.sequence in self._in_flight

    def close(self) -> None:
        if self._watching is not None:
            self._unwatch(self._watching)
        self._connection.close()

    def forked(self) -> None:
        """As Transport.forked. pyzmq closes nothing in a child, and an event loop's poll set would be the parent's."""
        self._watching = None

    def _mend(self) -> None:
        """Begin anew where an earlier message was broken off."""
        if not self._connection.torn:
            return
        if self._watching is not None:
            self._unwatch(self._watching)
        self._connection.renew()
        if self._watching is not None:
            self._watch(self._watching)

    def _watch(self, watching: Watching) -> None:
        self._watched = int(self._connection.socket.getsockopt(zmq.FD))
        watching.read(self._watched)

    def _unwatch(self, watching: Watching) -> None:
        watching.unread(self._watched)

    def _read(self, frames: Sequence[zmq.Frame]) -> Answer | None:
        """The answer in these frames, its outputs copied to their rows; None when nobody waits for it any more."""
        bodies = [frames[0].bytes, *(frame.buffer for frame in frames[1:])]
        return _read(bodies, self._rows, self._in_flight, self._connection.incarnation)


class DirectTcpTransport(_RelayTransport):
    """Over a connection that has no thread of its own. No message is ever broken off in its midst."""

    def __init__(self, connection: DirectConnection, rows: RowsHere, lease: int) -> None:
        super().__init__(connection, rows, lease)
        self._connection = connection
        self._watched = -1  # descriptor that the loop reads; its link may be closed before the loop is told
        # Of weak references: a lane that is lost is closed when it is collected, and must not wait for the collector.
        this = weakref.ref(self)

        def renewed() -> None:
            if (transport := this()) is not None:
                transport._renewed()

        connection.renewed = renewed

    def send(self, ticket: InFlight) -> None:
        if (link := self._ready_for(ticket)) is not None:
            self._in_flight[ticket.sequence] = (ticket.first, ticket.rows)
            link.send(ticket.sequence, _frames(self._lease, self._rows, ticket))

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        until = time.monotonic() + timeout
        if (link := self._ready_for(ticket)) is None:
            return None
        self._in_flight[ticket.sequence] = (ticket.first, ticket.rows)
        frames = _frames(self._lease, self._rows, ticket)
        message = link.exchange(ticket.sequence, frames, max(0.0, until - time.monotonic()))
        return None if message is None else self._read(message)

    def caller(self, place: RowPlace) -> _DirectCaller | None:
        """As Transport.caller; None for rows of any size, which take more than their bytes."""
        if place.input is None or place.extents is not None or place.outputs is None or place.rows != 1:
            return None
        return _DirectCaller(self._connection, self._rows, self._lease, place, self._in_flight)

    def receive(self, timeout: float) -> Sequence[Answer]:
        link = self._connection.link
        if link is None or link.broken:
            time.sleep(min(timeout, _ATTEMPT_AGAIN))
            return ()
        return [answer for message in link.receive(timeout) if (answer := self._read(message)) is not None]

    def holds(self, ticket: InFlight) -> bool:
        link = self._connection.link
        return ticket.incarnation == self._connection.incarnation and link is not None and link.holds(ticket.sequence)

    def close(self) -> None:
        if self._watching is not None:
            self._unwatch(self._watching)
        self._connection.close()

    def forked(self) -> None:
        """As Transport.forked. The socket is the parent's, of which only this process's number is closed."""
        self._watching = None
        self._connection.close()

    def _ready_for(self, ticket: InFlight) -> Zmtp | None:
        """The link, where the ticket is for the connection that stands."""
        self._meant_for(ticket)
        connection = self._connection
        if (link := connection.link) is not None and link.ready and link.silence >= IDLE:
            if not connection.stands():
                return None
            self._incarnation = ticket.incarnation = connection.incarnation  # it was not sent over any before
        return connection.link if ticket.incarnation == connection.incarnation else None

    def _renewed(self) -> None:
        """The connection has another link: have the loop watch that."""
        if self._watching is None:
            return
        self._unwatch(self._watching)
        self._watch(self._watching)

    def _watch(self, watching: Watching) -> None:
        if (link := self._connection.link) is not None:
            self._watched = link.descriptor
            watching.read(self._watched)
            link.watched(on=True)

    def _unwatch(self, watching: Watching) -> None:
        if self._watched >= 0:
            watching.unread(self._watched)
        self._watched = -1

    def _read(self, message: Sequence[Any]) -> Answer | None:
        return _read(message, self._rows, self._in_flight, self._connection.incarnation)


class _DirectCaller(SocketCaller):
    """A row goes from the caller's array, and comes back as new ones."""

    def __init__(
        self,
        connection: DirectConnection,
        rows: RowsHere,
        lease: int,
        place: RowPlace,
        in_flight: dict[int, tuple[int, int]],
    ) -> None:
        super().__init__(place, connection.engines)
        self._connection = connection
        self._rows = rows
        self._lease = lease
        self._in_flight = in_flight  # the transport's
        outputs: Any = place.outputs
        self._alone = type(outputs) is not dict
        named = {"": outputs} if self._alone else outputs
        self._outputs = [(name, array.dtype, array.shape, array.nbytes) for name, array in named.items()]

    def __call__(self, row: Any, sequence: int, seconds: float) -> Any:
        place, connection, link = self._place, self._connection, self._connection.link
        if self._incarnations.item(0) != place.incarnation or self._states.item(0) != _SERVING:
            return NOT_SENT
        if link is None or not link.ready or row is None:
            return NOT_SENT
        if link.silence >= IDLE and not (connection.stands() and connection.link is link):
            return NOT_SENT
        like = place.input
        assert like is not None
        if type(row) is not np.ndarray or row.shape != like.shape or row.dtype != like.dtype:
            return NOT_FIT
        ticket = PREFIX + PACK_TICKET.pack(
            sequence, self._lease, max(1, int(seconds * 1e9)), 0, 0, place.first, 1, 0, 0, place.incarnation
        )
        message = link.exchange(sequence, (ticket, row), seconds if seconds < LOOK_AFTER else LOOK_AFTER)
        if message is None:
            place.write(row)  # should it have to be sent again
            self._in_flight[sequence] = (place.first, 1)  # its answer comes by the transport
            return NOT_ANSWERED
        reply = self._reply = bytes(message[0])
        if reply[-4:] == _OK and len(reply) == HEAD and reply[:_NAMED] == ticket[:_NAMED]:
            return self._outputs_of(message)
        answer = read_reply(reply, "the server")
        self._message = answer.message
        if answer.sequence == 0:
            raise ProtocolMismatch(answer.message)
        _read(message, self._rows, {sequence: (place.first, 1)}, place.incarnation)  # reasons of a row that failed
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
    """A ticket as it is sent, with its rows."""
    left = max(1, ticket.deadline - time.monotonic_ns())  # the clock of another host says nothing here
    first, n = ticket.first, ticket.rows
    record = PACK_TICKET.pack(ticket.sequence, lease, left, 0, 0, first, n, 0, ticket.version, ticket.incarnation)
    return [PREFIX + record, *row_frames.packed(rows.columns, "inputs", first, n)]


def _read(
    frames: Sequence[Any], rows: RowsHere, in_flight: dict[int, tuple[int, int]], incarnation: int
) -> Answer | None:
    """The answer in these frames, its outputs copied to their rows; None when nobody waits for it any more."""
    answer = read_reply(bytes(frames[0]), "the server")
    if answer.sequence == 0:
        return answer
    if answer.incarnation != incarnation or (place := in_flight.pop(answer.sequence, None)) is None:
        return None
    bodies = [memoryview(frame) for frame in frames[1:]]
    try:
        if answer.code in (Code.OK, Code.ROW_FAILED):
            row_frames.unpack(rows.columns, "outputs", *place, bodies, failed=answer.code != Code.OK)
        elif answer.code == Code.SESSION_LOST:
            row_frames.unpack_reasons(rows.columns, *place, bodies)
    except Error as error:
        raise ProtocolMismatch(str(error)) from None
    return answer
