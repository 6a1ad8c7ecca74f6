"""The control channel: calls to the supervisor, each answered or timed out."""

from __future__ import annotations

import _thread
import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable

import zmq
from google.protobuf.message import DecodeError, Message

from jurybox.protocol.address import out_of_reach
from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, Lease
from jurybox.protocol.descriptors import exhausted, remedy, require
from jurybox.protocol.errors import Error, ProtocolMismatch, ServerGone, TooManyFiles, error_for
from jurybox.protocol.wire import PREFIX, prefix_error, require_control_size, require_name

_NUMBER = struct.Struct("<Q")
_SLICE_MS = 100
# A relay does not hear a second connection of a name while the first stands (security/, ROUTER_HANDOVER). So the first
# gets a moment to end, and who hears nothing over the second for a while takes a third.
_PARTING, _UNHEARD = 0.05, 5.0  # seconds
_CLOSE = 2.0  # seconds that closing all sockets may take
_FILES = 10  # of a socket and its monitor; libzmq ends the process where they run out in its midst
_MOST_BYTES = 64 << 20  # of an answer; a status document has some ten thousand


def new_socket(context: zmq.Context[zmq.Socket[bytes]], purpose: str = "to the server") -> zmq.Socket[bytes]:
    """A DEALER. Raises TooManyFiles where this process may open no more files."""
    try:
        return context.socket(zmq.DEALER)
    except zmq.ZMQError as error:
        if not exhausted(OSError(error.errno, "")):
            raise
        raise TooManyFiles(f"no socket {purpose}: {remedy()}") from error


def _destroy(context: zmq.Context[zmq.Socket[bytes]], linger: int, done: _thread.LockType) -> None:
    try:
        context.destroy(linger=linger)
    finally:
        done.release()


class Wires:
    """The ZeroMQ context of a link, and with it all its sockets. They are closed with the link, or when it is lost.

    A context that is collected with its sockets open waits for them for ever, so the link's finalizer holds it.
    """

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pid = os.getpid()

    def close(self, linger: int = 0) -> None:
        """Close every socket; what is not sent within `linger` ms is dropped. In a forked child this does nothing.

        libzmq waits for sockets that pyzmq has lost sight of, as it can where a KeyboardInterrupt meets a destructor.
        So it waits in a thread, and this for that at most _CLOSE seconds. The thread is a bare one: a garbage collector
        may call this in the midst of anything, the module threading included.
        """
        if os.getpid() != self._pid or self.context.closed:
            return
        done = _thread.allocate_lock()
        done.acquire()
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and with it everything
            _thread.start_new_thread(_destroy, (self.context, linger, done))
            done.acquire(timeout=_CLOSE + linger / 1000)


class Control:
    """Calls on the control socket of one server. Thread-safe: calls go one after another.

    A DEALER rather than a REQ socket: a lost reply costs a time-out, not the socket.

    Args:
        open_socket: makes the socket, connected; without it one to an address of this host.
        far: given where the server is on another host, whose relay may end with a request it has taken: nobody but the
            connection tells, and the request is sent again over the next one. A lease that the relay held ended with
            it. Where the relay lives after all, or the caller gave up, a lease comes that nobody waits for: this is
            called with it, to give it back.
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
        self._lock = threading.Lock()
        self._number = 0
        self._calling = False
        self._connect()

    def call(self, timeout: float, still_there: Callable[[], bool] = lambda: True, **request: Message) -> ControlReply:
        """Send one request (the field of ControlRequest by keyword) and wait for its reply.

        Args:
            timeout: seconds.
            still_there: asked now and then; False ends the wait early.

        Raises:
            ServerGone: no reply in time.
            ModelNotFound, Refused: the request has a name that no model can have, or is too large to be sent.
            ProtocolMismatch: something else than this protocol answers.
            Error: what the server answered, as the exception of its code.
        """
        for message in request.values():
            require_name(getattr(message, "model", ""))
        body = ControlRequest(**request).SerializeToString()  # type: ignore[arg-type]
        require_control_size(body)
        with self._lock:
            if self._calling:
                self._reopen()  # an earlier call was broken off: half a message may lie here
            self._calling = True
            try:
                reply = self._exchanged(timeout, still_there, body)
            except Error:
                self._calling = False
                raise
            self._calling = False
            return reply

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _exchanged(self, timeout: float, still_there: Callable[[], bool], body: bytes) -> ControlReply:
        self._number += 1
        number = _NUMBER.pack(self._number)
        while self._events is not None and self._events.poll(0):
            self._events.recv_multipart()  # of a connection that was lost before, with nothing on its way
        try:
            self._socket.send_multipart((PREFIX, number, body), zmq.NOBLOCK)
        except zmq.Again:  # libzmq gives a connection up for good when its handshake is refused
            self._reopen()
            self._socket.send_multipart((PREFIX, number, body), zmq.NOBLOCK)
        deadline = time.monotonic() + timeout
        again = time.monotonic() + _UNHEARD
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not still_there():
                self._reopen()  # a late reply must not meet the next call, nor wait for ever in a queue
                raise ServerGone(
                    f"no answer from {self.address} within {timeout:.1f} s: is a server running there? "
                    f"Start one with 'jurybox serve', or set JURYBOX_ADDRESS{out_of_reach(self.address)}"
                )
            if self._socket.poll(min(_SLICE_MS, max(1, int(left * 1000)))):
                frames = self._socket.recv_multipart()
                if (reply := self._read(frames, number)) is not None:
                    return reply
            lost = self._events is not None and self._events.poll(0)
            if lost or (self._far is not None and time.monotonic() > again):
                again = time.monotonic() + _UNHEARD
                self._reopen()  # by itself a socket would send nothing again, and what it had not sent yet twice
                self._socket.send_multipart((PREFIX, number, body), zmq.NOBLOCK)

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
        """The reply in these frames; None when it answers an earlier call."""
        if wrong := prefix_error(frames[0]):
            raise ProtocolMismatch(f"{self.address}: {wrong}")
        if len(frames) != 3:
            raise ProtocolMismatch(f"{self.address}: a control reply is 3 frames, {len(frames)} came")
        try:
            reply = ControlReply.FromString(frames[2])
        except DecodeError as error:
            raise ProtocolMismatch(f"{self.address}: not a control reply: {error}") from error
        # A server that cannot read our message cannot name its number either.
        if frames[1] not in (number, b""):
            if self._far is not None and reply.HasField("lease"):
                self._far(reply.lease)
            return None
        if reply.HasField("error"):
            raise error_for(reply.error.code, reply.error.message)
        return reply
