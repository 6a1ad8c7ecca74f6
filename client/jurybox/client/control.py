"""The control channel: calls to the supervisor, each of which is answered or times out."""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import zmq
from google.protobuf.message import DecodeError, Message

from jurybox.protocol.address import out_of_reach
from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, Lease
from jurybox.protocol.descriptors import exhausted, remedy, require
from jurybox.protocol.errors import Error, ProtocolMismatch, Refused, ServerGone, Timeout, TooManyFiles, error_for
from jurybox.protocol.locks import TimedLock
from jurybox.protocol.wire import PREFIX, prefix_error, require_control_size, require_name

_NUMBER = struct.Struct("<Q")
_SLICE_MS = 100
# A relay ignores a second connection with the same identity while the first is open (security/, ROUTER_HANDOVER). So
# the client gives the first a moment to close, and opens a third if it receives nothing over the second for a while.
_PARTING, _UNHEARD = 0.05, 5.0  # seconds
_NOTICE = 1.0  # seconds after which a call that cannot reach a server says that it waits
_CLOSE = 2.0  # seconds that closing all sockets may take
_FILES = 10  # file descriptors of a socket and its monitor; libzmq aborts the process if it runs out of them
_MOST_BYTES = 64 << 20  # of an answer; a status document has about ten thousand


def say_that_it_waits(address: str, timeout: float) -> bool:
    """Log that a call waits for a server that cannot be reached; return False if one may be reached."""
    if why := out_of_reach(address):
        import logging  # not needed by a client that reaches its server

        log = logging.getLogger("jurybox.client")
        log.warning("waiting up to %.1f s for a server at %s%s", timeout, address, why)
    return bool(why)


def new_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Create a DEALER socket. Raises TooManyFiles if this process may open no more files."""
    try:
        return context.socket(zmq.DEALER)
    except zmq.ZMQError as error:
        if not exhausted(OSError(error.errno, "")):
            raise
        raise TooManyFiles(f"no socket to the server: {remedy()}") from error


if TYPE_CHECKING:
    AnySocket: TypeAlias = zmq.Socket[bytes]
    AnyContext: TypeAlias = zmq.Context["_Socket"]
else:  # pyzmq before 23 has no generic classes
    AnySocket, AnyContext = zmq.Socket, zmq.Context


class _Socket(AnySocket):
    """A socket that its context holds until it is closed."""

    def close(self, linger: int | None = None) -> None:
        super().close(linger)
        context: Any = self.context
        context.held.pop(id(self), None)


class _Context(AnyContext):
    """A context that holds its sockets, or what closes them, so that only who closes them closes them.

    pyzmq closes a socket that is garbage-collected. Were it collected together with its link, that would happen at the
    same time as the link's finalizer closes it in another thread.
    """

    _socket_class = _Socket
    held: dict[int, Any] = {}  # noqa: RUF012  pyzmq takes attributes that the class lacks for options of libzmq

    def __init__(self) -> None:
        super().__init__()
        self.held = {}

    def socket(self, *args: Any, **options: Any) -> _Socket:
        socket = super().socket(*args, **options)
        self.held[id(socket)] = socket
        return socket


class Wires:
    """The ZeroMQ context of a link and all its sockets. They are closed with the link, or when it is collected.

    A context that is garbage-collected while its sockets are open waits for them forever, so the link's finalizer holds
    a reference to it.
    """

    def __init__(self) -> None:
        self.context = _Context()
        self._standing = [self.context]  # until one call ends it
        self._pid = os.getpid()

    def close(self, linger: int = 0) -> None:
        """Close every socket; messages not sent within `linger` ms are dropped. No effect in a forked child.

        libzmq waits for sockets that it has not closed yet, in a thread, and this method waits for that thread at most
        _CLOSE seconds.
        """
        done = _thread.allocate_lock()
        done.acquire()
        if self.leave(linger, done.release):
            done.acquire(timeout=_CLOSE + linger / 1000)

    def leave(self, linger: int = 0, done: Callable[[], None] = lambda: None) -> bool:
        """Like `close`, without waiting: for finalizers. Return whether it calls `done`, in another thread: once.

        The thread comes from _thread: the garbage collector may call this method at any point, even inside threading.
        """
        if os.getpid() != self._pid:
            return False
        try:
            # A second thread could end what libzmq has freed by then.
            context = self._standing.pop()
        except IndexError:
            return False
        try:
            _thread.start_new_thread(_destroy, (context, linger, done))
        except RuntimeError:  # the interpreter is shutting down
            return False
        return True


def _destroy(context: _Context, linger: int, done: Callable[[], None]) -> None:
    try:
        for socket in list(context.held.values()):
            socket.close(linger)
        context.term()
    finally:
        done()


class Control:
    """Calls on the control socket of one server. Thread-safe: calls run one after another.

    A call within another one of the same thread is refused: they would read each other's answers.

    It uses a DEALER rather than a REQ socket, so that a lost reply costs a time-out, not the socket.

    Args:
        open_socket: creates and connects the socket. Default: a socket to an address on this host.
        far: for a server on another host: a function that releases a lease. The relay there may die after it has
            received a request. Only the lost connection shows this, so the request is sent again over the next one; a
            lease granted by the dead relay ended with it. If the relay is alive after all, or the caller gave up, a
            lease arrives that no call waits for, and `far` is called with it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        open_socket: Callable[[], zmq.Socket[bytes]] | None = None,
        *,
        far: Callable[[Lease], None] | None = None,
    ) -> None:
        self.address = address
        self._far = far
        self._events: zmq.Socket[bytes] | None = None
        self._context = context
        self._open = open_socket or self._open_local
        self._lock = TimedLock(f"a call of the server at {address}")
        self._closed: Callable[[], None] | None = None  # what follows the end of the socket
        self._number = 0
        self._calling = False
        self._connect()

    def call(self, timeout: float, still_there: Callable[[], bool] = lambda: True, **request: Message) -> ControlReply:
        """Send one request (the field of ControlRequest by keyword) and wait for its reply.

        Args:
            timeout: seconds.
            still_there: called from time to time; if it returns False, the wait ends early.

        Raises:
            ServerGone: no reply in time.
            Timeout: another thread's call did not end in time.
            Refused: this is a signal handler or a destructor within another call, or the connection was closed.
            ModelNotFound, Refused: the request has a name that no model can have, or is too large to be sent.
            ProtocolMismatch: the answer does not follow this protocol.
            Error: the server's error answer, as the exception of its code.
        """
        for message in request.values():
            require_name(getattr(message, "model", ""))
        body = ControlRequest(**request).SerializeToString()  # type: ignore[arg-type]
        require_control_size(body)
        until = time.monotonic() + timeout
        try:
            with self._lock.once(timeout):
                if self._closed is not None:
                    raise Refused("this connection was closed: connect again")
                if self._calling:
                    self._reopen()  # an earlier call was interrupted: half a message may be left
                self._calling = True
                try:
                    reply = self._exchanged(timeout, until, still_there, body)
                except Error:
                    self._calling = False
                    raise
                self._calling = False
                return reply
        finally:
            if self._closed is not None:
                self.close(self._closed)

    @property
    def under_way(self) -> bool:
        """Whether this thread is within a call."""
        return self._lock.mine

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """Close the socket, and call `then`. If a call is under way, it does so when it ends."""
        self._closed = then
        if self._lock.mine:
            return
        with contextlib.suppress(Timeout, Refused), self._lock.within(_CLOSE):
            self._disconnect()
            then()

    def _exchanged(self, timeout: float, deadline: float, still_there: Callable[[], bool], body: bytes) -> ControlReply:
        self._number += 1
        number = _NUMBER.pack(self._number)
        while self._events is not None and self._events.poll(0):
            self._events.recv_multipart()  # a connection was lost earlier, with no request in flight
        if not self._sent(number, body):  # libzmq never reconnects after a refused handshake
            self._reopen()
            self._sent(number, body)
        again = time.monotonic() + _UNHEARD
        # If the time-out is shorter, the error comes soon enough; a far server's link says it.
        notice = math.inf if self._far is not None or timeout < 3 * _NOTICE else time.monotonic() + _NOTICE
        while True:
            left = deadline - time.monotonic()
            if time.monotonic() > notice and say_that_it_waits(self.address, timeout):
                notice = math.inf
            if left <= 0 or not still_there():
                self._reopen()  # a late reply must not reach the next call or stay in a queue forever
                raise ServerGone(
                    f"no answer from {self.address} within {timeout:.1f} s: is a server running there? "
                    f"Start one with 'jurybox serve FILE.toml', or set JURYBOX_ADDRESS{out_of_reach(self.address)}"
                )
            if self._socket.poll(min(_SLICE_MS, max(1, int(left * 1000)))):
                frames = self._socket.recv_multipart()
                if (reply := self._read(frames, number)) is not None:
                    return reply
            lost = self._events is not None and self._events.poll(0)
            if lost or (self._far is not None and time.monotonic() > again):
                again = time.monotonic() + _UNHEARD
                self._reopen()  # libzmq resends nothing that was lost; what is still queued must not go out twice
                self._sent(number, body)

    def _sent(self, number: bytes, body: bytes) -> bool:
        """Send a request; return False without a connection, as after a handshake that was refused at once."""
        try:
            self._socket.send_multipart((PREFIX, number, body), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _connect(self) -> None:
        if self._far is not None:
            require(_FILES, f"a connection to {self.address}")
        self._socket = self._open()
        if self._far is not None:
            self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def _disconnect(self) -> None:
        if self._events is not None:
            if not self._socket.closed:
                self._socket.disable_monitor()
            self._events.close()
        self._socket.close()

    def _reopen(self) -> None:
        self._disconnect()
        if self._far is not None:
            time.sleep(_PARTING)
        self._connect()

    def _open_local(self) -> zmq.Socket[bytes]:
        socket = new_socket(self._context)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.connect(self.address)
        return socket

    def _read(self, frames: list[bytes], number: bytes) -> ControlReply | None:
        """Return the reply in these frames; None if it answers an earlier call."""
        if wrong := prefix_error(frames[0]):
            raise ProtocolMismatch(f"{self.address}: {wrong}")
        if len(frames) != 3:
            raise ProtocolMismatch(f"{self.address}: a control reply is 3 frames, {len(frames)} came")
        try:
            reply = ControlReply.FromString(frames[2])
        except DecodeError as error:
            raise ProtocolMismatch(f"{self.address}: not a control reply: {error}") from error
        # A server that cannot parse the request returns an empty number.
        if frames[1] not in (number, b""):
            if self._far is not None and reply.HasField("lease"):
                self._far(reply.lease)
            return None
        if reply.HasField("error"):
            raise error_for(reply.error.code, reply.error.message)
        return reply
