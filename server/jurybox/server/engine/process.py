"""Working memory that stays: on a CPU half of an image model's time would otherwise go into page faults."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
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
from jurybox.protocol.errors import Code, Refused, plain, said
from jurybox.protocol.scoreboard import EngineState, Scoreboard
from jurybox.protocol.timings import Timings
from jurybox.server.engine.batches import Batches, Slot
from jurybox.server.engine.core import Engine, Transport
from jurybox.server.engine.device import bound_device_memory, show_device_memory
from jurybox.server.engine.device_regions import DeviceRegions
from jurybox.server.engine.model_loader import ModelLoader
from jurybox.server.engine.served import Outcome
from jurybox.server.logs import LogLimiter, configure, traced
from jurybox.server.transports import ShmTransport, ZmqTransport

# ----
# What other threads want done in the loop's thread, between two turns.


class CallbackQueue:
    """Actions in order, and a file that is readable while there are any.

    Args:
        failed: told what an action raised; the others are run all the same.
    """

    def __init__(self, failed: Callable[[BaseException], None] | None = None) -> None:
        self._failed = failed
        self._actions: list[Callable[[], None]] = []
        # List and file change together: apart, the file could be found empty, or stay readable for nothing.
        self._both = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def put(self, action: Callable[[], None]) -> None:
        """From any thread: have an action run, soon."""
        with self._both:
            self._actions.append(action)
            os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """In the loop's thread: run what there is. Next to nothing where there is nothing."""
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
        """Close the file."""
        os.close(self._wake)


# ----
# An engine that leaves for traces when the batch of a ticket began and ended (jurybox.protocol.timings).
#
# It stands around the core, so that an engine without traces runs not one instruction more.


class TracedBatches(Batches):
    """As Batches; leaves a batch's times before it answers, so that who has the answer finds them.

    Args:
        timings: where to leave them.
        engine: number to leave with them.
        parts: of Batches.
    """

    def __init__(self, timings: Timings, engine: int, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._timings = timings
        self._engine = engine

    def _computed(
        self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, began: int, outcome: Outcome | None
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
# Models are loaded by a thread beside the loop, so that those already ready are served meanwhile; a finished model is
# installed between two turns.


_HEARTBEAT = 0.25  # seconds between two signs of life of an idle engine
_MEND_NS = 250_000_000  # between two looks at what other processes may have overwritten
_ORDERS_NS = 5_000_000  # a busy engine looks at the control pipe this often
_ORDERS = 256  # carried out between two turns
_MILD = ("weights version not held", "out of memory, batches halved")


class EngineProcess:
    """One engine: builds the transports and the core from the first message, then serves until told to stop."""

    def __init__(self, control_pipe: ControlPipe, orders: dict[str, Any]) -> None:
        torch.set_num_threads(orders["threads"])
        if orders["device"] == "cpu":
            keep_freed_memory()
        bound_device_memory(torch.device(orders["device"]), orders["device_memory_mib"], orders["memory"])
        index, incarnation = orders["index"], orders["incarnation"]
        self._log = configure(f"engine-{index}", orders["log_level"], orders["log_format"])
        self._control_pipe = control_pipe
        self._sending = threading.Lock()
        self._scoreboard = Scoreboard.attach(orders["scoreboard"])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Whatever can come as often as somebody likes is logged once a second, with a count.
        self._warnings, self._errors = LogLimiter(self._log.warning), LogLimiter(self._log.error)
        self._callbacks = CallbackQueue(self._went_wrong)
        self._zmq = ZmqTransport(self._context, orders["address"], incarnation, self._warnings)
        others = [self._zmq.fileno(), control_pipe.fileno(), self._callbacks.fileno()]
        self._shm = ShmTransport(orders["rings"], others, incarnation, orders["spin_us"])
        self._timings = Timings.attach(orders["timings"], writable=True) if orders["timings"] else None
        self._engine = self._new_engine(index)
        self._loader = ModelLoader(
            torch.device(orders["device"]),
            self._tell,
            self._callbacks.put,
            self._engine,
            self._log.warning,
            orders["factories"],
        )
        self._regions = DeviceRegions(torch.device(orders["device"]))
        self._loader.regions = self._regions
        for order in orders["bindings"]:
            self._engine.regions = self._regions
            with contextlib.suppress(Refused):  # its tickets are refused with the reason
                self._regions.bind(order)
        # The record has one writer, which is this process. Others can write to it, so it is written anew all the time.
        self._words = self._scoreboard.engine_words(index)
        self._record = self._scoreboard.engines[index : index + 1]
        self._incarnation, self._state_and_pid = incarnation, 0
        self._state(EngineState.LOADING)
        show_device_memory(torch.device(orders["device"]), self._scoreboard.engines[index : index + 1])
        # Clients are sent here once every model of the configuration is ready, or has failed.
        self._loading = {order["model"] for order in orders["models"]}
        for order in orders["models"]:
            self._loader.load(order["model"], order["load"], order["name"], order["settings"])
        for order in orders["refused"]:
            self._engine.refuse(order["model"], Code(order["code"]), order["reason"])
        if not self._loading:  # every model was unloaded before its predecessor died
            self._serve()
        self._draining = False
        self._stopped = False
        self._paused, self._standing = orders["paused"], False

    def _new_engine(self, index: int) -> Engine:
        transports: list[Transport] = [self._shm, self._zmq]
        batches = Batches if self._timings is None else partial(TracedBatches, self._timings, index)
        return Engine(self._scoreboard, index, transports, pause=self._shm.pause, report=self._report, batches=batches)

    def _report(self, event: str, **fields: Any) -> None:
        (self._warnings if event in _MILD else self._errors)(event, **fields)

    def _went_wrong(self, error: BaseException) -> None:
        self._log.error("an action failed", error=said(error), exception=traced(error))

    def serve(self) -> None:
        """Serve until the control pipe ends or says stop."""
        exact_sleeps()
        with torch.inference_mode():
            self._loop()
        self._engine.stop_updaters()
        self._regions.close()
        self._state(EngineState.STOPPED)
        self._zmq.close()
        self._shm.close()
        self._context.term()

    def _loop(self) -> None:
        engine, next_look, next_mend = self._engine, 0, 0
        if self._paused:
            self._stand_by()
        while not self._stopped:
            busy = engine.turn() or self._sleep()
            now = time.monotonic_ns()
            if busy and now < next_look:
                continue  # a ticket that just came does not wait for what can wait
            next_look = now + _ORDERS_NS
            self._beat(now)
            if now >= next_mend:
                next_mend = now + _MEND_NS
                self._mend()
            self._obey()

    def _sleep(self) -> bool:
        """Wait for tickets, orders, or a batch that is held back; True where tickets came and nothing else."""
        due = self._engine.ready_in()
        if due is None and self._draining:
            self._tell("drained")
            self._draining = False
        timeout = _HEARTBEAT if due is None else min(due / 1e9, _HEARTBEAT)
        return self._zmq.may_sleep() and self._shm.wait(timeout)

    def _obey(self) -> None:
        """Carry out what the supervisor ordered and what the model loader finished."""
        for _ in range(_ORDERS):
            try:
                order = self._control_pipe.receive(0)
            except EOFError:
                self._stopped = True
                break
            except ValueError as error:  # no JSON: what it was cannot be known, and the next may be one
                self._log.error("an order came that is none", error=said(error))
                continue
            if order is None:
                break
            try:
                self._carry_out(order)
            except Exception as error:  # noqa: BLE001  an order that fails is answered; it must not end the engine
                self._refuse(order, error)
        self._callbacks.run()
        self._warnings.flush()
        self._errors.flush()

    def _refuse(self, order: dict[str, Any], error: Exception) -> None:
        kind = plain(order.get("kind") if isinstance(order, dict) else order, 200)
        self._log.error("an order failed", order=kind, error=said(error), exception=traced(error))
        with contextlib.suppress(OSError):  # the supervisor is gone, which the next look finds out
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
        """Open device memory of a client, or let go of it: between two batches, when none is under way."""
        self._engine.finish()
        self._engine.regions = self._regions
        reason = ""
        try:
            if order["kind"] == "bind":
                self._regions.bind(order)
            else:
                self._regions.unbind(order["lease"], order["first"])
        except Exception as error:  # noqa: BLE001  a client's handle, whatever it is
            reason = said(error)
        self._tell("bound", lease=order["lease"], first=order["first"], reason=reason)

    def _stand_by(self) -> None:
        """Compute nothing until told to go on; orders are carried out, weights adopted, and tickets wait outside."""
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
        """A model is not to be loaded any more, should it just be."""
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
        """Incarnation, heartbeat, state and process id; the expected wait between them is the core's to write."""
        words = self._words
        words[0], words[1], words[3] = self._incarnation, now, self._state_and_pid

    def _mend(self) -> None:
        """Write anew what others can write to. Where tickets or answers may have got lost, begin another life."""
        self._engine.show_counters()
        if overwritten := self._shm.mend():
            self._log.error(
                "another process wrote to the tickets' memory; all that are in flight are asked for again",
                lanes=overwritten,
            )
            self._engine.forget_all()
            self._incarnation = secrets.randbits(62) | 1
            self._shm.renew(self._incarnation)
            self._zmq.renew(self._incarnation)
            self._beat(time.monotonic_ns())


def run(control_pipe: ControlPipe) -> int:
    """The engine's main: the first message configures it, and may be long in coming to one on standby."""
    if (orders := configuration(control_pipe)) is not None:
        EngineProcess(control_pipe, orders).serve()
    return 0
