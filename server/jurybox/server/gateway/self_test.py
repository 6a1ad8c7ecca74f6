"""Whether models answer: each has answered somebody within the last seconds, or is asked one row now.

Nobody asking, nothing runs. Where real requests are answered, none is added to them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from jurybox.protocol.errors import Busy, Code, Error
from jurybox.server.gateway.health import not_ready
from jurybox.server.gateway.inference.lanes import Lanes
from jurybox.server.gateway.source import StatusSource

FRESH = 5.0  # seconds for which an answer shows that a model answers
_TIMEOUT = 2.0  # seconds a model has for the row; health checks commonly wait for 1 to 10


class SelfTest:
    """Keeps when each model last answered, and asks those that have not lately.

    Args:
        lanes: of one row each, so that asking never waits for the rows of real requests.
        clock: seconds, monotonic.
    """

    def __init__(self, source: StatusSource, lanes: Lanes, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._lanes = lanes
        self._clock = clock
        self._answered: dict[str, float] = {}
        self._counted: dict[
            str, tuple[int, float]
        ] = {}  # answers that the board had counted, and when it was looked at
        self._asking: dict[str, asyncio.Task[str]] = {}

    def answered(self, model: str) -> None:
        """A real request of that model has just been answered."""
        self._answered[model] = self._clock()

    async def reasons(self) -> list[str]:
        """Why the server should get no requests now; empty when every model is loaded and answers."""
        try:
            document = await self._source.status()
        except Error as error:
            return [str(error)]
        reasons = not_ready(document)
        ready = [model for model in document["models"] if model["state"] == "ready"]
        if document["server"]["state"] == "serving":
            reasons += filter(None, await asyncio.gather(*(self.silent(model) for model in ready)))
        return reasons

    async def silent(self, model: dict[str, Any]) -> str:
        """Why a model that is ready, given by its part of the status document, does not answer; empty where it does."""
        name, now = model["name"], self._clock()
        count, looked = self._counted.get(name, (-1, 0.0))
        self._counted[name] = (model["requests"], now)
        if 0 <= count < model["requests"] and now - looked < FRESH:
            self._answered[name] = now
        if now - self._answered.get(name, -FRESH) < FRESH:
            return ""
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = asyncio.create_task(self.ask(name))
            asking.add_done_callback(lambda _: self._asking.pop(name, None))
        return await asyncio.shield(asking)

    async def ask(self, name: str, version: int = 0) -> str:
        """Ask one row of zeros, of a weights version (0: the newest); gives why there was no answer."""
        try:
            held = await self._lanes.hold(name)
            row = {key: np.zeros((1, *spec.shape), spec.numpy_dtype) for key, spec in held.spec.inputs.items()}
            await self._lanes.ask(held, row, 1, _TIMEOUT, version)
        except Busy:
            return ""  # every row is leased and in use: its clients tell
        except Error as error:
            if error.code == Code.STALE_LEASE:
                return ""  # it was loaded again just now: the next question gets a new lane
            return f"model {name!r} does not answer: {error}"
        self._answered[name] = self._clock()
        return ""
