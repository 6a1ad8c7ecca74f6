"""The supervisor's loop: it starts the children, handles their messages, and stops everything in order."""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq
from numpy.typing import NDArray

from jurybox.protocol.address import ipc_path
from jurybox.protocol.errors import Error, Refused, SpecMismatch, asleep, plain, said
from jurybox.protocol.scoreboard import LANE_LOCK, Scoreboard
from jurybox.protocol.segment import is_locked, segment_name, sweep
from jurybox.protocol.spec import ModelSpec, specs_from_plain
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.wire import BEREFT
from jurybox.server.doctor.packages import unsatisfied
from jurybox.server.logs import Log, LogLimiter, traced
from jurybox.server.memory import MemoryKills
from jurybox.server.settings.config import Configuration, ModelSettings
from jurybox.server.settings.loadable import named_factories
from jurybox.server.supervisor.children import Child, Watchdog, killed_from_outside, services
from jurybox.server.supervisor.control import ControlHandlers, ControlSocket, Events
from jurybox.server.supervisor.dialect_fit import require_answerable
from jurybox.server.supervisor.engines import Engines
from jurybox.server.supervisor.leases import Leases
from jurybox.server.supervisor.models import HeldModel, Models
from jurybox.server.supervisor.robot_fit import require_steerable
from jurybox.server.supervisor.segment_server import SegmentServer
from jurybox.server.supervisor.service_manager import ServiceManager
from jurybox.server.supervisor.weights_saver import WeightsSaver

_TICK = 0.25  # seconds between two checks of heartbeats and leases
_PAUSED = 2.0  # seconds between two ticks from which on this process counts as having been stopped
_SETTLED = 60.0  # seconds of service after which a child's failures are forgotten
_STOP = 3.0  # seconds a child gets to stop
# The share of drain_timeout after which engines take no new tickets, even if gateway or relay still have requests.
_DOORS_SHARE = 0.8
# A model that was being computed at every one of several kills from outside is quarantined when their number exceeds
# this multiple of the limit for other deaths.
_CHANCE = 3
_DEAD_BY_THEN = 5.0  # seconds; a server that was killed just before the start has lost its locks by then
_SELDOM = ("grpc_http2", "robots", "dialects")  # logged only where there are any
_STOPPED, _COULD_NOT_START, _CHILD_LOST = 0, 3, 4  # exit statuses


class Supervisor:
    """Owns all shared resources of a server. Runs until a signal, or until a child can no longer be restarted."""

    def __init__(self, settings: Configuration, signals: socket.socket, log: Log, events: Events) -> None:
        self._all = settings
        self._settings = server = settings.server
        self._signals = signals
        self._log = log
        self._limited = LogLimiter(log.error)  # for events that others can cause at any rate
        self._poller = zmq.Poller()
        self._memory_kills = MemoryKills()
        self._short = ""  # what was short of memory at the last death of a child for lack of it
        self._weights_saver = WeightsSaver(log.error)
        self._computed: dict[int, NDArray[Any]] = {}  # engine -> batches of each model before its current start
        self._postponed: list[tuple[int, dict[str, Any]]] = []  # (engine, "loaded"), until their folder is free
        self._begun: dict[int, tuple[int, int]] = {}  # engine -> (model, load) that its model loader is working on
        # engine -> (the model computed at its last kills from outside, how many these were)
        self._killed: dict[int, tuple[int, int]] = {}
        self._exit: int | None = None
        self._drain_until: float | None = None
        self._doors_until = 0.0
        self._announced = False
        server_id = secrets.token_hex(4)
        engines = settings.engines()
        with contextlib.ExitStack() as undo:
            self._segments = segments = SegmentServer(server_id)
            undo.callback(segments.close)
            name = segment_name(server_id, "scoreboard")
            self._scoreboard = scoreboard = Scoreboard.create(name, len(engines), time.time(), segments.create)
            self._leases = Leases(
                scoreboard, lambda lane: is_locked(scoreboard.segment.fd, LANE_LOCK + lane), time.monotonic
            )
            self._models = Models(server_id, scoreboard, segments.create, [engine.python for engine in engines])
            for name, model in settings.models.items():
                self._models.add(name, model)
            self._engines = Engines(
                server,
                engines,
                server_id,
                scoreboard,
                self._models,
                segments,
                named_factories(settings),
                settings.folder,
            )
            self._control = ControlHandlers(
                settings,
                server_id,
                scoreboard,
                self._models,
                self._leases,
                self._engines,
                self._weights_saver,
                events,
                segments.sizes,
            )
            self._services = services(settings, self._control.listening)
            self._standbys = {child.standby for child in self._children() if child.standby is not None}
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(self._context.destroy, linger=0)  # collected with an open socket, it would wait for ever
            try:
                self._control_socket = ControlSocket(
                    self._context, server.address, self._control.handlers, self._limited
                )
            except zmq.ZMQError as error:
                raise Refused(f"cannot bind {server.address}: {error.strerror}") from error
            self._manager = ServiceManager(log.warning)
            self._watchdog = Watchdog(scoreboard, server.engine_timeout, server.start_timeout, time.monotonic())
            undo.pop_all()
        self._sweep_at = time.monotonic() + _DEAD_BY_THEN
        self._ticked = time.monotonic()

    def run(self, rehearsed: Configuration | None = None) -> int:
        """Start the children, serve, and return the exit status.

        Args:
            rehearsed: in a dry run, which ends when the models have loaded, the settings of the server that is tried.
        """
        self._poller.register(self._control_socket.socket, zmq.POLLIN)
        self._poller.register(self._signals, zmq.POLLIN)
        try:
            for child in self._children():
                self._start(child)
            give_up = time.monotonic() + self._settings.start_timeout
            next_tick = 0.0
            while self._exit is None:
                self._listen(_TICK)
                now = time.monotonic()
                if now >= next_tick:
                    self._survive("tick", self._tick, now)
                    next_tick = now + _TICK
                    self._limited.flush()
                if not self._announced and self._exit is None:
                    self._announce(rehearsed, late=now > give_up)
            return self._exit
        except (Error, OSError) as error:
            self._log.error("failed", error=str(error))
            return _COULD_NOT_START if not self._announced else 1
        finally:
            self._close()

    def _listen(self, timeout: float) -> None:
        for child in self._children():
            if child.alive:
                self._poller.register(child.fileno(), zmq.POLLIN | (zmq.POLLOUT if child.orders_waiting else 0))
        ready = {source for source, _ in self._poller.poll(int(timeout * 1000))}
        if self._signals.fileno() in ready:
            self._on_signals(len(self._signals.recv(64)))
        for child in self._children():
            if child.alive and child.fileno() in ready:
                child.send_waiting()
                self._survive(f"hearing {child.role}", self._hear, child)
        self._survive("control requests", self._control_socket.answer_waiting)

    def _survive(self, what: str, part: Callable[..., None], *arguments: Any) -> None:
        """Run a part of the loop. An exception is logged, and the loop continues.

        Raises:
            Error, OSError: before the server serves, when the caller can report it.
        """
        try:
            part(*arguments)
        except Exception as error:
            if not self._announced and isinstance(error, (Error, OSError)):
                raise
            self._limited("a part of the loop failed", part=what, error=said(error), exception=traced(error))

    def _tick(self, now: float) -> None:
        self._tell_manager()
        if (paused := now - self._ticked) > _PAUSED:  # no keep request could be read meanwhile
            for held in self._models:
                held.until = None if held.until is None else held.until + paused
        self._ticked = now
        if self._scoreboard.restore():
            self._log.warning("another process wrote to the server's scoreboard; its contents are restored")
        if self._announced and self._drain_until is None:
            for child, why in self._watchdog.hanging(self._engines.engines, self._services, now):
                self._log.error("child hangs, killing it", role=child.role, why=why)
                child.kill()
        for child in self._children():
            if child.alive and child.exited:
                self._hear(child, over=True)
        if self._drain_until is None:
            for child in self._children():
                if not child.alive and now >= child.restart_at:
                    self._start(child)
            self._prepare(now)
        elif now > self._drain_until:
            self._log.warning("draining took too long, stopping")
            self._exit = _STOPPED
        elif now > self._doors_until:
            self._drain_engines()
        if now > self._sweep_at:
            self._sweep_again()
        for name in self._models.look(now):
            self._log.warning("another process wrote to a weights channel; it is restored where possible", model=name)
        for lane in self._leases.reclaim(self._engines.living()):
            self._log.info("client gone, rows taken back", lane=lane.lane, rows=lane.rows)
            self._control.forget(lane)
            if (left := self._models.numbered(lane.model)) is not None and left.until is not None:
                left.until = min(left.until, now + BEREFT)  # a keeper that lives asks again before
        if self._control.look_at_pause():
            self._log.warning("the process that paused the engines is gone, resuming them")
        for held in self._models.given_up(now):
            self._log.info("no client keeps this model any more, unloading it", model=held.name)
            self._control.let_go(held)
        for held in self._models:
            self._control.let_go_of_loads(held)
        self._models.close_replaced({lane.model for lane in self._leases.in_use() if lane.retiring is not None})
        postponed, self._postponed = self._postponed, []
        for index, message in postponed:
            self._on_loaded(index, message)

    def _tell_manager(self) -> None:
        if not self._announced:
            waiting = [child.role for child in self._children() if not child.serving]
            self._manager.starting(f"loading, waiting for {', '.join(waiting)}")
            return  # the manager's watchdog begins with READY
        if self._drain_until is not None:
            self._manager.draining()
        self._manager.alive()

    def _tell_stopping(self) -> None:
        self._manager.draining()
        self._manager.alive()

    def _sweep_again(self) -> None:
        self._sweep_at = float("inf")
        try:
            if stale := sweep():
                self._log.warning("removed shared memory of dead owners", segments=len(stale))
        except OSError as error:  # no descriptor left; the next server sweeps at its start
            self._log.warning("cannot look for shared memory of dead owners", error=str(error))

    def _children(self) -> list[Child]:
        return [*self._engines.engines, *self._services]

    def _start(self, child: Child) -> None:
        if child not in self._services:
            index = self._engines.engines.index(child)
            self._computed[index] = self._scoreboard.counters["batches"][index].copy()
        try:
            child.start(time.monotonic())
        except (Error, OSError) as error:
            if not self._announced:
                raise
            # The other children go on. Memory or files may become free; a new server would lack them, too.
            self._log.error("cannot start a child yet", role=child.role, error=str(error))
            return
        self._log.debug("started", role=child.role, child=child.pid)

    def _prepare(self, now: float) -> None:
        """Start standby processes if configured, but not while children start."""
        if not all(child.serving for child in self._children()):
            return
        for standby in self._standbys:
            try:
                standby.look(now)
            except OSError as error:
                self._log.warning("cannot start a standby process yet", error=str(error))

    def _hear(self, child: Child, *, over: bool = False) -> None:
        """Handle a child's messages; `over`: its process has ended, so these are the last."""
        fd = child.fileno()
        try:
            for message in child.messages():
                try:
                    if child in self._services:
                        self._on_network_process(child, message)
                    else:
                        self._on_engine(self._engines.engines.index(child), message)
                except Exception as error:  # noqa: BLE001  one bad message must not end the server or lose the next
                    self._limited(
                        "a message of a child failed",
                        role=child.role,
                        kind=plain(message.get("kind"), 100),
                        error=said(error),
                        exception=traced(error),
                    )
            if over:
                raise EOFError
        except EOFError:
            self._poller.unregister(fd)
            self._on_death(child)

    def _on_death(self, child: Child) -> None:
        now = time.monotonic()
        settled = child.serving and now - child.started_at > _SETTLED
        served, by_supervisor = now - child.served_at if child.serving else 0.0, child.killed_by_supervisor
        status = child.reap(now, settled_after=_SETTLED)
        short = self._memory_kills.look()
        outside = killed_from_outside(
            status, served, by_supervisor=by_supervisor, memory=self._memory_kills, short=short
        )
        charged = None
        if child not in self._services:
            index = self._engines.engines.index(child)
            charged = self._charge(index, settled=settled, outside=outside)
            if charged is not None:
                self._leases.charge(charged.index)  # before clients can see that the engine is dead
            self._engines.died(index)
            self._leases.engine_died(index)
            for held in self._models:
                held.engine_died(index)
        if self._drain_until is not None:
            self._go_on_draining()
            return
        why = {"charged_to": charged.name} if charged else {}
        if short and status == -signal.SIGKILL and not by_supervisor:
            why["reason"] = self._short = short
        if status > 0 and charged is None and not self._announced:
            why |= unsatisfied()  # an import that failed is the likely reason, and what it says names no remedy
        self._log.error("child died", role=child.role, status=status, failures=child.failures, **why)
        if charged is not None:
            child.failures -= 1  # the death counts for the model instead
            if charged.deaths[index] > self._settings.max_restarts:
                self._quarantine(charged)
        elif outside:
            child.excuse_last_death(now)
        elif child.failures > self._settings.max_restarts:
            more = {**self._memory(), **(unsatisfied() if status > 0 and self._announced else {})}
            self._log.error("gave up on a child", role=child.role, failures=child.failures, **more)
            self._exit = _CHILD_LOST if self._announced else _COULD_NOT_START
            return
        if time.monotonic() >= child.restart_at:
            self._start(child)  # now, not at the next tick: clients may wait for its answers

    def _charge(self, index: int, *, settled: bool, outside: bool) -> HeldModel | None:
        """Charge an engine's death to the model that it was loading or computing; return that model, or None.

        After a kill from `outside`, a model that this engine had computed before is not charged, and all counts of
        this engine start anew. It is charged nevertheless if it was being computed at many such kills in a row: kills
        at random would have met another model, or none.
        """
        model, load = self._begun.pop(index, (int(self._scoreboard.engines["computing"][index]) - 1, 0))
        held = self._models.numbered(model)
        if held is not None and load and held.loads.get(index) != load:
            held = None
        if outside and not load and (held is None or self._has_computed(index, model)):
            last, times = self._killed.get(index, (-1, 0))
            times = times + 1 if model == last and held is not None and not settled else 1
            self._killed[index] = model, times
            if held is None or times <= _CHANCE * (self._settings.max_restarts + 1):
                held = None
                for each in self._models:
                    each.deaths.pop(index, None)
            else:
                del self._killed[index]
                held.deaths[index] = times - 1
        if held is None:
            return None
        held.deaths[index] = 1 if settled else held.deaths.get(index, 0) + 1
        return held

    def _has_computed(self, index: int, model: int) -> bool:
        """Return whether an engine has computed a batch of a model since it started."""
        return bool(self._scoreboard.counters["batches"][index, model] != self._computed[index][model])

    def _memory(self) -> dict[str, str]:
        """Return the field of a log event that says what was short of memory, if a child has died for lack of it."""
        return {"reason": self._short} if self._short else {}

    def _quarantine(self, held: HeldModel) -> None:
        """Quarantine a model that ends one engine after another, so that the others are served."""
        deaths = sum(held.deaths.values())
        short = f" ({self._short})" if self._short else ""
        held.quarantined = (
            f"model {held.name!r} is in quarantine: {deaths} engines died in a row while they computed or loaded "
            f"it{short}. It is served again once it is loaded again, server.load({held.name!r}); see the server's log"
        )
        held.engines = dict.fromkeys(self._engines.of(held), "quarantined")
        held.placed.clear()
        self._engines.order("refuse", model=held.index, reason=held.quarantined)
        self._log.error("model in quarantine", model=held.name, deaths=deaths, **self._memory())

    def _on_network_process(self, child: Child, message: dict[str, Any]) -> None:
        child.heard_at = time.monotonic()
        if message["kind"] == "ready":
            child.serves(child.heard_at)
            if self._drain_until is not None:
                child.send("drain")
            reported = ("http", "grpc", "grpc_http2", "tcp", "robots", "dialects")
            self._control.listening.update({key: message[key] for key in reported if key in message})
        elif message["kind"] == "alive":
            self._control.relay = message.get("relay", self._control.relay)
        elif message["kind"] == "drained":
            child.drained = True
            self._go_on_draining()
        elif message["kind"] == "failed":
            self._log.error(f"{child.role} failed", reason=message["reason"])
            if not self._announced:
                self._exit = _COULD_NOT_START

    def _on_engine(self, index: int, message: dict[str, Any]) -> None:
        child = self._engines.engines[index]
        match message["kind"]:
            case "begins":
                self._begun[index] = message["model"], message["load"]
            case "ends":
                self._begun.pop(index, None)
            case "loaded":
                self._on_loaded(index, message)
            case "ready" | "failed":
                self._on_settled(index, message)
            case "bound":
                reason = plain(message["reason"])
                self._engines.bindings.answered(
                    index, message["lease"], message["first"], ends=message["ends"], reason=reason
                )
            case "asleep" | "awake":
                self._on_weights_moved(index, message)
            case "order failed":
                order, reason = plain(message["order"], 100), plain(message["reason"])
                self._limited("an engine could not carry out an order", role=child.role, order=order, reason=reason)
            case "serving":
                child.serves(time.monotonic())
            case "retired":
                self._leases.confirmed(message["lane"], message["lease"], index)
            case "drained":
                child.drained = True
                self._go_on_draining()

    def _reported_model(self, index: int, message: dict[str, Any]) -> HeldModel | None:
        """Return the model of an engine's message; None if the load it belongs to is outdated."""
        held = self._models.numbered(message["model"])
        return held if held is not None and held.loads.get(index) == message["load"] else None

    def _on_loaded(self, index: int, message: dict[str, Any]) -> None:
        held = self._reported_model(index, message)
        if held is None:
            return
        settings = held.orders[index]
        if self._weights_saver.busy(held, settings):
            self._postponed.append((index, message))
            return
        self._control.let_go_of_loads(held)  # of earlier loads, whose folder this one may need
        try:
            tensors = (specs_from_plain(message[kind]) for kind in ("inputs", "outputs", "state"))
            spec = ModelSpec(held.name, *tensors, parameters=settings.own_parameters())
            self._require_answerable(spec)
            weights = [(name, dtype, tuple(shape)) for name, dtype, shape in message["weights"]]
            layout = WeightsLayout(weights) if weights else None
            keep = partial(self._prepare_saving, held, settings)
            replaces = self._models.adopt(held, index, spec, plain(message["digest"], 100), layout, keep)
        except Exception as error:  # noqa: BLE001  a model's spec may be anything: only this model fails
            self._engines.engines[index].send("abandon", model=held.index, load=message["load"], reason=said(error))
            return
        if not held.served:  # no load is in service that needs its own
            self._take_over(held, index)
        if replaces:
            for lane in self._leases.revoke(held.index, self._engines.living()):
                self._control.forget(lane)
        assert held.arena is not None
        channel = held.placed[index].channel
        self._engines.engines[index].send(
            "arena",
            model=held.index,
            load=message["load"],
            segment=held.arena.segment.name,
            number=held.arena_number,
            rows=held.arena.rows,
            weights=channel.name if channel else "",
        )

    def _require_answerable(self, spec: ModelSpec) -> None:
        """Raise SpecMismatch if a dialect or robot can never be answered with it; a server does not start with one."""
        try:
            require_answerable(self._all, spec)
            require_steerable(self._all, spec)
        except SpecMismatch as error:
            if not self._announced:
                self._log.error("could not start", error=str(error))
                self._exit = _COULD_NOT_START
            raise

    def _prepare_saving(self, held: HeldModel, settings: ModelSettings, channel: WeightsChannel | None) -> None:
        """Prepare to save the publications of a load, and publish the last saved weights in its channel."""
        restored = self._weights_saver.prepare(held, channel, settings)
        if restored is not None:
            self._log.info("weights restored", model=held.name, version=restored, folder=str(settings.save_dir))

    def _take_over(self, held: HeldModel, index: int) -> bool:
        """Make the weights channel of an engine's load the model's; return whether it had another one, or none."""
        if index not in held.placed:
            return False
        replaces = self._models.take_over(held, index)
        self._weights_saver.take_over(held, held.channel, held.orders[index])
        self._control.let_go_of_loads(held)
        return replaces

    def _on_settled(self, index: int, message: dict[str, Any]) -> None:
        held = self._reported_model(index, message)
        if held is None:
            return
        role = self._engines.engines[index].role
        if message["kind"] == "ready":
            warm_up = message["warm_up"]
            replaces = self._take_over(held, index)
            held.ready(index, message["arena"], warm_up)
            if replaces:  # a load with other settings would bring the earlier channel back
                self._engines.load(held, held.outdated())
            compiled = {"compiled": warm_up["graphs"]} if warm_up["graphs"] else {}
            self._log.info("model ready", model=held.name, role=role, warm_up=round(warm_up["seconds"], 3), **compiled)
            return
        reason = plain(message["reason"]) or "no reason was given"
        held.failed(index, reason)
        self._control.let_go_of_loads(held)
        self._log.error("model failed", model=held.name, role=role, reason=reason)
        if held.state == "failed" and not held.configured and not held.served:
            # A client loaded it: keep the error for the client's next request, and remove the model.
            self._control.let_go(held)
            self._models.remember_failed(held)

    def _on_weights_moved(self, index: int, message: dict[str, Any]) -> None:
        """Record that an engine has moved a model's weights to the host or back, or why it could not."""
        held = self._reported_model(index, message)
        if held is None:
            return
        role, kind, reason = self._engines.engines[index].role, message["kind"], plain(message["reason"])
        if reason:
            self._log.error(f"model not {kind}", model=held.name, role=role, reason=reason)
        else:
            moved = round(message["bytes"] / 2**20, 1)
            self._log.info(f"model {kind}", model=held.name, role=role, device_mib=moved)
        now_asleep = (kind == "asleep") is not bool(reason)
        for engine, load in held.weights_moved(index, asleep=now_asleep, reason=reason).items():
            if held.sleeping:
                self._engines.engines[engine].send("sleep", model=held.index, load=load, reason=str(asleep(held.name)))
            else:
                self._engines.engines[engine].send("wake", model=held.index, load=load)

    def _announce(self, rehearsed: Configuration | None, *, late: bool) -> None:
        """Log that the server is ready, or could not start."""
        states = {held.name: held.state for held in self._models}
        models = ", ".join(f"{name} ({state})" for name, state in states.items())
        broken = [name for name, state in states.items() if state in ("failed", "quarantined")]
        if states and len(broken) == len(states):
            self._log.error("could not start: every model failed", models=models, **self._memory())
            self._exit = _COULD_NOT_START
        elif all(child.serving for child in self._children()):
            self._announced = True
            dry_run, address, doors = rehearsed is not None, self._settings.address, dict(self._control.listening)
            if rehearsed is not None:
                address, doors = rehearsed.server.address, doors | rehearsed.doors()
            memory = sum(held.arena.segment.size for held in self._models if held.arena) + self._scoreboard.segment.size
            missing = {"failed": ", ".join(broken)} if broken else {}
            (self._log.warning if broken else self._log.info)(
                ("dry run done, some models failed" if broken else "dry run done, all models work")
                if dry_run
                else ("serving, without models that failed" if broken else "serving"),
                address=address,
                **{name: where for name, where in doors.items() if where or name not in _SELDOM},
                devices=", ".join(self._engines.devices),
                models=", ".join(f"{name} ({state})" for name, state in states.items() if name not in broken),
                shared_memory_mib=round(memory / 2**20, 1),
                **missing,
            )
            if not dry_run:
                self._manager.ready(f"serving {models}")
            self._exit = (_COULD_NOT_START if broken else _STOPPED) if dry_run else None
        elif late:
            waiting = [child for child in self._children() if not child.serving]
            died = any(child.failures for child in waiting)
            remedy = "'child died' above has the reason" if died else "raise server.start_timeout"
            self._log.error(
                f"could not start within {self._settings.start_timeout} s: {remedy}",
                waiting_for=", ".join(child.role for child in waiting),
                models=models,
            )
            self._exit = _COULD_NOT_START

    def _on_signals(self, count: int) -> None:
        if self._drain_until is not None or not self._announced or count > 1:
            self._log.info("stopping at once" if self._announced else "interrupted before it served, stopping")
            self._exit = _STOPPED
            return
        self._log.info("draining; a second signal stops at once")
        self._manager.stopping()
        now = time.monotonic()
        self._drain_until = now + self._settings.drain_timeout
        self._doors_until = now + _DOORS_SHARE * self._settings.drain_timeout
        self._control.draining = True
        self._engines.pause(False)
        for service in self._services:
            service.send("drain")
        self._go_on_draining()

    def _go_on_draining(self) -> None:
        """Drain from the outside inwards: gateway and relay, whose requests need the engines, and then the engines."""
        if not any(child.alive for child in self._engines.engines):
            self._exit = _STOPPED
        if not _drained(self._services):
            return
        self._drain_engines()
        if _drained(self._engines.engines):
            self._exit = _STOPPED

    def _drain_engines(self) -> None:
        if not self._control.closed:
            self._control.closed = True
            self._engines.order("drain")

    def _close(self) -> None:
        if self._announced and self._drain_until is None:
            self._manager.stopping()
        deadline = time.monotonic() + (_STOP if self._announced and self._exit == _STOPPED else 0.5)
        # Gateway and relay first: what they have not answered they refuse, and an engine's end would look like a fault.
        for children in (self._services, self._engines.engines):
            for child in children:
                child.send("stop")
            for child in children:
                child.stop(max(0.0, deadline - time.monotonic()))
        for standby in self._standbys:
            standby.close()
        self._control_socket.close()
        self._context.term()
        self._weights_saver.close(self._tell_stopping)  # the last saves may take longer than the stop time-out
        self._models.close()
        self._engines.close()
        self._scoreboard.close()
        self._segments.close()
        for address in (self._settings.address, *self._engines.addresses):
            if path := ipc_path(address):
                path.unlink(missing_ok=True)
        self._manager.close()
        if self._announced or self._exit != _STOPPED:  # else the line of the interrupt is enough
            self._log.info("stopped", status=self._exit)


def _drained(children: Sequence[Child]) -> bool:
    return not any(child.alive and child.serving and not child.drained for child in children)
