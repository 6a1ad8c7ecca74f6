"""Security settings, and files of secrets, which are read only if nobody else can read them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import zmq
import zmq.auth
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from jurybox.protocol.address import is_loopback
from jurybox.protocol.errors import Code, Refused
from jurybox.server.settings.endpoints import split_host

_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # a group may read: that is how orchestrators mount a secret
_MOST_BYTES = 1 << 20


def too_open(path: Path) -> str | None:
    """The reason why a file is too open for a secret; None if it is not, or does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_mode & _OTHERS:
        return f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, others can get at the secret in it: chmod 600 it"
    return None


def read_secret(path: Path) -> bytes:
    """The contents of a file that only its owner (and a group) can read.

    Raises:
        ValueError: it cannot be read, is no plain file, is larger than 1 MiB, or others can read or change it.
    """
    try:
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        if why := too_open(path):
            raise ValueError(why)
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than 1 MiB, which no secret is")
    return content


def write_new(path: Path, content: str, mode: int) -> None:
    """Create a file with that mode. Raises FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(content)


SHORTEST = 16  # characters
CHALLENGES = ("Bearer", 'Basic realm="jurybox", charset="UTF-8"')  # the second lets a browser ask its user


class Token:
    """A token, compared in constant time.

    Kept and compared as a digest: `compare_digest` alone would tell the token's length.
    """

    def __init__(self, secret: str) -> None:
        self._digest = _digest(secret)

    def __repr__(self) -> str:
        return "Token(...)"

    def is_shown_by(self, authorization: str | None) -> bool:
        """Whether an Authorization header has the token: ``Bearer TOKEN``, or ``Basic`` with the token as password."""
        scheme, _, given = (authorization or "").partition(" ")
        shown = given.strip() if scheme.lower() == "bearer" else _password(given) if scheme.lower() == "basic" else ""
        return hmac.compare_digest(_digest(shown), self._digest)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _password(given: str) -> str:
    try:
        return base64.b64decode(given.strip(), validate=True).decode("utf-8").partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


OWN_PREFIX = "jurybox-"  # of the server's own shared memory
FILES = ("token_file", "tls_cert", "tls_key", "curve_key", "curve_clients")  # settings that name files or folders


def _check_prefix(text: str) -> str:
    if not text:
        return text
    if not re.fullmatch(r"[\w.-]{1,100}", text, re.ASCII):
        raise ValueError('expected what the names of clients\' shared memory begin with, letters, digits and "_.-"')
    if text.startswith(OWN_PREFIX) or OWN_PREFIX.startswith(text):
        raise ValueError(f"the server's own memory is named {OWN_PREFIX}...: expected another beginning")
    return text


class SecuritySettings(BaseModel):
    """Part of [server]; docs/security.md describes each setting."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    token: SecretStr | None = None
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    curve_key: str | None = None
    curve_clients: str | None = None
    max_message_mib: int = Field(default=64, ge=1, le=1024)
    shared_memory_prefix: Annotated[str, AfterValidator(_check_prefix)] = ""
    cuda_shared_memory: bool = False

    @model_validator(mode="after")
    def _goes_together(self) -> SecuritySettings:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file both came, expected one of them")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("expected tls_cert and tls_key together, or neither")
        if self.curve_clients is not None and self.curve_key is None:
            raise ValueError("curve_clients came without curve_key, which is the server's own pair of keys")
        return self

    @property
    def max_message(self) -> int:
        """The maximum size of a message, request body or ZeroMQ frame in bytes."""
        return self.max_message_mib << 20

    def secret_token(self) -> str | None:
        """The required token, if there is one. Raises ValueError, without the token in its text."""
        if self.token is not None:
            token = self.token.get_secret_value()
        elif self.token_file is not None:
            try:
                token = read_secret(Path(self.token_file)).decode("ascii").strip()
            except UnicodeDecodeError:
                raise ValueError(f"{self.token_file} holds other than ASCII characters") from None
        else:
            return None
        if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(
                f"a token is at least {SHORTEST} printable ASCII characters without spaces: "
                "make one with: openssl rand -hex 32"
            )
        return token

    def broken_secrets(self) -> list[str]:
        """Problems with the files of these settings, one line each."""
        found = []
        try:
            self.secret_token()
        except ValueError as error:
            found.append(f"server.{'token' if self.token else 'token_file'}: {error}")
        if self.tls_cert is not None and not Path(self.tls_cert).is_file():
            found.append(f"server.tls_cert = {self.tls_cert!r}: there is no such file")
        for name, file, read in (("tls_key", self.tls_key, read_secret), ("curve_key", self.curve_key, read_pair)):
            try:
                if file is not None:
                    read(Path(file))
            except ValueError as error:
                found.append(f"server.{name}: {error}")
        if self.curve_clients is not None and not Path(self.curve_clients).is_dir():
            found.append(f"server.curve_clients = {self.curve_clients!r}: expected a folder of clients' .key files")
        return found

    def lacking(self, listening: Mapping[str, str]) -> list[str]:
        """Ports with a token that other hosts can reach without authentication, one line each; addresses by setting."""
        shown = self.token is not None or self.token_file is not None
        lacks = [f"server.{what}" for what, there in (("token_file", shown), ("tls_cert", self.tls_cert)) if not there]
        return [
            f'{name} = "{where}" needs {" and ".join(lacks)}'
            for name, where in listening.items()
            if where and lacks and not is_loopback(split_host(where)[0])
        ]


# CURVE keys: pairs made and read as files, in the format that ZeroMQ's own tools use.
#
# Elliptic-curve encryption and authentication of ZeroMQ connections: rfc.zeromq.org/spec/26. A key is 32 bytes,
# written as 40 characters of Z85.


PUBLIC, SECRET = ".key", ".key_secret"
_ABOUT = "#   A CURVE {kind} key of Jurybox. {advice}\n"
_PAIR = 'metadata\ncurve\n    public-key = "{public}"\n'


def make_pair(name: Path) -> tuple[Path, Path, str]:
    """Create NAME.key (public) and NAME.key_secret (mode 0600); returns both paths and the public key.

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
    """Read the .key files of a folder: the keys of admitted clients."""
    return sorted(folder.glob(f"*{PUBLIC}"))


_AT_ONCE = 8  # messages of the largest size that may be in a process at once


class Room:
    """Limits the bytes of all requests that a process holds at once. Belongs to one event loop.

    Args:
        most: bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    def take(self, size: int) -> None:
        """Reserve bytes. Raises Refused (code BUSY) if there is no room now."""
        if self._held + size > self._most:
            raise Refused(
                f"requests of {self._held} bytes are being answered, and at most {self._most} are held at once: ask "
                "again later",
                Code.BUSY,
            )
        self._held += size

    def give(self, size: int) -> None:
        """Release bytes."""
        self._held -= size


@dataclass(frozen=True, slots=True)
class Access:
    """The gateway's part of the security settings; its secrets are left out of `repr`."""

    secret: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    max_message: int = 64 << 20
    shared_memory_prefix: str = ""
    cuda_shared_memory: bool = False

    def __repr__(self) -> str:
        return f"Access(token={'set' if self.secret else 'none'}, tls_cert={self.tls_cert!r})"

    @classmethod
    def of(cls, settings: SecuritySettings) -> Access:
        """The access of these settings. Raises ValueError if a secret cannot be read."""
        return cls(
            settings.secret_token(),
            settings.tls_cert,
            settings.tls_key,
            settings.max_message,
            settings.shared_memory_prefix,
            settings.cuda_shared_memory,
        )

    @classmethod
    def from_order(cls, orders: dict[str, Any]) -> Access:
        """The inverse of `order`; without settings only the limits apply."""
        return cls(**orders.get("access", {}))

    def order(self) -> dict[str, Any]:
        """The settings for the control pipe, a private socket of two processes."""
        return {"access": asdict(self)}

    def room(self) -> Room:
        """The limit for the requests of one transport."""
        return Room(_AT_ONCE * self.max_message)

    @property
    def token(self) -> Token | None:
        return Token(self.secret) if self.secret else None

    def tls(self) -> tuple[bytes, bytes] | None:
        """Private key and certificate chain in PEM; None without TLS. Raises ValueError, OSError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return read_secret(Path(self.tls_key)), Path(self.tls_cert).read_bytes()


class Source:
    """A connection that asks one thing at a time, to those who wait for it.

    Args:
        peer: its address, as a transport's "peername".

    Attributes:
        near: whether it is of this host.
        answered: when it was answered last, s of the monotonic clock.
        quick: whether it asked again at once after that before.
    """

    __slots__ = ("answered", "near", "quick")

    def __init__(self, peer: Any) -> None:
        self.near = _is_near(peer)
        self.answered = 0.0
        self.quick = False


def _is_near(peer: Any) -> bool:
    """Whether a peer runs on this host."""
    try:
        return not peer or isinstance(peer, str) or ip_address(str(peer[0]).removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False
