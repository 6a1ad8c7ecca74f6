"""A client's libzmq sockets to engines and a relay, for CURVE and for installs without the native core."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq
from zmq.backend import Socket as Bare  # the plain methods: what zmq.Socket adds takes as long as they do
from zmq.utils.monitor import recv_monitor_message

from jurybox.client import control
from jurybox.client.transports.transport import number_in
from jurybox.protocol.descriptors import require

if TYPE_CHECKING:
    from jurybox.client.remote.keys import Keys

MOST_BYTES = 1 << 30  # the largest frame accepted from a server
BEAT_MS, SILENCE_MS = 2000, 10_000  # the heartbeat interval, and the silence that ends a connection
_FILES = 10  # file descriptors of a socket and its monitor; libzmq aborts the process if it runs out of them
_NOBLOCK, _NOBLOCK_MORE, _RCVMORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.RCVMORE)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None, identity: bytes
) -> zmq.Socket[bytes]:
    """Create a DEALER socket that reconnects automatically and detects an unreachable host through heartbeats.

    Args:
        address: what it will be connected to.
        identity: the socket's identity, the same for every connection. If empty, each connection gets a new one, and
            need not wait until the relay has closed the previous one.
    """
    socket = control.new_socket(context)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if address.startswith("tcp://"):  # on this host the kernel tells of the peer's end, and a stopped one may go on
        socket.setsockopt(zmq.HEARTBEAT_IVL, BEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return socket


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None, identity: bytes
) -> zmq.Socket[bytes]:
    """Create a socket like `new_socket` and connect it."""
    socket = new_socket(context, address, keys, identity)
    socket.connect(address)
    return socket


class ZmqSocket:
    """One connection over a libzmq socket, with the methods of native.Zmtp that a lane uses.

    A message of several frames is sent and received by several calls of pyzmq. A call that finds another one within a
    message, which was interrupted or in which it is nested, knows by `torn` that the connection must be replaced.

    pyzmq runs signal handlers, and the garbage collector destructors, also when it has looked whether a socket is open
    and before it uses it. A socket that a nested call closes there is freed memory, or already the next socket, which
    would get the rest of a message or lose one. So as long as calls are within it, the last of them closes it.

    Args:
        identity: see `new_socket`.
        plain: every message that comes has one frame; else libzmq is asked after each frame.

    Attributes:
        socket: libzmq's.
        broken: whether it must be replaced; it was closed, or will be. Messages that have arrived stay.
        torn: whether a call is within a message, or was when it was interrupted: nothing more can be sent or received.
        was_ready: whether the handshake was completed, also before it broke.
        descriptor: readable when messages may have arrived; edge-triggered, and sending clears its signal.
        silence: libzmq looks after it with heartbeats of its own, so none counts.
    """

    silence = 0.0

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: Keys | None,
        identity: bytes = b"",
        *,
        plain: bool = False,
    ) -> None:
        require(_FILES, f"a connection to {address}")
        self.broken = self.torn = self.was_ready = False
        self._pid, self._plain = os.getpid(), plain
        self._calls = itertools.count(1)
        self._inside: dict[int, None] = {}  # the numbers of the calls that are within a call of pyzmq
        self._asked: dict[int, None] = {}  # the numbers of messages whose answers are not settled
        self._arrived: dict[int, tuple[int, list[Any]]] = {}  # answers that are not settled, with their numbers
        self.socket = new_socket(context, address, keys, identity)
        self._events = self.socket.get_monitor_socket(_EVENTS)
        self._send, self._receive = partial(Bare.send, self.socket), partial(Bare.recv, self.socket)
        self._option = partial(Bare.get, self.socket)
        self._poll = partial(zmq.zmq_poll, [(self.socket, zmq.POLLIN)])
        self._open = [(self.socket, self._events)]
        # What closes all sockets of a link (control.Wires) must ask here: a call may be within these.
        getattr(context, "held", {}).update((id(socket), self) for socket in (self.socket, self._events))
        self.socket.connect(address)
        self.descriptor = int(self.socket.getsockopt(zmq.FD))

    @property
    def ready(self) -> bool:
        """Whether the handshake is complete, and the connection stands."""
        return self.was_ready and not self.broken

    @property
    def arrived(self) -> bool:
        """Whether there are answers to requests that are not settled."""
        return any(list(self._arrived))

    @property
    def unanswered(self) -> list[int]:
        """The numbers in flight, or those in flight when the connection broke."""
        return list(self._asked)

    def send(self, number: int, frames: Sequence[Any]) -> bool:
        """Send a message whose answer will have this number. False: it was not sent."""
        self.within(self._put, number, frames)
        return not self.broken and number in self._asked

    def exchange(self, number: int, frames: Sequence[Any], timeout: float) -> list[Any] | None:
        """Send a message and return its answer, or an error without a number, and settle it; None: none came."""
        return self.within(self._exchanged, number, frames, timeout)  # type: ignore[no-any-return]

    def answers(self, timeout: float) -> list[tuple[int, list[Any]]]:
        """Return the answers that are not settled; if there are none, wait up to `timeout` seconds for some."""
        self._take_in()
        if timeout > 0 and not self._arrived:
            self.within(self._poll, whole_ms(timeout))
            self._take_in()
        return list(self._arrived.values())

    def settled(self, number: int) -> None:
        """Drop an answer; it may be dropped already."""
        # In this order: after an interrupt in between the answer is still here, so that its ticket is not waited for.
        self._asked.pop(number, None)
        self._arrived.pop(number, None)

    def holds(self, number: int) -> bool:
        """Return whether a message was sent and its answer is not settled."""
        return (number in self._asked and not self.broken) or number in self._arrived

    def look(self) -> bool:
        """Notice the end of the handshake or of the connection; return whether there are answers."""
        while not self.torn and (event := self._event()):
            self.was_ready = self.was_ready or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event == zmq.EVENT_DISCONNECTED:  # libzmq would connect again, but the tickets in flight are lost
                self._take_in()  # what came before it
                self.close()
        return bool(self._arrived)

    def ping(self) -> None:
        """Do nothing: see `silence`."""

    def watched(self, on: bool) -> None:
        """Do nothing: libzmq's own thread sends what it was given."""

    def close(self, _: int | None = None) -> None:
        """Close the socket; what was not sent yet is dropped. In a forked child nothing is: the parent uses it."""
        self.broken = True  # also if this call is interrupted before there is another one
        self._close_if_left()

    def within(self, action: Callable[..., Any], *given: Any) -> Any:
        """Call `action` and return its result; the socket stays open meanwhile. None: it is broken."""
        call = next(self._calls)
        try:
            self._inside[call] = None  # before it looks whether it is broken: another thread may close it
            return None if self.broken else action(*given)
        except zmq.ZMQError:
            if not self.broken:  # else the context has ended
                raise
            return None
        finally:
            self._inside.pop(call, None)
            if self.broken:
                self._close_if_left()

    def _exchanged(self, number: int, frames: Sequence[Any], timeout: float) -> list[Any] | None:
        """Do what `exchange` does. Steps in Python are most of its price.

        It polls before it receives. To wait within `recv` would be one call less. But then it would be within a message
        all the time: a nested call would need another connection while this one, of the same identity, is still open.
        """
        until = time.monotonic() + timeout
        self._put(number, frames)
        while number in self._asked:
            if self._arrived and (arrived := self._arrived.get(number) or self._arrived.get(0)):
                self.settled(arrived[0])
                return arrived[1]
            if self.broken or (left := until - time.monotonic()) <= 0:
                break
            if self._poll(whole_ms(left)):
                self._take_one()
        return None

    def _close_if_left(self) -> None:
        """Close the socket if it is broken and no call is within it."""
        if not self.broken or self._inside or self._pid != os.getpid():
            return
        with contextlib.suppress(IndexError):  # another call closes it
            socket, events = self._open.pop()
            with contextlib.suppress(zmq.ZMQError):  # the context has ended, or has closed it
                socket.disable_monitor()
            events.close()
            socket.close()

    def _begins(self) -> bool:
        """Note that a message begins; return False if the socket is broken."""
        if self.torn:
            self.close()
        if self.broken:
            return False
        self.torn = True
        return True

    # Between `_begins` and its last line each of these is within a message. If the socket is torn before, a call was
    # interrupted there, or this one is nested in it; one that was nested in this one has broken the socket.

    def _put(self, number: int, frames: Sequence[Any]) -> None:
        """Send a message, unless the send buffer is full."""
        if not self._begins():
            return
        self._asked[number] = None
        more = len(frames)
        try:
            for frame in frames:
                more -= 1
                # pyzmq tries whether an array is a buffer, and takes what a signal handler raises meanwhile for a no.
                part = frame if isinstance(frame, bytes) else memoryview(frame)
                self._send(part, _NOBLOCK_MORE if more else _NOBLOCK)
        except zmq.Again:
            self._asked.pop(number, None)
        self.torn = self.broken

    def _take_one(self) -> bool:
        """Receive the next message; return False if none has arrived."""
        if not self._begins():
            return False
        try:
            # As bytes: the end of a zmq.Frame runs signal handlers, and drops what they raise.
            frames = [self._receive(_NOBLOCK)]
            while not self._plain and self._option(_RCVMORE):
                frames.append(self._receive(_NOBLOCK))
        except zmq.Again:
            self.torn = self.broken
            return False
        number = number_in(frames[0])
        self._arrived[number] = number, frames
        self.torn = self.broken
        return True

    def _take_in(self) -> None:
        """Receive the messages that have arrived."""
        while self.within(self._take_one):
            pass

    def _event(self) -> int:
        """Return the next event of the connection that has come; 0: none."""
        return self.within(self._next_event) or 0

    def _next_event(self) -> int:
        if not self._begins():
            return 0
        event = int(recv_monitor_message(self._events)["event"]) if self._events.poll(0) else 0
        self.torn = self.broken
        return event


def whole_ms(seconds: float) -> int:
    """Return milliseconds, rounded up: whoever waits in short steps must let other threads run."""
    return int(seconds * 1000 + 0.999)
