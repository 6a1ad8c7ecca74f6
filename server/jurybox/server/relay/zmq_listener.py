"""The relay's network socket over libzmq, with CURVE if there are keys."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.backend import Socket as Bare  # its methods without the wrappers of zmq.Socket, which double their cost

from jurybox.protocol.wire import PREFIX
from jurybox.server.security.access import public_keys, read_pair

_TRACKED = 4 << 10  # bytes; a message of at least this size is tracked until it has been sent
_COPIED = 64 << 10  # bytes; copying a smaller frame is cheaper than tracking its owner
_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE | zmq.NOBLOCK)
_CLIENTS = 8  # the limit on all clients' unread bytes, in limits of one; above it, each may have one unread message
_SEND_HIGH_WATER, _RECEIVE_HIGH_WATER = 1024, 64  # messages that a client may leave unread, and send ahead
_BEAT_MS, _SILENCE_MS = 2000, 10_000  # interval of libzmq's pings, and the silence after which it closes a connection
_HANDSHAKE_MS = 5000
_LINGER_MS = 200  # for answers that the I/O thread has not sent yet when the relay ends
_DOMAIN = "jurybox"
_PROBE = (PREFIX, bytes(8), b"")  # a control reply to call number 0, which no client has made


class ZmqListener:
    """A ROUTER socket on TCP, with CURVE if there are keys.

    Args:
        where: "host:port"; with port 0, a free port is chosen.
        curve_key: the server's .key_secret file; None: all clients are admitted.
        curve_clients: a folder with the .key files of the admitted clients; None: any key is admitted.
        max_message: the maximum size of a frame in bytes, and the maximum of bytes that one client may leave unread.

    Attributes:
        bound: the actual "host:port".

    Raises:
        zmq.ZMQError: it cannot be bound; ValueError: the keys cannot be read, or there is none of a client.
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
        self._quiet = False  # whether the last check found no message, and the socket was not used since
        self.socket = context.socket(zmq.ROUTER)
        set_option = self.socket.setsockopt
        self.socket.copy_threshold = 1024  # smaller frames are copied even with copy=False
        set_option(zmq.LINGER, 0)
        set_option(zmq.IPV6, 1 if "[" in where else 0)
        set_option(zmq.SNDHWM, _SEND_HIGH_WATER)
        set_option(zmq.RCVHWM, _RECEIVE_HIGH_WATER)
        set_option(zmq.MAXMSGSIZE, max_message)
        set_option(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        set_option(zmq.HEARTBEAT_IVL, _BEAT_MS)
        set_option(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        # A second connection with the same name is ignored while the first is open. A handover of the name would leave
        # the first half closed, and a ping on it aborts the process (libzmq 4.3.5: "Assertion failed: !_io_error").
        set_option(zmq.ROUTER_HANDOVER, 0)
        set_option(zmq.ROUTER_MANDATORY, 1)  # reports when a client is gone
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
        """Return whether a message of `size` bytes can be sent to a client now. One message is always allowed.

        ZeroMQ limits the number of a client's unread messages, but not their bytes.
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
        """Send to the client that the first frame names; return False if it is gone.

        The message is dropped if the client has left too many messages or bytes unread.
        """
        size = sum(map(len, frames))
        self._quiet = False  # sending consumes the socket's signal, perhaps that of a message
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
        """Return whether messages are waiting. Check it before waiting on `fileno`, which signals only changes."""
        if self._quiet:
            return False
        there = bool(int(Bare.get(self.socket, _EVENTS)) & _POLLIN)
        self._quiet = not there
        return there

    def fileno(self) -> int:
        """Return a descriptor that is readable when messages may have arrived. Then call `receive`."""
        return self._descriptor

    def receive(self, sizes: Callable[[bytes], int]) -> list[Any] | None:
        """Return a client's message: its routing id, then frames; None if there is none.

        Args:
            sizes: called with the first frame; returns the expected size of the frames behind it in bytes. If that is
                large, those are not copied: they are zmq.Frame. All other frames are bytes.
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
        """Drop the records of messages that have been sent."""
        for client in list(self._unsent):
            self.has_room(client, 0)

    def is_there(self, client: bytes) -> bool:
        """Return whether a client is connected."""
        return self.send((client, *_PROBE))

    def held(self) -> dict[str, Any]:
        """Return what the relay holds for its clients, as the status document has it; libzmq counts no requests."""
        self.forget_sent()
        return {"answers": {"bytes": self._unsent_bytes, "limit": _CLIENTS * self._most_unsent}}

    @property
    def unsent(self) -> bool:
        """Whether large answers have not been sent yet. `close` waits a moment for small ones."""
        self.forget_sent()
        return bool(self._unsent)

    def close(self) -> None:
        self.socket.close(linger=_LINGER_MS)
        if self._guard is not None:
            with contextlib.suppress(zmq.ZMQError):  # the context may be terminated already
                self._guard.stop()

    def _guard_with(self, context: zmq.Context[zmq.Socket[bytes]], curve_key: str, curve_clients: str | None) -> None:
        public, secret = read_pair(Path(curve_key))
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        # RFC 27: libzmq asks the authenticator before it passes on any message; without its answer no client gets in.
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
