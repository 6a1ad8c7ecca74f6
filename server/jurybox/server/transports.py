"""The engine's transports: shm (ring buffers in shared memory, for clients on the same host) and ZeroMQ."""

from __future__ import annotations

import select
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.backend import Socket as Bare  # its methods without the wrappers of zmq.Socket, which double their cost

from jurybox import native
from jurybox.protocol.errors import MOST_TEXT, Code, cut, said
from jurybox.protocol.shm_rings import ShmRings
from jurybox.protocol.wire import IDENTITY, PACK_REPLY, PREFIX, TICKET, TICKET_FRAME, prefix_error
from jurybox.server.settings.endpoints import bind_for_own_user


class ShmTickets:
    """The engine's side of its shared-memory rings.

    Args:
        segment: the name of the rings' segment.
        others: descriptors that also end `wait`; the first is that of another transport.
        incarnation: the incarnation of this engine process; tickets for another one are dropped.
        spin_us: the maximum time in microseconds for which `wait` spins before it sleeps; it adapts below this limit.
    """

    number = 0
    slow = False

    def __init__(self, segment: str, others: Sequence[int], incarnation: int, spin_us: int) -> None:
        self._memory = ShmRings.attach(segment)
        self._rings = native.ShmRingsEngine(
            self._memory.segment.array(np.uint8, (native.RINGS_BYTES,)),
            [self._memory.pipe, *others],
            incarnation,
            spin_us * 1000,
        )
        # Bound here, since a method that only calls another one costs as much as the call.
        self.collect = self._rings.collect  # see Transport.collect
        self.reply = self._rings.reply  # see Transport.reply; answers to a client that never reads are dropped
        self.wait = self._rings.wait  # (seconds)
        self.pause = self._rings.pause  # (seconds, tickets)
        self.mend = self._rings.mend  # () -> the number of lanes that were overwritten
        self.renew = self._rings.renew  # (incarnation)

    def close(self) -> None:
        self._memory.close()


# A client's credit (the rows of its lane) limits the replies that wait for it; beyond that, replies to a peer that
# never reads are dropped.
_HIGH_WATER = 8192
_MAX_MESSAGE = 4096  # bytes; a ticket has 66, and libzmq closes a connection that sends a larger message
_BAD = 32  # invalid messages per turn: answering one takes as long as reading several tickets
_FRAMES = 1024  # frames of a multipart message that are dropped in a turn
_ADDRESSED = struct.Struct("<QQ16xI28x")  # of a wire.TICKET: sequence, lease, lane
assert _ADDRESSED.size == TICKET.itemsize
_EVENTS, _RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)
_POLLIN, _NOBLOCK, _SNDMORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.SNDMORE | zmq.NOBLOCK)


class ZmqTickets:
    """Receives tickets and sends replies on one ROUTER socket.

    Args:
        address: the address to bind to.
        incarnation: the incarnation of this engine process, which is part of every reply.
        report: called with (event, **fields) to log an event.
    """

    number = 0
    slow = True

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        incarnation: int,
        report: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        self.renew(incarnation)
        self._report = report
        self._rest = False  # whether a multipart message has been read only in part
        self._quiet = False  # whether the last check found no message, and the socket was not used since
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a lane's holder keeps its name when it reconnects
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        bind_for_own_user(self._socket, address)
        self._signal = select.epoll()  # cheaper than poll, which builds its list for each call
        self._signal.register(self.fileno(), select.EPOLLIN)

    def renew(self, incarnation: int) -> None:
        """Begin a new incarnation: tickets for the previous one are dropped."""
        self._incarnation, self._meant = incarnation, incarnation.to_bytes(8, "little")

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def pending(self) -> bool:
        """Return whether messages are waiting. Check it before waiting on `fileno`, which signals only changes."""
        if self._quiet and not self._signal.poll(0, 1):  # takes a third of the time of zmq.EVENTS
            return False
        there = bool(int(Bare.get(self._socket, _EVENTS)) & _POLLIN)
        self._quiet = not there
        return there

    def may_sleep(self) -> bool:
        """Return whether `fileno` signals the next message: no message waits, and the socket was not used since."""
        return self._quiet or not self.pending()

    def collect(self, out: NDArray[Any]) -> int:
        """Collect tickets; see `Transport.collect`. Invalid messages get an error reply.

        A turn reads at most ``len(out)`` messages, valid or not, and at most _BAD invalid ones: a client that floods
        the socket with invalid messages takes only a part of each turn.
        """
        if not self.pending() or (self._rest and not self._drop_rest()):
            return 0
        socket, receive, get, meant, size = self._socket, Bare.recv, Bare.get, self._meant, TICKET.itemsize
        room = out.view(np.uint8).data  # assigning a record through NumPy would take longer than receiving it
        n = bad = 0
        try:
            for number in range(len(out)):
                identity = receive(socket, _NOBLOCK)
                frame = receive(socket, _NOBLOCK)
                if get(socket, _RCVMORE) or len(frame) != TICKET_FRAME or frame[:2] != PREFIX:
                    self._complain(identity, frame)
                    bad += 1
                    if bad == _BAD or self._rest:
                        break
                # Drop a ticket for another incarnation: its sender sees the new one on the scoreboard and resends it.
                elif frame[-8:] == meant:
                    room[n * size : (n + 1) * size] = frame[2:]
                    n += 1
                # If there was only one message, zmq.Again from another receive would cost more than this check.
                if number == 0 and not self.pending():
                    break
        except zmq.Again:
            pass
        return n

    def reply(self, tickets: NDArray[Any], code: int, version: int, message: str) -> None:
        """Answer tickets; see `Transport.reply`. The socket drops replies to peers that are gone."""
        self._quiet = False  # sending consumes the socket's signal, perhaps that of a message
        socket, send, incarnation = self._socket, Bare.send, self._incarnation
        text = cut(message, MOST_TEXT) if message else b""
        identity, reply = IDENTITY.pack, PACK_REPLY.pack
        for sequence, lease, lane in _ADDRESSED.iter_unpack(tickets.tobytes()):
            send(socket, identity(b"L", lane, lease), _SNDMORE)
            send(socket, PREFIX + reply(sequence, version, incarnation, code) + text, _NOBLOCK)

    def close(self) -> None:
        self._signal.close()
        self._socket.close()

    def _complain(self, identity: bytes, frame: bytes) -> None:
        """Send an error reply to a message that is not a ticket."""
        self._quiet = False
        self._rest = bool(Bare.get(self._socket, _RCVMORE))
        many = self._rest
        if many:
            self._drop_rest()
        mismatch = prefix_error(frame)
        message = mismatch or (
            f"{'several frames' if many else f'{len(frame)} bytes in 1 frames'} came that are not a ticket: expected "
            f"{TICKET_FRAME} bytes in one, {PREFIX!r} and a record of {TICKET.itemsize}"
        )
        code = Code.PROTOCOL_MISMATCH if mismatch else Code.MALFORMED
        self._report("bad message", error=message)
        reply = PREFIX + PACK_REPLY.pack(0, 0, self._incarnation, code) + message.encode()
        try:
            self._socket.send_multipart((identity, reply), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._report("complaint not sent", error=said(error))

    def _drop_rest(self) -> bool:
        """Drop the rest of a multipart message, at most _FRAMES frames per turn; return whether all are dropped."""
        for _ in range(_FRAMES):
            if not Bare.get(self._socket, _RCVMORE):
                self._rest = False
                return True
            Bare.recv(self._socket, _NOBLOCK)
        return False
