"""How a process with an event loop shows the supervisor that the loop turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from jurybox.protocol.control_pipe import ControlPipe

_EVERY = 1.0  # seconds


@contextlib.asynccontextmanager
async def signs_of_life(control_pipe: ControlPipe) -> AsyncIterator[None]:
    """Tell the parent every second, inside the ``with``, that this process lives."""

    async def tell() -> None:
        # A parent that was stopped reads nothing: waiting for it would stop this process, too.
        while True:
            if control_pipe.writable():
                control_pipe.send("alive")
            await asyncio.sleep(_EVERY)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        with contextlib.suppress(
            asyncio.CancelledError, OSError
        ):  # the parent may be gone: the control pipe says so too
            await telling
