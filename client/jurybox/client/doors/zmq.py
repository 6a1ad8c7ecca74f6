"""The ZeroMQ door: tickets as records to the engines' ROUTER sockets."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from numpy.typing import NDArray
from zmq.backend import Socket as Bare  # its methods without what zmq.Socket adds, which costs as much as they do

from jurybox.client.doors.door import (
    LOOK_AFTER,
    NOT_ANSWERED,
    NOT_SENT,
    Answer,
    CalledRow,
    Outgoing,
    Watching,
    read_reply,
    still,
)
from jurybox.protocol.board import EngineState
from jurybox.protocol.descriptors import remedy
from jurybox.protocol.errors import ProtocolMismatch, TooManyFiles
from jurybox.protocol.wire import PACK_REPLY, PACK_TICKET, PREFIX, lane_identity

_NOBLOCK = int(zmq.NOBLOCK)
_SERVING = int(EngineState.SERVING)
_HEAD = len(PREFIX) + PACK_REPLY.size
_SEQUENCE, _CODE = slice(0, len(PREFIX) + 8), slice(_HEAD - 4, None)  # of a reply's bytes, the prefix with the former
_OK = bytes(4)


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
        self._sockets: dict[int, tuple[int, zmq.Socket[bytes]]] = {}  # engine -> (epoch, socket)
        self._poller = zmq.Poller()
        self._watching: Watching | None = None

    def send(self, ticket: Outgoing) -> None:
        """As Door.send."""
        sequence, _, epoch, first, rows, submitted, deadline, version = ticket
        record = PACK_TICKET.pack(
            sequence, self._lease, deadline, submitted, self._lane, first, rows, 0, version, epoch
        )
        Bare.send(self._socket(ticket.engine, epoch), PREFIX + record)
        if (watching := still(self._watching)) is not None:
            # Sending reads the socket's signal, and with it perhaps the news of an answer.
            watching[0].call_soon(watching[1])

    def exchange(self, ticket: Outgoing, timeout: float) -> Answer | None:
        """As Door.exchange."""
        self.send(ticket)
        socket = self._sockets[ticket.engine][1]
        if timeout < LOOK_AFTER and not socket.poll(int(timeout * 1000 + 0.999)):
            return None
        try:
            # The socket's own time-out: one call where polling first would be two.
            return read_reply(Bare.recv(socket), "an engine")
        except zmq.Again:
            return None

    def caller(self, row: CalledRow, engine: NDArray[Any], epoch: int) -> _Caller | None:
        """As Door.caller."""
        if len(self._addresses) > 1:
            return None
        return _Caller(self._socket(0, epoch), self._lane, self._lease, row, engine, epoch)

    def receive(self, timeout: float) -> Sequence[Answer]:
        """As Door.receive."""
        answers: list[Answer] = []
        if len(self._sockets) == 1:
            ((_, socket),) = self._sockets.values()
            if timeout and not socket.poll(int(timeout * 1000 + 0.999)):
                return ()
            ready = [socket]
        else:
            ready = [socket for socket, _ in self._poller.poll(int(timeout * 1000 + 0.999))]
        for socket in ready:
            try:
                while True:
                    answers.append(read_reply(Bare.recv(socket, _NOBLOCK), "an engine"))
            except zmq.Again:
                continue
        return answers

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """As Door.watch."""
        if self._watching is None or self._watching[0] is not loop:
            self._watching = (loop, arrived)
            for _, socket in self._sockets.values():
                loop.add_reader(_descriptor(socket), arrived)

    def close(self) -> None:
        """As Door.close."""
        for engine in list(self._sockets):
            self._drop(engine)

    def _socket(self, engine: int, epoch: int) -> zmq.Socket[bytes]:
        known = self._sockets.get(engine)
        return known[1] if known is not None and known[0] == epoch else self._open(engine, epoch)

    def _open(self, engine: int, epoch: int) -> zmq.Socket[bytes]:
        self._drop(engine)
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise TooManyFiles(f"no socket to engine {engine}: {remedy()}") from error
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 1 << 20)
        socket.setsockopt(zmq.RCVTIMEO, int(LOOK_AFTER * 1000))
        socket.setsockopt(zmq.IDENTITY, lane_identity(self._lane, self._lease))
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.connect(self._addresses[engine])
        self._poller.register(socket, zmq.POLLIN)
        self._sockets[engine] = (epoch, socket)
        if (watching := still(self._watching)) is not None:
            watching[0].add_reader(_descriptor(socket), watching[1])
        return socket

    def _drop(self, engine: int) -> None:
        known = self._sockets.pop(engine, None)
        if known is None:
            return
        socket = known[1]
        if (watching := still(self._watching)) is not None:
            watching[0].remove_reader(_descriptor(socket))
        self._poller.unregister(socket)
        socket.close()


class _Caller:
    """As jurybox.client.doors.door.Caller, over the socket of one engine in one of its lives."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        lane: int,
        lease: int,
        row: CalledRow,
        engine: NDArray[Any],
        epoch: int,
    ) -> None:
        self._socket = socket
        self._lane = lane
        self._lease = lease
        self._outputs = row.outputs
        self._first = row.first
        self._place = row.place
        self._states = engine["state"]
        self._epochs = engine["epoch"]
        self._epoch = epoch
        self._message = ""

    def __call__(self, row: NDArray[Any], sequence: int, seconds: float) -> Any:
        """As Caller."""
        epoch, socket = self._epoch, self._socket
        if self._epochs.item(0) != epoch or self._states.item(0) != _SERVING:
            return NOT_SENT
        self._place[...] = row
        now = time.monotonic_ns()
        deadline = now + int(seconds * 1e9)
        record = PACK_TICKET.pack(sequence, self._lease, deadline, now, self._lane, self._first, 1, 0, 0, epoch)
        Bare.send(socket, PREFIX + record)
        if seconds < LOOK_AFTER and not socket.poll(int(seconds * 1000 + 0.999)):
            return NOT_ANSWERED
        try:
            frame = Bare.recv(socket)  # the socket's own time-out: one call where polling first would be two
        except zmq.Again:
            return NOT_ANSWERED
        if frame[_SEQUENCE] != PREFIX + sequence.to_bytes(8, "little") or frame[_CODE] != _OK:
            return self._failure(read_reply(frame, "an engine"), sequence)
        outputs = self._outputs
        if type(outputs) is dict:
            return {name: array.copy() for name, array in outputs.items()}
        return outputs.copy()

    def _failure(self, answer: Answer, sequence: int) -> int:
        if answer.sequence != sequence:
            raise ProtocolMismatch(f"ticket {sequence} was sent, and answered was {answer.sequence}: {answer.message}")
        self._message = answer.message
        return answer.code

    def message(self) -> str:
        """As Caller."""
        return self._message


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
