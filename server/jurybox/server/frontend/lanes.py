"""The gateway as a client of the engines: one lane for each model, and for each priority of requests to it.

The requests of all callers share the lane, so the engine batches them.

A lane that fails is given up, and the next request leases another one. All lanes share one connection, which stays
open if a single request is slow.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jurybox.client import Busy, Model, Server, Timeout, connect
from jurybox.client.lane import row_failed
from jurybox.client.row_codec import codec_of, shaped
from jurybox.client.sessions import Sessions
from jurybox.protocol.errors import Code, Error, ModelFailed, Refused, RowFailed, asleep
from jurybox.protocol.scoreboard import NORMAL
from jurybox.protocol.spec import ModelSpec
from jurybox.protocol.wire import require_name
from jurybox.server.frontend.coalescer import RequestCoalescer
from jurybox.server.frontend.returns import Returns
from jurybox.server.frontend.waiting_rows import Arrays
from jurybox.server.security.pace import WorkPace

T = TypeVar("T")
_Key = tuple[str, int]  # a model's name and a priority

DEFAULT_TIMEOUT = 60.0  # seconds for a request without a time-out of its own
_CONNECT = 2.0  # seconds that the server has to answer on the control socket
_AGAIN = 1.0  # seconds between two attempts to lease a larger lane
SOON, MOMENT = 0.02, 1.5  # seconds: between attempts to lease rows; until a dead client's rows are reclaimed at latest
_SESSIONS = 1024  # the maximum of a model's sequences: each uses a row of the lane and a state on the engines' device


class SharedLane:
    """A lane of a model, leased until the model's spec changes.

    Attributes:
        key: the model's name, and the priority of the lane's requests.
        rows: its number of rows.
        engines: the number of engines that compute its tickets at the same time.
        makeshift: whether it was leased with fewer rows than a full one, such as the one row of a probe.
        largest_until: until then (s of the monotonic clock) no larger lane is tried, because none was available.
        sessions: for a stateful model, one session for each row; else None. `free` are those without a sequence.
        callers: how many of the others are those of each connection.
    """

    def __init__(
        self, model: Model, rows: int, *, makeshift: bool, lanes: ModelRows, key: _Key, returns: Returns | None = None
    ) -> None:
        self.model = model
        self.key = key
        self.spec: ModelSpec = model.spec
        self.rows = rows
        self.makeshift = makeshift
        self.largest_until = 0.0
        self._leased = time.monotonic()
        self.piece = min(model.max_batch, rows)  # rows of the largest ticket
        self.codec = codec_of(model.spec)
        self.engines = model.requests.lane.engines
        self.sessions: Sessions | None = None
        self.free: list[int] = []
        self.callers: Counter[Hashable] = Counter()
        if model.spec.state:
            self.sessions = Sessions(model.requests, rows)
            self.free = [*range(rows - 1, 0, -1)] or [0]  # session 0 is reserved for probes if there are several
        self.coalescer = RequestCoalescer(
            model,
            self.piece,
            lambda: lanes.retire(self),
            lambda: lanes.let_go(self),
            self.sessions,
            returns,
            engines=self.engines,
            expired=lambda: lanes.timeouts.update([self.spec.name]),
            pace=lanes.pace,
        )
        self.in_use = 0  # callers inside the ``with``
        self.retired = self.closed = False
        self._lanes = lanes

    def __enter__(self) -> None:
        """Keep the lane open inside the ``with``. Raises Refused (code STALE_LEASE) if it was given up already."""
        if self.retired:
            raise Refused(f"the lane of {self.spec.name!r} was given up just now", Code.STALE_LEASE)
        self.in_use += 1

    def __exit__(self, *_: object) -> None:
        self.in_use -= 1
        self._lanes.let_go(self)

    @property
    def may_be_exchanged(self) -> bool:
        """Whether a new sequence should wait for a larger lane: once it has begun, this one stays in use.

        A gateway that has just started finds few free rows until those of its dead predecessor are reclaimed.
        """
        recent = time.monotonic() < self._leased + MOMENT
        return recent and self.makeshift and self.sessions is not None and not self.has_sequence

    @property
    def has_sequence(self) -> bool:
        """Whether the lane holds the state of a sequence."""
        return self.sessions is not None and len(self.free) < max(1, self.rows - 1)


class ModelRows:
    """Leases a lane for each requested model and runs requests on it. Use it in one event loop only.

    Args:
        address: the server's address.

    Attributes:
        timeouts: by model, the number of requests that were not answered in time.
        pace: shares the time between the lanes.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.timeouts: Counter[str] = Counter()
        self.pace = WorkPace()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="lanes")  # blocking calls run there
        self._connecting = threading.Lock()
        self._server: Server | None = None
        self._held: dict[_Key, SharedLane] = {}
        self._holding: dict[_Key, asyncio.Future[SharedLane]] = {}
        self._reserved: dict[SharedLane, None] = {}

    async def hold(self, name: str, *, trying: bool = False, priority: int = NORMAL) -> SharedLane:
        """Return the lane of a model; lease it first if there is none.

        Args:
            priority: of the lane's requests.
            trying: one row is enough. The lane serves requests too, until one of them leases a larger lane.

        Raises:
            ModelNotFound, ModelFailed; Refused (code NOT_READY): it is loading; Busy: its arena has no free rows.
        """
        key = name, priority
        held = self._held.get(key)
        if held is not None and (
            trying or not held.makeshift or held.has_sequence or time.monotonic() < held.largest_until
        ):
            return held
        require_name(name)
        holding = self._holding.get(key)
        if holding is None:
            holding = asyncio.get_running_loop().run_in_executor(self._thread, self._lease, key, trying, held)
            self._holding[key] = holding
            holding.add_done_callback(lambda done: self._leased(key, done))
        return await asyncio.shield(holding)  # a cancelled caller must not cancel it for the others

    async def hold_soon(self, name: str, until: float, priority: int = NORMAL) -> SharedLane:
        """Return the lane as `hold` does; if no row is free, wait for one until `until` (s of the monotonic clock).

        For sequences, also wait for a larger lane if this one was leased just now with few rows.

        A gateway that has just started may request rows before those of its dead predecessor are reclaimed.
        """
        held: SharedLane | None = None
        while True:
            late = time.monotonic() > until
            try:
                held = await self.hold(name, priority=priority)
                if late or not held.may_be_exchanged:
                    return held
            except Error as error:
                if held is None or held.retired:
                    if late or not isinstance(error, Busy):
                        raise
                elif late:  # no larger lane can be leased while no engine serves
                    return held
            await asyncio.sleep(SOON)

    def held(self, name: str, priority: int = NORMAL) -> SharedLane | None:
        """Return the lane of a model if `hold` would return it without leasing, else None."""
        held = self._held.get((name, priority))
        return None if held is None or held.makeshift else held

    async def reserve(
        self, name: str, rows: int, seconds: float, returns: Callable[[Model], Returns], priority: int = NORMAL
    ) -> SharedLane:
        """Lease a lane for one door: rows of clients that keep them whether they ask or not. `retire` gives it back.

        Args:
            rows: one for each client; a model without state gives half of its arena at most, and they share them.
            seconds: to wait for a model that is loading, and for the rows.
            returns: returns the rule for whom its tickets wait.

        Raises:
            Busy, ModelNotFound, ModelFailed, Refused, Timeout, ServerGone.
        """
        model, leased = await self.call(lambda server: _reserved(server, name, rows, seconds, priority))
        held = SharedLane(model, leased, makeshift=False, lanes=self, key=(name, priority), returns=returns(model))
        self._reserved[held] = None
        return held

    async def ask(
        self, held: SharedLane, inputs: Arrays, n: int, seconds: float, version: int, client: Any = None
    ) -> tuple[Arrays, int]:
        """Compute n rows; more than a batch holds are sent in pieces, possibly computed by several weights versions.

        Args:
            inputs: an array of shape (n, *row shape) for every input of the spec.
            version: the weights version; 0: the newest.
            client: who sent it; see `RequestCoalescer.put`.

        Returns:
            An array of shape (n, *row shape) for every output, and the weights version, the oldest of all pieces.

        Raises:
            Refused (code STALE_LEASE): the lane was given up; call `hold` again and repeat the request.
            Timeout, Busy, ModelFailed, Refused, ServerGone.
        """
        with held:
            if n <= held.model.max_batch:  # computed by one version, even if the lane has fewer rows
                return await held.coalescer.ask(inputs, n, seconds, version, None, client)
            return await self._in_pieces(held, inputs, n, time.monotonic() + seconds, version)

    async def ask_sessions(
        self,
        held: SharedLane,
        inputs: Arrays,
        sessions: list[int],
        begin: list[bool],
        seconds: float,
        version: int,
        client: Any = None,
    ) -> tuple[Arrays, int]:
        """Compute one row of each session, as `ask` does.

        Raises:
            SessionLost: its `sessions` have lost their state. Any error of `ask`.
        """
        begins = dict(zip(sessions, begin, strict=True))
        with held:
            return await held.coalescer.ask(inputs, len(sessions), seconds, version, begins, client)

    async def exchange_state(
        self, held: SharedLane, sessions: list[int], begin: list[bool], state: Arrays | None, seconds: float
    ) -> Arrays:
        """Return the state of some sessions by name, or write `state` if given. Raises the errors of `ask_sessions`."""
        assert held.sessions is not None
        with held:
            return await held.sessions.exchange_state_async(sessions, begin, state, seconds)

    async def probe(self, held: SharedLane, seconds: float, version: int) -> None:
        """Request one row of zeros. Raises the errors of `ask`."""
        row = {name: spec.zeros(1) for name, spec in held.spec.inputs.items()}
        try:
            if held.sessions is None:
                await self.ask(held, row, 1, seconds, version)
            elif held.rows > 1:
                await self.ask_sessions(held, row, [0], [True], seconds, version)
            elif held.free:  # else a sequence uses it, and its requests show whether the model answers
                only = held.free.pop()
                try:
                    await self.ask_sessions(held, row, [only], [True], seconds, version)
                finally:
                    held.free.append(only)
        except RowFailed:
            pass  # the model rejected the row of zeros, so it answers

    async def call(self, action: Callable[[Server], T]) -> T:
        """Run a blocking function of the connection, such as loading a model, in a thread, and return its result."""
        return await asyncio.to_thread(lambda: action(self._connected()))

    def lease_another(self, name: str, most: int, leased: Callable[[Model], None]) -> None:
        """Lease another lane of a model in the background, and pass it to `leased` in the event loop.

        It has at most `most` rows for each engine and another time, and an eighth of the arena's. Nothing happens if
        there is none for each of them.
        """

        def lease() -> Model | None:
            try:
                server = self._connected()
                parts = server.engines(name) + 1
                rows = min(most * parts, server.describe(name).arena_rows // 8)
                return server.model(name, rows=rows, wait=False) if rows >= parts else None
            except Error:
                return None

        def done(leasing: asyncio.Future[Model | None]) -> None:
            if not leasing.cancelled() and leasing.exception() is None and (model := leasing.result()) is not None:
                leased(model)

        asyncio.get_running_loop().run_in_executor(self._thread, lease).add_done_callback(done)

    def release(self, model: Model) -> None:
        """Release a lane of `lease_another` in the background."""
        self._thread.submit(model.close)

    def retire(self, held: SharedLane) -> None:
        """Give up a lane: its requests are sent again on the next one. It is released when it is no longer in use."""
        if held.retired:
            return
        held.retired = True
        self._reserved.pop(held, None)
        if self._held.get(held.key) is held:
            del self._held[held.key]
        why = f"the lane of {held.spec.name!r} was taken back: ask again"
        held.coalescer.give_up(Refused(why, Code.STALE_LEASE))
        self.let_go(held)

    def let_go(self, held: SharedLane) -> None:
        """Close a lane that was given up, once it is unused."""
        if held.retired and not held.closed and not held.in_use and not held.coalescer.busy:
            held.closed = True
            self._thread.submit(held.model.close)

    def doubt(self) -> None:
        """Handle an exception where answers are received: any request may be affected."""
        for held in (*self._held.values(), *self._reserved):
            held.coalescer.doubt()

    def give_up(self, error: Error) -> None:
        """Fail all requests that wait or are in flight."""
        for held in (*self._held.values(), *self._reserved):
            held.coalescer.give_up(error)

    def close(self) -> None:
        """Release all lanes."""
        self._held.clear()
        self._reserved.clear()
        self._thread.submit(self._disconnect)
        self._thread.shutdown(wait=False)

    async def _in_pieces(
        self, held: SharedLane, inputs: Arrays, n: int, until: float, version: int
    ) -> tuple[Arrays, int]:
        outputs = held.codec.room(n)
        starts = iter(range(0, n, held.piece))
        versions = []
        errors: dict[int, str] = {}

        async def ask_some() -> None:
            for at in starts:
                end = min(at + held.piece, n)
                piece = {name: array[at:end] for name, array in inputs.items()}
                try:
                    answer, used = await held.coalescer.ask(piece, end - at, until - time.monotonic(), version)
                except RowFailed as error:
                    errors.update({at + row: reason for row, reason in error.errors.items()})
                    held.codec.place(outputs, at, end - at, error.outputs)
                    versions.append(error.version)
                    continue
                versions.append(used)
                for name, array in answer.items():
                    outputs[name][at:end] = array

        workers = [asyncio.ensure_future(ask_some()) for _ in range(held.engines + 1)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        if errors:
            raise row_failed(held.spec.name, dict(sorted(errors.items())), n, shaped(outputs), min(versions))
        return outputs, min(versions)

    def _leased(self, key: _Key, done: asyncio.Future[SharedLane]) -> None:
        self._holding.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        earlier, held = self._held.get(key), done.result()
        if held is not earlier:
            self._held[key] = held
            if earlier is not None:
                earlier.retired = True  # requests in flight are still answered there
                self.let_go(earlier)

    def _lease(self, key: _Key, trying: bool, earlier: SharedLane | None) -> SharedLane:
        """Lease as many rows as available, or one for a probe. Runs in the thread."""
        name, priority = key
        try:
            server = self._connected()
            message = server.describe(name)
            if message.state == "quarantined":
                raise ModelFailed(message.reason)
            if message.state == "failed":
                raise ModelFailed(f"model {name!r} could not be loaded: {message.reason}")
            if message.state == "sleeping":
                raise asleep(name)
            if message.state != "ready":
                raise Refused(f"model {name!r} is {message.state}: ask again when it is ready", Code.NOT_READY)
            stateful = message.spec is not None and bool(message.spec.state)
            if trying:
                most = 1
            elif stateful:
                most = _SESSIONS
            else:  # each engine computes a batch, and one is written
                most = (server.engines(name) + 1) * message.max_batch
            rows = wanted = min(most, max(1, message.arena_rows // 2))
            while True:
                if earlier is not None and not earlier.retired and rows <= earlier.rows:
                    earlier.largest_until = time.monotonic() + (SOON if earlier.may_be_exchanged else _AGAIN)
                    earlier.makeshift = rows < wanted
                    return earlier  # no more rows are free, so keep the present lane
                try:
                    model = server.model(name, rows=rows, wait=False, priority=priority)
                    # Stateless requests work with few rows; every sequence needs its own row.
                    few = stateful and rows < wanted
                    return SharedLane(model, rows, makeshift=trying or few, lanes=self, key=key)
                except Busy:
                    if rows == 1:
                        raise
                    rows = max(1, rows // 4)
        except Timeout as error:
            raise Refused(str(error), Code.NOT_READY) from error

    def _connected(self) -> Server:
        with self._connecting:
            if self._server is None:
                self._server = connect(self._address, transport="shm", timeout=_CONNECT)
            return self._server

    def _disconnect(self) -> None:
        with self._connecting:
            server, self._server = self._server, None
        if server is not None:
            server.close()


def _reserved(server: Server, name: str, rows: int, seconds: float, priority: int) -> tuple[Model, int]:
    """Lease rows for all clients of a door, and return the model with their number; called in a thread."""
    with server.model(name, rows=1, timeout=seconds, priority=priority) as one:  # waits for a model that is loading
        state = bool(one.spec.state)
    if not state:
        rows = min(rows, max(1, server.describe(name).arena_rows // 2))
    return server.model(name, rows=rows, timeout=seconds, priority=priority), rows  # a stateful one may need all
