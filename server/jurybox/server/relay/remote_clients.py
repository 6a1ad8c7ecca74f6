"""The relay's socket to the network, and the lanes that it holds for remote clients."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.backend import Socket as Bare  # its methods without what zmq.Socket adds, which costs as much as they do

from jurybox import native
from jurybox.client.in_flight import InFlight
from jurybox.client.lane import Lane
from jurybox.client.transports.shm import ShmTransport, Words
from jurybox.protocol import row_frames
from jurybox.protocol.control_pb2 import Lease
from jurybox.protocol.errors import MOST_TEXT, Code, Error, cut
from jurybox.protocol.wire import PACK_REPLY, PREFIX
from jurybox.server.security.access import public_keys, read_pair

_TRACKED = 4 << 10  # bytes from which on a message is followed until it has left
_COPIED = 64 << 10  # bytes of a frame below which copying it is cheaper than keeping track of who owns it
_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE | zmq.NOBLOCK)
_CLIENTS = 8  # clients that may leave as much unread as one may, before all others are held to one message each
_SEND_HIGH_WATER, _RECEIVE_HIGH_WATER = 1024, 64  # messages a client may leave unread, and send ahead
_BEAT_MS, _SILENCE_MS = 2000, 10_000  # libzmq's own pings, and the silence that ends a connection
_HANDSHAKE_MS = 5000
_DOMAIN = "jurybox"
_MOST_HEAD = 255 + len(PREFIX) + PACK_REPLY.size + MOST_TEXT  # bytes of an answer's first frames: its client, its head
_PROBE = (PREFIX, bytes(8), b"")  # a control reply to call number 0, which nobody has made


class Front:
    """A ROUTER socket on TCP, with CURVE if there are keys.

    Args:
        where: "host:port"; port 0 takes a free one.
        curve_key: the server's .key_secret; None: whoever connects comes in.
        curve_clients: a folder of .key files of those who may come in; None: any key may.
        max_message: bytes of the largest frame, and of what one client may leave unread.

    Attributes:
        bound: "host:port" where it really listens.

    Raises:
        zmq.ZMQError: it cannot be bound; ValueError: the keys cannot be read, or no client's is there.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        where: str,
        curve_key: str | None,
        curve_clients: str | None,
        max_message: int,
    ) -> None:
        self._guard: ThreadAuthenticator | None = None
        self._most_unsent = max_message
        self._unsent: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}
        self._unsent_to: dict[bytes, int] = {}
        self._unsent_bytes = 0
        self._quiet = False  # nothing was there at the last look, and nothing was done with the socket since
        self.socket = context.socket(zmq.ROUTER)
        set_option = self.socket.setsockopt
        self.socket.copy_threshold = 1024  # of what is sent without a copy: smaller frames are copied all the same
        set_option(zmq.LINGER, 0)
        set_option(zmq.IPV6, 1 if "[" in where else 0)
        set_option(zmq.SNDHWM, _SEND_HIGH_WATER)
        set_option(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        set_option(zmq.MAXMSGSIZE, max_message)
        set_option(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        set_option(zmq.HEARTBEAT_IVL, _BEAT_MS)
        set_option(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        # A second connection of a name is not heard while the first stands. Handing the name over to it leaves the
        # first one half closed, and a ping on that ends the process (libzmq 4.3.5: "Assertion failed: !_io_error").
        set_option(zmq.ROUTER_HANDOVER, 0)
        set_option(zmq.ROUTER_MANDATORY, 1)  # says when a client is gone
        try:
            if curve_key is not None:
                self._guard_with(context, curve_key, curve_clients)
            self.socket.bind(f"tcp://{where}")
        except BaseException:
            self.close()
            raise
        self._descriptor = int(self.socket.getsockopt(zmq.FD))
        self.bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").removeprefix("tcp://")

    def has_room(self, client: bytes, size: int) -> bool:
        """Whether a message of so many bytes can be sent to a client now.

        ZeroMQ bounds the messages that a client leaves unread, not their bytes. One message may always be on its way.
        """
        waiting = self._unsent.get(client)
        while waiting and waiting[0][0].done:
            _, sent = waiting.popleft()
            self._unsent_to[client] -= sent
            self._unsent_bytes -= sent
        if not waiting:
            self._unsent.pop(client, None)
            self._unsent_to.pop(client, None)
            return True
        unsent = self._unsent_to[client] + size
        return unsent <= self._most_unsent and self._unsent_bytes + size <= _CLIENTS * self._most_unsent

    def send(self, frames: Sequence[Any]) -> bool:
        """Send to the client that the first frame names; False if it is gone. A client that does not read loses it."""
        size = sum(map(len, frames))
        self._quiet = False  # sending reads the socket's signal, and with it perhaps the news of a message
        try:
            if size < _TRACKED:
                socket, last = self.socket, len(frames) - 1
                for i, frame in enumerate(frames):
                    Bare.send(socket, frame, _SNDMORE if i < last else _NOBLOCK)
            elif self.has_room(frames[0], size):
                tracker = self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
                assert tracker is not None
                self._unsent.setdefault(frames[0], deque()).append((tracker, size))
                self._unsent_to[frames[0]] = self._unsent_to.get(frames[0], 0) + size
                self._unsent_bytes += size
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def has_news(self) -> bool:
        """Whether messages are waiting. Check it before sleeping on `fileno`, which signals changes only."""
        if self._quiet:
            return False
        there = bool(int(Bare.get(self.socket, _EVENTS)) & _POLLIN)
        self._quiet = not there
        return there

    def fileno(self) -> int:
        """Readable when messages may have come. Who was told so takes a look with `receive`."""
        return self._descriptor

    def receive(self, sizes: Callable[[bytes], int]) -> list[Any] | None:
        """A client's message, its routing id and first frames as bytes; None where there is none.

        Args:
            sizes: bytes to expect of each frame behind the first, given that: large ones are not copied, and are
                zmq.Frame.
        """
        socket = self.socket
        self._quiet = False
        if not self.has_news():
            return None
        frames: list[Any] = [Bare.recv(socket, _NOBLOCK)]
        copies = True
        while Bare.get(socket, _RCVMORE):
            frames.append(Bare.recv(socket, _NOBLOCK, copies))
            if len(frames) == 2:
                copies = sizes(frames[1]) < _COPIED
        return frames

    def forget_sent(self) -> None:
        """Forget messages that were sent."""
        for client in list(self._unsent):
            self.has_room(client, 0)

    def is_there(self, client: bytes) -> bool:
        """Whether a client is connected."""
        return self.send((client, *_PROBE))

    def close(self) -> None:
        self.socket.close()
        if self._guard is not None:
            with contextlib.suppress(zmq.ZMQError):  # the context may be gone already
                self._guard.stop()

    def _guard_with(self, context: zmq.Context[zmq.Socket[bytes]], curve_key: str, curve_clients: str | None) -> None:
        public, secret = read_pair(Path(curve_key))
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        # RFC 27: the guard is asked by libzmq before a connection carries anything; without an answer nobody comes in.
        self.socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
        self._guard = ThreadAuthenticator(context)
        self._guard.start()
        if curve_clients is None:
            self._guard.configure_curve(domain=_DOMAIN, location=zmq.auth.CURVE_ALLOW_ANY)
        elif public_keys(Path(curve_clients)):
            self._guard.configure_curve(domain=_DOMAIN, location=curve_clients)
        else:
            raise ValueError(
                f"server.curve_clients = {curve_clients!r} holds no .key file: put the .key of every client there "
                "(jurybox keys CLIENT makes one), and start again"
            )


_LONGEST_NS = 3_600_000_000_000  # an hour: no ticket waits longer


class InlineTicket(NamedTuple):
    """A received ticket: its connection, and the relevant fields of its record."""

    sender: bytes
    sequence: int
    left: int  # ns until its deadline
    first: int  # row, counted from the lane's first
    rows: int
    version: int
    incarnation: int  # of the client's connection


class HeldLane:
    """Sends the tickets of one client to the engines.

    Its tickets are in one of two hands: this object's, or a native.RelayLane's, which sees to all that is not special
    as long as none is in flight here. It hands over whenever something else is to be done about the lane.

    Args:
        lane: leased by the relay.
        owner: the connection whose end is the end of the lease.
        call: the number of the call that it was leased for; `granted`: the answer to it.
    """

    def __init__(self, lane: Lane, owner: bytes, call: bytes, granted: Lease, first: int, rows: int) -> None:
        self.lane = lane
        self.owner = owner
        self.call = call
        self.granted = granted
        self._first = first
        self._rows = rows
        self._in_flight: dict[int, tuple[InlineTicket, InFlight]] = {}
        self._busy = bytearray(rows)
        self._inputs = row_frames.PlainRows(lane.columns, "inputs")
        self._outputs = row_frames.PlainRows(lane.columns, "outputs")
        self._shm = lane.transport if isinstance(lane.transport, ShmTransport) else None
        self._this = weakref.ref(self)
        self._native: native.RelayLane | None = None
        self._native_for: tuple[native.Zmtp, tuple[int, int]] | None = None  # whose connection, which engine's life
        self._sender = b""

    @property
    def waits(self) -> bool:
        """Whether a ticket is in flight."""
        return bool(self._in_flight) or (self._native is not None and self._native.in_flight > 0)

    def connect(self, sender: bytes, link: native.Zmtp) -> bool:
        """After a `submit`: have the plain ones among the next tickets by this connection go past it, by `take_in`.

        Returns:
            Whether anything was done: False where rows are not plain, there are several engines, or it is so already.
        """
        if not self._inputs or not self._outputs or self._shm is None or (engine := self.lane.only_engine()) is None:
            return False
        if self._native_for is not None and self._native_for[0] is link and self._native_for[1] == engine:
            return False
        if (client := self._shm.client(*engine)) is None:
            return False
        self._take_back()
        if self._native is not None:
            self._native.close()
        memory = self._inputs.memory(), self._outputs.memory()
        number = self.granted.lease
        self._native = native.RelayLane(
            link, client, self.lane.engine, engine[1], number, self._first, self._rows, *memory
        )
        self._native_for, self._sender = (link, engine), sender
        return True

    def take_in(self) -> int:
        """Send on the plain tickets that came by its connection; how many. What is left there is for `submit`."""
        return 0 if self._native is None else self._native.take_in()

    def answer(self) -> bool:
        """Send answers to tickets of `take_in`; False where `answers` has to see to them."""
        return self._native is not None and self._native.answer()

    def stay(self, descriptors: Sequence[int], pause: float, seconds: float) -> bool:
        """Do both for a lone client, see native.RelayLane.stay; returns whether its connection has other messages."""
        if self._native is None or self._native_for is None or self._shm is None or not self._native.mine:
            return False
        self._shm.quiet()
        self._native.stay(descriptors, pause, seconds)
        return self._native_for[0].arrived

    @property
    def sender(self) -> bytes:
        """Whose connection `take_in` reads."""
        return self._sender

    def _take_back(self) -> None:
        """Have all tickets in flight here."""
        if self._native is None or self._native_for is None or not self._native.mine:
            return
        engine, life = self._native_for[1]
        for number, sequence, first, rows, version, incarnation, submitted, deadline in self._native.hand_over():
            ticket = InFlight(number, self._first + first, rows, deadline, version)
            ticket.holder = self._this
            self.lane.adopt(ticket, engine, life, submitted)
            came = InlineTicket(self._sender, sequence, 0, first, rows, version, incarnation)
            self._busy[first : first + rows] = b"\1" * rows
            self._in_flight[sequence] = (came, ticket)
        self.lane.sequence = max(self.lane.sequence, self._native.number)

    def _give(self) -> None:
        """Nothing is in flight any more: the next tickets may go past this object again."""
        if self._native is not None and not self._in_flight and not self.lane.in_flight:
            self._native.take_over(self.lane.sequence)

    def watch(self, loop: asyncio.AbstractEventLoop, words: Words, arrived: Callable[[], None]) -> None:
        """Have answers told to `words`; by `arrived` in the loop's thread, where the lane has another transport."""
        if self._shm is not None:
            self._shm.tell(words)
        else:
            self.lane.watch(loop, arrived)

    def arm(self) -> bool:
        """Have the next answer told; whether one is there already."""
        return self._shm is not None and self._shm.arm()

    def spin(self) -> bool:
        """Whether an answer came within microseconds; only a lone client's is waited for."""
        return self._shm is not None and self._shm.spin()

    def submit(self, ticket: InlineTicket, frames: Sequence[Any]) -> None:
        """Copy a ticket's rows to the lane and send it.

        Raises:
            Error: it does not fit the lane or the model.
        """
        self._take_back()
        try:
            self._submit(ticket, frames)
        finally:
            self._give()

    def _submit(self, ticket: InlineTicket, frames: Sequence[Any]) -> None:
        first, end = ticket.first, ticket.first + ticket.rows
        if not 0 < ticket.rows <= self._rows or end > self._rows:
            raise Error(f"rows {first}..{end - 1} were sent, this lane has {self._rows}", Code.REFUSED)
        if (known := self._in_flight.get(ticket.sequence)) is not None:
            if (known[0].first, known[0].rows) != (first, ticket.rows):
                raise Error(
                    f"ticket {ticket.sequence} came again with other rows: {known[0].rows} from row {known[0].first} "
                    f"came first, {ticket.rows} from row {first} now; a number is for one request",
                    Code.MALFORMED,
                )
            # Its client lost the connection and sends it again: the answer goes to where it is now.
            self._in_flight[ticket.sequence] = (ticket, known[1])
            return
        if any(self._busy[first:end]):
            raise Error("some of these rows belong to a ticket that is not answered yet", Code.BUSY)
        start = self._first + first
        bodies = [frame.buffer if isinstance(frame, zmq.Frame) else frame for frame in frames]
        if self._inputs:
            self._inputs.write(start, ticket.rows, bodies)
        else:
            row_frames.unpack(self.lane.columns, "inputs", start, ticket.rows, [memoryview(body) for body in bodies])
        deadline = time.monotonic_ns() + min(max(ticket.left, 1), _LONGEST_NS)
        self._busy[first:end] = b"\1" * ticket.rows
        self._in_flight[ticket.sequence] = (
            ticket,
            self.lane.submit(start, ticket.rows, deadline, ticket.version, self._this),
        )

    def answers(self, has_room: Callable[[bytes, int], bool] = lambda *_: True) -> Iterator[list[Any]]:
        """New answers, as frames to send.

        An answer for which its client has left no room stays in its rows, which are the client's own, until it has.
        """
        if self._native is not None and self._native.in_flight:
            self._take_back()
        self.lane.receive_now()
        answered = [(*each, each[1].answer.code) for each in self._in_flight.values() if each[1].answer is not None]
        for came, sent, code in answered:
            size = self._outputs.row_bytes * sent.rows or row_frames.size(
                self.lane.columns, "outputs", sent.first, sent.rows
            )
            if not has_room(came.sender, size + _MOST_HEAD):
                continue
            frames = self._frames(came, sent)
            # Sizes, state and reasons of failed rows come on top: what there is no room for would be lost.
            plain = self._outputs and code in (Code.OK, Code.MODEL_FAILED)
            if plain or has_room(came.sender, sum(map(len, frames))):
                self._settle(came)
                yield frames

    @property
    def owes(self) -> bool:
        """Whether an answer has not been sent yet."""
        return any(sent.answer is not None for _, sent in self._in_flight.values())

    def look_after(self) -> None:
        """Check engines and server; raises ServerGone. New answers are in `answers` afterwards."""
        if self._native is not None and self._native.in_flight:
            if not self._native.overdue():
                return  # all of them are new since the last look
            self._take_back()
        self.lane.receive(0)

    def input_bytes(self, rows: int) -> int:
        """Bytes of so many rows; 0 where that differs from row to row."""
        return self._inputs.row_bytes * rows

    def close(self) -> None:
        """Release the lane."""
        if self._native is not None:
            self._native.close()
        self._in_flight.clear()
        self._inputs.close()
        self._outputs.close()
        self.lane.close()

    def _settle(self, came: InlineTicket) -> None:
        del self._in_flight[came.sequence]
        self._busy[came.first : came.first + came.rows] = bytes(came.rows)
        self._give()

    def _frames(self, came: InlineTicket, sent: InFlight) -> list[Any]:
        answer = sent.answer
        assert answer is not None
        frames: list[Any] = [came.sender, head(came, answer.code, answer.message, answer.version)]
        if answer.code == Code.OK and self._outputs:
            frames += self._outputs.copies(sent.first, sent.rows)
        elif answer.code in (Code.OK, Code.ROW_FAILED):
            failed = answer.code != Code.OK
            rows = row_frames.packed(self.lane.columns, "outputs", sent.first, sent.rows, failed=failed)
            # Copies: the client may write the next ticket to these rows before the message is gone.
            frames += [part if type(part) is bytes else part.tobytes() for part in rows]
        elif answer.code == Code.SESSION_LOST:
            frames.append(row_frames.reasons(self.lane.columns, sent.first, sent.rows).tobytes())
        return frames


def head(ticket: InlineTicket, code: int, message: str, version: int = 0) -> bytes:
    """The first frame of an answer."""
    return PREFIX + PACK_REPLY.pack(ticket.sequence, version, ticket.incarnation, code) + cut(message, MOST_TEXT)
