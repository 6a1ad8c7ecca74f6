"""A lane's connection to one engine of a server on this host, and what becomes of tickets when it breaks."""

from __future__ import annotations

import itertools
import struct
import time
from typing import TYPE_CHECKING, Any

import zmq

from jurybox.client.in_flight import LOOK_AFTER, Answer, InFlight
from jurybox.client.transports.direct import can_dial, dial
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
    number_in,
    read_reply,
)
from jurybox.client.transports.zmq_socket import ZmqSocket
from jurybox.protocol.errors import Code, ProtocolMismatch
from jurybox.protocol.wire import PACK_TICKET, PREFIX, lane_identity

if TYPE_CHECKING:
    from jurybox.native import Zmtp

_MOST_REPLY = 1 << 20  # bytes; an engine's reply has no outputs, they are in the arena
_FRAME = struct.Struct(f"<{len(PREFIX)}s{PACK_TICKET.format[1:]}")  # a ticket with its prefix


class EngineLink:
    """The connection to one incarnation of an engine. It is dialled again if it breaks.

    A socket of our own (direct.py) breaks only when the engine ends, one of libzmq also when a call is interrupted
    within a message, or another one is nested there. Then it is unknown whether the engine has the tickets in flight.
    They are sent again with a second number. An engine answers a lane's tickets for the same weights in the order of
    their arrival. So once the second copy is answered, the first one is finished as well, and the engine no longer
    writes to its rows.

    A message stays until the answer in it is settled. So parsing it again, in a nested call or after an interrupted
    one, has the same result.

    Args:
        address: the engine's, ipc://path.
        incarnation: the tickets' incarnation of the engine.

    Attributes:
        link: the socket; None if nothing was listening.
        watched: the descriptor that an event loop watches; -1: none.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, lane: int, lease: int, incarnation: int
    ) -> None:
        self.incarnation = incarnation
        self.link: Zmtp | ZmqSocket | None = None
        self.watched = -1
        self._context = context
        self._address = address
        self._lane = lane
        self._lease = lease
        self._earlier: dict[int, bytes] = {}  # replies of replaced sockets, by number
        self._doubtful: set[int] = set()  # sequences whose state is unknown: answered, in flight or never sent
        self._again: dict[int, int] = {}  # second numbers -> sequence
        self._settled_again: set[int] = set()  # sequences that were sent again: only the second answer counts
        self._numbers = itertools.count((((lease & 0xFFFFFFFF) ^ 0x80000000) << 32) + 1)
        self.dial()

    @property
    def broken(self) -> bool:
        """Whether `dial` must be called before anything can be sent."""
        return (link := self.link) is None or link.broken or (isinstance(link, ZmqSocket) and link.torn)

    @property
    def descriptor(self) -> int:
        """The descriptor that is readable when answers may have arrived; -1 without a connection."""
        return -1 if self.link is None else self.link.descriptor

    def dial(self) -> None:
        """Connect, or connect again after the connection has broken."""
        if (link := self.link) is not None:
            self._keep(link)
            self._doubtful.update(link.unanswered)
            self._doubtful.difference_update(self._again)
            self._again.clear()
            link.close()
        identity = lane_identity(self._lane, self._lease)
        if can_dial(self._address):
            self.link = dial(self._address, identity, _MOST_REPLY)
        else:
            self.link = ZmqSocket(self._context, self._address, None, identity, plain=True)

    def send(self, sequence: int, first: int, rows: int, submitted: int, deadline: int, version: int) -> None:
        """Send a ticket. If the connection is broken it is not sent, and `has` returns False."""
        if self.link is not None:
            self.link.send(sequence, (self.frame(sequence, first, rows, submitted, deadline, version),))

    def exchange(self, ticket: InFlight, timeout: float) -> Answer | None:
        """Send a ticket and return its answer if it arrives in time."""
        t = ticket
        frame = self.frame(t.sequence, t.first, t.rows, t.submitted, t.deadline, t.version)
        reply = self.exchanged(t.sequence, frame, timeout)
        return None if reply is None else self.own(read_reply(reply, "an engine"), t.sequence)

    def exchanged(self, sequence: int, frame: bytes, timeout: float) -> bytes | None:
        """Send a ticket's bytes and return its reply, which is settled; None if none came, or another one counts."""
        if (link := self.link) is None or (message := link.exchange(sequence, (frame,), timeout)) is None:
            return None
        if self.link is not link:  # a nested call has replaced it
            if sequence in self._settled_again:
                return None
            self.settled(sequence)
        return bytes(message[0])

    def own(self, answer: Answer, sequence: int) -> Answer | None:
        """Return the answer of an exchange; None if the ticket must be sent again."""
        if answer.code == Code.BUSY and answer.sequence == sequence:
            self._doubtful.add(sequence)
            return None
        return answer

    def answers(self, timeout: float) -> list[Answer]:
        """Return the answers that are not settled; if there are none, wait up to `timeout` seconds for some."""
        answers: list[Answer] = []
        for reply in self._replies(timeout):
            try:
                answer = read_reply(reply, "an engine")
            except ProtocolMismatch:
                self._drop(number_in(reply))
                raise
            number = answer.sequence
            sequence = self._again.get(number)
            if sequence is not None:
                if answer.code == Code.BUSY:  # the engine still has the first copy: `has` sends it again
                    self._again.pop(number, None)
                    self._drop(number)
                else:
                    answers.append(answer._replace(sequence=sequence))
            elif answer.code == Code.BUSY:
                # The engine still has a ticket that was sent twice: `has` sends it again.
                self._doubtful.add(number)
                self._drop(number)
            elif number in self._settled_again:
                self._drop(number)
            else:
                answers.append(answer)
        return answers

    def settled(self, sequence: int) -> None:
        """Drop the answers to a ticket, and forget it."""
        for number in self._again_of(sequence):
            self._again.pop(number, None)
            self._drop(number)
        self._drop(sequence)
        self._doubtful.discard(sequence)
        self._settled_again.discard(sequence)

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

    def frame(self, sequence: int, first: int, rows: int, submitted: int, deadline: int, version: int) -> bytes:
        """Return a ticket's bytes."""
        lane, lease = self._lane, self._lease
        return _FRAME.pack(
            PREFIX, sequence, lease, deadline, submitted, lane, first, rows, 0, version, self.incarnation
        )

    def _replies(self, timeout: float) -> list[bytes]:
        """Return the replies that were not dropped; if there are none, wait up to `timeout` seconds for some."""
        if (link := self.link) is None:
            if not self._earlier and timeout > 0:
                time.sleep(min(timeout, LOOK_AFTER))
        elif arrived := link.answers(0 if self._earlier else timeout):
            if self.link is link:
                return list(self._earlier.values()) + [bytes(frames[0]) for _, frames in arrived]
            self._keep(link)  # a nested call has replaced it meanwhile
        return list(self._earlier.values())

    def _keep(self, link: Zmtp | ZmqSocket) -> None:
        """Keep the replies that have arrived over a socket that is replaced."""
        self._earlier.update((number, bytes(frames[0])) for number, frames in link.answers(0))

    def _drop(self, number: int) -> None:
        """Drop the reply with this number, first or second; it may be dropped already."""
        if self._earlier:
            self._earlier.pop(number, None)
        if self.link is not None:
            self.link.settled(number)

    def _again_of(self, sequence: int) -> list[int]:
        """Return the second numbers of a ticket."""
        return [number for number in list(self._again) if self._again.get(number) == sequence]

    def _send_again(self, ticket: InFlight) -> None:
        """Send a ticket again, with a second number."""
        self._settled_again.add(ticket.sequence)
        number = next(self._numbers)
        self._again[number] = ticket.sequence
        self.send(number, ticket.first, ticket.rows, time.monotonic_ns(), 0, ticket.version)


class EngineCaller(SocketCaller):
    """A caller over the connection to one incarnation of an engine."""

    def __init__(self, engine: EngineLink, place: RowPlace) -> None:
        super().__init__(place, place.engine)
        self._engine = engine

    def __call__(self, row: object, sequence: int, seconds: float) -> Any:
        engine, place = self._engine, self._place
        if self._incarnations.item(0) != engine.incarnation or self._states.item(0) != SERVING:
            return NOT_SENT
        if engine.broken:
            return NOT_SENT
        if row is not None and not place.write(row):
            return NOT_FIT
        now = time.monotonic_ns()
        self.deadline = deadline = now + int(seconds * 1e9)
        frame = engine.frame(sequence, place.first, place.rows, now, deadline, 0)
        reply = engine.exchanged(sequence, frame, seconds if seconds < LOOK_AFTER else LOOK_AFTER)
        if reply is None:
            return NOT_ANSWERED
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
