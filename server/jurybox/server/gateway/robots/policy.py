"""A robot port's model, as a client of the engines: many connections with one episode each, batched together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jurybox.client import Busy, Model, Server, SessionLost, SpecMismatch, Timeout, connect
from jurybox.client.sessions import Sessions
from jurybox.protocol.spec import ModelSpec
from jurybox.server.frontend.arrivals import ArrivalTracker
from jurybox.server.frontend.coalescer import RequestCoalescer
from jurybox.server.gateway.robots.counters import PortCounters
from jurybox.server.gateway.robots.observations import rows_of

_CONNECT = 2.0  # seconds to wait for an answer on the control socket
ACTIONS = "actions"
T = TypeVar("T")
_MOST_ENDED = 1024  # names of ended sessions that a connection remembers


class RobotPolicy:
    """The model of one port. Belongs to one event loop.

    The first observation leases a row for each of the `clients` (for a model without state at most half of the arena's)
    and the policy keeps them, so that robots connect and disconnect without leases. Observations that wait at the same
    time are sent as one ticket, which waits a little for robots that are about to send the next one (`ArrivalTracker`).

    Args:
        address: address of the server.
        model: name of the model.
        clients: largest number of connections, and so of requests in flight.
        timeout: seconds to wait for an answer.
        counters: counters of the port.
    """

    def __init__(
        self, address: str, model: str, clients: int, timeout: float, counters: PortCounters | None = None
    ) -> None:
        self._counters = counters or PortCounters()
        self._address, self._name, self._timeout = address, model, timeout
        self._clients = clients
        self._free = list(range(clients))
        self._freed = asyncio.Condition()
        self._leasing = asyncio.Lock()
        self._server: Server | None = None
        self._model: Model | None = None
        self._sessions: Sessions | None = None
        self._most = 1  # rows of the largest ticket
        self._arrivals = ArrivalTracker(1)
        self._coalescer: RequestCoalescer | None = None
        self._spec: ModelSpec | None = None  # the coalescer's
        self._unknown: set[int] = set()  # places whose last request timed out, so that its step may have been computed

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
                self._arrivals.left(place)
                if self._coalescer is not None:
                    self._coalescer.look_again()
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
        until = time.monotonic() + (self._timeout if within is None else min(within, self._timeout))
        model = self._model or await self._leased()
        spec = model.spec
        if needs_actions:
            require_actions(spec)
        values, n, batched = rows_of(observation, spec)
        coalescer = self._coalescer if spec is self._spec and self._coalescer is not None else self._coalesced(model)
        sessions = None
        if self._sessions is not None:
            if n > 1:
                raise SpecMismatch(f"model {spec.name!r} keeps state: expected one row an observation, came {n}")
            self._require_known(place, begins)
            sessions = {place: begins}
        most = self._most
        self._arrivals.arrived(place)
        try:
            answers = await _together(
                coalescer.ask(
                    {name: _batch(rows[at : at + most], spec.inputs[name].variable) for name, rows in values.items()},
                    min(most, n - at),
                    max(0.0, until - time.monotonic()),
                    0,
                    sessions,
                )
                for at in range(0, n, most)
            )
        except Timeout:
            if sessions is not None:
                self._unknown.add(place)  # its step may have been computed, or may still be
            raise
        finally:
            self._arrivals.answered(place)
        self._counters.sessions += begins
        return {name: _joined([outputs[name] for outputs, _ in answers], batched) for name in answers[0][0]}

    async def spec(self) -> ModelSpec:
        """Return the model's spec. Raises Busy, ModelNotFound, Refused, ServerGone, Timeout."""
        return (self._model or await self._leased()).spec

    def takes(self, name: str) -> bool:
        """Return whether the model has an input of this name; before it is leased, it may have any."""
        return self._model is None or name in self._model.spec.inputs

    def _require_known(self, place: int, begins: bool) -> None:
        """Raise SessionLost if it is not known which steps a session has taken."""
        if begins:
            self._unknown.discard(place)
        elif place in self._unknown:
            raise SessionLost(
                f"the episode's state of {self._name!r} is lost: an answer did not arrive in time; begin another "
                "episode with reset",
                sessions=[place],
            )

    def _coalesced(self, model: Model) -> RequestCoalescer:
        """Create a coalescer for the model's current spec, which may have changed if the model was reloaded."""
        engines = model.requests.lane.engines
        self._most = most = min(model.max_batch, self._clients)
        self._arrivals = ArrivalTracker(most, engines, self._counters.waited)
        self._spec = model.spec
        self._coalescer = RequestCoalescer(
            model, most, sessions=self._sessions, gathering=self._arrivals, engines=engines
        )
        return self._coalescer

    async def close(self) -> None:
        """Release the lane."""
        server, self._server = self._server, None
        sessions, self._sessions, self._model, self._coalescer = self._sessions, None, None, None
        if sessions is not None:
            await asyncio.to_thread(sessions.close)
        if server is not None:
            await asyncio.to_thread(server.close)

    async def _leased(self) -> Model:
        async with self._leasing:
            if self._model is None:
                model, self._sessions = await asyncio.to_thread(self._lease)
                self._model = model
            return self._model

    def _lease(self) -> tuple[Model, Sessions | None]:
        """Lease rows for all episodes; called in a thread."""
        if self._server is None:
            self._server = connect(self._address, transport="shm", timeout=_CONNECT)
        with self._server.model(self._name, rows=1, timeout=self._timeout) as one:  # waits for a model that is loading
            state = bool(one.spec.state)
        if state:  # its clients may need all rows, so `one` is released
            model = self._server.model(self._name, rows=self._clients, timeout=self._timeout)
            return model, Sessions(model.requests, self._clients)
        rows = min(self._clients, max(1, self._server.describe(self._name).arena_rows // 2))
        return self._server.model(self._name, rows=rows), None


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


async def _together(asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the answers to parts of one observation. If one fails, nobody waits for the others."""
    parts = list(asked)
    if len(parts) == 1:
        return [await parts[0]]
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _batch(rows: list[Any], variable: bool) -> Any:
    """Return the values of an input as the coalescer takes them."""
    if variable:
        return rows
    return np.stack(rows) if len(rows) > 1 else rows[0][None]


def _joined(parts: list[Any], batched: bool) -> Any:
    """Return an output of all rows; that of the only row without a batch axis if `batched` is false."""
    if not batched:
        return parts[0][0]
    rows = [row for part in parts for row in part]
    return np.stack(rows) if all(isinstance(row, np.ndarray) for row in rows) else rows
