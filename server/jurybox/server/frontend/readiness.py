"""Readiness: whether the server would answer requests now.

A readiness check tests whether each model answers: it has answered a request recently, or it is sent a probe of one
row. Probes use the same lanes as requests through the gateway, so that they fail when those fail. No probe is sent
without a check, nor to a model that has just answered a real request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from jurybox.protocol.errors import Code, Error, ServerGone, Timeout, said
from jurybox.server.frontend.lanes import MOMENT, SOON, ModelRows
from jurybox.server.frontend.source import Document, StatusSource

FRESH = 0.05  # seconds during which a model that has answered needs no probe
_TIMEOUT = 2.0  # seconds to answer a probe; health checks commonly wait for 1 to 10
_SILENT_FOR = 30.0  # seconds that the supervisor may be unresponsive while its engines still answer
_TRIES = 3  # as many as for a request


async def reasons(source: StatusSource) -> list[str]:
    """Return why the server is not ready, according to its status document; empty if it is ready."""
    try:
        return not_ready(await source.status())
    except Error as error:
        return [str(error)]


def not_ready(document: dict[str, Any]) -> list[str]:
    """Return why the server is not ready, from its status document; empty if it is ready.

    The server is ready when it is not draining, at least one engine serves with a fresh heartbeat, every configured
    model is loaded, and no model is in quarantine. A sleeping model does not count against readiness.
    """
    reasons = []
    state = document["server"]["state"]
    if state == "draining":
        reasons.append("the server is draining")
    elif state != "serving":
        reasons += [_engine(engine) for engine in document["engines"]] or ["there is no engine"]
    for model in document["models"]:
        if model["state"] == "sleeping":
            continue  # a client put it to sleep on purpose
        # A model that is being loaded at a client's request is not missing: only configured ones are required.
        if model["state"] != "ready" and (model.get("configured", True) or model["state"] != "loading"):
            why = f": {model['reason']}" if model["reason"] else ""
            reasons.append(f"model {model['name']!r} is {model['state']}{why}")
    return reasons


def _engine(engine: dict[str, Any]) -> str:
    if engine["hung"]:
        return f"engine {engine['index']} hangs: its last heartbeat is {engine['heartbeat_age']:.1f} s old"
    return f"engine {engine['index']} is {engine['state']}, restarted {engine['restarts']} times"


class SelfTest:
    """A readiness check that remembers when each model last answered, and probes those that have not lately.

    Args:
        source: source of the server's status.
        lanes: the lanes that requests use.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, source: StatusSource, lanes: ModelRows, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._lanes = lanes
        self._clock = clock
        self._answered: dict[str, float] = {}
        self._asking: dict[str, tuple[float, asyncio.Task[str]]] = {}  # the last probe of each model, and its start
        self._document: Document | None = None  # the last one received, at the time `_asked`
        self._asked = 0.0

    def record(self, model: str, answered: bool) -> None:
        """Record whether a request to that model was answered or failed."""
        if answered:
            self._answered[model] = self._clock()
        else:
            self._answered.pop(model, None)

    async def reasons(self) -> list[str]:
        """Return why the server should get no requests now; empty if every model is loaded and answers."""
        try:
            document = self._document = await self._source.status()
            self._asked = self._clock()
        except (ServerGone, Timeout) as error:
            # The supervisor, which leases lanes and restarts engines, is gone or busy. Requests on lanes that are
            # already leased are answered without it.
            if self._document is None or self._clock() - self._asked >= _SILENT_FOR:
                return [str(error)]
            document = self._document
        except Error as error:
            return [str(error)]
        if document["server"]["state"] == "draining":
            return not_ready(document)
        # Probe even if no engine serves according to the document: the probe, like a request, waits for the next one.
        asked = [model["name"] for model in document["models"] if _should_answer(model)]
        silent = [why for why in await asyncio.gather(*(self.silent(name) for name in asked)) if why]
        broken = any(model["state"] not in ("ready", "loading", "sleeping") for model in document["models"])
        return not_ready(document) + silent if silent or broken or not asked else []

    async def silent(self, name: str) -> str:
        """Return why a model does not answer; empty if it does."""
        now = self._clock()
        if now - self._answered.get(name, -FRESH) < FRESH:
            return ""
        # Checks at nearly the same time share a probe. An older probe is not shared: one that was sent a second ago
        # times out in a second, which says nothing about a request that is sent now.
        began, asking = self._asking.get(name, (-FRESH, None))
        if asking is None or now - began >= FRESH:
            asking = asyncio.create_task(self.ask(name))
            self._asking[name] = now, asking
        return await asyncio.shield(asking)

    async def ask(self, name: str, version: int = 0) -> str:
        """Request one row of zeros, and return why it failed; empty if it was answered.

        Args:
            version: of the weights; 0: the newest.
        """
        tries = _TRIES
        until = self._clock() + _TIMEOUT
        exchanged = until - _TIMEOUT + MOMENT  # requests wait as long for the rows of a gateway that died
        while True:
            held = None
            try:
                held = await self._lanes.hold(name, trying=True)
                await self._lanes.probe(held, until - self._clock(), version)
            except Error as error:
                if held is None and error.code == Code.BUSY and self._clock() < exchanged:
                    await asyncio.sleep(SOON)
                    continue
                tries -= 1
                if error.code == Code.STALE_LEASE and tries:
                    continue  # the model has just been reloaded
                if error.code == Code.MODEL_NOT_FOUND and not version and await self._was_unloaded(name):
                    return ""
                return f"model {name!r} does not answer: {error}"
            except Exception as error:  # noqa: BLE001  a probe reports every kind of failure
                return f"model {name!r} does not answer: {said(error)}"
            self._answered[name] = self._clock()
            return ""

    async def _was_unloaded(self, name: str) -> bool:
        """Return whether a model that an engine does not know need not answer: otherwise that engine fails requests."""
        try:
            document = await self._source.status(fresh=True)
        except Error:
            return False
        return not any(model["name"] == name and _should_answer(model) for model in document["models"])


def _should_answer(model: dict[str, Any]) -> bool:
    """Return whether requests to a model of the status document should be answered, perhaps by the next engine."""
    return model["state"] == "ready" or (model["state"] == "loading" and bool(model.get("configured", True)))
