"""Inference on a model of the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.in_flight import Taken, Turns, seconds
from jurybox.client.lane import Lane
from jurybox.client.row_codec import Checked, shaped, utf8, words
from jurybox.client.rows import CallRow, Rows
from jurybox.client.sessions import Sessions
from jurybox.client.ticket import Pieces, Reply, Seen, Ticket, send_parts, send_rows
from jurybox.protocol import forks
from jurybox.protocol.errors import Busy, Code, Refused, ServerGone, SpecMismatch
from jurybox.protocol.spec import BYTES, ModelSpec

Arrays = NDArray[Any] | Mapping[str, NDArray[Any]]
Outputs = NDArray[Any] | dict[str, NDArray[Any]]


class Model(forks.Closing):
    """Inference on one model through a lane of the server's shared memory. Get it from `Server.model`.

    Thread-safe: calls from several threads run one after another, and event loops do not block meanwhile. For threads
    that should run side by side, get one model each. In a forked child a model leases a lane of its own on first use.

    Attributes:
        spec: names, dtypes and row shapes of inputs and outputs.
        max_batch: rows in the largest batch; longer inputs are split.
        requests: the lane and the turns at it, for sessions.
    """

    def __init__(
        self, name: str, lease: Callable[[int, bool], tuple[Lane, ModelSpec, int]], rows: int, default_timeout: float
    ) -> None:
        self.name = name
        self.requests = Requests(name, lease, rows, default_timeout)

    @property
    def spec(self) -> ModelSpec:
        return self.requests.spec

    @property
    def max_batch(self) -> int:
        return self.requests.max_batch

    # ---- one call, one answer

    def __call__(self, row: Arrays | bytes | str, *, timeout: float | None = None) -> Any:
        """Compute one row: an array of the input's row shape, or bytes or text for a BYTES input.

        Pass a dict if the model has several inputs. Raises the same errors as `infer`.
        """
        requests = self.requests
        dtype, shape, text = requests.plain
        if (
            type(row) is np.ndarray
            and row.dtype == dtype
            and (row.shape == shape or shape is None)
            and row.flags.c_contiguous
        ):
            ready: Any = row
        elif text and type(row) is bytes:
            ready = row
        elif text and type(row) is str:
            ready = utf8(f"input {next(iter(self.spec.inputs))!r} of {self.name!r}", row)
        else:
            ready = requests.lane.codec.one(row)[0]
            requests.require_stateless()
        try:
            with (turns := requests.turns).now:
                if (kept := requests.kept) is None or kept.lane.gone is not None or kept.lane.in_flight:
                    kept = requests.keep()
                if kept is not None:
                    return kept.ask(ready, turns.timeout if timeout is None else seconds(timeout))
        except Taken:
            pass
        except Refused as error:
            if error.code != Code.STALE_LEASE:
                raise
            # As infer: once more, on a new lane. It has its whole time again, of which the first used next to nothing.
        outputs = requests.asked(lambda: requests.lane.codec.one(row), timeout, 0).outputs
        return {name: value[0] for name, value in outputs.items()} if isinstance(outputs, dict) else outputs[0]

    def row_reply(self, row: Any, timeout: float) -> Reply:
        """As a call, of one row as the spec has it, with the weights version; outputs may have a dimension of rows."""
        requests = self.requests
        dtype, _, text = requests.plain
        fits = type(row) is bytes if text else type(row) is np.ndarray and row.dtype == dtype
        ready: Any = row if fits and (text or row.flags.c_contiguous) else requests.lane.codec.one(row)[0]
        requests.require_stateless()
        deadline = requests.turns.deadline(timeout)
        try:
            with requests.turns.now:
                kept = requests.keep()
                if kept is not None:
                    kept.answer = None
                    outputs = kept.ask(ready, seconds(timeout))
                    return Reply(outputs, kept.version)
        except Taken:
            pass
        except Refused as error:
            if error.code != Code.STALE_LEASE:
                raise
        return requests.asked(lambda: requests.lane.codec.one(row), (deadline - time.monotonic_ns()) / 1e9, 0)

    def infer(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Any:
        """Compute n rows. More rows than the lane or a batch holds are split into several requests.

        Waits for rows that are still in use by requests that timed out earlier.

        Args:
            inputs: array (n, *row shape) of the spec's dtype; a dict of arrays if the model has several inputs.
            timeout: seconds in total. Defaults to the connection's.
            version: weights version to use, if the server still holds it; 0: the newest.

        Returns:
            Array (n, *row shape) of the output; a dict of arrays if the model has several outputs.

        Raises:
            SpecMismatch: dtype or shape differs from the spec; the message names both.
            RowFailed: the model failed on some rows; `errors` says which and why.
            Timeout: no answer in time.
            Busy: no row became free in time.
            ModelFailed: the model raised, or is quarantined after several crashes.
            Refused: the request is not allowed, as for a model that keeps state.
            ServerGone: the server ended, and none came back in time.
        """
        return self.infer_reply(inputs, timeout=timeout, version=version).outputs

    def infer_reply(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Reply:
        """Like `infer`, but return a `Reply` with the weights version.

        Up to `max_batch` rows are computed by one version. Of more rows it is the oldest one used.
        """
        requests = self.requests
        return requests.asked(lambda: requests.lane.codec.checked(inputs), timeout, version)

    async def infer_async(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Any:
        """Like `infer`, as a coroutine: the same arguments, outputs and errors.

        If no rows are free it waits for other tasks to release theirs, until the time-out.
        """
        return (await self.infer_reply_async(inputs, timeout=timeout, version=version)).outputs

    async def infer_reply_async(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Reply:
        """Like `infer_async`, but return a `Reply` with the weights version, as `infer_reply` does."""
        requests = self.requests
        deadline = requests.turns.deadline(timeout)
        given, n = requests.lane.codec.checked(inputs)
        requests.require_stateless()
        try:
            return await requests.answered_async(given, n, deadline, version)
        except Refused as error:
            if error.code != Code.STALE_LEASE:
                raise
        return await requests.answered_async(given, n, deadline, version)

    # ---- pipelining

    def submit(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Ticket:
        """Send n rows without waiting for the answer, and return a ticket, which is a future. Several may be in flight.

        Args:
            timeout: seconds after which the engine may skip the request.

        Raises:
            Busy: fewer than n neighbouring rows of the lane are free: collect results, or lease more with
                `Server.model(name, rows=...)`.
            SpecMismatch: dtype, shape or number of rows do not fit.
            Refused: the request is not allowed, as for a model that keeps state.
            ServerGone: the server ended, and none came back in time.
        """
        turns = self.requests.turns
        deadline = turns.deadline(timeout)
        return turns.run(lambda: self._submitted(inputs, deadline, version), deadline)

    def _submitted(self, inputs: Arrays, deadline: int, version: int) -> Ticket:
        requests = self.requests
        given, n = requests.lane.codec.checked(inputs)
        requests.require_stateless()
        if not 0 < n <= requests.max_batch:
            raise SpecMismatch(
                f"a ticket holds 1 to {requests.max_batch} rows (the server's max_batch), {n} came; infer() cuts"
            )
        lane = requests.usable()
        return send_rows(requests.turns, lane, given, 0, n, requests.found(lane, n), deadline, version)

    def submit_parts(
        self, parts: Sequence[tuple[Mapping[str, NDArray[Any]], int]], deadline: int, version: int, brief: float = 0.0
    ) -> Ticket | Seen | None:
        """Send rows of several callers as one ticket; return None if that is not possible right now.

        For gateways; only for models of fixed shapes without state.

        Args:
            parts: arrays by name, each (n, *row shape) of the spec's dtype, and how many rows of each.
            deadline: ns of CLOCK_MONOTONIC.
            brief: seconds to wait for the answer, if no other ticket is in flight.

        Returns:
            A ticket. If the answer came within `brief`: the outputs by name, where they lie, and the weights version;
            read them before the model is used again.
        """
        requests = self.requests
        try:
            with requests.turns.now:
                lane, rows = requests.lane, sum(n for _, n in parts)
                if lane.gone is not None or rows > requests.max_batch or (first := lane.find(rows)) is None:
                    return None
                return send_parts(requests.turns, lane, parts, first, rows, deadline, version, brief)
        except Taken:
            return None

    def look(self) -> None:
        """Deliver the answers that have arrived to the tasks of this event loop that wait for them."""
        turns = self.requests.turns
        turns.run(self.requests.lane.receive_now, turns.deadline(None))

    def room(self) -> int:
        """Return the length of the longest run of free rows. Larger requests are split; versions may then differ."""
        turns = self.requests.turns
        return turns.run(self._room, turns.deadline(None))

    def _room(self) -> int:
        lane = self.requests.lane
        return lane.largest if lane.gone is None else lane.rows

    # ---- zero-copy

    def rows(self, n: int = 1) -> Rows:
        """Hold n rows in a ``with``: write to `rows.inputs`, call `rows.infer()`, read `rows.outputs`.

        Raises:
            Busy: fewer than n neighbouring rows are free.
        """
        turns = self.requests.turns
        return turns.run(lambda: self._held(n), turns.deadline(None))

    def _held(self, n: int) -> Rows:
        requests = self.requests
        lane = requests.usable()
        requests.require_stateless()
        return Rows(requests.turns, lane, requests.found(lane, n), n, requests.max_batch)

    # ---- state on the server

    def sessions(self, n: int, *, pin_version: bool = False) -> Sessions:
        """Open n sessions of a model with state, one for each environment or conversation, numbered from 0.

        They lease a lane of their own, and their state lives as long as it. Close them, or use them in a ``with``.

        Args:
            pin_version: compute every request of a session with the weights of its first one, until it is reset.

        Example:
            with policy.sessions(8) as sessions:
                actions = sessions.infer(observations, reset=dones)

        Raises:
            Busy: as many sessions are open as the server has rows for.
            Refused: the model keeps no state.
        """
        if not self.spec.state:
            raise Refused(f"model {self.name!r} keeps no state: infer() needs no session")
        if n < 1:
            raise ValueError(f"n={n}: expected at least one session")
        return Sessions(self.requests.of_sessions(n), n, pin_version=pin_version)

    def close(self) -> None:
        """Release the lane.

        Raises:
            Timeout: a call of another thread did not end within the default time-out; the lane is still leased.
        """
        self.requests.turns.run(self.requests.close, self.requests.turns.deadline(None))


class Requests:
    """The requests of one model, on a lane that is leased anew where it was lost. Used by `Model` and `Sessions`.

    Methods that say nothing else are called in the model's turn.

    Args:
        lease: of so many rows (0: the server's default); whether to wait for them.
        rows: that the caller asked for, or 0.
        timeout: seconds of a call whose caller says nothing else.

    Attributes:
        turns: whose turn it is.
        lane: the lane at present; it may be gone, `usable` gives one that is not.
        spec, max_batch: as of the lane.
        kept: rows that are kept from call to call.
        plain: of the model's only input the dtype, the row shape (None: any size), and whether it takes byte strings.
    """

    def __init__(
        self, name: str, lease: Callable[[int, bool], tuple[Lane, ModelSpec, int]], rows: int, timeout: float
    ) -> None:
        self.name = name
        self.turns = Turns(name, timeout)
        self.kept: CallRow | None = None
        self._lease = lease
        self._rows = rows
        self._may_grow = rows == 0
        self._closed = False
        self.lane, self.spec, self.max_batch = lease(rows, True)
        self.plain = _only_input(self.spec)
        forks.register(self)

    def of_sessions(self, n: int) -> Requests:
        """Those of n sessions, which have a lane of their own. Out of turn."""
        return Requests(self.name, self._lease, n, self.turns.timeout)

    def require_stateless(self) -> None:
        """Raises Refused where the model keeps state."""
        if self.spec.state:
            kept = ", ".join(self.spec.state)
            raise Refused(
                f"model {self.name!r} keeps state ({kept}): open sessions with sessions(n), and ask through them"
            )

    def usable(self) -> Lane:
        """The lane; a new one where the server was restarted or took the old one back, and in a forked child."""
        if self._closed:
            raise Refused(f"model {self.name!r} was closed: get it again from the server")
        if self.lane.gone is not None:
            self.lane.close()
            self.give_up_kept()
            self._adopt(*self._lease(self._rows, True))
        return self.lane

    def _adopt(self, lane: Lane, spec: ModelSpec, max_batch: int) -> None:
        """Use another lane. Raises SpecMismatch where the model's spec has changed."""
        self.lane, self.max_batch = lane, max_batch
        if spec != self.spec:
            old, self.spec, self.plain = self.spec, spec, _only_input(spec)
            raise SpecMismatch(f"model {self.name!r} has changed: it was {words(old)}, it is {words(spec)}")

    def _roomy(self, n: int) -> Lane:
        """The lane; a larger one where the caller asked for no number of rows and needs more than it has."""
        lane = self.usable()
        if n <= lane.rows or not self._may_grow:
            return lane
        self.give_up_kept()
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

    def keep(self, rows: int | None = None) -> CallRow | None:
        """A row kept for calls of one row, until rows run out; None where none is free.

        Args:
            rows: of a model whose sessions are asked, all of them, together.
        """
        lane = self.usable()
        if self.kept is not None and self.kept.usable:
            return self.kept
        self.give_up_kept()
        first = lane.find(rows or 1)
        if first is not None:
            self.kept = CallRow(lane, first, rows)
        return self.kept

    def give_up_kept(self) -> bool:
        """Give back the rows that are kept between calls; False where there are none."""
        # By name: a traceback somewhere may refer to it.
        kept, self.kept = self.kept, None
        if kept is not None:
            kept.close()
        return kept is not None

    def found(self, lane: Lane, n: int) -> int:
        """The first of n neighbouring free rows."""
        first = lane.find(n)
        if first is None:
            self.give_up_kept()
            lane.look_after()
            first = lane.find(n)
        if first is None:
            raise Busy(
                f"{n} neighbouring rows were asked for, {lane.largest} of this lane's {lane.rows} are free: "
                f"collect results, or ask for a larger lane with model({self.name!r}, rows=...)"
            )
        return first

    def close(self) -> None:
        """Give the lane back."""
        if not self._closed:
            self._closed = True
            self.lane.close()

    def asked(self, check: Callable[[], tuple[Checked, int]], timeout: float | None, version: int) -> Reply:
        """Check rows, send them and wait for their outputs, in a turn of its own."""
        deadline = self.turns.deadline(timeout)
        return self.turns.run(lambda: self._checked_and_answered(check, deadline, version), deadline)

    def _checked_and_answered(self, check: Callable[[], tuple[Checked, int]], deadline: int, version: int) -> Reply:
        given, n = check()
        self.require_stateless()
        try:
            return self.answered(given, n, deadline, version)
        except Refused as error:
            if error.code != Code.STALE_LEASE:
                raise
        # The server replaced the model's arena; the inputs are still ours, so ask once more on a new lane.
        return self.answered(given, n, deadline, version)

    def answered(self, given: Checked, n: int, deadline: int, version: int) -> Reply:
        """Send n checked rows and wait for their outputs."""
        lane = self._roomy(n)
        if not 0 < n <= self.max_batch or (first := lane.find(n)) is None:
            return Pieces(self, lane, given, n, deadline, version).answered()
        lane.codec.put(lane.columns, given, 0, n, first)
        answer = lane.ask(first, n, (deadline - time.monotonic_ns()) / 1e9, version)
        # Nobody else can take the rows before this thread gives up the lock.
        if answer.code != Code.OK:
            raise lane.failure(answer, first, n)
        return Reply(shaped(lane.codec.take(lane.columns, first, n)), answer.version)

    async def answered_async(self, given: Checked, n: int, deadline: int, version: int) -> Reply:
        """As `answered`, in an event loop and out of turn."""
        lane = self.lane
        if lane.gone is not None or (n > lane.rows and self._may_grow):
            import asyncio

            lane = await asyncio.to_thread(self.turns.run, lambda: self._roomy(n), deadline)
        return await Pieces(self, lane, given, n, deadline, version).answered_async()

    def _after_fork_in_child(self) -> None:
        self.turns.anew()
        self.kept = None


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
