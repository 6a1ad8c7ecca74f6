"""Security settings, and files of secrets, which are read only if no other user can read them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import zmq
import zmq.auth
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from jurybox import native
from jurybox.protocol.address import is_loopback
from jurybox.server.security.limits import budget_of
from jurybox.server.settings.endpoints import split_host

_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # the group may read, since orchestrators mount secrets this way
_MOST_BYTES = 1 << 20


def too_open(path: Path) -> str | None:
    """Return the reason why a file's mode is too open for a secret; None if it is not, or the file does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_mode & _OTHERS:
        return f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, others can get at the secret in it: chmod 600 it"
    return None


def read_secret(path: Path) -> bytes:
    """Return the contents of a file that only its owner (and group) can read.

    Raises:
        ValueError: it cannot be read, is no regular file, is larger than 1 MiB, or others can read or change it.
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
        raise ValueError(f"{path} is larger than 1 MiB, too large for a secret")
    return content


def write_new(path: Path, content: str, mode: int) -> None:
    """Create a file with that mode. Raises FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(content)


SHORTEST = 16  # characters
CHALLENGES = ("Bearer", 'Basic realm="jurybox", charset="UTF-8"')  # with the second, a browser prompts its user


class Token:
    """A token, compared in constant time.

    It is stored and compared as a digest: `compare_digest` alone would reveal the token's length.
    """

    def __init__(self, secret: str) -> None:
        self._digest = _digest(secret)

    def __repr__(self) -> str:
        return "Token(...)"

    def is_shown_by(self, authorization: str | None) -> bool:
        """Check an Authorization header: ``Bearer TOKEN``, or ``Basic`` with the token as password."""
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


OWN_PREFIX = "jurybox-"  # prefix of the server's own shared memory
FILES = ("token_file", "tls_cert", "tls_key", "curve_key", "curve_clients")  # settings that name files or folders


def _check_prefix(text: str) -> str:
    if not text:
        return text
    if not re.fullmatch(r"[\w.-]{1,100}", text, re.ASCII):
        raise ValueError('expected a prefix of the names of clients\' shared memory, of letters, digits and "_.-"')
    if text.startswith(OWN_PREFIX) or OWN_PREFIX.startswith(text):
        raise ValueError(f"the server's own memory is named {OWN_PREFIX}...: expected another prefix")
    return text


class SecuritySettings(BaseModel):
    """The security settings of [server]; docs/security.md describes each of them."""

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
    def _check_combination(self) -> SecuritySettings:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both set, expected one of them")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("expected tls_cert and tls_key together, or neither")
        if self.curve_clients is not None and self.curve_key is None:
            raise ValueError("curve_clients is set without curve_key, the server's own key pair")
        return self

    @property
    def max_message(self) -> int:
        """The maximum size of a message, request body or ZeroMQ frame in bytes."""
        return self.max_message_mib << 20

    def secret_token(self) -> str | None:
        """Return the required token, or None. Raises ValueError, whose text does not contain the token."""
        if self.token is not None:
            token = self.token.get_secret_value()
        elif self.token_file is not None:
            try:
                token = read_secret(Path(self.token_file)).decode("ascii").strip()
            except UnicodeDecodeError:
                raise ValueError(f"{self.token_file} contains non-ASCII characters") from None
        else:
            return None
        if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(
                f"a token is at least {SHORTEST} printable ASCII characters without spaces: "
                "make one with: openssl rand -hex 32"
            )
        return token

    def broken_secrets(self) -> list[str]:
        """Return the problems with the files of these settings, one line each."""
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

    @property
    def guarded(self) -> bool:
        """Whether clients need a token or TLS."""
        return self.token is not None or self.token_file is not None or self.tls_cert is not None

    def lacking(self, listening: Mapping[str, str]) -> list[str]:
        """Return the ports that other hosts can reach although they lack a token or TLS, one line each.

        Args:
            listening: the address of each port, by the name of its setting.
        """
        shown = self.token is not None or self.token_file is not None
        lacks = [f"server.{what}" for what, there in (("token_file", shown), ("tls_cert", self.tls_cert)) if not there]
        return [
            f'{name} = "{where}" needs {" and ".join(lacks)}'
            for name, where in listening.items()
            if where and lacks and not is_loopback(split_host(where)[0])
        ]


# CURVE keys: key pairs in files, in the format of ZeroMQ's own tools.
#
# Elliptic-curve encryption and authentication of ZeroMQ connections: rfc.zeromq.org/spec/26. A key is 32 bytes,
# written as 40 characters of Z85.


PUBLIC, SECRET = ".key", ".key_secret"
_ABOUT = "#   A CURVE {kind} key of Jurybox. {advice}\n"
_PAIR = 'metadata\ncurve\n    public-key = "{public}"\n'


def make_pair(name: Path) -> tuple[Path, Path, str]:
    """Create NAME.key (public) and NAME.key_secret (mode 0600); return both paths and the public key.

    Raises:
        FileExistsError: one of them exists already. Existing keys are never replaced.
    """
    public_file, secret_file = Path(f"{name}{PUBLIC}"), Path(f"{name}{SECRET}")
    for file in (public_file, secret_file):
        if file.exists():
            raise FileExistsError(f"{file} exists: move it away, or choose another name")
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
    """Return the public and the secret key of a NAME.key_secret file.

    Raises:
        ValueError: it cannot be read, others can read it, or it contains no key pair.
    """
    read_secret(file)
    public, secret = zmq.auth.load_certificate(file)
    if public is None or secret is None:
        raise ValueError(f"{file} holds no pair of keys: expected a .key_secret of 'jurybox keys'")
    return public, secret


def public_keys(folder: Path) -> list[Path]:
    """Return the .key files of a folder, sorted: the keys of admitted clients."""
    return sorted(folder.glob(f"*{PUBLIC}"))


@dataclass(frozen=True, slots=True)
class Access:
    """The gateway's part of the security settings; `repr` omits its secrets."""

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
        """Create it from settings. Raises ValueError if a secret cannot be read."""
        return cls(
            settings.secret_token(),
            settings.tls_cert,
            settings.tls_key,
            settings.max_message,
            settings.shared_memory_prefix,
            settings.cuda_shared_memory,
        )

    def budget(self) -> native.Budget:
        """Return the budget of a process with these settings."""
        return budget_of(self.max_message)

    @property
    def token(self) -> Token | None:
        return Token(self.secret) if self.secret else None

    def tls(self) -> tuple[bytes, bytes] | None:
        """Return private key and certificate chain as PEM; None without TLS. Raises ValueError, OSError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return read_secret(Path(self.tls_key)), Path(self.tls_cert).read_bytes()


class ClientConnection:
    """A client's connection with at most one request in flight, and how soon it sends the next one.

    Args:
        peername: its address, as a transport's "peername".

    Attributes:
        near: whether the client runs on this host.
        answered: the time of the last answer in s of the monotonic clock.
        quick: whether the last request followed the answer before it at once.
    """

    __slots__ = ("answered", "near", "quick")

    def __init__(self, peername: Any) -> None:
        self.near = _is_near(peername)
        self.answered = 0.0
        self.quick = False


# The connection whose only request is answered in this task; None: unknown.
OF_CONNECTION: ContextVar[ClientConnection | None] = ContextVar("OF_CONNECTION", default=None)


def _is_near(peer: Any) -> bool:
    """Return whether a peer runs on this host."""
    try:
        return not peer or isinstance(peer, str) or ip_address(str(peer[0]).removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False
