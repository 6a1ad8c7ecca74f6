"""ZeroMQ without libzmq: a DEALER's connection to a ROUTER over a socket that the caller's thread reads and writes.

libzmq passes each message to its own I/O thread, and receives each answer through it. For a request of less than a
tenth of a millisecond, these two wake-ups are most of the client's cost. So if the native core is available and CURVE
is not used, the caller's thread reads and writes the socket itself (native/serving/zmtp.hpp). The peer sees no
difference.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from jurybox.client.in_flight import LOOK_AFTER, Answer, InFlight
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
    read_reply,
)
from jurybox.protocol.descriptors import exhausted, remedy
from jurybox.protocol.errors import Code, ProtocolMismatch, TooManyFiles
from jurybox.protocol.wire import PACK_TICKET, PREFIX, lane_identity

try:
    from jurybox import native
except ImportError:  # without the native core, libzmq is used
    native = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from jurybox.native import Zmtp

_MOST_REPLY = 1 << 20  # bytes; an engine's reply has no outputs, they are in the arena
_PATIENCE = 0.02  # seconds that a send waits for buffer space if no event loop watches the socket
_CONNECT = 0.1  # seconds to wait for space in an engine's listen queue
FRAME = struct.Struct(f"<{len(PREFIX)}s{PACK_TICKET.format[1:]}")  # a ticket with its prefix


def can_dial(address: str) -> bool:
    """Return whether `dial` can connect: the native core is available, and the address is ipc:// or tcp://."""
    return native is not None and address.startswith(("ipc://", "tcp://"))


def dial(address: str, identity: bytes, most: int, attempt: int = 0) -> Zmtp | None:
    """Connect to a ROUTER; return None if nothing is listening there. The first calls complete the handshake.

    Args:
        address: ipc://path or tcp://host:port.
        identity: the routing id; empty: the peer assigns one.
        most: maximum length of a received frame in bytes.
        attempt: number of the attempt; successive attempts try a host's addresses in turn.

    Raises:
        TooManyFiles: this process may open no more files.
    """
    made = None
    try:
        made = _local(address.removeprefix("ipc://")) if address.startswith("ipc://") else _remote(address, attempt)
        # From here on only the link owns the descriptor: closing it twice could close another file.
        descriptor = made.detach()
        try:
            return native.Zmtp(descriptor, identity, most, _PATIENCE)
        except (RuntimeError, MemoryError):  # the link has not taken ownership
            os.close(descriptor)
            raise
    except OSError as error:
        if exhausted(error):
            raise TooManyFiles(f"no socket to {address}: {remedy()}") from error
        return None
    except RuntimeError as error:  # the native core could not create its epoll descriptor
        raise TooManyFiles(f"no socket to {address}: {remedy()}") from error
    finally:
        if made is not None:
            made.close()


def _local(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # If many clients connect at once, wait for space in the listen queue.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, int(_CONNECT * 1e6)))
        made.connect("\0" + path[1:] if path.startswith("@") else path)
    except BaseException:
        made.close()
        raise
    return made


def _remote(address: str, attempt: int) -> socket.socket:
    """Return a socket that is connecting, without waiting for the peer."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[attempt % len(found)]
    made = socket.socket(family, kind, protocol)
    try:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if (why := made.connect_ex(where)) not in (0, errno.EINPROGRESS):
            raise OSError(why, os.strerror(why))
    except BaseException:
        made.close()
        raise
    return made


class EngineLink:
    """The tickets sent to one incarnation of an engine, and those that were sent twice.

    After a broken connection or an interrupted call, it is unknown whether the engine has the tickets in flight. They
    are sent again with a second number. An engine answers a lane's tickets for the same weights in the order of their
    arrival. So once the second copy is answered, the first one is finished as well, and the engine no longer writes to
    its rows.

    A message stays until the answer in it is settled. So parsing it again, in a nested call or after an interrupted
    one, has the same result.
    """

    def __init__(self, lane: int, lease: int, incarnation: int) -> None:
        self.incarnation = incarnation
        self._lane = lane
        self._lease = lease
        self._doubtful: set[int] = set()  # sequences whose state is unknown: answered, in flight or never sent
        self._again: dict[int, int] = {}  # second numbers -> sequence
        self._settled_again: set[int] = set()  # sequences that were sent again: only the second answer counts
        self._numbers = itertools.count((((lease & 0xFFFFFFFF) ^ 0x80000000) << 32) + 1)

    def frame(self, sequence: int, first: int, rows: int, submitted: int, deadline: int, version: int) -> bytes:
        """Return a ticket's bytes."""
        lane, lease = self._lane, self._lease
        return FRAME.pack(PREFIX, sequence, lease, deadline, submitted, lane, first, rows, 0, version, self.incarnation)

    def send(self, sequence: int, first: int, rows: int, submitted: int, deadline: int, version: int) -> None:
        """Send a ticket."""
        raise NotImplementedError

    def replies(self, timeout: float) -> list[bytes]:
        """Return the replies that were not dropped; if there are none, wait up to `timeout` seconds for some."""
        raise NotImplementedError

    def drop(self, number: int) -> None:
        """Drop the reply with this number, first or second; it may be dropped already."""
        raise NotImplementedError

    def answers(self, timeout: float) -> list[Answer]:
        """Return the answers that are not settled; if there are none, wait up to `timeout` seconds for some."""
        answers: list[Answer] = []
        for reply in self.replies(timeout):
            try:
                answer = read_reply(reply, "an engine")
            except ProtocolMismatch:
                self.drop(number_in(reply))
                raise
            number = answer.sequence
            sequence = self._again.get(number)
            if sequence is not None:
                if answer.code == Code.BUSY:  # the engine still has the first copy: `has` sends it again
                    self._again.pop(number, None)
                    self.drop(number)
                else:
                    answers.append(answer._replace(sequence=sequence))
            elif answer.code == Code.BUSY:
                # The engine still has a ticket that was sent twice: `has` sends it again.
                self.doubt_one(number)
                self.drop(number)
            elif number in self._settled_again:
                self.drop(number)
            else:
                answers.append(answer)
        return answers

    def settled(self, sequence: int) -> None:
        """Drop the answers to a ticket, and forget it."""
        for number in self._again_of(sequence):
            self._again.pop(number, None)
            self.drop(number)
        self.drop(sequence)
        self._doubtful.discard(sequence)
        self._settled_again.discard(sequence)

    def doubt_one(self, sequence: int) -> None:
        """Record that it is unknown whether the engine has a ticket."""
        self._doubtful.add(sequence)

    def _again_of(self, sequence: int) -> list[int]:
        """Return the second numbers of a ticket."""
        return [number for number in list(self._again) if self._again.get(number) == sequence]

    def _send_again(self, ticket: InFlight) -> int:
        """Send a ticket again and return its second number."""
        self._settled_again.add(ticket.sequence)
        number = next(self._numbers)
        self._again[number] = ticket.sequence
        self.send(number, ticket.first, ticket.rows, time.monotonic_ns(), 0, ticket.version)
        return number


def number_in(reply: bytes) -> int:
    """Return the number in a reply's bytes; 0 if they are too few."""
    return int.from_bytes(reply[len(PREFIX) : NAMED], "little") if len(reply) >= NAMED else 0


class DirectEngine(EngineLink):
    """The connection to one incarnation of an engine. It can be dialled again if it breaks.

    It breaks only when the engine ends.

    Attributes:
        link: the socket; None if nothing was listening.
    """

    def __init__(self, address: str, lane: int, lease: int, incarnation: int) -> None:
        super().__init__(lane, lease, incarnation)
        self.link: Zmtp | None = None
        self._address = address
        self._earlier: dict[int, bytes] = {}  # replies of broken connections, by number
        self.dial()

    @property
    def broken(self) -> bool:
        """Whether `dial` must be called before anything can be sent."""
        return self.link is None or self.link.broken

    @property
    def descriptor(self) -> int:
        """The descriptor that is readable when answers may have arrived; -1 without a connection."""
        return -1 if self.link is None else self.link.descriptor

    def dial(self) -> None:
        """Connect, or connect again after the connection has broken."""
        if (link := self.link) is not None:
            self._earlier.update((number, bytes(frames[0])) for number, frames in link.answers(0))
            self._doubtful.update(link.unanswered)
            self._doubtful.difference_update(self._again)
            self._again.clear()
            link.close()
        self.link = dial(self._address, lane_identity(self._lane, self._lease), _MOST_REPLY)

    def send(self, sequence: int, first: int, rows: int, submitted: int, deadline: int, version: int) -> None:
        """Send a ticket. If the connection is broken it is not sent, and `has` returns False."""
        if self.link is not None:
            self.link.send(sequence, (self.frame(sequence, first, rows, submitted, deadline, version),))

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """Send a ticket and return its answer if it arrives in time."""
        if (link := self.link) is None:
            return None
        t = ticket
        frame = self.frame(t.sequence, t.first, t.rows, t.submitted, t.deadline, t.version)
        message = link.exchange(t.sequence, (frame,), timeout)
        return None if message is None else self.own(read_reply(bytes(message[0]), "an engine"), t.sequence)

    def own(self, answer: Answer, sequence: int) -> Answer | None:
        """Return the answer of an exchange; None if the ticket must be sent again."""
        if answer.code == Code.BUSY and answer.sequence == sequence:
            self.doubt_one(sequence)
            return None
        return answer

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for a message."""
        if self.link is None:
            time.sleep(min(timeout, LOOK_AFTER))
        else:
            self.link.answers(timeout)

    def replies(self, timeout: float) -> list[bytes]:
        earlier = list(self._earlier.values())
        if (link := self.link) is None:
            if not earlier and timeout > 0:
                time.sleep(min(timeout, LOOK_AFTER))
            return earlier
        return earlier + [bytes(frames[0]) for _, frames in link.answers(0 if earlier else timeout)]

    def drop(self, number: int) -> None:
        if self._earlier:
            self._earlier.pop(number, None)
        if self.link is not None:
            self.link.settled(number)

    def has(self, ticket: InFlight) -> bool:
        """Return whether the engine may have the ticket, or its answer is not settled."""
        sequence, link = ticket.sequence, self.link
        if (link is not None and link.holds(sequence)) or sequence in self._earlier:
            return True
        if sequence not in self._doubtful:
            return False
        if link is None or not any(link.holds(number) for number in self._again_of(sequence)):
            self._send_again(ticket)
        return True

    def close(self) -> None:
        """Close the connection. Tickets in flight are never answered."""
        if self.link is not None:
            self.link.close()


class DirectCaller(SocketCaller):
    """A caller over the connection to one incarnation of an engine."""

    def __init__(self, engine: DirectEngine, place: RowPlace) -> None:
        super().__init__(place, place.engine)
        self._engine = engine

    def __call__(self, row: object, sequence: int, seconds: float) -> Any:
        engine, place = self._engine, self._place
        link = engine.link
        if self._incarnations.item(0) != engine.incarnation or self._states.item(0) != SERVING:
            return NOT_SENT
        if link is None or link.broken:
            return NOT_SENT
        if row is not None and not place.write(row):
            return NOT_FIT
        now = time.monotonic_ns()
        self.deadline = deadline = now + int(seconds * 1e9)
        frame = engine.frame(sequence, place.first, place.rows, now, deadline, 0)
        message = link.exchange(sequence, (frame,), seconds if seconds < LOOK_AFTER else LOOK_AFTER)
        if message is None:
            return NOT_ANSWERED
        reply = bytes(message[0])
        if len(reply) == HEAD and reply[-4:] == OK and reply[:NAMED] == frame[:NAMED]:
            self._reply = reply
            return place.copied()
        answer = engine.own(read_reply(reply, "an engine"), sequence)
        if answer is None:
            return NOT_ANSWERED  # not yet: it is sent again
        if answer.sequence == 0:
            raise ProtocolMismatch(answer.message)
        self._message, self._reply = answer.message, answer
        return answer.code
