"""The engine's process: its callback queue, its traced batches, and the loop that serves tickets and orders."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import zmq
from numpy.typing import NDArray

from jurybox import native
from jurybox.processes import ControlPipe, configuration, exact_sleeps, keep_freed_memory
from jurybox.processes.surroundings import Surroundings
from jurybox.protocol.errors import Code, Refused, plain, said
from jurybox.protocol.scoreboard import EngineState, Scoreboard
from jurybox.protocol.timings import Timings
from jurybox.server.engine.batches import Batches, Slot
from jurybox.server.engine.core import Engine, TicketSource
from jurybox.server.engine.device import (
    DeviceLost,
    bound_device_memory,
    engine_device,
    show_device_memory,
    use_device,
)
from jurybox.server.engine.device_regions import DeviceRegions
from jurybox.server.engine.loads import LOADS
from jurybox.server.engine.model_code import look_in
from jurybox.server.engine.model_loader import ModelLoader
from jurybox.server.engine.served import BatchOutcome
from jurybox.server.logs import LogLimiter, configure, traced
from jurybox.server.transports import ShmTickets, ZmqTickets

# ----
# Actions of other threads, to be run in the loop's thread between two turns.


class CallbackQueue:
    """A queue of actions with a file descriptor that is readable while the queue is not empty.

    Args:
        failed: called with the exception of an action; the others run all the same. None: `run` raises it.
    """

    def __init__(self, failed: Callable[[BaseException], None] | None = None) -> None:
        self._failed = failed
        self._actions: list[Callable[[], None]] = []
        # List and eventfd change under one lock. Otherwise the eventfd could be empty when `run` reads it, or stay
        # readable with no action queued.
        self._both = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def put(self, action: Callable[[], None]) -> None:
        """Queue an action. Thread-safe."""
        with self._both:
            self._actions.append(action)
            os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Run all queued actions. Call it in the loop's thread; it costs next to nothing if the queue is empty."""
        if not self._actions:
            return
        with self._both:
            actions, self._actions = self._actions, []
            os.eventfd_read(self._wake)
        for action in actions:
            try:
                action()
            except BaseException as error:
                if self._failed is None:
                    raise
                self._failed(error)

    def close(self) -> None:
        """Close the file descriptor."""
        os.close(self._wake)


# ----
# Batches that record for traces when each ticket's batch began and ended (jurybox.protocol.timings).
#
# It is a subclass, so that an engine without traces runs no additional instructions.


class TracedBatches(Batches):
    """As Batches; writes a batch's times before its tickets are answered, so that a client with its answer finds them.

    Args:
        timings: where the times are written.
        engine: the engine's number, written with them.
        parts, more: the arguments of Batches.
    """

    def __init__(self, timings: Timings, engine: int, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._timings = timings
        self._engine = engine

    def _computed(
        self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, began: int, outcome: BatchOutcome | None
    ) -> None:
        self._timings.write(
            tickets,
            began=began,
            ended=self._clock(),
            engine=self._engine,
            batch_rows=rows,
            batch_tickets=len(tickets),
        )
        super()._computed(slot, tickets, rows, version, began, outcome)


# ----
# The engine's process: settings and orders from the control pipe, tickets from the transports, one loop.
#
# Models are loaded by a thread beside the loop, so that those already in service are served meanwhile. A loaded model
# is installed between two turns.


# Seconds after which a thread that runs Python gives the loop its turn. With Python's own 5 ms, a model that is loaded
# delays each request of the others by as much several times.
_SWITCH = 0.0005
_HEARTBEAT = 0.25  # seconds between two heartbeats of an idle engine
_MEND_NS = 250_000_000  # between two checks of the memory that other processes may have overwritten
_ORDERS_NS = 5_000_000  # between two reads of the control pipe by a busy engine
_CHECK_NS = 50_000_000  # between two looks at what forwards changed for the process, of ten microseconds or more
_ORDERS = 256  # the most orders carried out between two turns
_CHANGED = "a forward changed what other models compute in, it was set back"
_MILD = ("weights version not held", "out of memory, batches halved", _CHANGED)


class EngineProcess:
    """One engine: builds the transports and the core from the first message, then serves until it is stopped."""

    def __init__(self, control_pipe: ControlPipe, orders: dict[str, Any]) -> None:
        torch.set_num_threads(orders["threads"])
        self._device = engine_device(orders["device"])
        if self._device.type == "cpu":  # page faults would otherwise take half of an image model's time
            keep_freed_memory()
        use_device(self._device)
        bound_device_memory(self._device, orders["device_memory_mib"], orders["memory"])
        index, incarnation = orders["index"], orders["incarnation"]
        self._log = configure(f"engine-{index}", orders["log_level"], orders["log_format"])
        self._control_pipe = control_pipe
        self._sending = threading.Lock()
        self._scoreboard = Scoreboard.attach(orders["scoreboard"])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Events that others can cause at any rate are logged once a second, with a count.
        self._warnings, self._errors = LogLimiter(self._log.warning), LogLimiter(self._log.error)
        self._callbacks = CallbackQueue(self._went_wrong)
        self._zmq = ZmqTickets(self._context, orders["address"], incarnation, self._warnings)
        others = [self._zmq.fileno(), control_pipe.fileno(), self._callbacks.fileno()]
        self._shm = ShmTickets(orders["rings"], others, incarnation, orders["spin_us"])
        self._timings = Timings.attach(orders["timings"], writable=True) if orders["timings"] else None
        self._engine = self._new_engine(index)
        look_in(orders["folder"])
        self._loader = ModelLoader(
            self._device,
            self._tell,
            self._callbacks.put,
            self._engine,
            self._log.warning,
            self._log.debug,
            orders["factories"],
            lambda: self._beat(time.monotonic_ns()),
        )
        self._regions = DeviceRegions(self._device)
        self._loader.regions = self._regions
        for order in orders["bindings"]:
            self._engine.regions = self._regions
            with contextlib.suppress(Refused):  # tickets for these rows are refused with the reason
                self._regions.bind(order)
        # This process is the record's only writer. Others can overwrite it, so it is rewritten periodically.
        self._words = self._scoreboard.engine_words(index)
        self._record = self._scoreboard.engines[index : index + 1]
        self._incarnation, self._state_and_pid = incarnation, 0
        self._state(EngineState.LOADING)
        show_device_memory(self._device, self._scoreboard.engines[index : index + 1])
        # The engine gets clients once every model of the configuration is ready or has failed.
        self._loading = {order["model"] for order in orders["models"]}
        for order in orders["models"]:
            self._loader.load(order["model"], order["load"], order["name"], order["settings"])
        for order in orders["refused"]:
            self._engine.refuse(order["model"], Code(order["code"]), order["reason"])
        if not self._loading:  # all models were unloaded before the previous engine died
            self._serve()
        self._draining = False
        self._stopped = False
        self._paused, self._standing = orders["paused"], False

    def _new_engine(self, index: int) -> Engine:
        transports: list[TicketSource] = [self._shm, self._zmq]
        kind = Batches if self._timings is None else partial(TracedBatches, self._timings, index)
        batches = partial(kind, device=self._device)
        return Engine(self._scoreboard, index, transports, pause=self._shm.pause, report=self._report, batches=batches)

    def _report(self, event: str, **fields: Any) -> None:
        (self._warnings if event in _MILD else self._errors)(event, **fields)

    def _went_wrong(self, error: BaseException) -> None:
        if isinstance(error, DeviceLost):
            raise error
        self._log.error("an action failed", error=said(error), exception=traced(error))

    def serve(self) -> None:
        """Serve until the control pipe is closed or the order "stop" arrives.

        Raises:
            DeviceLost: this process cannot use its device any more. Another one, which the supervisor starts, can.
        """
        exact_sleeps()
        sys.setswitchinterval(_SWITCH)
        try:
            with torch.inference_mode():
                self._loop()
        except DeviceLost as lost:
            self._record["computing"] = lost.shown  # the death counts for this model
            self._log.error("device lost, the engine ends", error=said(lost), exception=traced(lost))
            raise
        self._engine.stop_updaters()
        self._regions.close()
        self._state(EngineState.STOPPED)
        self._zmq.close()
        self._shm.close()
        self._context.term()

    def _loop(self) -> None:
        engine, next_look, next_mend, next_check = self._engine, 0, 0, 0
        surroundings = Surroundings()
        if self._paused:
            self._stand_by()
        while not self._stopped:
            busy = engine.turn() or self._sleep()
            now = time.monotonic_ns()
            if busy and now < next_look:
                continue  # serve tickets first; orders and heartbeats can wait
            next_look = now + _ORDERS_NS
            mends = now >= next_mend
            if (mends or now >= next_check) and not LOADS.running:
                next_check = now + _CHECK_NS
                if changed := surroundings.restore(slow=mends):
                    self._report(_CHANGED, model=engine.computed, changed=", ".join(changed))
            self._beat(now)
            if mends:
                next_mend = now + _MEND_NS
                self._mend()
            self._obey()

    def _sleep(self) -> bool:
        """Wait for tickets, for orders, or until a held-back batch is due; return True if only tickets arrived."""
        due = self._engine.ready_in()
        if due is None and self._draining:
            self._tell("drained")
            self._draining = False
        timeout = _HEARTBEAT if due is None else min(due / 1e9, _HEARTBEAT)
        return self._zmq.may_sleep() and self._shm.wait(timeout)

    def _obey(self) -> None:
        """Carry out the supervisor's orders and run the queued callbacks."""
        for _ in range(_ORDERS):
            try:
                order = self._control_pipe.receive(0)
            except EOFError:
                self._stopped = True
                break
            except ValueError as error:  # not JSON: skip it, since the next message may be valid
                self._log.error("a message is not an order", error=said(error))
                continue
            if order is None:
                break
            try:
                self._carry_out(order)
            except DeviceLost:
                raise
            except Exception as error:  # noqa: BLE001  a failed order is reported; it must not end the engine
                self._refuse(order, error)
        self._callbacks.run()
        self._warnings.flush()
        self._errors.flush()

    def _refuse(self, order: dict[str, Any], error: Exception) -> None:
        kind = plain(order.get("kind") if isinstance(order, dict) else order, 200)
        self._log.error("an order failed", order=kind, error=said(error), exception=traced(error))
        with contextlib.suppress(OSError):  # the supervisor is gone: the next read of the pipe raises EOFError
            self._tell("order failed", order=kind, reason=said(error))

    def _carry_out(self, order: dict[str, Any]) -> None:
        match order["kind"]:
            case "load":
                self._loader.load(order["model"], order["load"], order["name"], order["settings"])
            case "arena":
                self._loader.arena(
                    order["model"], order["load"], order["segment"], order["number"], order["rows"], order["weights"]
                )
            case "abandon":
                self._loader.abandon(order["model"], order["load"], order["reason"])
            case "unload":
                self._let_go(order["model"])
                self._engine.remove(order["model"])
                self._tell("unloaded", model=order["model"])
            case "refuse":
                self._let_go(order["model"])
                self._engine.refuse(order["model"], Code.MODEL_FAILED, order["reason"])
            case "sleep":
                self._loader.sleep(order["model"], order["load"], order["reason"])
            case "wake":
                self._loader.wake(order["model"], order["load"])
            case "retire":
                self._engine.retire(order["lane"], order["lease"])
                self._tell("retired", lane=order["lane"], lease=order["lease"])
            case "bind" | "unbind":
                self._bind(order)
            case "pause":
                self._paused = order["pause"]
                if self._paused and not self._standing:
                    self._stand_by()
            case "drain":
                self._paused = False
                self._engine.refuse_new(Code.DRAINING, "the server is stopping; it takes no new requests")
                self._draining = True
                self._state(EngineState.DRAINING)
            case "stop":
                self._stopped = True
            case unknown:
                raise ValueError(f"unknown order {unknown!r}")

    def _bind(self, order: dict[str, Any]) -> None:
        """Bind a client's device memory, or release it. No batch is in flight meanwhile."""
        self._engine.finish()
        self._engine.regions = self._regions
        reason = ""
        try:
            if order["kind"] == "bind":
                self._regions.bind(order)
            else:
                self._regions.unbind(order["lease"], order["first"])
        except Exception as error:  # noqa: BLE001  a client's handle may be anything
            reason = said(error)
        ends = order["kind"] == "unbind"
        self._tell("bound", lease=order["lease"], first=order["first"], ends=ends, reason=reason)

    def _stand_by(self) -> None:
        """Compute nothing until the pause ends. Orders are carried out, weights are updated, and tickets wait."""
        self._engine.finish()
        self._standing = True
        ears = select.poll()
        for source in (self._control_pipe, self._callbacks):
            ears.register(source.fileno(), select.POLLIN)
        self._record["paused"] = 1
        while self._paused and not self._stopped:
            self._beat(time.monotonic_ns())
            ears.poll(int(_HEARTBEAT * 1000))
            self._obey()
        self._record["paused"] = 0
        self._standing = False

    def _let_go(self, model: int) -> None:
        """Drop a model that may still be loading; the engine no longer waits for it before it serves."""
        self._loader.unload(model)
        with self._sending:
            self._settled(model)

    def _tell(self, kind: str, **fields: Any) -> None:
        with self._sending:
            self._control_pipe.send(kind, **fields)
            if kind in ("ready", "failed"):
                self._settled(fields["model"])

    def _settled(self, model: int) -> None:
        if self._loading:
            self._loading.discard(model)
            if not self._loading:
                self._serve()

    def _serve(self) -> None:
        if self._state_and_pid & 0xFFFFFFFF == EngineState.DRAINING:
            return
        self._state(EngineState.SERVING)
        self._control_pipe.send("serving")

    def _state(self, state: EngineState) -> None:
        self._state_and_pid = state | os.getpid() << 32
        self._words[0], self._words[1] = self._incarnation, time.monotonic_ns()
        self._record["pid"] = os.getpid()
        native.show_state(self._record, int(state))

    def _beat(self, now: int) -> None:
        """Write incarnation, heartbeat, state and process id. The core writes the word between, the expected wait."""
        words = self._words
        words[0], words[1], words[3] = self._incarnation, now, self._state_and_pid

    def _mend(self) -> None:
        """Rewrite memory that other processes can overwrite.

        If tickets or answers may have been lost by it, begin a new incarnation, so that clients send again.
        """
        self._engine.show_counters()
        if overwritten := self._shm.mend():
            self._log.error(
                "another process wrote to the tickets' memory; clients send all tickets in flight again",
                lanes=overwritten,
            )
            self._engine.forget_all()
            self._incarnation = secrets.randbits(62) | 1
            self._shm.renew(self._incarnation)
            self._zmq.renew(self._incarnation)
            self._beat(time.monotonic_ns())


def run(control_pipe: ControlPipe) -> int:
    """Run the engine's process; return its exit status.

    The first message configures it. For an engine on standby it may arrive late.
    """
    if (orders := configuration(control_pipe)) is not None:
        try:
            EngineProcess(control_pipe, orders).serve()
        except DeviceLost:
            return 1
    return 0
