"""The ZeroMQ transport: tickets are sent as records to the engines' ROUTER sockets.

It uses its own sockets if the native core is available (direct.py), otherwise those of libzmq.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq
from zmq.backend import Socket as Bare  # the plain methods: what zmq.Socket adds takes as long as they do

from jurybox.client.control import new_socket
from jurybox.client.held_socket import HeldSocket
from jurybox.client.in_flight import LOOK_AFTER, Answer, Claim, InFlight
from jurybox.client.transports.direct import DirectCaller, DirectEngine, EngineLink, can_dial, number_in
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
from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.wire import PREFIX, lane_identity

if TYPE_CHECKING:
    import asyncio

_NOBLOCK = int(zmq.NOBLOCK)
_SEQUENCE, _CODE = slice(0, NAMED), slice(HEAD - len(OK), None)  # of a reply's bytes; the former with the prefix
_WAITING = (0,)  # the flags of one blocking receive
_ENDED = weakref.ref(Claim())  # that of a call that has ended


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
        self._engines: dict[tuple[int, int], _AttachedSocket | DirectEngine] = {}  # by engine and incarnation
        self._poller = zmq.Poller()
        self._watching: Watching | None = None

    def send(self, ticket: InFlight) -> None:
        t = ticket
        engine = self._attached(t.engine, t.incarnation)
        engine.send(t.sequence, t.first, t.rows, t.submitted, t.deadline, t.version)
        if (watching := self._watching) is not None and watching.on and isinstance(engine, _AttachedSocket):
            # Sending clears libzmq's signal, which may have announced an answer.
            watching.tell()

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        return self._attached(ticket.engine, ticket.incarnation).exchange(ticket, timeout)

    def caller(self, place: RowPlace) -> DirectCaller | _ZmqCaller | None:
        engine = self._attached(place.number, place.incarnation)
        return DirectCaller(engine, place) if isinstance(engine, DirectEngine) else _ZmqCaller(engine, place)

    def receive(self, timeout: float) -> Sequence[Answer]:
        engines = list(self._engines.values())
        if len(engines) == 1:
            return engines[0].answers(timeout)
        answers = [answer for engine in engines for answer in engine.answers(0)]
        if not answers and timeout > 0:
            with contextlib.ExitStack() as within:
                for engine in engines:
                    if isinstance(engine, _AttachedSocket):
                        within.enter_context(engine.held.within())
                self._poller.poll(int(timeout * 1000 + 0.999))
            answers = [answer for engine in engines for answer in engine.answers(0)]
        return answers

    def settled(self, answer: Answer) -> None:
        for engine in list(self._engines.values()):
            if engine.incarnation == answer.incarnation or not answer.sequence:
                engine.settled(answer.sequence)

    def holds(self, ticket: InFlight) -> bool:
        engine = self._engines.get((ticket.engine, ticket.incarnation))
        return engine is not None and self._whole(engine).has(ticket)

    def is_reading(self, ticket: InFlight) -> bool:
        engine = self._engines.get((ticket.engine, ticket.incarnation))
        return isinstance(engine, _AttachedSocket) and engine.may_be_taking(ticket.sequence)

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        earlier = self._watching
        if earlier is None or earlier.loop is not loop:
            self._watching = watching = Watching(loop, arrived)
            for engine in list(self._engines.values()):
                if earlier is not None:
                    self._unwatch(engine, earlier)
                self._watch(engine, watching)

    def close(self) -> None:
        for key in list(self._engines):
            self._drop(key)

    def forked(self) -> None:
        """See Transport.forked. pyzmq closes nothing in a child, and the event loop's poll set is the parent's."""
        self._engines, self._watching = {}, None

    def _attached(self, number: int, incarnation: int) -> _AttachedSocket | DirectEngine:
        if (known := self._engines.get((number, incarnation))) is None:
            return self._open(number, incarnation)
        return self._whole(known)

    def _whole(self, engine: _AttachedSocket | DirectEngine) -> _AttachedSocket | DirectEngine:
        """Reconnect the engine if its connection has broken, and return it."""
        if isinstance(engine, DirectEngine) and engine.broken:
            self._let_go(engine)
            engine.dial()
            self._take_up(engine)
        return engine

    def _open(self, number: int, incarnation: int) -> _AttachedSocket | DirectEngine:
        for key in list(self._engines):
            if key[0] == number and key[1] != incarnation:
                self._drop(key)
        address = self._addresses[number]
        engine: _AttachedSocket | DirectEngine
        if can_dial(address):
            engine = DirectEngine(address, self._lane, self._lease, incarnation)
        else:
            engine = _AttachedSocket(self._socket(number), address, self._lane, self._lease, incarnation)
        if (known := self._engines.setdefault((number, incarnation), engine)) is not engine:
            engine.close()  # a nested call has connected meanwhile
            return known
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
        return socket

    def _drop(self, key: tuple[int, int]) -> None:
        known = self._engines.pop(key, None)
        if known is not None:
            self._let_go(known)
            known.close()

    def _take_up(self, engine: _AttachedSocket | DirectEngine) -> None:
        """Begin to poll and watch a new connection."""
        if engine.descriptor >= 0:
            self._poller.register(
                engine.socket if isinstance(engine, _AttachedSocket) else engine.descriptor, zmq.POLLIN
            )
            if self._watching is not None:
                self._watch(engine, self._watching)

    def _let_go(self, engine: _AttachedSocket | DirectEngine) -> None:
        """Stop polling and watching a connection that is about to be closed."""
        if engine.descriptor >= 0:
            if self._watching is not None:
                self._unwatch(engine, self._watching)
            self._poller.unregister(engine.socket if isinstance(engine, _AttachedSocket) else engine.descriptor)

    def _watch(self, engine: _AttachedSocket | DirectEngine, watching: Watching) -> None:
        if engine.descriptor >= 0:
            watching.read(engine.descriptor)
            if isinstance(engine, DirectEngine) and engine.link is not None:
                engine.link.watched(on=True)

    def _unwatch(self, engine: _AttachedSocket | DirectEngine, watching: Watching) -> None:
        if engine.descriptor >= 0:
            watching.unread(engine.descriptor)
            if isinstance(engine, DirectEngine) and engine.link is not None:
                engine.link.watched(on=False)


class _AttachedSocket(EngineLink):
    """The socket to one incarnation of an engine.

    pyzmq checks for signals at the end of each call. So a KeyboardInterrupt can drop a frame that was received, or hide
    that one was sent, and a nested call may come in there. Each sending and receiving call is recorded in `_moving` as
    long as it is under way. If the next call finds one that has ended without saying so, it was interrupted, and it is
    unknown whether the engine still has the unanswered tickets.

    Attributes:
        unanswered: sequence numbers of tickets that were sent and are not settled.
        held: closes the socket, when no call is within it.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str, lane: int, lease: int, incarnation: int) -> None:
        super().__init__(lane, lease, incarnation)
        self.socket = socket
        self.held = HeldSocket(socket)
        # One step of the interpreter connects, once. Two connections of one identity would take each other's answers.
        self._connecting = map(partial(Bare.connect, socket), (address,))
        self.descriptor = int(socket.getsockopt(zmq.FD))
        self.unanswered: dict[int, None] = {}
        self._arrived: deque[bytes] = deque()  # replies that were not dropped
        self._moving: dict[int, weakref.ref[Claim]] = {}
        self._newest = 0  # the last sequence number that was sent
        self._taking: dict[int, int] = {}  # those of `_moving` that receive: the last number sent before
        self._send = partial(Bare.send, socket)
        self._receive = partial(Bare.recv, socket)
        self._receive_now = partial(Bare.recv, socket, _NOBLOCK)

    def send(self, sequence: int, first: int, rows: int, submitted: int, deadline: int, version: int) -> None:
        frame = self.frame(sequence, first, rows, submitted, deadline, version)
        claim = self._move()
        try:
            with self.held.within() as opened:
                if opened:  # else its ticket is lost, and the lane knows
                    next(self._connecting, None)
                    self.unanswered[sequence] = None
                    self._newest = max(self._newest, sequence)
                    self._send(frame)
        except BaseException:
            self._moving[id(claim)] = _ENDED  # a traceback may keep the claim
            raise
        self._moving.pop(id(claim), None)

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """Send a ticket and return its answer if the next reply has it and arrives in time."""
        t = ticket
        self.send(t.sequence, t.first, t.rows, t.submitted, t.deadline, t.version)
        if timeout >= LOOK_AFTER or self.wait(timeout):
            self.receive_one()
        return self.taken(t.sequence)

    def taken(self, sequence: int) -> Answer | None:
        """Return the answer to a ticket, or a complaint that names none, and settle it; None if there is none."""
        for answer in self.answers(0):
            if answer.sequence in (sequence, 0):
                self.settled(answer.sequence)
                return answer
        return None

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a frame, without receiving it; return whether there is one."""
        with self.held.within() as opened:
            return opened and bool(self.socket.poll(int(timeout * 1000 + 0.999)))

    def close(self) -> None:
        """Close the socket. Tickets in flight are never answered."""
        self.held.close()

    def receive_one(self) -> None:
        """Receive one frame, waiting at most LOOK_AFTER seconds."""
        # The socket's own time-out takes one call, polling first would take two.
        self._take_in(map(self._receive, _WAITING))

    def replies(self, timeout: float) -> list[bytes]:
        if timeout > 0 and not self._arrived:
            self.wait(timeout)
        self._take_in(iter(self._receive_now, None))
        return list(self._arrived)

    def _take_in(self, frames: Iterator[bytes]) -> None:
        """Receive frames until there are no more. Each is kept in the step of the interpreter that received it."""
        claim = self._move()
        self._taking[id(claim)] = self._newest
        try:
            with self.held.within() as opened:
                if opened:
                    self._arrived.extend(frames)
        except zmq.Again:
            pass
        except BaseException:
            self._moving[id(claim)] = _ENDED
            raise
        self._taking.pop(id(claim), None)
        self._moving.pop(id(claim), None)

    def may_be_taking(self, sequence: int) -> bool:
        """Return whether a call that is under way, and within which this one is, may have received a ticket's answer.

        A handler runs when pyzmq has received a frame and has not returned it.
        """
        return sequence in self.unanswered and any(
            sequence <= newest and (moving := self._moving.get(key)) is not None and moving() is not None
            for key, newest in list(self._taking.items())
        )

    def drop(self, number: int) -> None:
        # In this order: after an interrupt in between the reply is still here, so that its ticket is not waited for.
        self.unanswered.pop(number, None)
        for reply in list(self._arrived):
            if number_in(reply) == number:
                with contextlib.suppress(ValueError):  # a nested call has dropped it
                    self._arrived.remove(reply)

    def only(self, sequence: int) -> bytes | None:
        """Return the bytes of the only reply if its ticket has this number and was computed, and settle it."""
        arrived = list(self._arrived)
        if len(arrived) != 1:
            return None
        (reply,) = arrived
        if reply[_SEQUENCE] != PREFIX + sequence.to_bytes(8, "little") or reply[_CODE] != OK or self._settled_again:
            return None
        self.drop(sequence)
        return reply

    def has(self, ticket: InFlight) -> bool:
        """Return whether the engine may have the ticket, or its answer is not settled."""
        self._doubt()
        sequence = ticket.sequence
        if sequence not in self.unanswered:
            return any(number_in(reply) == sequence for reply in list(self._arrived))
        if sequence in self._doubtful and not self._again_of(sequence):
            self.unanswered.pop(self._send_again(ticket), None)
        return True

    def _move(self) -> Claim:
        """Begin to send or to receive; keep the result until the end."""
        if self._moving:
            self._doubt()
        claim = Claim()
        self._moving[id(claim)] = weakref.ref(claim)
        return claim

    def _doubt(self) -> None:
        """Mark all unanswered tickets as doubtful if a call was interrupted."""
        ended = [key for key in list(self._moving) if (moving := self._moving.get(key)) is not None and not moving()]
        if not ended:
            return
        for number in list(self._again):
            self.unanswered.pop(number, None)
        self._doubtful.update(list(self.unanswered))
        self._again.clear()
        for key in ended:
            self._moving.pop(key, None)
            self._taking.pop(key, None)


class _ZmqCaller(SocketCaller):
    """A caller over the socket of one incarnation of an engine."""

    def __init__(self, engine: _AttachedSocket, place: RowPlace) -> None:
        super().__init__(place, place.engine)
        self._engine = engine

    def __call__(self, row: object, sequence: int, seconds: float) -> Any:
        engine, place = self._engine, self._place
        if self._incarnations.item(0) != engine.incarnation or self._states.item(0) != SERVING:
            return NOT_SENT
        if row is not None and not place.write(row):
            return NOT_FIT
        now = time.monotonic_ns()
        self.deadline = deadline = now + int(seconds * 1e9)
        engine.send(sequence, place.first, place.rows, now, deadline, 0)
        if seconds < LOOK_AFTER and not engine.wait(seconds):
            return NOT_ANSWERED
        engine.receive_one()
        if (reply := engine.only(sequence)) is not None:
            self._reply = reply
            return place.copied()
        if (answer := engine.taken(sequence)) is None:
            return NOT_ANSWERED  # not yet: the lane reads what arrived while it waits, or sends it again
        if answer.sequence == 0:
            raise ProtocolMismatch(answer.message)
        self._message, self._reply = answer.message, answer
        if answer.code:
            return answer.code
        return place.copied()
