"""The ZeroMQ door: tickets as protobuf frames to the engines' ROUTER sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from jurybox.client.doors.door import Answer, Outgoing
from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.ticket_pb2 import Reply, Ticket
from jurybox.protocol.wire import PREFIX, lane_identity, prefix_error

_PATIENCE = 0.1  # seconds; callers wait in slices of that


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
        self._watching: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None

    def send(self, ticket: Outgoing) -> None:
        """As Door.send."""
        message = Ticket(
            sequence=ticket.sequence,
            lane=self._lane,
            lease=self._lease,
            first_row=ticket.first,
            rows=ticket.rows,
            submitted_ns=ticket.submitted,
            deadline_ns=ticket.deadline,
            version=ticket.version,
            epoch=ticket.epoch,
        )
        known = self._sockets.get(ticket.engine)
        socket = known[1] if known is not None and known[0] == ticket.epoch else self._open(ticket.engine, ticket.epoch)
        socket.send(PREFIX + message.SerializeToString())
        if self._watching is not None:
            # Sending reads the socket's signal, and with it perhaps the news of an answer.
            self._watching[0].call_soon(self._watching[1])

    def exchange(self, ticket: Outgoing, timeout: float) -> Answer | None:
        """As Door.exchange."""
        self.send(ticket)
        socket = self._sockets[ticket.engine][1]
        if timeout < _PATIENCE and not socket.poll(int(timeout * 1000 + 0.999)):
            return None
        try:
            return self._read(socket.recv())  # the socket's own time-out: one call where polling first would be two
        except zmq.Again:
            return None

    def caller(self, place: NDArray[Any], first: int, epoch: int, most: float) -> None:
        """As Door.caller."""

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
                    answers.append(self._read(socket.recv(zmq.NOBLOCK)))
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

    def _open(self, engine: int, epoch: int) -> zmq.Socket[bytes]:
        self._drop(engine)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(_PATIENCE * 1000))
        socket.setsockopt(zmq.IDENTITY, lane_identity(self._lane, self._lease))
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.connect(self._addresses[engine])
        self._poller.register(socket, zmq.POLLIN)
        self._sockets[engine] = (epoch, socket)
        if self._watching is not None:
            self._watching[0].add_reader(_descriptor(socket), self._watching[1])
        return socket

    def _drop(self, engine: int) -> None:
        known = self._sockets.pop(engine, None)
        if known is None:
            return
        socket = known[1]
        if self._watching is not None and not self._watching[0].is_closed():
            self._watching[0].remove_reader(_descriptor(socket))
        self._poller.unregister(socket)
        socket.close()

    def _read(self, frame: bytes) -> Answer:
        if wrong := prefix_error(frame):
            raise ProtocolMismatch(f"an engine answered what is no reply: {wrong}")
        try:
            reply = Reply.FromString(frame[2:])
        except DecodeError as error:
            raise ProtocolMismatch(f"an engine answered what is no reply: {error}") from error
        return Answer(reply.sequence, reply.code, reply.message, reply.version, reply.epoch)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
