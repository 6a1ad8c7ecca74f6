"""Run, answer and count batches, and decide how long to wait for clients that are about to send again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.errors import Code, Error, ModelFailed, VersionNotHeld, plain, said
from jurybox.protocol.scoreboard import TIME_BUCKETS
from jurybox.protocol.spec import ModelSpec
from jurybox.server.engine.device import DeviceBatch, DeviceLost, DeviceServed, device_error, forget_frames
from jurybox.server.engine.device_regions import DeviceRegions, RowsNotBound
from jurybox.server.engine.forward_timeout import ForwardTimeout, limited
from jurybox.server.engine.loads import Disturbed
from jurybox.server.engine.queues import Queue
from jurybox.server.engine.recovery import Recovery
from jurybox.server.engine.served import OUT_OF_MEMORY, BatchOutcome, Caches, Served
from jurybox.server.logs import traced


def cell(record: NDArray[Any], name: str) -> memoryview:
    """Return one number of a record, shape (1,), as a memoryview: storing to an array takes several times as long."""
    field: Any = record[name]
    return memoryview(field)


class ModelCounters:
    """The counters of one model in one engine, and the only writer of its record on the scoreboard.

    The counts are kept here and copied to the scoreboard, because other processes can write to the scoreboard.

    Args:
        shown: one record of scoreboard.COUNTERS, shape (1,); counting continues from its values.

    Attributes:
        left: the rows that wait, as they were published last.
    """

    def __init__(self, shown: NDArray[Any]) -> None:
        self._shown = shown
        self._own = shown.copy()
        self._own["sessions"] = 0  # sessions do not survive the engine that kept them
        self.left = 0
        self._waiting_shown = cell(shown, "waiting")
        # Count one answered batch: (tickets, rows, began, ended), the times in ns of CLOCK_MONOTONIC.
        self.batch: Callable[[NDArray[Any], int, int, int], None] = partial(native.count_batch, self._own, shown)

    def add(self, name: str, tickets: NDArray[Any]) -> None:
        """Count tickets without an answer of the model: "failed", "expired", "refused" or "not_held"."""
        self._own[name] += len(tickets)
        self._shown[name] = self._own[name]

    def cached(self, cache: Caches, tickets: int = 0, rows: int = 0) -> None:
        """Count what a cache has answered since the last call, and tickets that it answered without a batch."""
        counted = {"cache_hits": cache.hits, "cache_misses": cache.misses, "requests": tickets, "rows": rows}
        cache.hits = cache.misses = 0
        for name, n in counted.items():
            self._own[name] += n
            self._shown[name] = self._own[name]

    def waiting(self, rows: int) -> None:
        """Publish how many rows wait for a batch."""
        self._waiting_shown[0] = self.left = rows

    def sessions(self, n: int) -> None:
        """Publish how many sessions have state in this engine."""
        self._shown["sessions"] = self._own["sessions"] = n

    def adopted(self, version: int, seconds: float) -> None:
        """Count a weights update: `version` is in use from now on, `seconds` after it was published."""
        self._own["version"] = version
        self._own["newest"] = np.maximum(self._own["newest"], version)
        self._own["updates"] += 1
        self._own["adopted"] = time.monotonic_ns()
        nanoseconds = max(0, int(seconds * 1e9))
        self._own["adopt_total_ns"] += nanoseconds
        self._own["adopt_ns"][0, min(nanoseconds.bit_length(), TIME_BUCKETS - 1)] += 1
        self.show()

    def show(self) -> None:
        """Rewrite the whole record, in case another process has overwritten it."""
        self._own["waiting"] = self.left
        self._shown[:] = self._own


class Runs(Protocol):
    """The interface of what a slot runs: `Served`, or a group of models that are computed together."""

    spec: ModelSpec
    forward_timeout: float  # seconds after which a batch fails, as far as its forward runs Python; 0: never

    @property
    def version(self) -> int: ...

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> BatchOutcome | None:
        """See `Served.run`."""

    def free_memory(self) -> None:
        """See `Served.free_memory`."""


class Updates(Protocol):
    """The interface of a weights updater, of one model or of a group."""

    def stop(self) -> None: ...

    def join(self) -> None: ...


class Slot:
    """A model in this engine: its queue, its module and its counters. The models of a group share one (groups/)."""

    def __init__(self, served: Runs, queue: Queue, counters: ModelCounters) -> None:
        self.served = served
        self.queue = queue
        self.counters = counters
        self.cost = native.BatchCost()
        self.cache = served.cache if isinstance(served, Served) else None
        self.shown = 0  # 1 + the model's number, for the scoreboard's `computing`; 0: read it from the tickets

    @property
    def updater(self) -> Updates | None:
        """The updater that keeps the weights at their newest version; None if no weights are published."""
        return self.served.weights_updater if isinstance(self.served, Served) else None

    def answers(self, tickets: NDArray[Any], version: int) -> Iterable[tuple[NDArray[Any], int]]:
        """Split a computed batch by the weights version of its answers.

        `version` is the one that they were computed with; a group's members have one each.
        """
        return ((tickets, version),)

    def parts(self, tickets: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """Return the parts of a batch that can fail independently."""
        return (tickets,)

    def name(self, tickets: NDArray[Any]) -> str:
        """Return the name of the tickets' model."""
        return self.served.spec.name

    def show_sessions(self) -> None:
        """Publish the number of sessions with state in this engine."""
        if isinstance(self.served, Served):
            self.counters.sessions(self.served.sessions)

    def forget(self, lease: int) -> None:
        """Drop the sessions of a lease that has ended."""
        if isinstance(self.served, Served):
            self.served.forget(lease)

    def release(self) -> None:
        """Stop serving a model from this slot."""
        if isinstance(self.served, Served):
            self.served.close()


# ----
# Running batches, one at a time on the CPU and up to two in flight on a device, and recovering from their errors.


_SMOOTHING = 0.1
_ON_THEIR_WAY = 2  # batches in flight on a device: one computes while the next is copied in
_TRACED_NS = 10_000_000_000  # the shortest time between two logged tracebacks of a model


class _Flight(NamedTuple):
    """A batch in flight on a device."""

    slot: Slot
    tickets: NDArray[Any]
    rows: int
    asked: int  # requested weights version; 0: the newest
    used: int
    began: int
    batch: DeviceBatch


class Batches:
    """Runs, answers and counts batches.

    Args:
        answer: replies to tickets, with a code, a weights version and a message.
        tracker: is notified of every answered ticket.
        clock: returns the time in nanoseconds.
        report: logs an event, called with (event, fields).
        interruptible: see `Engine`.
        device: the device of the models.

    Attributes:
        mean_ns: the smoothed duration of a batch.
        one_ns: the same for a batch of one row; the least possible if all batches had the same number of rows.
        regions: the rows that clients have bound to device memory; None if this engine does not support it.
        ended: when the last batch ended.
        under_way: the number of batches in flight: begun and not yet answered.
        prompt: clients that were away and prompt when the last batch in flight was answered.
        recovery: the parts of failed batches that are still to be computed, by `recover`.
    """

    def __init__(
        self,
        answer: Callable[[NDArray[Any], int, int, str], None],
        tracker: native.ArrivalTracker,
        clock: Callable[[], int],
        report: Callable[..., None],
        *,
        interruptible: bool = False,
        device: torch.device = torch.device("cpu"),  # noqa: B008  immutable
    ) -> None:
        self.mean_ns = self.one_ns = 0.0
        self.ended = 0
        self._device = device
        self.regions: DeviceRegions | None = None
        self._answer = answer
        self._tracker = tracker
        self._clock = clock
        self._report = report
        self._mine = (KeyboardInterrupt,) if interruptible else ()
        self._traced: dict[str, int] = {}  # time of the last logged traceback, by model
        self._flights: deque[_Flight] = deque()  # oldest first
        self._landed = 0
        self.under_way = self.prompt = 0
        self.recovery = Recovery()

    def run(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int) -> None:
        """Compute and answer a batch. On a device, begin it, and answer the oldest one if enough are in flight.

        Raises:
            DeviceLost: the device cannot be used any more. Batches in flight are not answered.
        """
        if isinstance(slot.served, DeviceServed):
            self._begin(slot, slot.served, tickets.copy(), rows, version)
        else:
            self._compute(slot, tickets, rows, version)

    def recover(self, slot: Slot) -> None:
        """Compute and answer the next part of a slot's failed batches, by itself.

        Raises:
            DeviceLost: see `run`.
        """
        part, late = self.recovery.next(slot, self._clock())
        if len(late):
            self.expire(slot, late)
        if part is not None:
            self.land_all()  # its rows get all the memory
            self._compute(slot, part.tickets, int(part.tickets["rows"].sum()), part.version)

    def expire(self, slot: Slot, late: NDArray[Any]) -> None:
        """Answer tickets whose deadline has passed."""
        slot.counters.add("expired", late)
        self._answer(late, Code.TIMEOUT, slot.served.version, "the deadline passed before the ticket's turn came")

    def land(self, *, wait: bool = False) -> bool:
        """Answer the oldest batch in flight if it is done; return False if none is in flight.

        Args:
            wait: wait for the batch instead of returning while it is still being computed.

        Raises:
            DeviceLost: see `run`.
        """
        if not self._flights:
            return False
        flight, outcome, failure = self._flights[0], None, None
        try:
            if not wait and not flight.batch.done():
                return True
            outcome = flight.batch.finish()
        except BaseException as error:  # noqa: BLE001  a model may raise anything: its callers get it, others continue
            failure = error
            self._require_device(flight.slot, flight.tickets, error)
        self._flights.popleft()
        self.under_way = len(self._flights)
        if failure is not None:
            self._failed(flight.slot, flight.tickets, flight.rows, flight.asked, failure)
        else:
            # Count the batch's time from when the device was free for it.
            began = max(flight.began, self._landed)
            self._computed(flight.slot, flight.tickets, flight.rows, flight.used, began, outcome)
            self.prompt = self._tracker.prompt
        self._landed = self._clock()
        return True

    def land_all(self) -> None:
        """Answer all batches in flight. Afterwards nothing writes to any rows."""
        while self.land(wait=True):
            pass

    def _compute(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int) -> None:
        began = self._clock()
        served = slot.served
        try:
            if self.regions and not isinstance(served, DeviceServed) and self.regions.of(tickets) is not None:
                raise RowsNotBound("this model reads no device memory any more: it was loaded anew. Take rows again")
            run = served.run if slot.cache is None else slot.cache.run
            if served.forward_timeout:
                with limited(served.forward_timeout):
                    outcome = run(tickets, rows, version)
            else:
                outcome = run(tickets, rows, version)
        except BaseException as error:  # noqa: BLE001  see `land`
            failure = error
        else:
            self._computed(slot, tickets, rows, version or served.version, began, outcome)
            return
        self._failed(slot, tickets, rows, version, failure)

    def _begin(self, slot: Slot, served: DeviceServed, tickets: NDArray[Any], rows: int, version: int) -> None:
        began = self._clock()
        failure = None
        try:
            with limited(served.forward_timeout):
                batch = served.begin(tickets, rows, version)
        except BaseException as error:  # noqa: BLE001  see `land`
            failure = error
        if failure is not None:
            self._failed(slot, tickets, rows, version, failure)
            return
        self._flights.append(_Flight(slot, tickets, rows, version, version or served.version, began, batch))
        self.under_way = len(self._flights)
        if self.under_way == _ON_THEIR_WAY:
            self.land(wait=True)

    def _computed(
        self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, began: int, outcome: BatchOutcome | None
    ) -> None:
        computed = rows
        if outcome is not None:
            tickets = self._not_computed(slot, tickets, version, outcome)
            rows = int(tickets["rows"].sum())
        for answered, used in slot.answers(tickets, version):
            self._answer(answered, Code.OK, used, "")
        self.ended = ended = self._clock()
        took = ended - began
        self._tracker.answered(tickets, ended)
        slot.counters.batch(tickets, rows, began, ended)
        if slot.cache is not None:
            slot.counters.cached(slot.cache)
        self.mean_ns += _SMOOTHING * (took - self.mean_ns)
        self.one_ns += _SMOOTHING * (slot.cost.observe(computed, took) - self.one_ns)

    def _not_computed(self, slot: Slot, tickets: NDArray[Any], version: int, outcome: BatchOutcome) -> NDArray[Any]:
        """Answer the tickets of a batch that failed individually, and plan the recovery of others; return the rest."""
        others = np.ones(len(tickets), np.bool_)
        for numbers, error in outcome.errors:
            left = [number for number in numbers if others[number] and number not in outcome.refused]
            others[left] = False
            if left:
                self._require_device(slot, tickets[left], error)
                self._fail(slot, tickets[left].copy(), error)
        for number, (code, message) in outcome.refused.items():
            if others[number]:
                others[number] = False
                one = tickets[number : number + 1].copy()
                slot.counters.add("failed" if code == Code.ROW_FAILED else "refused", one)
                for answered, used in slot.answers(one, version):
                    self._answer(answered, code, used, message)
        again = [number for number in sorted(outcome.again) if others[number]]
        if again:
            others[again] = False
            self.recovery.add(slot, _halves(tickets[again]), int(tickets["version"][0]))
        return tickets[others].copy()

    def _failed(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, error: BaseException) -> None:
        """Recover from the error of a batch.

        Call it outside of the `except` block: inside, Python itself keeps the batch's tensors alive.
        """
        self._require_device(slot, tickets, error)
        self.land_all()  # the recovery uses the staging buffers, also those of the batch in flight
        self._recover(slot, tickets, rows, version, error)
        if isinstance(error, self._mine):
            raise error
        forget_frames(error)  # the caller's frame refers to the error: only the garbage collector would free the two

    def _require_device(self, slot: Slot, tickets: NDArray[Any], error: BaseException) -> None:
        """Raise DeviceLost if a model's error leaves a GPU that fails every call. Then nothing could be computed again.

        The error may be that of an earlier batch, since a device computes after the call has returned: the oldest
        batch in flight is named.
        """
        if isinstance(error, (OUT_OF_MEMORY, Error)) or (lost := device_error(self._device)) is None:
            return
        if self._flights:
            slot, tickets = self._flights[0].slot, self._flights[0].tickets
        raise DeviceLost(
            f"{self._device} fails every call since model {slot.name(tickets)!r} was computed: {said(error)}",
            slot.shown or int(tickets["model"][0]) + 1,
        ) from lost

    def _recover(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, error: BaseException) -> None:
        """Plan the recovery from a batch that was not computed.

        If memory ran out, halve this batch and lower the limit for later ones. Otherwise compute its parts separately,
        so that only the callers whose rows caused the error receive it. Each part has a turn of its own.
        """
        if isinstance(error, Disturbed):
            self.recovery.add(slot, [tickets.copy()], version)
            return
        if isinstance(error, OUT_OF_MEMORY) and len(tickets) > 1:
            slot.queue.max_batch = max(rows // 2, int(tickets["rows"].max()))
            name = slot.served.spec.name
            self._report("out of memory, batches halved", model=name, max_batch=slot.queue.max_batch)
            forget_frames(error)
            slot.served.free_memory()
        elif len(parts := slot.parts(tickets)) > 1:
            self.recovery.add(slot, parts, version)
            return
        elif len(tickets) == 1 or isinstance(error, (*self._mine, VersionNotHeld, ForwardTimeout)):
            self._fail(slot, tickets, error)
            return
        self.recovery.add(slot, _halves(tickets), version)

    def _fail(self, slot: Slot, tickets: NDArray[Any], error: BaseException) -> None:
        name = slot.name(tickets)
        if isinstance(error, RowsNotBound):
            slot.counters.add("refused", tickets)
            self._refuse(slot, tickets, error.code, said(error))
            return
        if isinstance(error, VersionNotHeld):  # the requested version is missing: not a failure of the model
            slot.counters.add("not_held", tickets)
            self._report("weights version not held", model=name, error=said(error), tickets=len(tickets))
            self._refuse(slot, tickets, error.code, said(error))
            return
        if isinstance(error, ForwardTimeout):
            rows = int(tickets["rows"].sum())
            message = f"model {name!r} failed on {rows} rows: {said(error)}; raise models.{name}.forward_timeout"
        else:
            message = plain(error) if isinstance(error, ModelFailed) else f"model {name!r} raised {said(error)}"
        slot.counters.add("failed", tickets)
        fields: dict[str, Any] = {"model": name, "error": message, "tickets": len(tickets)}
        now = self._clock()
        if now - self._traced.get(name, now - _TRACED_NS) >= _TRACED_NS:
            self._traced[name] = now
            fields["exception"] = traced(error)
        self._report("model failed", **fields)
        # Never the error's own code: one that the model has set could be Code.OK.
        self._refuse(slot, tickets, Code.MODEL_FAILED, message)

    def _refuse(self, slot: Slot, tickets: NDArray[Any], code: int, message: str) -> None:
        """Answer tickets with an error and the newest version, which is another one for each member of a group."""
        for answered, newest in slot.answers(tickets, slot.served.version):
            self._answer(answered, code, newest, message)


def _halves(tickets: NDArray[Any]) -> list[NDArray[Any]]:
    """Return copies of the two halves of several tickets; a single one stays whole.

    Halving isolates the rows that the model fails on: the callers of the other rows get their answers.
    """
    half = len(tickets) // 2
    return [part.copy() for part in (tickets[:half], tickets[half:]) if len(part)]


# ----
# Which closed-loop clients are about to send again, and whether the engine should wait for one more ticket.
#
# On few cores an engine that starts at once on whatever has arrived takes the core from the clients whose tickets
# would have filled its batch. So it waits briefly, but only for clients that recently sent again right after their
# answer and have had a whole batch's time to do so: those answered with the last batch run while the next one is
# computed, and waiting for them would leave the engine idle instead. It waits for one more ticket as long as that
# ticket is expected to arrive sooner than one ticket's share of the batch's common cost so far, which is the time
# waited plus the batch's fixed cost. If a model's cost is purely per row, there is no common cost and the engine does
# not wait. It also waits for at most half of these clients: the two halves alternate, and while one half's batch is
# computed the other half's clients run. A batch of all clients would leave all other cores idle. The engine never
# waits for a lone client, because no other client is missing when its ticket arrives. A client that fails to return in
# time is not waited for again until it has shown that it is quick. native.ArrivalTracker keeps this record.
#
# Where a batch's fixed cost is many times the clients' way back (a large model, a GPU), two halves in turn would pay it
# twice as often as needed, and the other cores have little to do meanwhile. There the engine waits for all clients that
# sent again within a quarter of that cost the last time, and no longer than that. So a round is never more than a
# quarter of the fixed cost longer, and mostly has one batch instead of two. On a device, which computes one batch while
# the next is copied in, two halves would take turns just so: with a batch of prompt clients under way the next one
# waits for them, unless it is full, or copying its rows takes a good part of what that saves.


QUICK = 4  # a closed-loop client is quick if it sends again within the time of this many batches
COPIED = 1.0  # bytes a ns, at least, that rows are copied to a device and back
PROMPT = 0.25  # and prompt if it does so within this share of a batch's fixed cost (`native.BatchCost.prompt`)
