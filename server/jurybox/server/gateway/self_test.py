"""Whether models answer: each has answered somebody here just now, or is asked one row.

It is asked as everybody who comes through the gateway is, on the same lanes: only so does it fail when they do. Nobody
asking, nothing runs. Where real requests are answered, none is added to them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from jurybox.protocol.errors import Code, Error, ServerGone, Timeout, said
from jurybox.server.gateway.health import not_ready
from jurybox.server.gateway.inference.lanes import Lanes
from jurybox.server.gateway.source import Document, StatusSource

FRESH = 0.05  # seconds for which an answer shows that a model answers
_TIMEOUT = 2.0  # seconds a model has for the row; health checks commonly wait for 1 to 10
_SILENT_FOR = 30.0  # seconds a supervisor may be busy while its engines answer all the same
_TRIES = 3  # as a request has


class SelfTest:
    """Keeps when each model last answered, and asks those that have not lately.

    Args:
        lanes: those that requests are answered on.
        clock: seconds, monotonic.
    """

    def __init__(self, source: StatusSource, lanes: Lanes, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._lanes = lanes
        self._clock = clock
        self._answered: dict[str, float] = {}
        self._asking: dict[str, tuple[float, asyncio.Task[str]]] = {}  # when it began, the last of each model
        self._document: Document | None = None  # the last there was, and when
        self._asked = 0.0

    def told(self, model: str, answered: bool) -> None:
        """A real request of that model has just been answered, or has failed."""
        if answered:
            self._answered[model] = self._clock()
        else:
            self._answered.pop(model, None)

    async def reasons(self) -> list[str]:
        """Why the server should get no requests now; empty when every model is loaded and answers."""
        try:
            document = self._document = await self._source.status()
            self._asked = self._clock()
        except (ServerGone, Timeout) as error:
            # Who leases lanes and restarts engines is away or busy. Whoever has a lane is answered all the same.
            if self._document is None or self._clock() - self._asked >= _SILENT_FOR:
                return [str(error)]
            document = self._document
        except Error as error:
            return [str(error)]
        if document["server"]["state"] == "draining":
            return not_ready(document)
        # Asked even where the document says that no engine serves: a request waits for the next one, as this row does.
        asked = [
            model["name"]
            for model in document["models"]
            if model["state"] == "ready" or (model["state"] == "loading" and model.get("configured", True))
        ]
        silent = [why for why in await asyncio.gather(*(self.silent(name) for name in asked)) if why]
        broken = any(model["state"] not in ("ready", "loading") for model in document["models"])
        return not_ready(document) + silent if silent or broken or not asked else []

    async def silent(self, name: str) -> str:
        """Why a model does not answer; empty where it does."""
        now = self._clock()
        if now - self._answered.get(name, -FRESH) < FRESH:
            return ""
        # Who asks at nearly the same moment shares the answer. No row is shared for longer: one that was sent a second
        # ago has a second left, and its time-out says nothing about a request that is sent now.
        began, asking = self._asking.get(name, (-FRESH, None))
        if asking is None or now - began >= FRESH:
            asking = asyncio.create_task(self.ask(name))
            self._asking[name] = now, asking
        return await asyncio.shield(asking)

    async def ask(self, name: str, version: int = 0) -> str:
        """Ask one row of zeros, of a weights version (0: the newest); gives why there was no answer."""
        tries = _TRIES
        until = self._clock() + _TIMEOUT
        while True:
            try:
                held = await self._lanes.hold(name, trying=True)
                row = {key: np.zeros((1, *spec.shape), spec.numpy_dtype) for key, spec in held.spec.inputs.items()}
                await self._lanes.ask(held, row, 1, until - self._clock(), version)
            except Error as error:
                tries -= 1
                if error.code == Code.STALE_LEASE and tries:
                    continue  # it was loaded again just now
                if error.code == Code.MODEL_NOT_FOUND and not version:
                    return ""  # it was unloaded just now
                return f"model {name!r} does not answer: {error}"
            except Exception as error:  # noqa: BLE001  a probe tells what is wrong, whatever it is
                return f"model {name!r} does not answer: {said(error)}"
            self._answered[name] = self._clock()
            return ""
