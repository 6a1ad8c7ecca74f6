"""A relay seen from the client: the socket, its CURVE keys, and whether the server still answers."""

from __future__ import annotations

import os
import re
import secrets
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from jurybox.client import control
from jurybox.client.link import OneEngine
from jurybox.client.transports.direct import dial
from jurybox.protocol.descriptors import require
from jurybox.protocol.errors import Refused
from jurybox.protocol.scoreboard import EngineState

if TYPE_CHECKING:
    from jurybox.native import Zmtp

MOST_BYTES = 1 << 30  # of a frame that a server may send
_TIMEOUT = 10.0  # seconds without a connection after which the server counts as gone
_BEAT_MS, _SILENCE_MS = 2000, 10_000  # libzmq's own pings, and the silence that ends a connection
_FILES_OF_OWN = 3  # of a socket of the caller's own, and what watches it
_FILES = 10  # of a socket and its monitor; libzmq ends the process where they run out in its midst
_REDIAL = 0.05  # seconds between two attempts to connect
_HANDSHAKE = 5.0  # seconds that one may take
IDLE = 5.0  # seconds without a sign of life after which a connection is looked at before it is used
_RETURN = 1.0  # seconds to wait for a new connection in the place of one that ended idle
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def new_socket(context: zmq.Context[zmq.Socket[bytes]], keys: Keys | None, identity: bytes) -> zmq.Socket[bytes]:
    """A DEALER that reconnects by itself and notices a host that has vanished.

    Args:
        identity: its name, which it keeps; empty: every connection gets a new one, and waits for the end of no other.
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
    """As `new_socket`, connecting."""
    socket = new_socket(context, keys, identity)
    socket.connect(address)
    return socket


def new_identity() -> bytes:
    """A name for a connection that nobody else can guess, so that nobody can take its place."""
    return b"R" + secrets.token_bytes(15)


class Connection(OneEngine):
    """A connection for one lane, to the server's relay.

    The engine's incarnation grows whenever the connection breaks, so that the lane sends its tickets again.

    Attributes:
        torn: set while a message of several frames is sent or taken in. Who finds it set knows that this was broken
            off, by a KeyboardInterrupt perhaps, and renews the connection.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None) -> None:
        super().__init__()
        self._context = context
        self._address = address
        self._keys = keys
        self.torn = False
        self._open()

    def _open(self) -> None:
        require(_FILES, f"a connection to {self._address}")
        # It does not stand yet. Of a server that ends before it ever does, libzmq tells nothing.
        self._broken_at: float | None = time.monotonic()
        # A lane's tickets name the lease, so its connection needs no name: a new one is heard at once, whatever became
        # of the one before it.
        self.socket = new_socket(self._context, self._keys, b"")
        self._events = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(self._address)

    def renew(self) -> None:
        """Break the connection and make another: what was on its way is sent again, in the next incarnation."""
        self.close()
        self.engines["incarnation"] += 1
        self.engines["state"] = EngineState.SERVING
        self._open()
        self.torn = False

    def server_lives(self) -> bool:
        """As Scoreboard.server_lives: whether the connection stands, or began or broke only a moment ago."""
        while not self.torn and self._events.poll(0):
            self.torn = True
            stands = recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if not stands and self._broken_at is None:
                self._broken_at = time.monotonic()
                self.engines["incarnation"] += 1
            if stands:
                self._broken_at = None
            self.engines["state"] = EngineState.SERVING if stands else EngineState.ABSENT
            self.torn = False
        return self._broken_at is None or time.monotonic() - self._broken_at < _TIMEOUT

    def close(self) -> None:
        """Close the socket; what was not sent yet is dropped."""
        if not self.socket.closed:
            self.socket.disable_monitor()
        self._events.close()
        self.socket.close()


class DirectConnection(OneEngine):
    """As Connection, over a socket of the caller's own (transports/direct.py): in the open, since it speaks no CURVE.

    Nobody reads it while nobody calls. So the relay ends it after ten idle seconds, and the next call makes another.

    Attributes:
        link: None where no address could be found just now.
        renewed: called when `link` is another; the one before it may be closed already.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        require(_FILES_OF_OWN, f"a connection to {address}")
        self._address = address
        self.renewed: Callable[[], None] = lambda: None
        self.link: Zmtp | None = None
        self._attempt = 0
        self._pinged_at: float | None = None
        # It does not stand yet.
        self._broken_at: float | None = time.monotonic()
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
        """As Scoreboard.server_lives: whether the connection stands, or began or broke only a moment ago.

        A broken one is made anew.
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
            if self._broken_at is None:
                self._broken_at = now
                self.engines["incarnation"] += 1
                self.engines["state"] = EngineState.ABSENT
                self._attempt = 0
                self._dial()
            elif now - self._dialled_at >= _REDIAL:
                if self.engines["state"] == EngineState.SERVING:  # the first never stood: what it took is lost
                    self.engines["incarnation"] += 1
                self._dial()
        elif now - self._dialled_at >= _HANDSHAKE:
            link.close()  # a handshake that does not end; another is tried at the next look
        return self._broken_at is None or time.monotonic() - self._broken_at < _TIMEOUT

    def stands(self) -> bool:
        """Whether a message can be sent and answered; makes a connection anew that ended while nobody called."""
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
        """Whether a peer that was asked for a sign of life gave none in time."""
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


# ----
# A client's CURVE keys, from arguments, variables and the files of `jurybox keys`.


_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # rfc.zeromq.org/spec/32


class Keys(NamedTuple):
    """The server's public key, and this client's pair."""

    server: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Keys(server={self.server!r}, public={self.public!r})"


def keys(server_key: str | None, client_key: str | None) -> Keys | None:
    """The keys to connect with; None where no server's key is given, and the connection is in the open.

    Args:
        server_key: the public key itself or a .key file; JURYBOX_SERVER_KEY without it.
        client_key: a .key_secret file; JURYBOX_CLIENT_KEY without it; a new pair where neither is given.

    Raises:
        Refused: a file cannot be read or is no such key.
    """
    server = server_key or os.environ.get("JURYBOX_SERVER_KEY")
    client = client_key or os.environ.get("JURYBOX_CLIENT_KEY")
    if not server:
        if client:
            raise Refused(f"client_key {client!r} came without the server's key: give server_key, its public .key file")
        return None
    public_of_server = server.encode() if _Z85.fullmatch(server) else _read(server)[0]
    public, secret = _read(client) if client else zmq.curve_keypair()
    if secret is None:
        raise Refused(f"{client} holds a public key alone: client_key is the .key_secret file beside it")
    return Keys(public_of_server, public, secret)


def _read(file: str) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(Path(file).expanduser())
    except (OSError, ValueError) as error:
        raise Refused(f"{file!r} is no key: expected a file of 'jurybox keys', or 40 characters of Z85") from error
    return public, secret
