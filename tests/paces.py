"""Turns of a process's doors in tests."""

from __future__ import annotations

from typing import Any

from jurybox.server.security.pace import Turns


class NotedTurns(Turns):
    """Turns that are had at once, and who has waited for one after how many seconds of work."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[Any, float]] = []

    async def wait(self, who: Any, seconds: float) -> None:
        self.waits.append((who, seconds))
