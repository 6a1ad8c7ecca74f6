"""Rows that one door keeps for its clients, each of which has a place, and with a stateful model a state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from jurybox.client import Model
from jurybox.protocol.errors import Code, Refused, SessionLost, SpecMismatch, Timeout
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import ModelSpec
from jurybox.server.frontend.lanes import ModelRows, SharedLane
from jurybox.server.frontend.requests import RowsReply, RowsRequest
from jurybox.server.frontend.returns import WholeGroup

_TRIES = 3  # lanes on which a request is tried if they are revoked one after another


class ReservedRows:
    """A lane of its own, leased with the first request: its clients connect and disconnect without leases.

    Requests that wait at the same time are sent as one ticket, which waits a little for clients that are about to send
    the next one (`WholeGroup`). Use it in one event loop only.

    Args:
        lanes: lease it.
        model: name of the model.
        places: largest number of clients.
        timeout: seconds to wait for a model that is loading, and for rows.
        waited: called with the seconds that each request of a ticket waited before it was sent.
        priority: of all requests.
    """

    def __init__(
        self,
        lanes: ModelRows,
        model: str,
        places: int,
        timeout: float,
        waited: Callable[[Sequence[float]], None] = lambda waits: None,
        priority: int = NORMAL,
    ) -> None:
        self._lanes, self._name, self._places, self._timeout = lanes, model, places, timeout
        self._waited, self._priority = waited, priority
        self._leasing = asyncio.Lock()
        self._held: SharedLane | None = None
        self._unknown: set[int] = set()  # places whose last request timed out, so that its step may have been computed

    @property
    def known(self) -> ModelSpec | None:
        """The model's spec; None before the lane is leased."""
        return None if self._held is None else self._held.spec

    async def spec(self) -> ModelSpec:
        """Return the model's spec. Raises Busy, ModelNotFound, Refused, ServerGone, Timeout."""
        return (await self._lane()).spec

    async def compute(self, request: RowsRequest, place: int, *, begins: bool) -> RowsReply:
        """Compute the rows of a client, with a stateful model one.

        Args:
            begins: whether its state begins with them.

        Raises:
            SpecMismatch, RowFailed, SessionLost, Timeout, Busy, ModelFailed, ModelNotFound, Refused, ServerGone.
        """
        tries = _TRIES
        while True:
            held = await self._lane()
            inputs, n, _ = request.read(held.spec, False)
            left = max(0.0, request.until - time.monotonic())
            try:
                if held.sessions is None:
                    outputs, version = await self._lanes.ask(held, inputs, n, left, 0, place)
                else:
                    self._require_one(held, n, place, begins=begins)
                    outputs, version = await self._lanes.ask_sessions(held, inputs, [place], [begins], left, 0, place)
            except Timeout:
                if held.sessions is not None:
                    self._unknown.add(place)  # its step may have been computed, or may still be
                raise
            except Refused as error:
                tries -= 1
                if error.code != Code.STALE_LEASE or not tries:
                    raise
                if held.sessions is not None and not begins:
                    raise self._lost(place, "its rows were taken back") from None
            else:
                return RowsReply(outputs, version, held.spec)

    def left(self, place: int) -> None:
        """Note that a client is gone: no ticket waits for it."""
        if self._held is not None:
            self._held.coalescer.left(place)

    def close(self) -> None:
        """Give the lane back."""
        held, self._held = self._held, None
        if held is not None:
            self._lanes.retire(held)

    async def _lane(self) -> SharedLane:
        async with self._leasing:
            held = self._held
            if held is not None and held.model.spec is not held.spec:  # the model was loaded again with another one
                self._lanes.retire(held)
            if held is None or held.retired:
                held = self._held = await self._lanes.reserve(
                    self._name, self._places, self._timeout, self._group, self._priority
                )
            return held

    def _group(self, model: Model) -> WholeGroup:
        return WholeGroup(min(model.max_batch, self._places), model.requests.lane.engines, self._waited)

    def _require_one(self, held: SharedLane, n: int, place: int, *, begins: bool) -> None:
        if n > 1:
            raise SpecMismatch(f"model {held.spec.name!r} keeps state: expected one row an observation, came {n}")
        if begins:
            self._unknown.discard(place)
        elif place in self._unknown:
            raise self._lost(place, "an answer did not arrive in time")

    def _lost(self, place: int, why: str) -> SessionLost:
        return SessionLost(
            f"the episode's state of {self._name!r} is lost: {why}; begin another episode with reset", sessions=[place]
        )
