"""The ZeroMQ door: tickets as records to the engines' ROUTER sockets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq
from numpy.typing import NDArray
from zmq.backend import Socket as Bare  # its methods without what zmq.Socket adds, which costs as much as they do

from jurybox.client.control import new_socket
from jurybox.client.doors.door import LOOK_AFTER, NOT_ANSWERED, NOT_SENT, Answer, InFlight, Watching, read_reply
from jurybox.protocol.board import EngineState
from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.wire import PACK_REPLY, PACK_TICKET, PREFIX, lane_identity

_NOBLOCK = int(zmq.NOBLOCK)
_SERVING = int(EngineState.SERVING)
_HEAD = len(PREFIX) + PACK_REPLY.size
_SEQUENCE, _CODE = slice(0, len(PREFIX) + 8), slice(_HEAD - 4, None)  # of a reply's bytes, the prefix with the former
_OK = bytes(4)
_WAITING = (0,)  # flags of one receive that waits


class ZmqDoor:
    """One DEALER socket an engine, opened when the engine is first chosen, anew when it has restarted.

    Args:
        addresses: of the engines, in the board's order.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[str], lane: int, lease: int
    ) -> None:
        self._context = context
        self._addresses = addresses
        self._lane = lane
        self._lease = lease
        self._engines: dict[int, _Attached] = {}
        self._poller = zmq.Poller()
        self._watching: Watching | None = None

    def send(self, ticket: InFlight) -> None:
        """As Door.send."""
        record = PACK_TICKET.pack(
            ticket.sequence,
            self._lease,
            ticket.deadline,
            ticket.submitted,
            self._lane,
            ticket.first,
            ticket.rows,
            0,
            ticket.version,
            ticket.epoch,
        )
        self._attached(ticket.engine, ticket.epoch).send(ticket.sequence, PREFIX + record)
        if (watching := self._watching) is not None and watching.on:
            # Sending reads the socket's signal, and with it perhaps the news of an answer.
            watching.tell()

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """As Door.exchange."""
        self.send(ticket)
        engine = self._engines[ticket.engine]
        if timeout < LOOK_AFTER and not engine.socket.poll(int(timeout * 1000 + 0.999)):
            return None
        engine.receive_one()
        for answer in engine.answers():
            if answer.sequence in (ticket.sequence, 0):
                return answer
        return None

    def caller(self, first: int, place: NDArray[Any], outputs: Any, engine: NDArray[Any], epoch: int) -> _Caller | None:
        """As Door.caller."""
        if len(self._addresses) > 1:
            return None
        return _Caller(self._attached(0, epoch), self._lane, self._lease, first, place, outputs, engine)

    def receive(self, timeout: float) -> Sequence[Answer]:
        """As Door.receive."""
        engines = list(self._engines.values())
        if timeout and not any(engine.arrived for engine in engines):
            if len(engines) == 1:
                if not engines[0].socket.poll(int(timeout * 1000 + 0.999)):
                    return ()
            else:
                self._poller.poll(int(timeout * 1000 + 0.999))
        answers: list[Answer] = []
        for engine in engines:
            engine.receive()
            answers += engine.answers()
        return answers

    def holds(self, ticket: InFlight) -> bool:
        """As Door.holds."""
        engine = self._engines.get(ticket.engine)
        return engine is not None and engine.epoch == ticket.epoch and ticket.sequence in engine.unanswered

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """As Door.watch."""
        earlier = self._watching
        if earlier is None or earlier.loop is not loop:
            self._watching = watching = Watching(loop, arrived)
            for engine in self._engines.values():
                if earlier is not None:
                    earlier.unread(engine.descriptor)
                watching.read(engine.descriptor)

    def close(self) -> None:
        """As Door.close."""
        for engine in list(self._engines):
            self._drop(engine)

    def forked(self) -> None:
        """As Door.forked. pyzmq closes nothing in a child, and an event loop's poll set would be the parent's."""
        self._engines, self._watching = {}, None

    def _attached(self, engine: int, epoch: int) -> _Attached:
        known = self._engines.get(engine)
        return known if known is not None and known.epoch == epoch else self._open(engine, epoch)

    def _open(self, engine: int, epoch: int) -> _Attached:
        self._drop(engine)
        socket = new_socket(self._context, f"to engine {engine}")
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
        socket.setsockopt(zmq.RCVTIMEO, int(LOOK_AFTER * 1000))
        socket.setsockopt(zmq.IDENTITY, lane_identity(self._lane, self._lease))
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.connect(self._addresses[engine])
        self._poller.register(socket, zmq.POLLIN)
        self._engines[engine] = attached = _Attached(socket, epoch)
        if self._watching is not None:
            self._watching.read(attached.descriptor)
        return attached

    def _drop(self, engine: int) -> None:
        known = self._engines.pop(engine, None)
        if known is None:
            return
        if self._watching is not None:
            self._watching.unread(known.descriptor)
        self._poller.unregister(known.socket)
        known.socket.close()


class _Attached:
    """The socket to one engine in one of its lives.

    Sending and taking in are each one call of C that notes what it did, so that no KeyboardInterrupt falls between a
    message and the note of it.

    Attributes:
        unanswered: sequence numbers of what was sent and is not answered.
        arrived: frames that were taken in and not read.
    """

    def __init__(self, socket: zmq.Socket[bytes], epoch: int) -> None:
        self.socket = socket
        self.epoch = epoch
        self.descriptor = int(socket.getsockopt(zmq.FD))
        self.unanswered: dict[int, object] = {}
        self.arrived: deque[bytes] = deque()
        self._send = partial(Bare.send, socket)
        self._receive = partial(Bare.recv, socket)
        self._receive_now = partial(Bare.recv, socket, _NOBLOCK)

    def send(self, sequence: int, frame: bytes) -> None:
        """Send a ticket's frame."""
        self.unanswered.update(zip((sequence,), map(self._send, (frame,)), strict=False))

    def receive_one(self) -> None:
        """Wait LOOK_AFTER at most for a frame."""
        with contextlib.suppress(zmq.Again):
            # The socket's own time-out: one call where polling first would be two.
            self.arrived.extend(map(self._receive, _WAITING))

    def receive(self) -> None:
        """Take in every frame that is there."""
        with contextlib.suppress(zmq.Again):
            self.arrived.extend(iter(self._receive_now, None))

    def answers(self) -> list[Answer]:
        """What the frames say that were taken in."""
        answers: list[Answer] = []
        while self.arrived:
            try:
                answer = read_reply(self.arrived[0], "an engine")
            except ProtocolMismatch:
                self.arrived.popleft()
                raise
            answers.append(answer)
            self.unanswered.pop(answer.sequence, None)
            self.arrived.popleft()
        return answers


class _Caller:
    """As jurybox.client.doors.door.Caller, over the socket of one engine in one of its lives."""

    def __init__(
        self,
        engine: _Attached,
        lane: int,
        lease: int,
        first: int,
        place: NDArray[Any],
        outputs: Any,
        record: NDArray[Any],
    ) -> None:
        self._engine = engine
        self._socket = engine.socket
        self._lane = lane
        self._lease = lease
        self._first = first
        self._place = place
        self._outputs = outputs
        self._states = record["state"]
        self._epochs = record["epoch"]
        self._message = ""

    def __call__(self, row: NDArray[Any], sequence: int, seconds: float) -> Any:
        """As Caller."""
        engine = self._engine
        epoch, arrived = engine.epoch, engine.arrived
        if self._epochs.item(0) != epoch or self._states.item(0) != _SERVING:
            return NOT_SENT
        self._place[...] = row
        now = time.monotonic_ns()
        deadline = now + int(seconds * 1e9)
        record = PACK_TICKET.pack(sequence, self._lease, deadline, now, self._lane, self._first, 1, 0, 0, epoch)
        engine.send(sequence, PREFIX + record)
        if seconds < LOOK_AFTER and not self._socket.poll(int(seconds * 1000 + 0.999)):
            return NOT_ANSWERED
        engine.receive_one()
        if len(arrived) != 1 or arrived[0][_SEQUENCE] != PREFIX + sequence.to_bytes(8, "little"):
            return NOT_ANSWERED  # yet: what came is read where the answer is waited for
        if arrived[0][_CODE] != _OK:
            (answer,) = engine.answers()
            self._message = answer.message
            return answer.code
        del engine.unanswered[sequence]
        arrived.clear()
        outputs = self._outputs
        if type(outputs) is dict:
            return {name: array.copy() for name, array in outputs.items()}
        return outputs.copy()

    def message(self) -> str:
        """As Caller."""
        return self._message
