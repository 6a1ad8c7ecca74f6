"""A relay seen from the client: the socket, its CURVE keys, and whether the server still answers."""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zmq
import zmq.auth
from zmq.utils.monitor import recv_monitor_message

from jurybox.client import control
from jurybox.protocol.descriptors import require
from jurybox.protocol.errors import Refused
from jurybox.protocol.scoreboard import ENGINE, EngineState

MOST_BYTES = 1 << 30  # of a frame that a server may send
_TIMEOUT = 10.0  # seconds without a connection after which the server counts as gone
_BEAT_MS, _SILENCE_MS = 2000, 10_000  # libzmq's own pings, and the silence that ends a connection
_FILES = 10  # of a socket and its monitor; libzmq ends the process where they run out in its midst
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


class Connection:
    """A connection for one lane; to the lane it is the scoreboard of a server with one engine, the server's relay.

    The engine's incarnation grows whenever the connection breaks, so that the lane sends its tickets again.

    Attributes:
        engines: one record of scoreboard.ENGINE.
        torn: set while a message of several frames is sent or taken in. Who finds it set knows that this was broken
            off, by a KeyboardInterrupt perhaps, and renews the connection.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None) -> None:
        self._context = context
        self._address = address
        self._keys = keys
        self.engines = np.zeros(1, ENGINE)
        self.engines["state"], self.engines["incarnation"] = EngineState.SERVING, 1
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

    @property
    def incarnation(self) -> int:
        return int(self.engines["incarnation"][0])

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
