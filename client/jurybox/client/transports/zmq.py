"""The ZeroMQ transport: tickets are sent as records to the engines' ROUTER sockets.

It uses its own sockets if the native core is available (direct.py), otherwise those of libzmq.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq
from numpy.typing import NDArray
from zmq.backend import Socket as Bare  # the plain methods: what zmq.Socket adds takes as long as they do

from jurybox.client.control import new_socket
from jurybox.client.in_flight import LOOK_AFTER, Answer, InFlight
from jurybox.client.transports.direct import DirectCaller, DirectEngine, EngineLink, can_dial
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
)
from jurybox.protocol.wire import PREFIX, lane_identity

if TYPE_CHECKING:
    import asyncio

_NOBLOCK = int(zmq.NOBLOCK)
_SEQUENCE, _CODE = slice(0, NAMED), slice(HEAD - len(OK), None)  # of a reply's bytes; the former with the prefix
_WAITING = (0,)  # the flags of one blocking receive


class ZmqTransport(Transport):
    """One DEALER socket per engine, opened when the engine is first chosen, and again after a restart.

    Args:
        addresses: the engines' addresses, in the scoreboard's order.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[str], lane: int, lease: int
    ) -> None:
        self._context = context
        self._addresses = addresses
        self._lane = lane
        self._lease = lease
        self._engines: dict[int, _Attached | DirectEngine] = {}
        self._poller = zmq.Poller()
        self._watching: Watching | None = None

    def send(self, ticket: InFlight) -> None:
        t = ticket
        engine = self._attached(t.engine, t.incarnation)
        engine.send(t.sequence, t.first, t.rows, t.submitted, t.deadline, t.version)
        if (watching := self._watching) is not None and watching.on and isinstance(engine, _Attached):
            # Sending clears libzmq's signal, which may have announced an answer.
            watching.tell()

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        engine = self._attached(ticket.engine, ticket.incarnation)
        engine.exchange(ticket, timeout)
        for answer in engine.answers():
            if answer.sequence in (ticket.sequence, 0):
                return answer
        return None

    def caller(self, place: RowPlace) -> DirectCaller | _Caller | None:
        engine = self._attached(place.number, place.incarnation)
        return DirectCaller(engine, place) if isinstance(engine, DirectEngine) else _Caller(engine, place)

    def receive(self, timeout: float) -> Sequence[Answer]:
        engines = list(self._engines.values())
        if timeout and not any(engine.arrived for engine in engines):
            if len(engines) == 1:
                engines[0].wait(timeout)
            else:
                self._poller.poll(int(timeout * 1000 + 0.999))
        answers: list[Answer] = []
        for engine in engines:
            engine.receive()
            answers += engine.answers()
        return answers

    def holds(self, ticket: InFlight) -> bool:
        engine = self._engines.get(ticket.engine)
        if engine is None or engine.incarnation != ticket.incarnation:
            return False
        return self._whole(ticket.engine, engine).has(ticket)

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        earlier = self._watching
        if earlier is None or earlier.loop is not loop:
            self._watching = watching = Watching(loop, arrived)
            for engine in self._engines.values():
                if earlier is not None:
                    self._unwatch(engine, earlier)
                self._watch(engine, watching)

    def close(self) -> None:
        for engine in list(self._engines):
            self._drop(engine)

    def forked(self) -> None:
        """See Transport.forked. pyzmq closes nothing in a child, and the event loop's poll set is the parent's."""
        self._engines, self._watching = {}, None

    def _attached(self, number: int, incarnation: int) -> _Attached | DirectEngine:
        known = self._engines.get(number)
        if known is None or known.incarnation != incarnation:
            return self._open(number, incarnation)
        return self._whole(number, known)

    def _whole(self, number: int, engine: _Attached | DirectEngine) -> _Attached | DirectEngine:
        """Reconnect the engine if its connection has broken, and return it."""
        if isinstance(engine, DirectEngine) and engine.broken:
            self._let_go(engine)
            engine.dial()
            self._take_up(engine)
        return engine

    def _open(self, number: int, incarnation: int) -> _Attached | DirectEngine:
        self._drop(number)
        address = self._addresses[number]
        engine: _Attached | DirectEngine
        if can_dial(address):
            engine = DirectEngine(address, self._lane, self._lease, incarnation)
        else:
            engine = _Attached(self._socket(number), self._lane, self._lease, incarnation)
        self._engines[number] = engine
        self._take_up(engine)
        return engine

    def _socket(self, number: int) -> zmq.Socket[bytes]:
        socket = new_socket(self._context, f"to engine {number}")
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
        socket.setsockopt(zmq.RCVTIMEO, int(LOOK_AFTER * 1000))
        socket.setsockopt(zmq.IDENTITY, lane_identity(self._lane, self._lease))
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.connect(self._addresses[number])
        return socket

    def _drop(self, number: int) -> None:
        known = self._engines.pop(number, None)
        if known is not None:
            self._let_go(known)
            known.close()

    def _take_up(self, engine: _Attached | DirectEngine) -> None:
        """Begin to poll and watch a new connection."""
        if engine.descriptor >= 0:
            self._poller.register(engine.socket if isinstance(engine, _Attached) else engine.descriptor, zmq.POLLIN)
            if self._watching is not None:
                self._watch(engine, self._watching)

    def _let_go(self, engine: _Attached | DirectEngine) -> None:
        """Stop polling and watching a connection that is about to be closed."""
        if engine.descriptor >= 0:
            if self._watching is not None:
                self._unwatch(engine, self._watching)
            self._poller.unregister(engine.socket if isinstance(engine, _Attached) else engine.descriptor)

    def _watch(self, engine: _Attached | DirectEngine, watching: Watching) -> None:
        if engine.descriptor >= 0:
            watching.read(engine.descriptor)
            if isinstance(engine, DirectEngine) and engine.link is not None:
                engine.link.watched(on=True)

    def _unwatch(self, engine: _Attached | DirectEngine, watching: Watching) -> None:
        if engine.descriptor >= 0:
            watching.unread(engine.descriptor)
            if isinstance(engine, DirectEngine) and engine.link is not None:
                engine.link.watched(on=False)


class _Attached(EngineLink):
    """The socket to one incarnation of an engine.

    pyzmq checks for signals at the end of each call, so a KeyboardInterrupt can drop a frame that was received, or hide
    that one was sent. `torn` is set while that may happen. If the next call finds it set, it is unknown whether the
    engine still has the unanswered tickets.

    Attributes:
        unanswered: sequence numbers of tickets that were sent and are not answered.
        torn: whether sending or receiving was interrupted.
    """

    def __init__(self, socket: zmq.Socket[bytes], lane: int, lease: int, incarnation: int) -> None:
        super().__init__(lane, lease, incarnation)
        self.socket = socket
        self.descriptor = int(socket.getsockopt(zmq.FD))
        self.unanswered: dict[int, None] = {}
        self.torn = False
        self._send = partial(Bare.send, socket)
        self._receive = partial(Bare.recv, socket)
        self._receive_now = partial(Bare.recv, socket, _NOBLOCK)

    def send(self, sequence: int, first: int, rows: int, submitted: int, deadline: int, version: int) -> None:
        frame = self.frame(sequence, first, rows, submitted, deadline, version)
        if self.torn:
            self.doubt()
        self.torn = True
        self.unanswered[sequence] = None
        self._send(frame)
        self.torn = False

    def exchange(self, ticket: InFlight, timeout: float) -> None:
        """Send a ticket and receive the next frame if it arrives in time."""
        t = ticket
        self.send(t.sequence, t.first, t.rows, t.submitted, t.deadline, t.version)
        if timeout >= LOOK_AFTER or self.socket.poll(int(timeout * 1000 + 0.999)):
            self.receive_one()

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a frame, without receiving it."""
        self.socket.poll(int(timeout * 1000 + 0.999))

    def close(self) -> None:
        """Close the socket. Tickets in flight are never answered."""
        self.socket.close()

    def receive_one(self) -> None:
        """Receive one frame, waiting at most LOOK_AFTER seconds."""
        if self.torn:
            self.doubt()
        self.torn = True
        try:  # noqa: SIM105  contextlib.suppress would take as long as receiving
            # The socket's own time-out takes one call, polling first would take two.
            self.arrived.extend(map(self._receive, _WAITING))
        except zmq.Again:
            pass
        self.torn = False

    def receive(self) -> None:
        """Receive every frame that has arrived."""
        if self.torn:
            self.doubt()
        self.torn = True
        with contextlib.suppress(zmq.Again):
            self.arrived.extend(iter(self._receive_now, None))
        self.torn = False

    def has(self, ticket: InFlight) -> bool:
        """Return whether the engine may have the ticket, or its answer may be in transit."""
        if self.torn:
            self.doubt()
        sequence = ticket.sequence
        if sequence not in self.unanswered:
            return False
        if sequence in self._doubtful and sequence not in self._again.values():
            self.unanswered.pop(self._send_again(ticket), None)
        return True

    def doubt(self) -> None:
        """Mark all unanswered tickets as doubtful, after a call was interrupted."""
        for number in list(self._again):
            self.unanswered.pop(number, None)
        self._doubtful.update(self.unanswered)
        self._again.clear()
        self.torn = False

    def _forget(self, sequence: int) -> None:
        super()._forget(sequence)
        self.unanswered.pop(sequence, None)


class _Caller(SocketCaller):
    """A caller over the socket of one incarnation of an engine."""

    def __init__(self, engine: _Attached, place: RowPlace) -> None:
        super().__init__(place, place.engine)
        self._engine = engine
        self._socket = engine.socket

    def __call__(self, row: NDArray[Any] | bytes | None, sequence: int, seconds: float) -> Any:
        engine, place = self._engine, self._place
        incarnation, arrived = engine.incarnation, engine.arrived
        if self._incarnations.item(0) != incarnation or self._states.item(0) != SERVING:
            return NOT_SENT
        if row is not None and not place.write(row):
            return NOT_FIT
        now = time.monotonic_ns()
        self.deadline = deadline = now + int(seconds * 1e9)
        engine.send(sequence, place.first, place.rows, now, deadline, 0)
        if seconds < LOOK_AFTER and not self._socket.poll(int(seconds * 1000 + 0.999)):
            return NOT_ANSWERED
        engine.receive_one()
        if len(arrived) != 1 or arrived[0][_SEQUENCE] != PREFIX + sequence.to_bytes(8, "little"):
            return NOT_ANSWERED  # not yet: the lane reads what arrived while it waits
        if arrived[0][_CODE] != OK:
            for answer in engine.answers():
                self._message, self._reply = answer.message, answer
                return answer.code
            return NOT_ANSWERED  # not yet: it is sent again
        engine.unanswered.pop(sequence, None)
        self._reply = arrived.popleft()
        return place.copied()
