"""What the environments of a cluster want of those who hold them. `env_workers` has it with Ray."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, Protocol


class Lost(Enum):
    """Instead of an answer: the worker was replaced, and all that it holds is new."""

    LOST = "lost"


LOST: Final = Lost.LOST


class Workers(Protocol):
    """Numbered workers, each of which holds an object whose methods can be called.

    Attributes:
        restarts: workers replaced so far.
    """

    restarts: int

    def __len__(self) -> int: ...

    def life(self, worker: int) -> int:
        """How often it was replaced."""

    def ask(self, worker: int, method: str, *arguments: Any) -> Any:
        """Begin a call; several may be under way, they are done in order. Gives what `answer` wants."""

    def answer(self, asked: Any) -> Any:
        """Wait for it; `LOST` where the worker was replaced since, or is replaced now."""

    def close(self) -> None:
        """End them."""
