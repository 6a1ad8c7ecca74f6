"""What the engine's core asks of a way in."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray


class Door(Protocol):
    """A source of tickets and the way back for replies. None of its methods waits."""

    number: int  # the core writes it into the tickets that came through this door

    def collect(self, out: NDArray[Any]) -> int:
        """Write tickets that arrived to `out`, n records of wire.TICKET; gives how many, at most n."""

    def reply(self, tickets: NDArray[Any], code: int, version: int, message: str) -> None:
        """Answer tickets that came through this door, all with the same code, weights version and message."""
