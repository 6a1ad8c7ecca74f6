"""How the doors of a process close: what is new is refused, and what was accepted is answered.

HTTP, gRPC, robots, dialects and streams of weights share one `Doors`. The supervisor orders it to close first when the
server stops, while the engines still compute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from jurybox.protocol.errors import Code, Error, Refused

RETRY_AFTER = "2"  # seconds after which a client that was refused may ask again
_HERE = 0.02  # seconds for a message that has come already

T = TypeVar("T")


class Doors:
    """Open until `close`. Use it in one event loop only.

    Attributes:
        closing: set when the doors have closed.
    """

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self._waits: set[asyncio.Timeout] = set()

    @property
    def closed(self) -> bool:
        """Whether new requests are refused."""
        return self.closing.is_set()

    def close(self) -> None:
        """Refuse new requests from now on, and end the waits for the next messages of open streams."""
        self.closing.set()
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())
        self._waits.clear()

    async def message(self, coming: Awaitable[T], seconds: float | None = None) -> T:
        """Wait for the next message of a stream, for at most `seconds`.

        Raises:
            TimeoutError: it did not come in time, or the doors have closed and none had come before.
        """
        async with asyncio.timeout(_HERE if self.closed else seconds) as wait:
            self._waits.add(wait)
            try:
                return await coming
            finally:
                self._waits.discard(wait)


def refusal() -> Error:
    """Return the error for a request that comes after the doors have closed."""
    return Refused("the server is stopping and takes no new requests: ask again when it is back", Code.DRAINING)
