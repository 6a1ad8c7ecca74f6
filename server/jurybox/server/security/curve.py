"""CURVE keys: pairs made and read as files, in the format that ZeroMQ's own tools use.

Elliptic-curve encryption and authentication of ZeroMQ connections: rfc.zeromq.org/spec/26. A key is 32 bytes, written
as 40 characters of Z85.
"""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.auth

from jurybox.server.security.secret_files import read_secret, write_new

PUBLIC, SECRET = ".key", ".key_secret"
_ABOUT = "#   A CURVE {kind} key of Jurybox. {advice}\n"
_PAIR = 'metadata\ncurve\n    public-key = "{public}"\n'


def make_pair(name: Path) -> tuple[Path, Path, str]:
    """Make NAME.key (to give away) and NAME.key_secret (to keep, mode 0600); gives both and the public key.

    Raises:
        FileExistsError: one of them is there already: a key that is in use is never replaced.
    """
    public_file, secret_file = Path(f"{name}{PUBLIC}"), Path(f"{name}{SECRET}")
    for file in (public_file, secret_file):
        if file.exists():
            raise FileExistsError(f"{file} exists: move it away, or take another name")
    public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
    pair = _PAIR.format(public=public)
    write_new(
        secret_file,
        _ABOUT.format(kind="secret", advice="Keep it to yourself.") + pair + f'    secret-key = "{secret}"\n',
        0o600,
    )
    write_new(public_file, _ABOUT.format(kind="public", advice="Give it to the other side.") + pair, 0o644)
    return public_file, secret_file, public


def read_pair(file: Path) -> tuple[bytes, bytes]:
    """Public and secret key of a NAME.key_secret.

    Raises:
        ValueError: it cannot be read, others can read it, or it holds no pair.
    """
    read_secret(file)
    public, secret = zmq.auth.load_certificate(file)
    if public is None or secret is None:
        raise ValueError(f"{file} holds no pair of keys: expected a .key_secret of 'jurybox keys'")
    return public, secret


def public_keys(folder: Path) -> list[Path]:
    """The .key files of a folder: of the clients that may come in."""
    return sorted(folder.glob(f"*{PUBLIC}"))
