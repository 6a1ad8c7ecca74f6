"""One HTTP/2 connection to a gateway, which its user's thread reads and writes.

gRPC's own client passes a call to its core and gets the answer from its polling thread: that is most of the cost of a
small request. Here `native.GrpcClient` (over the system's libnghttp2) has the protocol, `ssl` the encryption, and the
thread that waits for an answer reads it from the socket itself.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import ssl
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import grpc

from jurybox.client.in_flight import Claim
from jurybox.client.remote.http2_call import MOST_BYTES, LineCall
from jurybox.client.remote.infer_calls import Failed
from jurybox.protocol.descriptors import exhausted, remedy
from jurybox.protocol.errors import TooManyFiles

try:
    from jurybox import native
except ImportError:  # without the native core there are no lines
    native = None  # type: ignore[assignment]

_CHUNK = 1 << 18  # bytes read at once
_LONGEST_WAIT = 60.0  # seconds of a poll: it takes milliseconds as an int
_CONNECTING = 5.0  # seconds to connect to one of several addresses, before the next one is tried
_BUSY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
# Of an unused connection the kernel notices after half a minute that the other host is gone.
_LIVENESS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", 20),
            ("TCP_KEEPINTVL", 5),
            ("TCP_KEEPCNT", 2),
            ("TCP_USER_TIMEOUT", 30_000),
        )
        if hasattr(socket, name)
    ),
]
_INTERRUPTED = "a call was interrupted in it"


def are_possible() -> bool:
    """Return whether there can be lines: the native core and libnghttp2 are there."""
    return native is not None and not native.nghttp2()[1]


class LineTarget(NamedTuple):
    """Where to connect, and how each call begins.

    Attributes:
        host, port: of the gateway.
        head: the fields of each call.
        context: for TLS; None: no encryption.
    """

    host: str
    port: str
    head: Sequence[tuple[str, str]]
    context: ssl.SSLContext | None


class Line:
    """A connection. One method at a time, by the thread that uses it; a line that a call was interrupted in is torn.

    Args:
        target: where to connect.
        attempt: successive attempts try a host's addresses in turn.

    Attributes:
        broken: why it ended; empty while it stands.
        calls: those under way, by their numbers on this line.
        attempt: as given.
        addresses: the number of the host's addresses.
        user: what uses it now: a weak reference to that call's claim.

    Raises:
        TooManyFiles: this process may open no more files.
    """

    broken = ""
    _socket: socket.socket | None = None  # here, because a call may be interrupted before `__init__` begins

    def __init__(self, target: LineTarget, attempt: int) -> None:
        self._target = target
        self._client = native.GrpcClient(list(target.head), MOST_BYTES)
        self.attempt = attempt
        self.calls: dict[int, LineCall] = {}
        self.user: weakref.ref[Claim] | None = None
        self.was_ready = False
        self._unsent: memoryview | bytes = b""
        self._served = False  # whether an earlier call was answered
        self._silent = True  # whether no call has ended since the oldest one under way began
        self._wants = select.POLLOUT
        self._began = time.monotonic()
        self.addresses = 1
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            self.addresses = len(found)
            family, kind, protocol, _, where = found[attempt % len(found)]
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setblocking(False)
            for option in _LIVENESS:
                self._socket.setsockopt(*option)
            if (error := self._socket.connect_ex(where)) not in (0, errno.EINPROGRESS):
                raise OSError(error, os.strerror(error))
        except OSError as failed:
            if exhausted(failed):
                raise TooManyFiles(f"no socket to {target.host}:{target.port}: {remedy()}") from failed
            self._break(failed)

    def __del__(self) -> None:
        self.close()

    # ---- state

    @property
    def descriptor(self) -> int:
        """The descriptor of its socket; -1 if it has none."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def wants(self) -> int:
        """The events of its descriptor after which `turn` goes on, of POLLIN and POLLOUT."""
        return self._wants

    @property
    def open(self) -> bool:
        """Whether calls may begin."""
        return not self.broken and self._client.open

    @property
    def used(self) -> bool:
        """Whether a call uses it, or was interrupted in it."""
        return self.user is not None

    @property
    def torn(self) -> bool:
        """Whether a call was interrupted in it: it cannot be used any more."""
        return (user := self.user) is not None and user() is None

    @property
    def idle(self) -> bool:
        """Whether it can be used by anybody."""
        return self.open and self.was_ready and not self.used and not self.calls and not len(self._unsent)

    @property
    def late(self) -> bool:
        """Whether it takes so long to connect that another address of the host should be tried."""
        return not self.was_ready and self.addresses > 1 and time.monotonic() - self._began >= _CONNECTING

    @property
    def sending(self) -> bool:
        """Whether bytes wait for the connection, or for room."""
        return not self.broken and (not self.was_ready or len(self._unsent) > 0)

    # ---- calls

    def begin(self, call: LineCall) -> None:
        """Begin a call, and send what can be sent at once. It has no line still if the gateway takes no more here."""
        if len(call.request) > MOST_BYTES:
            said = f"the request has {len(call.request)} bytes, more than {MOST_BYTES}"
            call.finish(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, said))
            return
        if not self.calls:
            self._silent = True
        left = max(1, math.ceil(1000 * call.left))
        number = self._client.call(call.request, f"{left}m" if left < 10**8 else f"{min(left // 1000, 10**8 - 1)}S")
        if number == 0:
            return
        call.line, call.number = self, number
        self.calls[number] = call
        if self.was_ready and not self.broken:
            try:
                self._flush()
            except OSError as error:
                self._break(error)

    def cancel(self, call: LineCall) -> None:
        """Tell the gateway, with the next bytes, that nobody wants the answer to a call any more."""
        number = call.number
        if self.calls.get(number) is call:  # not if a nested call has begun it elsewhere, under a number of that line
            self.calls.pop(number, None)
            self._client.cancel(number)
        call.line = None

    def turn(self) -> bool:
        """Read and write what can be at once; return whether anything came. Calls that ended are told."""
        came = False
        if self.broken:
            return came
        try:
            if not self.was_ready and not self._connect():
                if self.late:
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                return came
            if len(self._unsent):
                self._flush()
            came = self._read()
            self._flush()
        except OSError as error:  # also ssl's
            self._break(error)
        return came

    def wait(self, seconds: float) -> None:
        """Wait until `turn` can go on, at most so long or a minute, and call it."""
        if not self.broken:
            if not self.was_ready and self.addresses > 1:
                seconds = min(seconds, self._began + _CONNECTING - time.monotonic())
            poll = select.poll()
            poll.register(self.descriptor, self._wants)
            poll.poll(math.ceil(1000 * min(max(0.0, seconds), _LONGEST_WAIT)))
            self.turn()

    def close(self) -> None:
        """Close the socket. Nobody can use this line any more."""
        self.broken = self.broken or "the connection was closed"
        if self._socket is not None:
            self._socket.close()

    def tear(self) -> None:
        """Give a line up in which a call was interrupted: it may be within a message."""
        self.broken = self.broken or _INTERRUPTED
        self.user = None

    def leave(self) -> None:
        """Let the calls begin again on another line, while a call that this one is nested in uses this one."""
        for number, call in list(self.calls.items()):
            if call.line is self:
                call.line = None
            self.calls.pop(number, None)

    def lose(self, *, free: bool = False) -> None:
        """Let the calls of a closed line begin again: at once if it was idle when the gateway closed it.

        Args:
            free: see LineCall.lost.
        """
        failed = Failed(grpc.StatusCode.UNAVAILABLE, self.broken)
        free = free or self.broken == _INTERRUPTED or (self._served and self._silent)
        for number, call in list(self.calls.items()):
            if call.line is self:
                call.lost(failed, free=free)
            self.calls.pop(number, None)

    # ---- private

    def _connect(self) -> bool:
        """Go on with connecting; return whether calls can be sent."""
        made = self._socket
        assert made is not None
        if not isinstance(made, ssl.SSLSocket):
            if error := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            poll = select.poll()
            poll.register(made, select.POLLOUT)
            if not poll.poll(0):
                return False
            if (context := self._target.context) is not None:
                made = context.wrap_socket(made, do_handshake_on_connect=False, server_hostname=self._target.host)
                self._socket = made
        if isinstance(made, ssl.SSLSocket):
            try:
                made.do_handshake()
            except ssl.SSLWantReadError:
                self._wants = select.POLLIN
                return False
            except ssl.SSLWantWriteError:
                self._wants = select.POLLOUT
                return False
        self.was_ready = True
        self._flush()
        return True

    def _flush(self) -> None:
        """Write what can be written. Raises OSError."""
        assert self._socket is not None
        while True:
            if not len(self._unsent):
                self._unsent = b""  # what was sent gives its memory back to the next bytes
                self._unsent = memoryview(self._client.outgoing())
                if not len(self._unsent):
                    self._wants = select.POLLIN
                    return
            try:
                sent = self._socket.send(self._unsent)
            except _BUSY:
                self._wants = select.POLLIN | select.POLLOUT
                return
            self._unsent = self._unsent[sent:]

    def _read(self) -> bool:
        """Read what has come, or a part of much; return whether there was anything. Raises OSError."""
        assert self._socket is not None
        try:
            data = self._socket.recv(_CHUNK)
        except _BUSY:
            return False
        if not data:
            raise ConnectionResetError("the gateway closed the connection")
        for number, how in self._client.receive(data):
            self._silent = False
            if (call := self.calls.get(number)) is not None:
                self._served = True
                if call.line is self:
                    call.ended(how)
                self.calls.pop(number, None)
        if self._client.over:
            raise ConnectionResetError("the gateway ended the connection")
        return True

    def _break(self, error: OSError) -> None:
        where = f"{self._target.host}:{self._target.port}"
        self.broken = f"{'connection to' if self.was_ready else 'no connection to'} {where}: {error.strerror or error}"
