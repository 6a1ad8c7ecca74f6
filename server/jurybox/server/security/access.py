"""What a process that listens must know of the walls, on its way there through the lifeline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jurybox.protocol.errors import Code, Refused
from jurybox.server.security.secret_files import read_secret
from jurybox.server.security.settings import SecuritySettings
from jurybox.server.security.token import Token

_AT_ONCE = 8  # messages of the largest size that may be in a process at once


class Room:
    """Bounds the bytes of all requests that a process holds at once; for one event loop.

    Args:
        most: bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    def take(self, size: int) -> None:
        """Raises Refused (code BUSY) where there is no room for so many bytes now."""
        if self._held + size > self._most:
            raise Refused(
                f"requests of {self._held} bytes are being answered, and at most {self._most} are held at once: ask "
                "again later",
                Code.BUSY,
            )
        self._held += size

    def give(self, size: int) -> None:
        """Those bytes are held no longer."""
        self._held -= size


@dataclass(frozen=True, slots=True)
class Access:
    """The gateway's part of the security settings; its secrets are left out of `repr`."""

    secret: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    max_message: int = 64 << 20
    shared_memory_prefix: str = ""

    def __repr__(self) -> str:
        return f"Access(token={'set' if self.secret else 'none'}, tls_cert={self.tls_cert!r})"

    @classmethod
    def of(cls, settings: SecuritySettings) -> Access:
        """Raises ValueError where a secret cannot be read."""
        return cls(
            settings.secret_token(),
            settings.tls_cert,
            settings.tls_key,
            settings.max_message,
            settings.shared_memory_prefix,
        )

    @classmethod
    def from_order(cls, orders: dict[str, Any]) -> Access:
        """What `order` gave; no walls but the limits where the order says nothing."""
        return cls(**orders.get("access", {}))

    def order(self) -> dict[str, Any]:
        """For the lifeline, a socket that only the two processes hold."""
        return {"access": asdict(self)}

    def room(self) -> Room:
        """For the requests of one door."""
        return Room(_AT_ONCE * self.max_message)

    @property
    def token(self) -> Token | None:
        return Token(self.secret) if self.secret else None

    def tls(self) -> tuple[bytes, bytes] | None:
        """Private key and certificate chain in PEM; None without TLS. Raises ValueError, OSError."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return read_secret(Path(self.tls_key)), Path(self.tls_cert).read_bytes()
