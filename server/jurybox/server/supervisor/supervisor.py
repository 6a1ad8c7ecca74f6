"""The supervisor's loop: children, leases, models and the control door, each in a module of its own."""

from __future__ import annotations

import secrets
import socket
import time
from typing import Any

import zmq

from jurybox import native
from jurybox.protocol.address import engine_address, ipc_path
from jurybox.protocol.bell import Bell
from jurybox.protocol.board import LANE_LOCK, Board, EngineState
from jurybox.protocol.control_pb2 import (
    Hello,
    Lease,
    LeaseRequest,
    LoadRequest,
    ModelMessage,
    ModelRequest,
    ReleaseRequest,
    ServerMessage,
    StatusMessage,
    StatusRequest,
    UnloadRequest,
)
from jurybox.protocol.errors import Code, Error, ModelFailed, Refused
from jurybox.protocol.locks import is_locked
from jurybox.protocol.segment import segment_name
from jurybox.protocol.spec import ModelSpec, specs_from_plain
from jurybox.protocol.wire import build_version
from jurybox.server.config import Settings, model_settings_from_json
from jurybox.server.logs import Log
from jurybox.server.status import status_json
from jurybox.server.supervisor.child import Child
from jurybox.server.supervisor.desk import Desk
from jurybox.server.supervisor.leases import Leases
from jurybox.server.supervisor.models import HeldModel, Models

_TICK = 0.25  # seconds between two looks at heartbeats and leases
_SETTLED = 60.0  # seconds of service after which a child's failures are forgotten
_STOP = 3.0  # seconds a child gets to stop


class Supervisor:
    """Owns everything a server shares; runs until a signal, or until a child is lost for good."""

    def __init__(self, settings: Settings, signals: socket.socket, log: Log) -> None:
        self._settings = settings
        self._signals = signals
        self._log = log
        self._id = secrets.token_hex(4)
        self._engine_specs = settings.server.engine_devices()
        self._board = Board.create(segment_name(self._id, "board"), len(self._engine_specs), time.time())
        self._leases = Leases(
            self._board, lambda lane: is_locked(self._board.segment.fd, LANE_LOCK + lane), time.monotonic
        )
        self._models = Models(self._id)
        for name, model in settings.models.items():
            self._models.add(name, model)
        self._replaced: list[tuple[HeldModel, Any]] = []  # arenas to close when no lane looks at them
        self._bells: dict[int, Bell] = {}
        self._bells_made = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._desk = Desk(self._context, settings.server.address, self._handlers(), log.warning)
        except zmq.ZMQError as error:
            self._board.close()
            raise Refused(f"cannot bind {settings.server.address}: {error.strerror}") from error
        self._engines = [self._engine(index, device) for index, device in enumerate(self._engine_specs)]
        self._gateway = self._gateway_child() if settings.server.http else None
        self._poller = zmq.Poller()
        self._exit: int | None = None
        self._drain_until: float | None = None
        self._announced = False

    # ---- the loop

    def run(self, *, dry_run: bool) -> int:
        """Start the children and serve; gives the exit status."""
        self._poller.register(self._desk.socket, zmq.POLLIN)
        self._poller.register(self._signals, zmq.POLLIN)
        try:
            for child in self._children():
                self._start(child)
            give_up = time.monotonic() + self._settings.server.start_timeout
            next_tick = 0.0
            while self._exit is None:
                self._listen(_TICK)
                now = time.monotonic()
                if now >= next_tick:
                    self._tick(now)
                    next_tick = now + _TICK
                if not self._announced:
                    self._announce(dry_run=dry_run, late=now > give_up)
            return self._exit
        finally:
            self._close()

    def _listen(self, timeout: float) -> None:
        ready = {source for source, _ in self._poller.poll(int(timeout * 1000))}
        if self._signals.fileno() in ready:
            self._on_signal()
        for child in self._children():
            if child.alive and child.fileno() in ready:
                self._hear(child)
        self._desk.answer_waiting()

    def _tick(self, now: float) -> None:
        for index, child in enumerate(self._engines):
            if child.alive and child.serving:
                age = (time.monotonic_ns() - int(self._board.engines["heartbeat"][index])) / 1e9
                if age > self._settings.server.engine_timeout:
                    self._log.error("engine hangs", role=child.role, heartbeat_age=round(age, 1))
                    child.kill()
        for child in self._children():
            if not child.alive and now >= child.restart_at and self._drain_until is None:
                self._start(child)
        for lane in self._leases.reclaim(self._living()):
            self._log.info("client gone, rows taken back", lane=lane.lane, rows=lane.rows)
            self._ask_to_forget(lane.lane, lane.lease)
        self._close_replaced()
        if self._drain_until is not None and now > self._drain_until:
            self._log.warning("drain took too long, stopping")
            self._exit = 0

    # ---- children

    def _children(self) -> list[Child]:
        return [*self._engines, self._gateway] if self._gateway else list(self._engines)

    def _living(self) -> list[int]:
        return [index for index, child in enumerate(self._engines) if child.alive]

    def _engine(self, index: int, device: str) -> Child:
        server = self._settings.server

        def configure() -> dict[str, Any]:
            models = list(self._models)
            bell = self._new_bell(index)
            for held in models:
                held.engines[index] = "loading"
                held.reasons.pop(index, None)
            return {
                "index": index,
                "epoch": secrets.randbits(62) | 1,
                "board": self._board.segment.name,
                "bell": bell.segment.name,
                "spin_us": server.spin_us,
                "address": engine_address(server.address, index),
                "device": device,
                "threads": server.engine_threads(),
                "log_level": server.log_level,
                "log_format": server.log_format,
                "models": [
                    {"model": held.index, "name": held.name, "settings": held.settings.model_dump(mode="json")}
                    for held in models
                ],
            }

        threads = str(server.engine_threads())
        environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        return Child(f"engine-{index}", "jurybox.server.engine", configure, environment)

    def _new_bell(self, index: int) -> Bell:
        """A bell for a new life of an engine: nothing its predecessor left can be taken for the new one's."""
        if earlier := self._bells.pop(index, None):
            earlier.close()
        self._bells_made += 1
        bell = self._bells[index] = Bell.create(segment_name(self._id, "bell", self._bells_made), native.BELL_BYTES)
        self._board.engines[index : index + 1]["bell"] = self._bells_made
        return bell

    def _gateway_child(self) -> Child:
        server = self._settings.server

        def configure() -> dict[str, Any]:
            return {
                "address": server.address,
                "http": server.http,
                "log_level": server.log_level,
                "log_format": server.log_format,
            }

        return Child("gateway", "jurybox.server.gateway", configure)

    def _start(self, child: Child) -> None:
        child.start(time.monotonic())
        self._poller.register(child.fileno(), zmq.POLLIN)
        self._log.debug("started", role=child.role, child=child.pid)

    def _hear(self, child: Child) -> None:
        fd = child.fileno()
        try:
            for message in child.messages():
                self._on_message(child, message)
        except EOFError:
            self._poller.unregister(fd)
            self._on_death(child)

    def _on_death(self, child: Child) -> None:
        status = child.bury(time.monotonic(), settled_after=_SETTLED)
        if child in self._engines:
            index = self._engines.index(child)
            record = self._board.engines[index : index + 1]
            record["state"], record["epoch"] = EngineState.ABSENT, 0
            record["restarts"] += 1
            self._leases.engine_died(index)
            for held in self._models:
                held.engines[index] = "loading"
        if self._drain_until is not None:
            self._finish_drain()
            return
        self._log.error("child died", role=child.role, status=status, failures=child.failures)
        if child.failures > self._settings.server.max_restarts:
            self._log.error("gave up on a child", role=child.role, failures=child.failures)
            self._exit = 4 if self._announced else 3

    def _on_message(self, child: Child, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "loaded":
                self._on_loaded(child, message)
            case "ready" if child is self._gateway:
                child.serving = True
            case "ready":
                self._mark(child, message["model"], "ready")
            case "failed" if child is self._gateway:
                self._log.error("gateway failed", reason=message["reason"])
                if not self._announced:
                    self._exit = 3
            case "failed":
                self._mark(child, message["model"], "failed", message["reason"])
            case "serving":
                child.serving = True
            case "retired":
                self._leases.confirmed(message["lane"], message["lease"], self._engines.index(child))
            case "drained":
                child.serving = False
                self._finish_drain()

    def _on_loaded(self, child: Child, message: dict[str, Any]) -> None:
        held = self._models.numbered(message["model"])
        if held is None:
            return  # unloaded meanwhile
        try:
            spec = ModelSpec(held.name, specs_from_plain(message["inputs"]), specs_from_plain(message["outputs"]))
            replaced = self._models.adopt_spec(held, spec, message["digest"])
        except Error as error:
            self._mark(child, held.index, "failed", str(error))
            return
        if replaced is not None:
            for lane in self._leases.revoke(held.index, self._living()):
                self._ask_to_forget(lane.lane, lane.lease)
            self._replaced.append((held, replaced))
        assert held.arena is not None
        child.send("arena", model=held.index, segment=held.arena.segment.name, rows=held.arena.rows)

    def _mark(self, child: Child, model: int, state: str, reason: str = "") -> None:
        held = self._models.numbered(model)
        if held is None:
            return
        index = self._engines.index(child)
        held.engines[index] = state
        held.reasons.pop(index, None)
        if reason:
            held.reasons[index] = reason
            self._log.error("model failed", model=held.name, role=child.role, reason=reason)
        else:
            self._log.info("model ready", model=held.name, role=child.role)

    def _ask_to_forget(self, lane: int, lease: int) -> None:
        for index in self._living():
            self._engines[index].send("retire", lane=lane, lease=lease)

    def _close_replaced(self) -> None:
        busy = {lane.model for lane in self._leases.in_use() if lane.retiring is not None}
        for held, arena in self._replaced:
            if held.index not in busy:
                arena.close()
        self._replaced = [(held, arena) for held, arena in self._replaced if held.index in busy]

    # ---- start and end

    def _announce(self, *, dry_run: bool, late: bool) -> None:
        """Say once that the server is ready, or that it will not be."""
        states = {held.name: held.state for held in self._models}
        if states and all(state == "failed" for state in states.values()):
            self._log.error("could not start: every model failed", models=", ".join(states))
            self._exit = 3
        elif all(child.serving for child in self._children()):
            self._announced = True
            footprint = sum(held.arena.segment.size for held in self._models if held.arena) + self._board.segment.size
            self._log.info(
                "serving",
                address=self._settings.server.address,
                http=self._settings.server.http,
                engines=len(self._engines),
                devices=", ".join(self._engine_specs),
                models=", ".join(f"{name} ({state})" for name, state in states.items()),
                shared_memory_mib=round(footprint / 2**20, 1),
            )
            if dry_run:
                self._exit = 0
        elif late:
            waiting = [child.role for child in self._children() if not child.serving]
            self._log.error(
                "could not start in time: raise server.start_timeout",
                seconds=self._settings.server.start_timeout,
                waiting_for=", ".join(waiting),
                models=", ".join(f"{name} ({state})" for name, state in states.items()),
            )
            self._exit = 3

    def _on_signal(self) -> None:
        numbers = self._signals.recv(64)
        for _ in numbers:
            if self._drain_until is not None or not self._announced:
                self._log.info("stopping at once")
                self._exit = 0
                return
            self._log.info("draining; a second signal stops at once")
            self._drain_until = time.monotonic() + self._settings.server.drain_timeout
            for index in self._living():
                self._engines[index].send("drain")
        if not self._living():
            self._exit = 0

    def _finish_drain(self) -> None:
        if self._drain_until is not None and not any(child.alive and child.serving for child in self._engines):
            self._exit = 0

    def _close(self) -> None:
        if self._gateway:
            self._gateway.stop(_STOP)
        for child in self._engines:
            child.send("stop")
        for child in self._engines:
            child.stop(_STOP)
        self._desk.close()
        self._context.term()
        for _, arena in self._replaced:
            arena.close()
        self._models.close()
        for bell in self._bells.values():
            bell.close()
        self._board.close()
        for address in (self._settings.server.address, *self._engine_addresses()):
            if path := ipc_path(address):
                path.unlink(missing_ok=True)
        self._log.info("stopped", status=self._exit)

    # ---- the control door

    def _handlers(self) -> dict[str, Any]:
        return {
            "hello": self._hello,
            "lease": self._lease,
            "release": self._release,
            "status": self._status,
            "model": self._model,
            "load": self._load,
            "unload": self._unload,
        }

    def _engine_addresses(self) -> list[str]:
        return [engine_address(self._settings.server.address, index) for index in range(len(self._engine_specs))]

    def _hello(self, request: Hello) -> ServerMessage:
        return ServerMessage(
            server_id=self._id,
            build=build_version(),
            board=self._board.segment.name,
            engines=self._engine_addresses(),
            models=[held.name for held in self._models],
        )

    def _usable(self, name: str) -> HeldModel:
        held = self._models.named(name)
        if self._drain_until is not None:
            raise Refused("the server is stopping; it takes no new clients", Code.DRAINING)
        if held.state == "failed":
            raise ModelFailed(f"model {name!r} could not be loaded: {held.reason}")
        if held.state != "ready":
            raise Refused(f"model {name!r} is still loading", Code.NOT_READY)
        return held

    def _lease(self, request: LeaseRequest) -> Lease:
        held = self._usable(request.model)
        assert held.arena is not None
        rows = held.lane_rows(request.rows)
        if rows > held.arena.rows:
            raise Refused(
                f"{rows} rows were asked for, the arena of {request.model!r} has {held.arena.rows}: ask for fewer, "
                f"or raise models.{request.model}.rows"
            )
        lane = self._leases.grant(held.index, rows, held.arena.rows)
        return Lease(model=held.message(), lane=lane.lane, lease=lane.lease, first_row=lane.first, rows=lane.rows)

    def _release(self, request: ReleaseRequest) -> None:
        if self._leases.release(request.lane, request.lease, self._living()):
            self._ask_to_forget(request.lane, request.lease)

    def _status(self, request: StatusRequest) -> StatusMessage:
        return StatusMessage(
            json=status_json(
                self._board,
                list(self._models),
                self._leases.in_use(),
                server_id=self._id,
                address=self._settings.server.address,
                http=self._settings.server.http,
                draining=self._drain_until is not None,
            )
        )

    def _model(self, request: ModelRequest) -> ModelMessage:
        return self._models.named(request.model).message()

    def _load(self, request: LoadRequest) -> ModelMessage:
        """Load a model anew, or again; clients follow its state with model requests."""
        if request.settings_json:
            settings = model_settings_from_json(request.model, request.settings_json)
        else:
            settings = self._models.named(request.model).settings
        held = self._models.add(request.model, settings)
        for index in self._living():
            if held.engines.get(index) != "ready":  # one that serves goes on serving while the new one loads
                held.engines[index] = "loading"
            self._engines[index].send(
                "load", model=held.index, name=held.name, settings=settings.model_dump(mode="json")
            )
        return held.message()

    def _unload(self, request: UnloadRequest) -> None:
        held = self._models.remove(request.model)
        for lane in self._leases.revoke(held.index, self._living()):
            self._ask_to_forget(lane.lane, lane.lease)
        for index in self._living():
            if held.engines.get(index) == "ready":
                self._engines[index].send("unload", model=held.index)
        if held.arena is not None:
            self._replaced.append((held, held.arena))
