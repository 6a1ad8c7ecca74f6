"""The engine's core, which turns tickets into batches and replies, and the interface of its transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.errors import Code, plain, said
from jurybox.protocol.scoreboard import MAX_MODELS, NORMAL, Scoreboard
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.batches import COPIED, PROMPT, QUICK, Batches, ModelCounters, Slot, cell
from jurybox.server.engine.device_regions import DeviceRegions
from jurybox.server.engine.loads import LOADS
from jurybox.server.engine.queues import Queue
from jurybox.server.engine.served import Served


class TicketSource(Protocol):
    """A source of tickets and the sink of their replies. None of its methods blocks."""

    number: int  # the core writes it into the tickets that arrive through this transport
    slow: bool  # whether polling takes microseconds: skipped every other turn if another transport has tickets

    def collect(self, out: NDArray[Any]) -> int:
        """Write newly arrived tickets to `out`, an array of wire.TICKET records; return their number.

        At most len(out) are written.
        """

    def reply(self, tickets: NDArray[Any], code: int, version: int, message: str) -> object:
        """Answer tickets of this transport, all with the same code, weights version and message, which is plain."""


# ----
# The engine's core: from tickets to replies, one batch per turn.
#
# It opens no socket and never blocks, so it runs the same way in its own process (process.py) and inside a caller's
# (jurybox.server.inproc), and tests drive it turn by turn.


_HALVES = 1_000_000_000  # ns without a batch in which the expected wait of one of several engines halves
_ARRIVALS = 1024  # the most tickets taken per turn and transport; the rest stays with the transport


class Engine:
    """Batches the tickets of all transports.

    Args:
        scoreboard: its lanes define which rows a ticket may use, and the counters are written to it.
        index: this engine's index on the scoreboard.
        transports: the sources of tickets.
        clock: returns the time in nanoseconds, of CLOCK_MONOTONIC unless a test injects its own.
        pause: called with (seconds, tickets); returns after that time or once that many tickets have arrived, so that
            clients about to send can do so. None: never wait for clients.
        report: logs an event, called with (event, fields).
        interruptible: whether a KeyboardInterrupt during a model's call may come from the user, as in a user's own
            process: the batch is answered as failed, and the interrupt is raised again. Otherwise it counts as any
            other exception of the model.
        batches: creates the object that runs the batches.
    """

    def __init__(
        self,
        scoreboard: Scoreboard,
        index: int,
        transports: Sequence[TicketSource],
        clock: Callable[[], int] = time.monotonic_ns,
        pause: Callable[[float, int], None] | None = None,
        report: Callable[..., None] = lambda event, **fields: None,
        *,
        interruptible: bool = False,
        batches: Callable[..., Batches] = Batches,
    ) -> None:
        self.scoreboard = scoreboard
        self.index = index
        self.transports: list[TicketSource] = []
        for transport in transports:
            self.add_transport(transport)
        self.slots: dict[int, Slot] = {}
        self._queues: list[Slot] = []  # every slot once, even if models share it
        self._only: Slot | None = None  # the slot, if there is one
        self._clock = clock
        self._pause = pause
        self._report = report
        self._tracker = native.ArrivalTracker(len(scoreboard.lanes))
        self._counters: dict[int, ModelCounters] = {}
        self._batches = batches(self._answer, self._tracker, clock, report, interruptible=interruptible)
        self._recovery = self._batches.recovery
        self._limits = np.zeros(MAX_MODELS, np.uint32)
        self._arenas = np.zeros(MAX_MODELS, np.uint32)
        self._admission = native.Admission(scoreboard.lanes, self._limits, self._arenas)
        self._unserved: dict[int, tuple[Code, str]] = {}  # models that are refused with their own code and message
        self._resting: dict[int, tuple[Slot, int]] = {}  # sleeping models: slot and largest batch
        self._closed: tuple[Code, str] | None = None
        self._last: Slot | None = None
        record: Any = scoreboard.engines[index : index + 1]
        self._shown, self._computing = cell(record, "expected_wait"), cell(record, "computing")
        self._one_of_several = len(scoreboard.engines) > 1
        self._arrivals = np.zeros(_ARRIVALS, TICKET)
        self._passed_by = False  # whether the slow transports were skipped the last time

    @property
    def computed(self) -> str:
        """The name of the model, or group, that was computed last; empty before the first."""
        return self._last.served.spec.name if self._last is not None else ""

    @property
    def regions(self) -> DeviceRegions | None:
        """The rows that clients have bound to device memory; None if this engine does not support it."""
        return self._batches.regions

    @regions.setter
    def regions(self, regions: DeviceRegions) -> None:
        self._batches.regions = regions

    def add_transport(self, transport: TicketSource) -> None:
        """Add a transport to collect tickets from."""
        transport.number = max((other.number for other in self.transports), default=-1) + 1
        self.transports.append(transport)

    def remove_transport(self, transport: TicketSource) -> None:
        """Stop collecting from a transport. Tickets that came through it get no reply."""
        self.transports.remove(transport)

    def counters(self, model: int) -> ModelCounters:
        """Return the counters of a model in this engine."""
        if model not in self._counters:
            self._counters[model] = ModelCounters(self.scoreboard.counters[self.index, model : model + 1])
        return self._counters[model]

    def show_counters(self) -> None:
        """Write all counters to the scoreboard again, in case another process has overwritten them."""
        for slot in self._queues:
            slot.show_sessions()
        for counters in list(self._counters.values()):  # a copy: the model loader's thread may add an entry
            counters.show()

    def finish(self) -> None:
        """Answer all batches in flight; afterwards the device is idle."""
        self._batches.land_all()

    def forget_all(self) -> None:
        """Drop every ticket; nothing is computed afterwards.

        The senders see a new incarnation of the engine and send again.
        """
        self._batches.land_all()
        for model, slot in self.slots.items():
            self._admission.leave(self._withdraw(slot, model)[0])
            slot.counters.waiting(slot.queue.rows)

    def install(self, model: int, served: Served, min_batch: int = 1, max_wait_ns: int = 0, arena: int = 0) -> None:
        """Serve a model from the next batch on. It takes over the waiting tickets of an earlier model of its number.

        Args:
            arena: the number of the arena whose rows it computes; tickets of lanes in other arenas are refused.
        """
        queue = Queue(served.max_batch, min_batch, max_wait_ns, served.costs, served.max_cost)
        slot = Slot(served, queue, self.counters(model))
        slot.shown = model + 1
        self.put(model, slot, served.max_batch, arena)

    def put(self, model: int, slot: Slot, max_batch: int, arena: int = 0) -> None:
        """As `install`, into a slot that models may share.

        Args:
            max_batch: rows of this model's largest batch.
        """
        self._batches.land_all()
        earlier = self.slots.get(model)
        if earlier is not None and earlier is not slot:
            waiting, pinned = self._withdraw(earlier, model)
            if len(waiting):
                if int(self._arenas[model]) == arena:
                    slot.queue.push(waiting)
                    slot.queue.pinned |= pinned
                    slot.queue.ranked |= bool((waiting["priority"] != NORMAL).any())
                else:  # their rows are in an arena that the new model does not read
                    self._answer(waiting, Code.STALE_LEASE, 0, _REFUSALS[Code.STALE_LEASE])
                    slot.counters.waiting(slot.queue.rows)
            earlier.release()
        if (resting := self._resting.pop(model, None)) is not None and resting[0] is not slot:
            resting[0].release()
        self._hold(model, slot)
        self._unserved.pop(model, None)
        self._limits[model], self._arenas[model] = max_batch, arena

    def arena(self, model: int) -> int:
        """Return the number of the arena whose rows a model computes."""
        return int(self._arenas[model])

    def remove(self, model: int) -> None:
        """Stop serving a model and refuse its waiting tickets. Do nothing if it is not served."""
        self._unserved.pop(model, None)
        self._remove(model, Code.MODEL_NOT_FOUND, "")

    def refuse(self, model: int, code: Code, message: str) -> None:
        """Stop serving a model, and answer its waiting and later tickets with `code` and `message`."""
        self._remove(model, code, message)
        self._unserved[model] = (code, message)

    def rest(self, model: int, message: str) -> Slot | None:
        """Suspend a model until `resume`: it keeps its slot, but no batch uses it.

        Its waiting and later tickets are answered with Code.SLEEPING and `message`.

        Returns:
            Its slot; None if it is not served, or shares its slot with other models.
        """
        slot = self.slots.get(model)
        if slot is None or not isinstance(slot.served, Served):
            return None
        self._batches.land_all()
        self._resting[model] = slot, int(self._limits[model])
        self._limits[model] = 0
        self._unserved[model] = (Code.SLEEPING, message)
        if len(waiting := self._withdraw(slot, model)[0]):
            self._answer(waiting, Code.SLEEPING, 0, message)
        slot.counters.waiting(0)
        self._hold(model, None)
        return slot

    def resume(self, model: int) -> None:
        """Serve a model again after `rest`."""
        if (resting := self._resting.pop(model, None)) is not None:
            slot, self._limits[model] = resting
            self._unserved.pop(model, None)
            self._hold(model, slot)

    def resting(self, model: int) -> Slot | None:
        """Return the slot of a suspended model; None if it is not suspended."""
        return self._resting[model][0] if model in self._resting else None

    def _remove(self, model: int, code: Code, message: str) -> None:
        self._batches.land_all()
        self._limits[model] = 0
        if model in self._resting:
            self._resting.pop(model)[0].release()
            self._forget_counters(model)
            return
        slot = self.slots.get(model)
        if slot is None:
            return
        if len(waiting := self._withdraw(slot, model)[0]):
            self._answer(waiting, code, 0, message or f"model {slot.name(waiting)!r} was unloaded")
        slot.release()
        self._hold(model, None)
        self._forget_counters(model)

    def _withdraw(self, slot: Slot, model: int) -> tuple[NDArray[Any], bool]:
        """Remove and return a model's tickets in a slot, and whether one may ask for a weights version."""
        failed = self._batches.recovery.remove(slot, "model", model)
        pinned = slot.queue.pinned or bool(failed["version"].any())
        return np.concatenate((failed, slot.queue.withdraw(model))), pinned

    def _forget_counters(self, model: int) -> None:
        self._counters.pop(model, None)
        self.scoreboard.counters[self.index, model] = 0  # another model may get this number

    def _hold(self, model: int, slot: Slot | None) -> None:
        if slot is None:
            del self.slots[model]
        else:
            self.slots[model] = slot
        self._queues = list(dict.fromkeys(self.slots.values()))
        self._only = self._queues[0] if len(self._queues) == 1 else None

    def stop_updaters(self) -> None:
        """Stop the weights updaters, since a thread that outlives the interpreter would crash the process."""
        updaters = [slot.updater for slot in self._queues if slot.updater is not None]
        for updater in updaters:
            updater.stop()
        for updater in updaters:
            updater.join()

    def retire(self, lane: int, lease: int = 0) -> None:
        """Drop a revoked lane's waiting tickets and its lease's sessions.

        Call it between two turns, when nothing uses the lane's rows. The client may still be alive (if the model was
        replaced), so the dropped tickets are answered with Code.STALE_LEASE. Later ones are refused on arrival.
        """
        self._batches.land_all()
        if self.regions is not None:
            self.regions.forget(lease)
        for slot, _ in self._resting.values():
            slot.forget(lease)
        for slot in self._queues:
            slot.forget(lease)
            dropped = np.concatenate((self._batches.recovery.remove(slot, "lane", lane), slot.queue.drop(lane)))
            if len(dropped):
                self._answer(dropped, Code.STALE_LEASE, 0, _REFUSALS[Code.STALE_LEASE])
                slot.counters.waiting(slot.queue.rows)

    def refuse_new(self, code: Code, message: str) -> None:
        """Accept the tickets that have arrived so far; answer all later ones with `code` and `message`."""
        self._passed_by = True
        self._take_in(self._clock())
        self._closed = (code, message)

    def turn(self) -> bool:
        """Take in new tickets, and answer or begin one batch; return False if there was nothing to compute."""
        now = self._clock()
        self._take_in(now)
        slot = self._next(now)
        if slot is None:
            under_way = self._batches.under_way
            self._show_wait(under_way)
            if under_way:
                return self._batches.land()
            self._computing[0] = 0
            # An engine that was slow for a moment is asked again in the end, and then shows how fast it is.
            if self._one_of_several and (idle := now - self._batches.ended) >= _HALVES:
                self._shown[0] >>= min(idle // _HALVES, 62)
            return False
        if LOADS.running and LOADS.hold():
            return True
        self._last, queue = slot, slot.queue
        recovers, under_way = slot in self._recovery.parts, self._batches.under_way
        if under_way and not recovers and self._waits_for_those_under_way(slot):
            return self._batches.land()
        if self._tracker.away and self._pause is not None and not under_way and not recovers:
            if self._tracker.prompt:
                self._wait_for_all(slot, now)
            if self._tracker.overdue:
                self._wait_for_more(slot, now)
        if (late := queue.expired(now)) is not None:
            self._batches.expire(slot, late)
            slot.counters.waiting(queue.rows)
            if not len(queue) and not recovers:
                return True
        if recovers:
            self._show_wait(1 + under_way)
            self._computing[0] = slot.shown or self._recovery.model(slot) + 1
            self._batches.recover(slot)
            return True
        waiting = queue.rows
        pinned = queue.pinned
        tickets = queue.take()
        version = tickets["version"].item(0) if pinned else 0
        rows = waiting - (left := queue.rows)
        if left or slot.counters.left:
            slot.counters.waiting(left)
        self._show_wait(1 + under_way)
        self._computing[0] = slot.shown or tickets["model"].item(0) + 1  # names the model if it crashes the process
        self._batches.run(slot, tickets, rows, version)
        return True

    def _wait_for_more(self, slot: Slot, began: int) -> None:
        """Wait for overdue clients, up to half of the quick ones, as long as that pays (see batches.py)."""
        assert self._pause is not None
        queue, tracker = slot.queue, self._tracker
        while (overdue := tracker.overdue) and tracker.away > len(queue) and queue.rows < queue.max_batch:
            shared = self._clock() - began + slot.cost.fixed
            more = (tracker.away - len(queue) + 1) // 2  # a client that sends is no longer counted in `away`
            self._pause(shared / len(queue) / 1e9, min(more, overdue))
            if not self._take_in(self._clock()):
                tracker.stays_away()

    def _wait_for_all(self, slot: Slot, began: int) -> None:
        """Wait for the prompt clients, all of them, for as long as they took the last time (see batches.py)."""
        assert self._pause is not None
        queue, tracker, until = slot.queue, self._tracker, began + self._prompt_ns()
        while tracker.prompt and queue.rows < queue.max_batch:
            left = until - self._clock()
            if left <= 0:
                tracker.not_prompt()
                return
            self._pause(left / 1e9, tracker.prompt)
            self._take_in(self._clock())

    def _waits_for_those_under_way(self, slot: Slot) -> bool:
        """Whether the next batch is to have the clients of the one under way on the device, too (see batches.py)."""
        queue = slot.queue
        if not self._batches.prompt or queue.rows >= queue.max_batch or (prompt := self._prompt_ns()) == 0:
            return False
        spec = slot.served.spec
        row = sum(each.row_bytes for part in (spec.inputs, spec.outputs) for each in part.values())
        return queue.rows * row <= prompt * COPIED

    def _prompt_ns(self) -> int:
        """Return the time within which a client that returns is waited for; 0: none is, only up to half of the crowd.

        Not with several models: the clients of one of them fill no batch of another.
        """
        return 0 if self._only is None else self._only.cost.prompt(PROMPT)

    def ready_in(self) -> int | None:
        """Return the nanoseconds until a held-back batch is due; None if no tickets wait."""
        if self._recovery.parts:
            return 0
        due = None
        for slot in self._queues:
            if not slot.queue.rows:
                continue
            wait = slot.queue.ready_in(self._clock())
            if wait is not None and (due is None or wait < due):
                due = wait
        return due

    def _take_in(self, now: int) -> int:
        """Queue newly arrived tickets; return the number accepted."""
        accepted, came, pass_by, self._passed_by = 0, 0, not self._passed_by, False
        only = self._only
        for transport in self.transports:
            if came and pass_by and transport.slow:
                self._passed_by = True
                continue
            n = transport.collect(self._arrivals)
            if not n:
                continue
            came += n
            tickets = self._arrivals[:n]
            refused, rows, pinned, ranked = self._admission.admit(tickets, transport.number)
            if self._closed:
                self._answer(tickets, self._closed[0], 0, self._closed[1])
                continue
            if refused:
                tickets = self._refuse(tickets)
            self._tracker.came(tickets, now, QUICK * self._batches.mean_ns, self._prompt_ns())
            accepted += len(tickets)
            if only is not None and only.cache is None:
                queue = only.queue
                queue.pinned |= pinned
                queue.ranked |= ranked
                queue.push(tickets, rows)
            else:
                self._sort(tickets, rows, pinned=pinned, ranked=ranked)
        return accepted

    def _sort(self, tickets: NDArray[Any], rows: int, *, pinned: bool, ranked: bool) -> None:
        while len(tickets):
            models = tickets["model"]
            model = models.item(0)
            slot, own = self.slots[model], tickets
            # As a rule all are of one model: no mask, no copy, and their rows are counted already.
            if len(tickets) == 1 or (same := models == model).all():
                counted, tickets = rows, tickets[:0]
            else:
                counted, own, tickets = None, tickets[same], tickets[~same]
                rows = int(tickets["rows"].sum())
            if slot.cache is not None and (known := slot.cache.answer(own)) is not None:
                answered, own, counted = own[known], own[~known], None
                slot.counters.cached(slot.cache, len(answered), int(answered["rows"].sum()))
                self._answer(answered, Code.OK, slot.served.version, "")
            slot.queue.pinned |= pinned
            slot.queue.ranked |= ranked
            slot.queue.push(own, counted)

    def _next(self, now: int) -> Slot | None:
        """Return the due slot whose oldest ticket has waited longest; None if no slot is due.

        A slot with tickets of a higher priority comes first, PASSED_OVER times in a row at most (see `Queue.rank`).
        A slot that recovers from a failed batch counts as waiting since its last part was computed, so that whatever
        arrived before that comes first.
        """
        failed, only = self._recovery.parts, self._only
        if only is not None and not failed:
            queue = only.queue
            return only if queue.rows and (not queue.max_wait_ns or queue.ready_in(now) == 0) else None
        due = [slot for slot in self._queues if (slot.queue.rows and slot.queue.ready_in(now) == 0) or slot in failed]
        if len(due) == 1:
            return due[0]

        def since(slot: Slot) -> int:
            return self._recovery.since(slot) if slot in failed else int(slot.queue.waiting["submitted"][0])

        if not any(slot.queue.ranked or slot.queue.skipped for slot in due):
            return min(due, key=since, default=None)
        chosen = min(due, key=lambda slot: (slot.queue.rank, since(slot)))
        for slot in due:
            slot.queue.skipped = slot.queue.skipped + 1 if since(slot) < since(chosen) else 0
        return chosen

    def _show_wait(self, batches: int) -> None:
        """Publish the expected wait of a new ticket of few rows, for clients that choose between engines.

        Args:
            batches: the number of batches before it, without the full ones that wait.
        """
        for slot in self._queues:
            batches += slot.queue.rows // slot.queue.max_batch
        if self._recovery.parts:
            batches += len(self._recovery)
        # Not the mean for its own batch: an engine that got larger batches than another one is not slower.
        self._shown[0] = int(self._batches.mean_ns * batches + self._batches.one_ns)

    def _answer(self, tickets: NDArray[Any], code: int, version: int, message: str) -> None:
        only = self._admission.leave(tickets)
        if self._one_of_several:
            self._show_wait(self._batches.under_way)  # first: the clients that it wakes choose an engine again
        if message:
            message = plain(message)
        for transport in self.transports:
            try:
                if transport.number == only:
                    transport.reply(tickets, code, version, message)
                elif only < 0 and (mine := tickets["transport"] == transport.number).any():
                    transport.reply(tickets[mine], code, version, message)
            except Exception as error:  # noqa: BLE001  one failing transport must not keep the others' replies back
                self._report("answers not sent", error=said(error), tickets=len(tickets))

    def _refuse(self, tickets: NDArray[Any]) -> NDArray[Any]:
        refused = tickets[tickets["code"] != Code.OK]
        for model, (code, message) in self._unserved.items():
            those = (refused["code"] == Code.MODEL_NOT_FOUND) & (refused["model"] == model)
            if those.any():
                self._answer(refused[those], code, 0, message)
                refused = refused[~those]
        for code, message in _REFUSALS.items():
            if (those := refused["code"] == code).any():
                self._answer(refused[those], code, 0, message)
        for model in np.unique(refused["model"][np.isin(refused["code"], (Code.REFUSED, Code.BUSY))]):
            self.counters(int(model)).add("refused", refused[refused["model"] == model])
        accepted: NDArray[Any] = tickets[tickets["code"] == Code.OK]
        return accepted


_REFUSALS = {
    Code.STALE_LEASE: "the lane is not leased to the sender (any more): lease one again",
    Code.MODEL_NOT_FOUND: "the lane's model is not served by this engine (any more)",
    Code.BUSY: "more rows than the lane has are asked for at once: wait for answers before rows are sent again",
    Code.REFUSED: "the ticket has no rows, more than one batch holds, or rows outside its lane",
}
