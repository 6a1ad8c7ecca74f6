"""A client's CURVE keys, from arguments, environment variables and the files that `jurybox keys` writes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth

from jurybox.protocol.errors import Refused

_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # rfc.zeromq.org/spec/32


class Keys(NamedTuple):
    """The server's public key and this client's key pair."""

    server: bytes
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Keys(server={self.server!r}, public={self.public!r})"


def keys(server_key: str | None, client_key: str | None) -> Keys | None:
    """Return the keys to connect with; None if no server key is given: the connection is then not encrypted.

    Args:
        server_key: the public key itself or a .key file; default: JURYBOX_SERVER_KEY.
        client_key: a .key_secret file; default: JURYBOX_CLIENT_KEY. If neither is set, a new pair is generated.

    Raises:
        Refused: a file cannot be read or is not a key file, or a client key was given without a server key.
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
