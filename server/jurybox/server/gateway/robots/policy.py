"""A robot port's model, as a client of the engines: many connections with one episode each, batched together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client import Busy, SessionLost, SpecMismatch
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import ModelSpec
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.requests import ReadRows, RowsRequest
from jurybox.server.gateway.robots.counters import PortCounters
from jurybox.server.gateway.robots.observations import rows_of

ACTIONS = "actions"
_MOST_ENDED = 1024  # names of ended sessions that a connection remembers


class RobotPolicy:
    """The model of one port. Belongs to one event loop.

    Args:
        frontend: computes the rows.
        model: name of the model.
        clients: largest number of connections, and so of requests in flight.
        timeout: seconds to wait for an answer.
        counters: counters of the port.
        priority: of its requests; see `Server.model`.
    """

    def __init__(
        self,
        frontend: Frontend,
        model: str,
        clients: int,
        timeout: float,
        counters: PortCounters | None = None,
        priority: int = NORMAL,
    ) -> None:
        self._counters = counters or PortCounters()
        self._name, self._timeout = model, timeout
        self._clients = clients
        self._free = list(range(clients))
        self._freed = asyncio.Condition()
        self._rows = frontend.reserved(model, clients, timeout, self._counters.waited, priority)

    @contextlib.asynccontextmanager
    async def episode(self, timeout: float, *, returns: bool = False) -> AsyncIterator[RobotEpisode]:
        """Return an async context manager with an episode for one connection.

        Args:
            timeout: seconds to wait for a free place: a robot may connect again before its old connection has ended.
            returns: whether each request of a robot has an episode of its own. Then the next one is taken for a robot
                that was answered last and returns, so batches wait for these robots, too.

        Raises:
            Busy: all places are taken.
        """
        try:
            async with asyncio.timeout(timeout), self._freed:
                await self._freed.wait_for(lambda: bool(self._free))
                place = self._free.pop(-1 if returns else 0)  # the one that has been free longest, or shortest
        except TimeoutError:
            self._counters.refused["full"] += 1
            raise Busy(f"{self._clients} robots are connected, which is the maximum (robots.NAME.clients)") from None
        try:
            yield RobotEpisode(self, place)
        finally:
            if not returns:
                self._rows.left(place)
            self._free.append(place)
            async with self._freed:
                self._freed.notify_all()

    async def ask(
        self,
        observation: Mapping[str, Any],
        place: int,
        *,
        begins: bool,
        within: float | None = None,
        needs_actions: bool = False,
    ) -> Any:
        """Compute the outputs for one observation.

        Args:
            observation: values by input name; see `rows_of`.
            place: the connection's place.
            begins: whether the observation begins an episode.
            within: seconds to wait for the answer, if less than the port's `timeout`.
            needs_actions: whether the model must have one output, or one named actions.

        Returns:
            Outputs by name, with a batch axis if the observation's arrays have one.

        Raises:
            SpecMismatch, RowFailed, SessionLost, Timeout, Busy, ModelFailed, ModelNotFound, Refused, ServerGone.
        """
        batched = False

        def read(spec: ModelSpec, _: bool) -> ReadRows:
            nonlocal batched
            if needs_actions:
                require_actions(spec)
            values, n, batched = rows_of(observation, spec)
            return ReadRows({name: _batch(rows, spec.inputs[name].variable) for name, rows in values.items()}, n)

        until = time.monotonic() + (self._timeout if within is None else min(within, self._timeout))
        reply = await self._rows.compute(RowsRequest(self._name, read, until), place, begins=begins)
        self._counters.sessions += begins
        return {name: _given(rows, batched) for name, rows in reply.outputs.items()}

    async def spec(self) -> ModelSpec:
        """Return the model's spec. Raises Busy, ModelNotFound, Refused, ServerGone, Timeout."""
        return await self._rows.spec()

    def takes(self, name: str) -> bool:
        """Return whether the model has an input of this name; before it is leased, it may have any."""
        return (spec := self._rows.known) is None or name in spec.inputs

    async def close(self) -> None:
        """Release the lane."""
        self._rows.close()


class RobotEpisode:
    """The episode of one connection: its row of the lane, and its state on the server."""

    def __init__(self, policy: RobotPolicy, place: int) -> None:
        self._policy, self._place = policy, place
        self._begins = True
        self._session = ""
        self._ended: dict[str, None] = {}

    def takes(self, name: str) -> bool:
        """Return whether the model has an input of this name, as far as is known."""
        return self._policy.takes(name)

    def reset(self) -> None:
        """Begin a new episode with the next observation."""
        self._begins = True

    def name(self, session: str) -> None:
        """Set the session of the next observation; a new name begins an episode.

        Raises:
            SessionLost: the session ended when another one began.
        """
        if session == self._session:
            return
        if session in self._ended:
            raise SessionLost(
                f"session {session[:80]!r} ended when {self._session[:80]!r} began: a connection has one session, open "
                "one connection for each"
            )
        if self._session:
            self._ended[self._session] = None
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        self._begins = True  # also after observations without a name
        self._session = session

    async def infer(
        self, observation: Mapping[str, Any], within: float | None = None, *, needs_actions: bool
    ) -> dict[str, NDArray[Any]]:
        """Return the outputs for an observation; see `RobotPolicy.ask`."""
        outputs: dict[str, Any] = await self._policy.ask(
            observation, self._place, begins=self._begins, within=within, needs_actions=needs_actions
        )
        self._begins = False
        return outputs


def require_actions(spec: ModelSpec) -> None:
    """Raise SpecMismatch if a model has several outputs and none named actions."""
    if len(spec.outputs) > 1 and ACTIONS not in spec.outputs:
        raise SpecMismatch(
            f"model {spec.name!r} has {', '.join(spec.outputs)}: robots expect one output, or one named {ACTIONS}"
        )


def _batch(rows: list[Any], variable: bool) -> Any:
    """Return the values of an input as the frontend takes them."""
    if variable:
        return rows
    return np.stack(rows) if len(rows) > 1 else rows[0][None]


def _given(rows: Any, batched: bool) -> Any:
    """Return an output of all rows; that of the only row without a batch axis if `batched` is false."""
    if not batched:
        return rows[0]
    return np.stack(rows) if isinstance(rows, list) and all(isinstance(row, np.ndarray) for row in rows) else rows
