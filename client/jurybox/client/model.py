"""A model of the server, as its client sees it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.doors.door import Answer
from jurybox.client.lane import Lane, Ticket
from jurybox.client.rows import CallRow, Rows
from jurybox.protocol.errors import Busy, Code, Refused, SpecMismatch, error_for
from jurybox.protocol.spec import ModelSpec

Arrays = NDArray[Any] | Mapping[str, NDArray[Any]]
Outputs = NDArray[Any] | dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: `outputs` (an array where the model has one output, else by name) and the weights' `version`."""

    outputs: Any
    version: int


class Model:
    """Inference on one model through a lane of the server's shared memory. Get it from `Server.model`.

    Calls from several threads are safe and go one after another; threads that should not wait for each other take
    a model each.

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
        self.lock = threading.RLock()
        self.name = name
        self._closed = False
        self._held: CallRow | None = None
        self._lane, self.spec, self.max_batch = lease(rows, True)
        self._call_dtype, self._call_shape = _only_input(self.spec)

    # ---- one call, one answer

    def __call__(self, row: Arrays, *, timeout: float | None = None) -> Any:
        """One row in, one row out: an array of the input's row shape (a dict where there are several inputs)."""
        if (
            type(row) is np.ndarray
            and row.dtype == self._call_dtype
            and row.shape == self._call_shape
            and row.flags.c_contiguous
        ):
            with self.lock:
                if (held := self._held) is None or held.lane.gone is not None:
                    held = self._hold()
                return held.ask(row, self._default_timeout if timeout is None else timeout)
        if isinstance(row, Mapping):
            outputs = self.infer({name: np.asarray(value)[None] for name, value in row.items()}, timeout=timeout)
        else:
            outputs = self.infer(np.asarray(row)[None], timeout=timeout)
        return {name: value[0] for name, value in outputs.items()} if isinstance(outputs, dict) else outputs[0]

    def infer(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Any:
        """Answer n rows; more than the lane or a batch holds go in pieces, several in flight.

        Args:
            inputs: (n, *row shape) of the spec's dtype; a dict of such where the model has several inputs.
            timeout: seconds for all of it; the connection's default without it.
            version: of the weights to be answered by, where it is still held; 0: the newest.

        Returns:
            (n, *row shape) of the output, or a dict of such where there are several.

        Raises:
            SpecMismatch, Timeout, Busy, ModelFailed, Refused, ServerGone.
        """
        return self.infer_reply(inputs, timeout=timeout, version=version).outputs

    def infer_reply(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Reply:
        """As `infer`, with the weights version: the oldest of its pieces'."""
        deadline = self._deadline(timeout)
        with self.lock:
            given, n = self._checked(inputs)
            try:
                return self._answered(given, n, deadline, version)
            except Refused as error:
                if error.code != Code.STALE_LEASE:
                    raise
            # The server replaced the model's arena; the inputs are still ours, so ask once more on a new lane.
            return self._answered(given, n, deadline, version)

    # ---- pipelining

    def submit(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Ticket:
        """Send n rows without waiting; `result` collects them. Several tickets may be in flight.

        Args:
            timeout: seconds after which the engine need not compute it any more.

        Raises:
            Busy: fewer than n neighbouring rows of the lane are free: collect results, or ask
                `Server.model(name, rows=...)` for more.
            SpecMismatch, Refused, ServerGone.
        """
        deadline = self._deadline(timeout)
        with self.lock:
            given, n = self._checked(inputs)
            if not 0 < n <= self.max_batch:
                raise SpecMismatch(
                    f"a ticket holds 1 to {self.max_batch} rows (the server's max_batch), {n} came; infer() cuts"
                )
            lane = self._usable()
            return self._send(lane, given, 0, n, self._take(lane, n), deadline, version)

    def result(self, ticket: Ticket, timeout: float | None = None) -> Reply:
        """Wait for a ticket's outputs; its rows are free afterwards.

        Raises:
            Timeout: none came in time. The ticket is lost to its caller; its rows go free when the engine answers.
            ModelFailed, Refused, ServerGone.
        """
        deadline = self._deadline(timeout)
        with self.lock:
            try:
                return self._collected(ticket, ticket.lane.wait(ticket, deadline))
            finally:
                ticket.lane.let_go(ticket)

    async def result_async(self, ticket: Ticket, timeout: float | None = None) -> Reply:
        """As `result`, in an event loop."""
        try:
            return self._collected(ticket, await ticket.lane.wait_async(ticket, self._deadline(timeout)))
        finally:
            ticket.lane.let_go(ticket)

    async def infer_async(self, inputs: Arrays, *, timeout: float | None = None, version: int = 0) -> Reply:
        """As `infer` for at most `max_batch` rows, in an event loop; gives a `Reply`.

        Where no rows are free it waits for those of other tasks to come back, until the time-out.
        """
        deadline = self._deadline(timeout)
        given, n = self._checked(inputs)
        while True:
            lane = self._usable()
            if not 0 < n <= min(self.max_batch, lane.free.total):
                raise SpecMismatch(f"1 to {min(self.max_batch, lane.free.total)} rows go in one request, {n} came")
            first = lane.free.take(n)
            if first is None and self._held is not None:
                self._let_go_of_held()
                continue
            if first is not None:
                break
            await lane.wait_for_rows(deadline)
        ticket = self._send(lane, given, 0, n, first, deadline, version)
        return await self.result_async(ticket, (deadline - time.monotonic_ns()) / 1e9)

    def look(self) -> None:
        """Take in the answers that are there, for those who wait for them in this event loop."""
        self._lane.receive_now()

    # ---- zero-copy

    def rows(self, n: int = 1) -> Rows:
        """Hold n neighbouring rows, to be used in a ``with``: write `rows.inputs`, `rows.infer()`, read `rows.outputs`.

        Raises:
            Busy: fewer are free.
        """
        with self.lock:
            lane = self._usable()
            return Rows(self, lane, self._take(lane, n), n, self.max_batch)

    def close(self) -> None:
        """Give the lane back to the server."""
        with self.lock:
            if not self._closed:
                self._closed = True
                self._lane.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seconds(self, timeout: float | None) -> float:
        """A time-out, or the connection's default."""
        return self._default_timeout if timeout is None else timeout

    # ---- inside

    def _deadline(self, timeout: float | None) -> int:
        return time.monotonic_ns() + int(self.seconds(timeout) * 1e9)

    def _usable(self) -> Lane:
        """The lane; a new one where the server was restarted or took the old one back."""
        if self._closed:
            raise Refused(f"model {self.name!r} was closed: get it again from the server")
        if self._lane.gone is not None:
            self._lane.close()
            self._held = None
            self._lane, spec, self.max_batch = self._lease(self._rows, True)
            if spec != self.spec:
                old, self.spec = self.spec, spec
                self._call_dtype, self._call_shape = _only_input(spec)
                raise SpecMismatch(f"model {self.name!r} has changed: it was {_words(old)}, it is {_words(spec)}")
        return self._lane

    def _checked(self, inputs: Arrays) -> tuple[dict[str, NDArray[Any]], int]:
        """The inputs by name, each fitting the spec, and the number of rows."""
        specs = self.spec.inputs
        if not isinstance(inputs, Mapping):
            if len(specs) != 1:
                raise SpecMismatch(f"{self.name!r} takes {_words(self.spec)}: give a dict with an array for each")
            inputs = {next(iter(specs)): inputs}
        elif inputs.keys() != specs.keys():
            raise SpecMismatch(f"{self.name!r} takes inputs {sorted(specs)}, {sorted(inputs)} came")
        given = {name: np.asarray(inputs[name]) for name in specs}
        n = len(next(iter(given.values()))) if next(iter(given.values())).ndim else 0
        for name, spec in specs.items():
            array = given[name]
            if array.dtype != spec.numpy_dtype or array.shape != (n, *spec.shape):
                expected = "n, " + ", ".join(map(str, spec.shape)) if spec.shape else "n"
                raise SpecMismatch(
                    f"input {name!r} of {self.name!r}: expected {spec.dtype} of shape ({expected}), came "
                    f"{array.dtype} of shape {array.shape}{_hint(array, spec.numpy_dtype, spec.shape)}"
                )
        return given, n

    def _grow(self, lane: Lane, n: int) -> Lane:
        """Who did not say how many rows it needs gets more when it turns out to need them, where there are more."""
        self._let_go_of_held()
        if lane.free.free < lane.free.total:
            return lane  # something is in flight on it
        try:
            larger, _, _ = self._lease(min(n, self.max_batch), False)
        except (Busy, Refused):
            self._may_grow = False  # pieces will do
            return lane
        lane.close()
        self._lane, self._rows = larger, larger.free.total
        return larger

    def _hold(self) -> CallRow:
        """Keep a row for calls of one row; it is given up when rows run out."""
        lane = self._usable()
        self._held = CallRow(self.rows(1), lane)
        return self._held

    def _let_go_of_held(self) -> None:
        if self._held is not None:
            self._held.rows.close()
            self._held = None

    def _take(self, lane: Lane, n: int) -> int:
        first = lane.free.take(n)
        if first is None:
            lane.receive_now()
            self._let_go_of_held()
            first = lane.free.take(n)
        if first is None:
            raise Busy(
                f"{n} neighbouring rows were asked for, {lane.free.largest} of this lane's {lane.free.total} are free: "
                f"collect results, or ask for a larger lane with model({self.name!r}, rows=...)"
            )
        return first

    def _send(
        self, lane: Lane, given: Mapping[str, NDArray[Any]], at: int, n: int, first: int, deadline: int, version: int
    ) -> Ticket:
        for name, array in given.items():
            lane.inputs[name][first : first + n] = array[at : at + n]
        return lane.submit(first, n, deadline, version)

    def _collected(self, ticket: Ticket, answer: Answer) -> Reply:
        return self._copied(ticket.lane, ticket.first, ticket.rows, answer)

    def _copied(self, lane: Lane, first: int, n: int, answer: Answer) -> Reply:
        if answer.code != Code.OK:
            raise error_for(answer.code, answer.message)
        outputs = {name: array[first : first + n].copy() for name, array in lane.outputs.items()}
        return Reply(self._shaped(outputs), answer.version)

    def _answered(self, given: Mapping[str, NDArray[Any]], n: int, deadline: int, version: int) -> Reply:
        lane = self._usable()
        if n > lane.free.total and self._may_grow:
            lane = self._grow(lane, n)
        if not 0 < n <= self.max_batch or (first := lane.free.take(n)) is None:
            return self._in_pieces(given, n, deadline, version)
        for name, array in given.items():
            lane.inputs[name][first : first + n] = array
        answer = lane.ask(first, n, (deadline - time.monotonic_ns()) / 1e9, version)
        if isinstance(answer, Ticket):
            ticket = answer
            try:
                return self._collected(ticket, lane.wait(ticket, deadline))
            finally:
                lane.let_go(ticket)
        try:
            return self._copied(lane, first, n, answer)
        finally:
            lane.free.give(first, n)

    def _in_pieces(self, given: Mapping[str, NDArray[Any]], n: int, deadline: int, version: int) -> Reply:
        lane = self._usable()
        outputs = {name: np.empty((n, *spec.shape), spec.numpy_dtype) for name, spec in self.spec.outputs.items()}
        in_flight: deque[tuple[int, Ticket]] = deque()
        sent, oldest = 0, None
        try:
            while sent < n or in_flight:
                while sent < n and (piece := min(n - sent, self.max_batch, lane.free.largest)):
                    first = self._take(lane, piece)
                    in_flight.append((sent, self._send(lane, given, sent, piece, first, deadline, version)))
                    sent += piece
                if not in_flight:
                    lane.free.give(self._take(lane, 1), 1)  # it says that and why no row is free, or one has come back
                    continue
                at, ticket = in_flight[0]
                answer = lane.wait(ticket, deadline)
                in_flight.popleft()
                first, end = ticket.first, ticket.first + ticket.rows
                if answer.code == Code.OK:
                    for name, array in outputs.items():
                        array[at : at + ticket.rows] = lane.outputs[name][first:end]
                lane.let_go(ticket)
                if answer.code != Code.OK:
                    raise error_for(answer.code, answer.message)
                oldest = answer.version if oldest is None else min(oldest, answer.version)
        finally:
            for _, ticket in in_flight:
                lane.let_go(ticket)
        return Reply(self._shaped(outputs), oldest or 0)

    def _shaped(self, outputs: dict[str, NDArray[Any]]) -> Outputs:
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _only_input(spec: ModelSpec) -> tuple[np.dtype[Any] | None, tuple[int, ...]]:
    """Dtype and row shape of a model's only input; None where it has several."""
    if len(spec.inputs) != 1:
        return None, ()
    (only,) = spec.inputs.values()
    return only.numpy_dtype, only.shape


def _words(spec: ModelSpec) -> str:
    inputs = ", ".join(f"{name} {tensor}" for name, tensor in spec.inputs.items())
    outputs = ", ".join(f"{name} {tensor}" for name, tensor in spec.outputs.items())
    return f"{inputs} -> {outputs}"


def _hint(array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    if array.shape == shape:
        return "; for a single row call the model itself, or add an axis: array[None]"
    if array.shape[1:] == shape and array.dtype != dtype:
        return f"; convert it on purpose: array.astype({dtype.name!r})"
    return ""
