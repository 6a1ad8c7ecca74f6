"""Event loops in tests."""

from __future__ import annotations

import asyncio


async def turns(n: int = 20) -> None:
    """Let the other tasks run until they wait for something: a number of turns, not a time, so load changes nothing."""
    for _ in range(n):
        await asyncio.sleep(0)
