"""Batches: running and answering them, counting that, and who is about to come back for the next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.errors import Code, ModelFailed, Refused, VersionNotHeld, plain, said
from jurybox.protocol.scoreboard import TIME_BUCKETS
from jurybox.protocol.spec import ModelSpec
from jurybox.server.batch_cost import BatchCost
from jurybox.server.engine.device import Batch, DeviceServed
from jurybox.server.engine.device_regions import DeviceRegions
from jurybox.server.engine.queues import Queue
from jurybox.server.engine.served import OUT_OF_MEMORY, Outcome, Served
from jurybox.server.logs import traced


class Counters:
    """The counters of one model in one engine; the only writer of its record on the scoreboard.

    What is counted is kept here and shown there: other processes can write to the scoreboard.

    Args:
        shown: one record of scoreboard.COUNTERS, shape (1,); counting goes on where it stands.
    """

    def __init__(self, shown: NDArray[Any]) -> None:
        self._shown = shown
        self._own = shown.copy()
        self._own["sessions"] = 0  # they ended with the engine that kept them
        self._waiting = 0

    def batch(self, tickets: NDArray[Any], rows: int, began: int, ended: int) -> None:
        """Count one answered batch; `began` and `ended` are ns of CLOCK_MONOTONIC."""
        native.count_batch(self._own, self._shown, tickets, rows, began, ended)

    def failed(self, tickets: NDArray[Any]) -> None:
        """Count tickets that the model could not answer."""
        self._add("failed", len(tickets))

    def expired(self, tickets: NDArray[Any]) -> None:
        """Count tickets whose deadline had passed."""
        self._add("expired", len(tickets))

    def not_held(self, tickets: NDArray[Any]) -> None:
        """Count tickets that asked for a weights version that is not held."""
        self._add("not_held", len(tickets))

    def refused(self, n: int) -> None:
        """Count n tickets refused on arrival."""
        self._add("refused", n)

    def waiting(self, rows: int) -> None:
        """Show how many rows wait for a batch."""
        self._shown["waiting"] = self._waiting = rows

    def sessions(self, n: int) -> None:
        """Show how many sessions have state in this engine."""
        self._shown["sessions"] = self._own["sessions"] = n

    def adopted(self, version: int, seconds: float) -> None:
        """Count a change of weights: the version in use from now on, `seconds` after its publication."""
        self._own["version"] = version
        self._own["newest"] = np.maximum(self._own["newest"], version)
        self._own["updates"] += 1
        self._own["adopted"] = time.monotonic_ns()
        nanoseconds = max(0, int(seconds * 1e9))
        self._own["adopt_total_ns"] += nanoseconds
        self._own["adopt_ns"][0, min(nanoseconds.bit_length(), TIME_BUCKETS - 1)] += 1
        self.show()

    def show(self) -> None:
        """Rewrite the whole record: another process may have overwritten it."""
        self._own["waiting"] = self._waiting
        self._shown[:] = self._own

    def _add(self, name: str, n: int) -> None:
        self._own[name] += n
        self._shown[name] = self._own[name]


class Runs(Protocol):
    """What a slot runs: `Served`, or a group of models that are computed together."""

    spec: ModelSpec

    @property
    def version(self) -> int: ...

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> Outcome | None:
        """As `Served.run`."""

    def free_memory(self) -> None:
        """As `Served.free_memory`."""


class Updates(Protocol):
    """A weights updater of one model, or of a group."""

    def stop(self) -> None: ...

    def join(self) -> None: ...


class Slot:
    """A model in this engine: its queue, its module, its counters. Models of a group share one (groups/)."""

    def __init__(self, served: Runs, queue: Queue, counters: Counters) -> None:
        self.served = served
        self.queue = queue
        self.counters = counters
        self.cost = BatchCost()
        self.shown = 0  # 1 + number of the model, as the scoreboard shows who computes; 0: ask the tickets

    @property
    def updater(self) -> Updates | None:
        """What keeps the weights at their newest version; None where nobody publishes."""
        return self.served.weights_updater if isinstance(self.served, Served) else None

    def answers(self, tickets: NDArray[Any], version: int) -> Iterable[tuple[NDArray[Any], int]]:
        """A computed batch by the weights version of its answers; `version` is the one that was asked for, or 0."""
        return ((tickets, version or self.served.version),)

    def parts(self, tickets: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """The parts of a batch that can fail independently."""
        return (tickets,)

    def name(self, tickets: NDArray[Any]) -> str:
        """The name of the model of these tickets."""
        return self.served.spec.name

    def show_sessions(self) -> None:
        """Show the number of sessions with state in this engine."""
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
# Running batches: one at a time on the CPU, two on their way on a device of its own; whatever goes wrong with one.


_SMOOTHING = 0.1
_ON_THEIR_WAY = 2  # on a device: one computes, the next is copied in
_TRACED_NS = 10_000_000_000  # a model's traceback is made and logged this often at most


class _Flight(NamedTuple):
    """A batch that a device computes by itself."""

    slot: Slot
    tickets: NDArray[Any]
    rows: int
    asked: int  # weights version, 0: the newest
    used: int
    began: int
    batch: Batch


class Batches:
    """Runs batches, answers and counts them.

    Args:
        answer: replies to tickets, with a code, a weights version and a message.
        tracker: told who was answered.
        clock: nanoseconds.
        report: called with (event, fields) for what should be logged.
        interruptible: as `Engine`.

    Attributes:
        mean_ns: what a batch takes, smoothed.
        regions: what clients have bound to device memory; None where nobody can.
    """

    def __init__(
        self,
        answer: Callable[[NDArray[Any], int, int, str], None],
        tracker: native.ArrivalTracker,
        clock: Callable[[], int],
        report: Callable[..., None],
        *,
        interruptible: bool = False,
    ) -> None:
        self.mean_ns = 0.0
        self.regions: DeviceRegions | None = None
        self._answer = answer
        self._tracker = tracker
        self._clock = clock
        self._report = report
        self._mine = (KeyboardInterrupt,) if interruptible else ()
        self._traced: dict[str, int] = {}  # when a traceback was logged, by model
        self._flights: deque[_Flight] = deque()  # the oldest first
        self._landed = 0

    @property
    def under_way(self) -> int:
        """The number of batches begun and not answered."""
        return len(self._flights)

    def run(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int) -> None:
        """Answer a batch; on a device of its own, begin it, and answer the oldest where enough are under way."""
        if isinstance(slot.served, DeviceServed):
            self._begin(slot, slot.served, tickets.copy(), rows, version)
        else:
            self._compute(slot, tickets, rows, version)

    def land(self, *, wait: bool = False) -> bool:
        """Answer the oldest batch under way, if it is done or is to be waited for; False where there is none."""
        if not self._flights:
            return False
        flight = self._flights[0]
        if not wait and not flight.batch.done():
            return True
        self._flights.popleft()
        try:
            outcome = flight.batch.finish()
        except BaseException as error:  # a model may raise anything; its callers are told, others go on
            self._recover(flight.slot, flight.tickets, flight.rows, flight.asked, error)
            if isinstance(error, self._mine):
                raise
        else:
            # It counts from when the device was free for it.
            began = max(flight.began, self._landed)
            self._computed(flight.slot, flight.tickets, flight.rows, flight.used, began, outcome)
        self._landed = self._clock()
        return True

    def land_all(self) -> None:
        """Answer all that are under way. Afterwards nothing writes to any rows."""
        while self.land(wait=True):
            pass

    def _compute(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int) -> None:
        began = self._clock()
        try:
            if self.regions and not isinstance(slot.served, DeviceServed) and self.regions.of(tickets) is not None:
                raise Refused("this model reads no device memory any more: it was loaded anew. Take rows again")
            outcome = slot.served.run(tickets, rows, version)
        except BaseException as error:
            self._recover(slot, tickets, rows, version, error)
            if isinstance(error, self._mine):
                raise
            return
        self._computed(slot, tickets, rows, version, began, outcome)

    def _begin(self, slot: Slot, served: DeviceServed, tickets: NDArray[Any], rows: int, version: int) -> None:
        began = self._clock()
        try:
            batch = served.begin(tickets, rows, version)
        except BaseException as error:
            self.land_all()
            self._recover(slot, tickets, rows, version, error)
            if isinstance(error, self._mine):
                raise
            return
        self._flights.append(_Flight(slot, tickets, rows, version, version or served.version, began, batch))
        if len(self._flights) == _ON_THEIR_WAY:
            self.land(wait=True)

    def _computed(
        self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, began: int, outcome: Outcome | None
    ) -> None:
        computed = rows
        if outcome is not None:
            tickets = self._not_computed(slot, tickets, version, outcome)
            rows = int(tickets["rows"].sum())
        for answered, used in slot.answers(tickets, version):
            self._answer(answered, Code.OK, used, "")
        ended = self._clock()
        self._tracker.answered(tickets, ended)
        slot.counters.batch(tickets, rows, began, ended)
        self.mean_ns += _SMOOTHING * (ended - began - self.mean_ns)
        slot.cost.observe(computed, ended - began)

    def _not_computed(self, slot: Slot, tickets: NDArray[Any], version: int, outcome: Outcome) -> NDArray[Any]:
        """Answer those of a batch's tickets that failed by themselves; gives the others."""
        others = np.ones(len(tickets), np.bool_)
        for numbers, error in outcome.errors:
            left = [number for number in numbers if others[number] and number not in outcome.refused]
            others[left] = False
            if left:
                self._fail(slot, tickets[left].copy(), error)
        for number, (code, message) in outcome.refused.items():
            if others[number]:
                others[number] = False
                one = tickets[number : number + 1].copy()
                if code == Code.ROW_FAILED:
                    slot.counters.failed(one)
                else:
                    slot.counters.refused(1)
                self._answer(one, code, version or slot.served.version, message)
        return tickets[others].copy()

    def _recover(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, error: BaseException) -> None:
        """A batch was not computed. One that was too large for the memory is halved, and so is every later one."""
        if isinstance(error, OUT_OF_MEMORY) and len(tickets) > 1:
            slot.queue.max_batch = max(rows // 2, int(tickets["rows"].max()))
            name = slot.served.spec.name
            self._report("out of memory, batches halved", model=name, max_batch=slot.queue.max_batch)
            slot.served.free_memory()
            half = len(tickets) // 2
            parts: Sequence[NDArray[Any]] = (tickets[:half].copy(), tickets[half:].copy())
        elif len(parts := slot.parts(tickets)) == 1:
            if len(tickets) == 1 or isinstance(error, (*self._mine, VersionNotHeld)):
                self._fail(slot, tickets, error)
                return
            # Whose rows it was that the model could not bear shows in halves: the others' callers get their answers.
            half = len(tickets) // 2
            parts = (tickets[:half].copy(), tickets[half:].copy())
        for part in parts:
            self._compute(slot, part, int(part["rows"].sum()), version)

    def _fail(self, slot: Slot, tickets: NDArray[Any], error: BaseException) -> None:
        name, version = slot.name(tickets), slot.served.version
        if isinstance(error, VersionNotHeld):  # what was asked for is not there: no fault of the model
            slot.counters.not_held(tickets)
            self._report("weights version not held", model=name, error=said(error), tickets=len(tickets))
            self._answer(tickets, error.code, version, said(error))
            return
        message = plain(error) if isinstance(error, ModelFailed) else f"model {name!r} raised {said(error)}"
        slot.counters.failed(tickets)
        fields: dict[str, Any] = {"model": name, "error": message, "tickets": len(tickets)}
        now = self._clock()
        if now - self._traced.get(name, now - _TRACED_NS) >= _TRACED_NS:
            self._traced[name] = now
            fields["exception"] = traced(error)
        self._report("model failed", **fields)
        # Whatever it raised: a code that the model made up could say that all went well.
        self._answer(tickets, Code.MODEL_FAILED, version, message)


# ----
# Who is about to come back: clients in closed loop, and whether one more of them is worth waiting for.
#
# On few cores an engine that starts on whatever has arrived takes the core from the very clients whose tickets would
# have filled its batch. So it waits a little, but only for clients that lately came back at once, and only by this
# rule: one more ticket is worth waiting for while it comes sooner than its share of what all of the batch's tickets
# bear in common so far, the waiting and the fixed cost of a batch. A model whose cost is all by the row has nothing
# to share, and nobody is waited for. Nor is more than half of the crowd: its halves take turns, and while one is
# computed the other's clients run, where a batch of everybody would leave all other cores idle. A lone client is
# never waited for, since nobody is missing when it asks; a client that stays away loses its credit and is waited for
# no more until it shows again that it is quick. native.ArrivalTracker keeps that book.


QUICK = 4  # batches' time within which a client in closed loop is back
