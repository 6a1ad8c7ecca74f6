"""Connections from the client to a relay: sockets, and detection of a dead server."""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from jurybox.client import control
from jurybox.client.in_flight import Claim
from jurybox.client.link import OneEngine
from jurybox.client.remote.keys import Keys
from jurybox.client.transports.direct import dial
from jurybox.protocol.descriptors import require
from jurybox.protocol.scoreboard import EngineState

if TYPE_CHECKING:
    from jurybox.native import Zmtp

MOST_BYTES = 1 << 30  # the largest frame accepted from a server
_TIMEOUT = 10.0  # seconds without a connection after which the server counts as gone
_BEAT_MS, _SILENCE_MS = 2000, 10_000  # libzmq's heartbeat interval, and the silence that closes a connection
_FILES_OF_OWN = 3  # file descriptors of a direct socket and the event loop that watches it
_FILES = 10  # file descriptors of a socket and its monitor; libzmq aborts the process if it runs out of them
_REDIAL = 0.05  # seconds between two attempts to connect
_HANDSHAKE = 5.0  # seconds that a handshake may take
IDLE = 5.0  # seconds without received bytes after which a connection is checked before it is used
_RETURN = 1.0  # seconds to wait for a new connection that replaces one closed while idle
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def new_socket(context: zmq.Context[zmq.Socket[bytes]], keys: Keys | None, identity: bytes) -> zmq.Socket[bytes]:
    """Create a DEALER socket that reconnects automatically and detects an unreachable host through heartbeats.

    Args:
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
    socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    return socket


def open_socket(
    context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None, identity: bytes
) -> zmq.Socket[bytes]:
    """Create a socket like `new_socket` and connect it."""
    socket = new_socket(context, keys, identity)
    socket.connect(address)
    return socket


def new_identity() -> bytes:
    """Return a random identity, so that no other client can guess it and impersonate this one."""
    return b"R" + secrets.token_bytes(15)


class Connection(OneEngine):
    """A lane's connection to the server's relay.

    The engine's incarnation is incremented whenever the connection breaks, so that the lane sends its tickets again.

    A message of several frames is sent and received by several calls of pyzmq. A call that finds another one within a
    message, which was interrupted or in which it is nested, renews the connection: `moving` shows it.

    Attributes:
        moving: the call that is within a message, or was when it was interrupted.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None) -> None:
        super().__init__()
        self._context = context
        self._address = address
        self._keys = keys
        self.moving: Claim | None = None
        self._open()

    def _open(self) -> None:
        require(_FILES, f"a connection to {self._address}")
        # Not connected yet. If the server dies before the connection is established, libzmq sends no event.
        self._broken_at: float | None = time.monotonic()
        # A lane's tickets name the lease, so its connection needs no fixed identity: the relay accepts a new connection
        # immediately, even if the previous one is still open.
        self.socket = new_socket(self._context, self._keys, b"")
        self._events = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(self._address)

    def renew(self) -> None:
        """Replace the connection; tickets in flight are sent again, in the next incarnation."""
        self.close()
        self.engines["incarnation"] += 1
        self.engines["state"] = EngineState.SERVING
        self.moving = None
        self._open()

    def moved(self, claim: Claim) -> bool:
        """End a message; return False if the connection was renewed within it."""
        if self.moving is not claim:
            return False
        self.moving = None
        return True

    def server_lives(self) -> bool:
        """Return whether the server is connected, or was last connected less than _TIMEOUT seconds ago.

        A new connection counts from its creation. See Scoreboard.server_lives.
        """
        while self.moving is None and self._events.poll(0):
            self.moving = claim = Claim()
            try:
                stands = recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            except zmq.ZMQError:  # a nested call has renewed the connection
                if self.moving is claim:
                    raise
                break
            if not self.moved(claim):
                break
            if not stands and self._broken_at is None:
                self._broken_at = time.monotonic()
                self.engines["incarnation"] += 1
            if stands:
                self._broken_at = None
            self.engines["state"] = EngineState.SERVING if stands else EngineState.ABSENT
        return self._broken_at is None or time.monotonic() - self._broken_at < _TIMEOUT

    def close(self) -> None:
        """Close the socket; what was not sent yet is dropped."""
        if not self.socket.closed:
            self.socket.disable_monitor()
        self._events.close()
        self.socket.close()


class DirectConnection(OneEngine):
    """Like Connection, over a socket that the caller's thread reads (transports/direct.py). It does not support CURVE.

    The socket is read only during calls. So the relay closes it after ten idle seconds, and the next call reconnects.

    Attributes:
        link: None if the last attempt to connect failed immediately.
        renewed: called when `link` has been replaced; the previous one may already be closed.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        require(_FILES_OF_OWN, f"a connection to {address}")
        self._address = address
        self.renewed: Callable[[], None] = lambda: None
        self.link: Zmtp | None = None
        self._attempt = 0
        self._pinged_at: float | None = None
        self._broken_at: float | None = time.monotonic()  # not connected yet
        self._dial()

    def _dial(self) -> None:
        before = self.link
        self._dialled_at = time.monotonic()
        self.link = dial(self._address, b"", MOST_BYTES, self._attempt)
        self._attempt += 1
        self._pinged_at = None
        self.renewed()
        if before is not None:
            before.close()

    def server_lives(self) -> bool:
        """Return whether the server is connected, or was last connected less than _TIMEOUT seconds ago.

        A new connection counts from its creation. A broken connection is replaced. See Scoreboard.server_lives.
        """
        now, link = time.monotonic(), self.link
        if link is not None and not link.broken:
            link.look()
            if not link.broken and link.ready:
                if self._is_silent(link, now):
                    link.close()
                else:
                    self._broken_at = None
                    self.engines["state"] = EngineState.SERVING
                    return True
        if link is None or link.broken:
            # If nobody has looked since it was made, it counts as standing until now: the relay closes idle ones.
            if self._broken_at is None or (link is not None and link.was_ready):
                self._broken_at = now
                self.engines["incarnation"] += 1
                self.engines["state"] = EngineState.ABSENT
                self._attempt = 0
                self._dial()
            elif now - self._dialled_at >= _REDIAL:
                if self.engines["state"] == EngineState.SERVING:  # the first attempt failed: its tickets are lost
                    self.engines["incarnation"] += 1
                self._dial()
        elif now - self._dialled_at >= _HANDSHAKE:
            link.close()  # the handshake timed out; the next check connects again
        return self._broken_at is None or time.monotonic() - self._broken_at < _TIMEOUT

    def stands(self) -> bool:
        """Return whether messages can be exchanged; replace a connection that was closed while idle."""
        link = self.link
        if link is None:
            return False
        if link.ready and link.silence < IDLE:
            return True
        if link.look() or not self.server_lives() or (link := self.link) is None:
            return link is not None and link.ready
        until = time.monotonic() + _RETURN
        while not link.ready and not link.broken and time.monotonic() < until:
            select.select([link.descriptor], [], [], 0.05)
            link.look()
        self.server_lives()
        return link.ready

    def _is_silent(self, link: Zmtp, now: float) -> bool:
        """Return whether the peer has not answered a ping in time; send a ping if one is due."""
        if not link.unanswered or link.silence < _BEAT_MS / 1e3:
            self._pinged_at = None
        elif self._pinged_at is None:
            self._pinged_at = now
            link.ping()
        elif now - self._pinged_at > _SILENCE_MS / 1e3:
            return True
        return False

    def close(self) -> None:
        """Close the socket; what was not sent yet is dropped."""
        if self.link is not None:
            self.link.close()
