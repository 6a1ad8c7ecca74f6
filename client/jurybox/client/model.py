"""A model of the server, as its client sees it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from jurybox.client.lane import Lane
from jurybox.client.pieces import Pieces
from jurybox.client.row_codec import Checked, shaped, utf8, words
from jurybox.client.rows import CallRow, Rows
from jurybox.client.ticket import Reply, Ticket
from jurybox.client.transports.transport import seconds
from jurybox.protocol import forks
from jurybox.protocol.errors import Busy, Code, Refused, ServerGone, SpecMismatch, Timeout
from jurybox.protocol.spec import BYTES, ModelSpec

if TYPE_CHECKING:
    import asyncio

    from jurybox.client.sessions import Sessions

Arrays = NDArray[Any] | Mapping[str, NDArray[Any]]
T = TypeVar("T")
Outputs = NDArray[Any] | dict[str, NDArray[Any]]


class Model(forks.Closing):
    """Inference on one model through a lane of the server's shared memory. Get it from `Server.model`.

    Calls from several threads are safe and go one after another; threads that should not wait for each other take
    a model each. So are calls of several event loops, which do not stand still meanwhile. In a forked child a model
    takes a lane of its own as soon as it is used.

    Attributes:
        spec: names, dtypes and row shapes of inputs and outputs.
        max_batch: rows of the server's largest batch; longer inputs go in pieces.
    """

    def __init__(
        self, name: str, lease: Callable[[int, bool], tuple[Lane, ModelSpec, int]], rows: int, default_timeout: float
    ) -> None:
        self._lease = lease  # of so many rows (0: the server's default); whether to wait for them
        self._rows = rows
        self._may_grow = rows == 0
        self._default_timeout = default_timeout
        self.turns = Turns(name)
        self.name = name
        self._closed = False
        self._row: CallRow | None = None
        self._lane, self.spec, self.max_batch = lease(rows, True)
        self._codec = self._lane.codec
        self._call_dtype, self._call_shape, self._call_text = _only_input(self.spec)
        forks.register(self)

    # ---- one call, one answer

    def __call__(self, row: Arrays | bytes | str, *, timeout: float | None = None) -> Any:
        """One row in, one row out: an array of the input's row shape, bytes or text where it takes such.

        A dict where there are several inputs. Raises as `infer`.
        """
        if (
            type(row) is np.ndarray
            and row.dtype == self._call_dtype
            and (row.shape == self._call_shape or self._call_shape is None)
            and row.flags.c_contiguous
        ):
            ready: Any = row
        elif self._call_text and type(row) is bytes:
            ready = row
        elif self._call_text and type(row) is str:
            ready = utf8(f"input {next(iter(self.spec.inputs))!r} of {self.name!r}", row)
        else:
            ready = self._codec.one(row)[0]
            self._require_stateless()
        try:
            with self.turns.now:
                if (kept := self._row) is None or kept.lane.gone is not None or kept.lane.in_flight:
                    kept = self._keep_row()
                if kept is not None:
                    return kept.ask(ready, self._default_timeout if timeout is None else seconds(timeout))
        except Taken:
            pass
        except Refused as error:
            if error.code != Code.STALE_LEASE:
                raise
            # As infer: once more, on a new lane. It has its whole time again, of which the first used next to nothing.
        outputs = self._asked(lambda: self._codec.one(row), timeout, 0).outputs
        return {name: value[0] for name, value in outputs.items()} if isinstance(outputs, dict) else outputs[0]

    def row_reply(self, row: Any, timeout: float) -> Reply:
        """As a call, of one row as the spec has it, with the weights version; outputs may have a dimension of rows."""
        fits = type(row) is bytes if self._call_text else type(row) is np.ndarray and row.dtype == self._call_dtype
        ready: Any = row if fits and (self._call_text or row.flags.c_contiguous) else self._codec.one(row)[0]
        self._require_stateless()
        deadline = self.deadline(timeout)
        try:
            with self.turns.now:
                kept = self._keep_row()
                if kept is not None:
                    kept.answer = None
                    outputs = kept.ask(ready, seconds(timeout))
                    return Reply(outputs, kept.version)
        except Taken:
            pass
        except Refused as error:
            if error.code != Code.STALE_LEASE:
                raise
        return self._asked(lambda: self._codec.one(row), (deadline - time.monotonic_ns()) / 1e9, 0)

    def infer(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Any:
        """Answer n rows; more than the lane or a batch holds go in pieces, several in flight.

        Where rows are still with an engine that nobody waits for any more, it waits for them to come back.

        Args:
            inputs: (n, *row shape) of the spec's dtype; a dict of such where the model has several inputs.
            timeout: seconds for all of it; the connection's default without it.
            version: of the weights to be answered by, where it is still held; 0: the newest.

        Returns:
            (n, *row shape) of the output, or a dict of such where there are several.

        Raises:
            SpecMismatch: dtype or shape differ from the spec; the message has both.
            RowFailed: the model failed on single rows; `index` and `reason` say which and why.
            Timeout: no answer in time.
            Busy: no row became free in time.
            ModelFailed: the model raised, or was given up after several crashes.
            Refused: the request is not allowed, as for a model that keeps state.
            ServerGone: the server ended, and none came back in time.
        """
        return self.infer_reply(inputs, timeout=timeout, version=version).outputs

    def infer_reply(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Reply:
        """As `infer`, with the weights version: the oldest of its pieces'."""
        return self._asked(lambda: self._codec.checked(inputs), timeout, version)

    def _asked(self, check: Callable[[], tuple[Checked, int]], timeout: float | None, version: int) -> Reply:
        deadline = self.deadline(timeout)
        return self.turns.run(lambda: self._checked_and_answered(check, deadline, version), deadline)

    def _checked_and_answered(self, check: Callable[[], tuple[Checked, int]], deadline: int, version: int) -> Reply:
        given, n = check()
        self._require_stateless()
        try:
            return self._answered(given, n, deadline, version)
        except Refused as error:
            if error.code != Code.STALE_LEASE:
                raise
        # The server replaced the model's arena; the inputs are still ours, so ask once more on a new lane.
        return self._answered(given, n, deadline, version)

    async def infer_async(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Any:
        """As `infer`, in an event loop: the same arguments, outputs and errors.

        Where no rows are free it waits for those of other tasks to come back, until the time-out.
        """
        return (await self.infer_reply_async(inputs, timeout=timeout, version=version)).outputs

    async def infer_reply_async(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Reply:
        """As `infer_async`, with the weights version: the oldest of its pieces'."""
        deadline = self.deadline(timeout)
        given, n = self._codec.checked(inputs)
        self._require_stateless()
        try:
            return await self._answered_async(given, n, deadline, version)
        except Refused as error:
            if error.code != Code.STALE_LEASE:
                raise
        return await self._answered_async(given, n, deadline, version)

    # ---- pipelining

    def submit(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Ticket:
        """Send n rows without waiting; the ticket is a future. Several tickets may be in flight.

        Args:
            timeout: seconds after which the engine need not compute it any more.

        Raises:
            Busy: fewer than n neighbouring rows of the lane are free: collect results, or ask
                `Server.model(name, rows=...)` for more.
            SpecMismatch: dtype, shape or number of rows do not fit.
            Refused: the request is not allowed, as for a model that keeps state.
            ServerGone: the server ended, and none came back in time.
        """
        deadline = self.deadline(timeout)
        return self.turns.run(lambda: self._submitted(inputs, deadline, version), deadline)

    def _submitted(self, inputs: Arrays, deadline: int, version: int) -> Ticket:
        given, n = self._codec.checked(inputs)
        self._require_stateless()
        if not 0 < n <= self.max_batch:
            raise SpecMismatch(
                f"a ticket holds 1 to {self.max_batch} rows (the server's max_batch), {n} came; infer() cuts"
            )
        lane = self._usable()
        return self._sent(lane, given, 0, n, self._found(lane, n), deadline, version)

    def submit_parts(
        self, parts: Sequence[tuple[Mapping[str, NDArray[Any]], int]], deadline: int, version: int, brief: float = 0.0
    ) -> Ticket | None:
        """Send rows of several callers as one ticket; None where they cannot go just now as they are.

        For programs that answer others, of models of fixed shapes without state.

        Args:
            parts: arrays by name, each (n, *row shape) of the spec's dtype, and how many rows of each.
            deadline: ns of CLOCK_MONOTONIC.
            brief: seconds to wait for the answer at once, where a sleep would take as long.
        """
        try:
            with self.turns.now:
                lane, rows = self._lane, sum(n for _, n in parts)
                if lane.gone is not None or rows > self.max_batch or (first := lane.find(rows)) is None:
                    return None
                ticket, at = Ticket(self, lane, first, rows), first
                for arrays, n in parts:
                    for name, column in lane.columns.inputs.items():
                        array = arrays[name]
                        if array.dtype != column.dtype or array.shape != (n, *column.shape[1:]):
                            return None  # made for a model that was loaded anew meanwhile
                        column[at : at + n] = array
                    at += n
                ticket._send(deadline, version, brief)
                return ticket
        except Taken:
            return None

    def look(self) -> None:
        """Receive the answers that have arrived, for tasks of this event loop that wait for them."""
        self.turns.run(self._lane.receive_now, self.deadline(None))

    def room(self) -> int:
        """The length of the longest run of free rows. A larger request goes in pieces, each with its own version."""
        return self.turns.run(
            lambda: self._lane.largest if self._lane.gone is None else self._lane.rows, self.deadline(None)
        )

    # ---- zero-copy

    def rows(self, n: int = 1) -> Rows:
        """Hold n neighbouring rows, to be used in a ``with``: write `rows.inputs`, `rows.infer()`, read `rows.outputs`.

        Raises:
            Busy: fewer are free.
        """
        return self.turns.run(lambda: self._held(n), self.deadline(None))

    def _held(self, n: int) -> Rows:
        lane = self._usable()
        self._require_stateless()
        return Rows(self, lane, self._found(lane, n), n, self.max_batch)

    # ---- state on the server

    def sessions(self, n: int, *, pin_version: bool = False) -> Sessions:
        """Open n sessions of a model with state, one for each environment or conversation, numbered from 0.

        They have a lane of their own, and their state lasts as long as it: close them, or use them in a ``with``.

        Args:
            pin_version: a session is answered by the weights of its first request until it is reset.

        Example:
            with policy.sessions(8) as sessions:
                actions = sessions.infer(observations, reset=dones)

        Raises:
            Busy: as many sessions are open as the server has rows for.
            Refused: the model keeps no state.
        """
        from jurybox.client.sessions import Sessions

        if not self.spec.state:
            raise Refused(f"model {self.name!r} keeps no state: infer() needs no session")
        if n < 1:
            raise ValueError(f"n={n}: expected at least one session")
        return Sessions(Model(self.name, self._lease, n, self._default_timeout), n, pin_version=pin_version)

    def close(self) -> None:
        """Give the lane back to the server.

        Raises:
            Timeout: another thread's call was not over within the model's default time-out; nothing was given back.
        """
        self.turns.run(self._close, self.deadline(None))

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._lane.close()

    # ---- for tickets and rows

    def seconds(self, timeout: float | None) -> float:
        """A time-out, or the connection's default."""
        return self._default_timeout if timeout is None else seconds(timeout)

    def deadline(self, timeout: float | None) -> int:
        """The end of a time-out that begins now, ns of CLOCK_MONOTONIC."""
        return time.monotonic_ns() + int((self._default_timeout if timeout is None else seconds(timeout)) * 1e9)

    # ---- inside

    def _require_stateless(self) -> None:
        if self.spec.state:
            kept = ", ".join(self.spec.state)
            raise Refused(
                f"model {self.name!r} keeps state ({kept}): open sessions with sessions(n), and ask through them"
            )

    def _usable(self) -> Lane:
        """The lane; a new one where the server was restarted or took the old one back, and in a forked child."""
        if self._closed:
            raise Refused(f"model {self.name!r} was closed: get it again from the server")
        if self._lane.gone is not None:
            self._lane.close()
            self._give_up_row()
            self._adopt(*self._lease(self._rows, True))
        return self._lane

    def _adopt(self, lane: Lane, spec: ModelSpec, max_batch: int) -> None:
        """Use another lane. Raises SpecMismatch where the model's spec has changed."""
        self._lane, self.max_batch = lane, max_batch
        if spec != self.spec:
            old, self.spec, self._codec = self.spec, spec, lane.codec
            self._call_dtype, self._call_shape, self._call_text = _only_input(spec)
            raise SpecMismatch(f"model {self.name!r} has changed: it was {words(old)}, it is {words(spec)}")

    def _roomy(self, n: int) -> Lane:
        """The lane; a larger one where the caller asked for no number of rows and needs more than it has."""
        lane = self._usable()
        if n <= lane.rows or not self._may_grow:
            return lane
        self._give_up_row()
        if lane.free < lane.rows:
            return lane  # something is in flight on it
        try:
            larger, spec, max_batch = self._lease(min(n, self.max_batch), False)
        except (Busy, Refused):
            self._may_grow = False  # pieces will do
            return lane
        except ServerGone:  # it was too busy to answer at once, or the request that follows finds out
            return lane
        self._rows = larger.rows
        try:
            self._adopt(larger, spec, max_batch)
        finally:
            lane.close()
        return larger

    def _keep_row(self, rows: int | None = None) -> CallRow | None:
        """A row kept for calls of one row, until rows run out; None where none is free.

        Args:
            rows: of a model whose sessions are asked, all of them, together.
        """
        lane = self._usable()
        if self._row is not None and self._row.usable:
            return self._row
        self._give_up_row()
        first = lane.find(rows or 1)
        if first is not None:
            self._row = CallRow(lane, first, rows)
        return self._row

    def _give_up_row(self) -> None:
        # By name: a traceback somewhere may refer to it.
        row, self._row = self._row, None
        if row is not None:
            row.close()

    def _found(self, lane: Lane, n: int) -> int:
        """The first of n neighbouring free rows."""
        first = lane.find(n)
        if first is None:
            self._give_up_row()
            lane.look_after()
            first = lane.find(n)
        if first is None:
            raise Busy(
                f"{n} neighbouring rows were asked for, {lane.largest} of this lane's {lane.rows} are free: "
                f"collect results, or ask for a larger lane with model({self.name!r}, rows=...)"
            )
        return first

    def _sent(self, lane: Lane, given: Checked, at: int, n: int, first: int, deadline: int, version: int) -> Ticket:
        """A ticket for n of the given rows, sent."""
        ticket = Ticket(self, lane, first, n)
        lane.codec.put(lane.columns, given, at, n, first)
        ticket._send(deadline, version)
        return ticket

    def _answered(self, given: Checked, n: int, deadline: int, version: int) -> Reply:
        lane = self._roomy(n)
        if not 0 < n <= self.max_batch or (first := lane.find(n)) is None:
            return Pieces(self, lane, given, n, deadline, version).answered()
        lane.codec.put(lane.columns, given, 0, n, first)
        answer = lane.ask(first, n, (deadline - time.monotonic_ns()) / 1e9, version)
        # Nobody else can take the rows before this thread gives up the lock.
        if answer.code != Code.OK:
            raise lane.failure(answer, first, n)
        return Reply(shaped(lane.codec.take(lane.columns, first, n)), answer.version)

    async def _answered_async(self, given: Checked, n: int, deadline: int, version: int) -> Reply:
        lane = self._lane
        if lane.gone is not None or (n > lane.rows and self._may_grow):
            import asyncio

            lane = await asyncio.to_thread(self.turns.run, lambda: self._roomy(n), deadline)
        return await Pieces(self, lane, given, n, deadline, version).answered_async()

    def _after_fork_in_child(self) -> None:
        self.turns.anew()
        self._row = None


def _only_input(spec: ModelSpec) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None, bool]:
    """Of a model's only input the dtype, the row shape (None: any size), and whether it takes byte strings.

    A dtype of None: rows are none that could go as they are.
    """
    if len(spec.inputs) != 1 or spec.state:
        return None, (), False
    (only,) = spec.inputs.values()
    if only.dtype == BYTES:
        return None, (), True
    return only.numpy_dtype, None if only.variable else only.shape, False


# ----
# Whose turn it is: threads and event loops that share a model use its lane one after another.


_TURN = 0.001  # seconds between two looks of an event loop whether another thread's call is over


class Taken(Exception):
    """Another thread has the lock."""


class _Mine(dict[bool, None]):
    """A table of what `acquire` returned: the lookup of False raises Taken."""

    def __missing__(self, _: bool) -> None:
        raise Taken


_MINE = _Mine({True: None})


class Turn:
    """The lock in a ``with`` that waits so many seconds for it, or not at all, and then raises Taken.

    Entering and leaving are single calls of C, as a lock's own are: a KeyboardInterrupt never falls between taking the
    lock and the ``with`` knowing of it. And it costs no more than ``with lock``.
    """

    __slots__ = ("__enter__", "__exit__")

    def __init__(self, lock: Any, seconds: float = 0.0) -> None:
        how = (True, seconds) if seconds > 0 else (False,)
        self.__enter__ = map(_MINE.__getitem__, starmap(lock.acquire, repeat(how))).__next__
        self.__exit__ = lock.__exit__


class Turns:
    """The turns of one model.

    Attributes:
        lock: re-entrant, as a signal's handler or a destructor may use the model in the midst of a call.
        now: the turn that is there at once or not at all.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.anew()

    def anew(self) -> None:
        """In a forked child, whose parent's threads may have had the lock."""
        self.lock = threading.RLock()
        self.now = Turn(self.lock)
        self._watched: tuple[Lane, asyncio.AbstractEventLoop] | None = None

    def run(self, action: Callable[[], T], deadline: int) -> T:
        """Do something while no other thread uses the lane.

        Raises:
            Timeout: another thread's call was not over by `deadline`, ns of CLOCK_MONOTONIC.
        """
        try:
            with self.now:
                return action()
        except Taken:
            pass
        try:
            with Turn(self.lock, (deadline - time.monotonic_ns()) / 1e9):
                return action()
        except Taken:
            raise self._late() from None

    async def alone(self, action: Callable[[], T], deadline: int) -> T:
        """As `run`, of something short; the event loop goes on until then."""
        import asyncio  # most clients have no event loop, and its import costs as much as ZeroMQ's

        while True:
            try:
                with self.now:
                    return action()
            except Taken:
                pass
            if time.monotonic_ns() > deadline:
                raise self._late()
            await asyncio.sleep(_TURN)

    def watch(self, lane: Lane, loop: asyncio.AbstractEventLoop) -> None:
        """Receive the lane's answers in the running loop from now on, and those that have arrived."""
        if self._watched is None or self._watched[0] is not lane or self._watched[1] is not loop:
            this, that = weakref.ref(self), weakref.ref(lane)  # what a loop or a thread calls must keep nothing alive

            def arrived() -> None:
                turns, watched = this(), that()
                if turns is not None and watched is not None:
                    turns._arrived(watched, loop, arrived)

            lane.watch(loop, arrived)
            self._watched = (lane, loop)
        lane.receive_now()

    def _arrived(self, lane: Lane, loop: asyncio.AbstractEventLoop, again: Callable[[], None]) -> None:
        try:
            with self.now:
                if lane.gone is None:
                    lane.receive_now()
        except Taken:  # by another thread, which takes in what it finds; perhaps it has looked already
            loop.call_later(_TURN, again)

    def _late(self) -> Timeout:
        return Timeout(f"another thread's call of {self._model!r} was not over in time: take a model for each")
