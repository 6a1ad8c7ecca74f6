"""Inference on a model of the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from jurybox.client.lane import Lane
from jurybox.client.requests import Requests
from jurybox.client.row_allocator import version_of, whole
from jurybox.client.rows import Rows
from jurybox.client.sessions import Sessions
from jurybox.client.ticket import Reply, Seen, Ticket, send_parts, send_rows
from jurybox.protocol import forks
from jurybox.protocol.errors import Refused, SpecMismatch, StaleLease
from jurybox.protocol.locks import Taken, seconds
from jurybox.protocol.spec import ModelSpec

Arrays = NDArray[Any] | Mapping[str, NDArray[Any]]
Outputs = NDArray[Any] | dict[str, NDArray[Any]]


def _leased(name: str, model: Callable[..., Model], rows: int, timeout: float, wait: bool, priority: int) -> Model:
    return model(name, rows=rows, timeout=timeout, wait=wait, priority=priority)


class Model(forks.Closing):
    """Inference on one model through a lane of the server's shared memory. Created by `Server.model`.

    Thread-safe: calls from several threads run one after another, and event loops do not block meanwhile. For
    concurrent requests, give each thread its own model. In a forked child a model leases its own lane on first use, and
    so it does where it is unpickled, over a connection of its own.

    Attributes:
        spec: names, dtypes and row shapes of inputs and outputs.
        max_batch: rows in the largest batch; longer inputs are split.
        requests: the lane and its lock; used by `Sessions`.
    """

    def __init__(
        self,
        name: str,
        lease: Callable[[int, bool], tuple[Lane, ModelSpec, int]],
        rows: int,
        default_timeout: float,
        opened: Callable[[Requests], None] = lambda _: None,
        again: tuple[Callable[..., Model], float, bool, int] | None = None,
        where: str = "",
    ) -> None:
        self.name = name
        self._where = where
        self._again = None if again is None else (again[0], rows, *again[1:])
        self.requests = Requests(name, lease, rows, default_timeout, opened)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._again is None:
            return super().__reduce__()
        return _leased, (self.name, *self._again)

    @property
    def spec(self) -> ModelSpec:
        return self.requests.spec

    @property
    def max_batch(self) -> int:
        return self.requests.max_batch

    def __repr__(self) -> str:
        told = [
            ", ".join(f"{name}: {tensor}" for name, tensor in of.items())
            for of in (self.spec.inputs, self.spec.outputs)
        ]
        lane = self.requests.lane
        return (
            f"<Model {self.name!r} ({told[0]}) -> ({told[1]}), {lane.rows} rows, {len(lane.in_flight)} in flight, "
            f"up to {self.max_batch} rows a batch{self._where and f', {self._where}'}>"
        )

    # ---- one call, one answer

    def __call__(
        self, row: Arrays | bytes | str | None = None, /, *, timeout: float | None = None, **inputs: Any
    ) -> Any:
        """Compute one row: an array of the input's row shape, or bytes or text for a BYTES input.

        If the model has several inputs, pass each by its name, or all in a dict (an input called ``timeout`` only so).
        Raises the same errors as `infer`.

        Example:
            score = juror(image=photo, prompt="a red chair")
        """
        requests = self.requests
        if inputs:
            row = self._named(row, inputs)
        if row is None:
            row = {}
        slot = requests.kept
        try:
            with (turns := requests.turns).now:
                if (kept := requests.taken_kept()) is not None:
                    try:
                        return kept.ask(row, turns.timeout if timeout is None else seconds(timeout))
                    finally:
                        if slot or kept.lane.in_flight:
                            requests.put_back(kept)
                        else:
                            slot.append(kept)  # as a rule: what `put_back` does, without a call
        except (Taken, StaleLease):
            pass
        # On a new lane too, as in infer, with the full time-out: the first attempt used almost none of it.
        return self.call_reply(row, timeout=timeout).outputs

    def _named(self, row: Any, inputs: dict[str, Any]) -> Any:
        """Return the row of a call by name: a dict, or of an only input its value, which is copied only once."""
        if row is not None:
            raise SpecMismatch(
                f"a call of {self.name!r} takes one row or inputs by name, came a row and {', '.join(sorted(inputs))}"
            )
        return next(iter(inputs.values())) if len(inputs) == 1 and inputs.keys() == self.spec.inputs.keys() else inputs

    def call_reply(
        self, row: Arrays | bytes | str | None = None, /, *, timeout: float | None = None, **inputs: Any
    ) -> Reply:
        """Compute one row like `__call__`, but return a `Reply` with the weights version.

        Example:
            reply = policy.call_reply(observation)
            action, version = reply.outputs, reply.version
        """
        requests = self.requests
        if inputs:
            row = self._named(row, inputs)
        reply = requests.asked(lambda: requests.lane.codec.one({} if row is None else row), timeout, 0)
        return Reply(_first_row(reply.outputs), reply.version, reply.only)

    def row_reply(self, row: Any, timeout: float) -> Reply:
        """Compute one row like `__call__`, but return a `Reply`. Its outputs may have a leading dimension of one row.

        Args:
            row: as described by the spec.
            timeout: seconds.
        """
        requests = self.requests
        deadline = requests.turns.deadline(timeout)
        try:
            with requests.turns.now:
                if (kept := requests.taken_kept()) is not None:
                    try:
                        kept.answer = None
                        outputs = kept.ask({} if row is None else row, seconds(timeout))
                        return Reply(outputs, kept.version, kept.lane.codec.only)
                    finally:
                        requests.put_back(kept)
        except (Taken, StaleLease):
            pass
        return requests.asked(lambda: requests.lane.codec.one(row), (deadline - time.monotonic_ns()) / 1e9, 0)

    def infer(
        self, inputs: Arrays, *, timeout: float | None = None, version: int | None = None, output: str | None = None
    ) -> Any:
        """Compute n rows. If they exceed the lane or a batch, they are split into several requests.

        Waits for rows that earlier requests still use after a time-out.

        Args:
            inputs: array (n, *row shape) of the spec's dtype; a dict of arrays if the model has several inputs, by
                their names in `spec.inputs` ("numbers.age" of a nested observation).
            timeout: seconds in total. Defaults to the connection's.
            version: weights version to use, if the server still holds it; None: the newest.
            output: return the array of this output alone, however many the model has.

        Returns:
            Array (n, *row shape) of the output; a dict of arrays if the model has several outputs.

        Raises:
            SpecMismatch: dtype or shape differs from the spec, or it has no such output; the message names both.
            RowFailed: the model failed on some rows; `errors` maps their indices to the reasons.
            Timeout: no answer in time.
            Busy: no row became free in time.
            ModelFailed: the model raised, or is quarantined after several crashes.
            Refused: the request is not allowed, for example because the model keeps state.
            ServerGone: the server ended, and was not restarted in time.
            ValueError: the version is no whole number of at least 0.
        """
        if output is None:
            return self.infer_reply(inputs, timeout=timeout, version=version).outputs
        self.requests.require_output(output)
        return self.infer_reply(inputs, timeout=timeout, version=version).named[output]

    def infer_reply(self, inputs: Arrays, *, timeout: float | None = None, version: int | None = None) -> Reply:
        """Like `infer`, but return a `Reply` with the weights version.

        Up to `max_batch` rows are computed by one version. For more rows, `version` is the oldest one used.
        """
        requests = self.requests
        if version is None and (reply := requests.again(inputs, timeout)) is not None:
            return reply
        version = version_of(version)
        return requests.asked(lambda: requests.lane.codec.checked(inputs), timeout, version)

    async def infer_async(
        self, inputs: Arrays, *, timeout: float | None = None, version: int | None = None, output: str | None = None
    ) -> Any:
        """Like `infer`, as a coroutine: the same arguments, outputs and errors.

        If no rows are free, it waits until other tasks release theirs, up to the time-out.
        """
        if output is None:
            return (await self.infer_reply_async(inputs, timeout=timeout, version=version)).outputs
        self.requests.require_output(output)
        return (await self.infer_reply_async(inputs, timeout=timeout, version=version)).named[output]

    async def infer_reply_async(
        self, inputs: Arrays, *, timeout: float | None = None, version: int | None = None
    ) -> Reply:
        """Like `infer_async`, but return a `Reply` with the weights version, as `infer_reply` does."""
        requests, version = self.requests, version_of(version)
        deadline = requests.turns.deadline(timeout)
        given, n = requests.lane.codec.checked(inputs)
        requests.require_stateless()
        try:
            return await requests.answered_async(given, n, deadline, version)
        except StaleLease:
            pass
        return await requests.answered_async(given, n, deadline, version)

    # ---- pipelining

    def submit(self, inputs: Arrays, *, timeout: float | None = None, version: int | None = None) -> Ticket:
        """Send n rows and return a ticket, which is a future, at once. Several tickets may be in flight.

        If the lane is too small and its size was not set, it grows, as with `infer`.

        Args:
            timeout: seconds after which the engine may skip the request.

        Raises:
            Busy: the lane has no n contiguous free rows: collect results, or lease more with
                `Server.model(name, rows=...)`.
            SpecMismatch: dtype, shape or number of rows do not match.
            Refused: the request is not allowed, for example because the model keeps state.
            ServerGone: the server ended, and was not restarted in time.
        """
        turns, version = self.requests.turns, version_of(version)
        deadline = turns.deadline(timeout)
        return turns.run(lambda: self._submitted(inputs, deadline, version), deadline)

    def _submitted(self, inputs: Arrays, deadline: int, version: int) -> Ticket:
        requests = self.requests
        given, n = requests.lane.codec.checked(inputs)
        requests.require_stateless()
        if not 0 < n <= requests.max_batch:
            raise SpecMismatch(
                f"a ticket holds 1 to {requests.max_batch} rows (the server's max_batch), got {n}; infer() splits them"
            )
        lane = requests.roomy(n)
        return send_rows(Ticket(requests.turns, lane, requests.found(lane, n)), given, 0, deadline, version)

    def submit_parts(
        self, parts: Sequence[tuple[Mapping[str, NDArray[Any]], int]], deadline: int, version: int, brief: float = 0.0
    ) -> Ticket | Seen | None:
        """Send rows of several callers as one ticket; return None if that is not possible right now.

        For gateways; only for stateless models whose outputs have fixed shapes.

        Args:
            parts: for each caller, inputs as for `infer`, of the spec's dtypes, and their row count n.
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
                if lane.gone is not None or rows > requests.max_batch or (run := lane.take(rows)) is None:
                    return None
                return send_parts(requests.turns, lane, parts, run, deadline, version, brief)
        except Taken:
            return None

    def look(self) -> None:
        """Deliver the answers that have arrived to the tasks of this event loop that await them."""
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
        """Reserve n rows for a ``with`` block: write to `rows.inputs`, call `rows.infer()`, read `rows.outputs`.

        Inputs begin as zeros, those of variable size as empty: never as another request's. If the lane is too small and
        its size was not set, it grows, as with `infer`.

        Raises:
            Busy: the lane has no n contiguous free rows.
            ValueError: n is not a whole number of at least 1.
        """
        held = self.unwritten_rows(n)
        held.clear()
        return held

    def unwritten_rows(self, n: int) -> Rows:
        """Like `rows`, with the inputs of an earlier request; for inputs that are elsewhere, in device memory."""
        turns = self.requests.turns
        return turns.run(lambda: self._held(whole(n, "n", 1)), turns.deadline(None))

    def _held(self, n: int) -> Rows:
        requests = self.requests
        requests.require_stateless()
        lane = requests.roomy(n, at_once=True)
        return Rows(requests.turns, lane, requests.found(lane, n), requests.max_batch)

    # ---- state on the server

    def sessions(self, n: int, *, pin_version: bool = False) -> Sessions:
        """Open n sessions of a stateful model, one for each environment or conversation, numbered from 0.

        They lease their own lane, and their state lives as long as the lane. Close them, or use them in a ``with``
        statement.

        Args:
            pin_version: compute all requests of a session with the weights version of its first one, until it is reset.
                `Sessions.submit` then needs a version.

        Example:
            with policy.sessions(8) as sessions:
                actions = sessions.infer(observations, reset=dones)

        Raises:
            Busy: the server has no free rows for n more sessions.
            Refused: the model keeps no state.
        """
        if not self.spec.state:
            raise Refused(f"model {self.name!r} keeps no state: infer() needs no session")
        n = whole(n, "n", 1)
        return Sessions(self.requests.of_sessions(n), n, pin_version=pin_version)

    def close(self) -> None:
        """Release the lane.

        Raises:
            Timeout: another thread's call did not end within the default time-out; the lane is still leased.
            Refused: this is a signal handler or a destructor within a call of this model: close it afterwards.
        """
        self.requests.end()


def _first_row(outputs: Any) -> Any:
    """Return the outputs of a request of one row, without the dimension of rows."""
    return {name: value[0] for name, value in outputs.items()} if isinstance(outputs, dict) else outputs[0]
