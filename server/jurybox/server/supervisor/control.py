"""The control socket: requests as protobuf frames on a ROUTER socket, one handler for each kind."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from google.protobuf.message import DecodeError, Message

from jurybox.protocol import control_pb2 as pb
from jurybox.protocol.errors import Busy, Code, Error, ModelFailed, Refused, asleep, plain, said
from jurybox.protocol.scoreboard import NORMAL, PAUSE_LOCK, PRIORITIES, Scoreboard
from jurybox.protocol.segment import is_locked
from jurybox.protocol.wire import MAX_CONTROL, PREFIX, build_version, prefix_error, require_name
from jurybox.server.logs import traced
from jurybox.server.settings.config import Configuration, ModelSettings, model_settings_from_json
from jurybox.server.settings.endpoints import bind_for_own_user
from jurybox.server.settings.loadable import LONGEST_KEEP, require_loadable, require_loadable_from_elsewhere
from jurybox.server.status import status_json
from jurybox.server.supervisor.engines import Engines
from jurybox.server.supervisor.leases import GrantedLease, Leases
from jurybox.server.supervisor.models import HeldModel, Models
from jurybox.server.supervisor.weights_saver import WeightsSaver

_HIGH_WATER = 4096

Handler = Callable[[Any], Message | None]
_KEPT = 50
_LONGEST = 300  # characters of a value; a model's reason may be a long traceback
_OF_EVERY_LINE = ("timestamp", "level", "process", "event", "exception")


class Events:
    """The last 50 log events.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    def keep(self, line: Mapping[str, Any]) -> None:
        """Add a log event, given as its fields."""
        fields = {
            plain(key, 100): value if isinstance(value, (int, float)) else plain(value, _LONGEST)
            for key, value in line.items()
            if key not in _OF_EVERY_LINE
        }
        event = plain(line["event"], _LONGEST)
        self._kept.append({"at": self._clock(), "level": line["level"], "event": event, "fields": fields})

    def last(self) -> list[dict[str, Any]]:
        """Return the kept events, the newest last: `at` (seconds since 1970), `level`, `event`, `fields`."""
        return list(self._kept)


class ControlSocket:
    """Answers control requests.

    Args:
        address: the address to bind.
        handlers: by the field of pb.ControlRequest's oneof. A handler is called with that field's message and returns
            the reply's message (None: pb.Done). An `Error` that it raises is sent to the client.
        report: called with (event, fields) for what should be logged.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        handlers: Mapping[str, Handler],
        report: Callable[..., None],
    ) -> None:
        self._handlers = handlers
        self._report = report
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 200)
        self.socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self.socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL)
        bind_for_own_user(self.socket, address)

    def answer_waiting(self, limit: int = 64) -> None:
        """Answer at most `limit` requests, so that the supervisor's loop can also read from children."""
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(frames)

    def close(self) -> None:
        self.socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        # identity, prefix, the eight bytes of the caller, body
        number = frames[2] if len(frames) > 2 and len(frames[2]) == 8 else b""
        try:
            if wrong := prefix_error(frames[1] if len(frames) > 1 else b""):
                raise Error(wrong, Code.PROTOCOL_MISMATCH)
            if len(frames) != 4 or not number:
                raise Error(
                    f"a control message has 3 frames (prefix, 8 bytes, body), got {len(frames) - 1}", Code.MALFORMED
                )
            reply = self._handle(frames[3]).SerializeToString()
        except Error as error:
            reply = _failed(error.code, said(error))
        except Exception as error:  # noqa: BLE001  a bad request must not end the server; it is answered and logged
            self._report("request failed", error=said(error), exception=traced(error))
            message = f"the server failed to handle this request ({said(error, 500)}); its log says more"
            reply = _failed(Code.REFUSED, message)
        try:
            self.socket.send_multipart((frames[0], PREFIX, number, reply), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._report("reply not sent", error=said(error))

    def _handle(self, body: bytes) -> pb.ControlReply:
        try:
            request = pb.ControlRequest.FromString(body)
        except DecodeError as error:
            raise Error(f"not a control request: {error}", Code.MALFORMED) from error
        kind = request.WhichOneof("request")
        if kind is None or kind not in self._handlers:
            raise Error(f"unknown control request {kind!r}: a newer client?", Code.MALFORMED)
        asked = getattr(request, kind)
        require_name(getattr(asked, "model", ""))
        result = self._handlers[kind](asked) or pb.Done()
        field = next(item.name for item in pb.ControlReply.DESCRIPTOR.fields if item.message_type is result.DESCRIPTOR)
        reply = pb.ControlReply()
        getattr(reply, field).CopyFrom(result)
        # A message without content would otherwise not count as set.
        getattr(reply, field).SetInParent()
        return reply


def _failed(code: Code, message: str) -> bytes:
    return pb.ControlReply(error=pb.ErrorMessage(code=code, message=plain(message))).SerializeToString()


_ORDERS = 256  # orders that may wait for an engine


class ControlHandlers:
    """Handlers of the control requests, by the field of pb.ControlRequest that carries them."""

    def __init__(
        self,
        settings: Configuration,
        server_id: str,
        scoreboard: Scoreboard,
        models: Models,
        leases: Leases,
        engines: Engines,
        weights_saver: WeightsSaver,
        events: Events,
        segments: Callable[[], Mapping[str, int]],
    ) -> None:
        self._segments = segments
        self._settings = settings
        self._server_id = server_id
        self._scoreboard = scoreboard
        self._models = models
        self._leases = leases
        self._engines = engines
        self._weights_saver = weights_saver
        self._events = events
        self.draining = self.closed = False  # whether the server stops; whether no lanes are leased any more
        # As configured; gateway and relay replace it with the addresses that they bound.
        self.listening = {**settings.doors(), "grpc_http2": ""}
        self.relay: dict[str, Any] = {}  # what it holds for its clients, as it told last
        self._panels = settings.plain_panels()
        self.handlers: dict[str, Any] = {
            "hello": self._hello,
            "lease": self._lease,
            "release": self._release,
            "status": self._status,
            "model": self._model,
            "load": self._load,
            "unload": self._unload,
            "keep": self._keep,
            "sleep": self._sleep,
            "wake": self._wake,
            "pause": self._pause,
            "bind": self._bind,
        }

    def forget(self, lane: GrantedLease) -> None:
        """Order all engines to forget a retiring lane."""
        self._engines.bindings.forget(lane.lease)
        self._engines.order("retire", lane=lane.lane, lease=lane.lease)

    def _hello(self, request: pb.Hello) -> pb.ServerMessage:
        return pb.ServerMessage(
            server_id=self._server_id,
            build=build_version(),
            scoreboard=self._scoreboard.segment.name,
            engines=self._engines.addresses,
            models=[held.name for held in self._models],
            transport="zmq" if self._settings.server.transport == "zmq" else "",
        )

    def _lease(self, request: pb.LeaseRequest) -> pb.Lease:
        held = self._models.described(request.model)
        if self.closed:  # not before: a gateway may need a lane for requests that it has accepted
            raise Refused("the server is stopping and accepts no new clients", Code.DRAINING)
        if held.quarantined:
            raise ModelFailed(held.quarantined)
        if held.state == "sleeping":
            raise asleep(held.name)
        if held.state == "failed":
            raise ModelFailed(f"model {held.name!r} could not be loaded: {held.reason}")
        if held.state != "ready" or held.arena is None:
            raise Refused(f"model {held.name!r} is still loading", Code.NOT_READY)
        rows = held.lane_rows(request.rows)
        if rows > held.arena.rows:
            raise Refused(
                f"{rows} rows were asked for, the arena of {held.name!r} has {held.arena.rows}: ask for fewer, or "
                f"raise models.{held.name}.rows"
            )
        engines = held.only or range(len(self._engines.addresses))
        if (priority := request.priority or NORMAL) not in PRIORITIES:
            raise Refused(f"priority={priority} was asked for: expected 1 (first), 2 (normal) or 3 (last)")
        lane = self._leases.grant(held.index, rows, held.arena.rows, held.arena_number, engines, priority)
        return pb.Lease(
            model=held.message(),
            lane=lane.lane,
            lease=lane.lease,
            first_row=lane.first,
            rows=lane.rows,
            engine=lane.engine,
            priority=request.priority,
        )

    def _release(self, request: pb.ReleaseRequest) -> None:
        lane = self._leases.release(request.lane, request.lease, self._engines.living())
        if lane is not None:
            self.forget(lane)

    def _status(self, request: pb.StatusRequest) -> pb.StatusMessage:
        return pb.StatusMessage(
            json=status_json(
                self._scoreboard,
                list(self._models),
                self._leases.in_use(),
                segments=self._segments(),
                server_id=self._server_id,
                address=self._settings.server.address,
                **self.listening,
                panels=self._panels,
                relay=self.relay,
                draining=self.draining,
                engine_timeout=self._settings.server.engine_timeout,
                events=self._events.last(),
                devices=self._engines.devices,
                pythons=self._engines.pythons,
            )
        )

    def _model(self, request: pb.ModelRequest) -> pb.ModelMessage:
        return self._models.described(request.model).message()

    def _load(self, request: pb.LoadRequest) -> pb.ModelMessage:
        """Load or reload a model. The client polls its state with model requests."""
        if self.draining:
            raise Refused("the server is stopping and loads no models", Code.DRAINING)
        if request.model in self._panels:
            raise Refused(f"{request.model!r} is a panel of this server's: load the model by another name")
        if request.settings_json:
            configured = self._settings.models.get(request.model)
            settings = model_settings_from_json(request.model, request.settings_json, configured)
            self._require_publication_settings(request)
            self._require_interpreter(request.model, settings)
            if request.remote:
                self._require_theirs(request.model)
                require_loadable_from_elsewhere(self._settings, request.model, settings, request.keep)
            require_loadable(self._settings, request.model, settings)
        else:
            settings = self._known_settings(request.model)
            if request.remote and request.keep:
                self._require_theirs(request.model)
        until = self._until(request.model, request.keep) if request.keep else None
        if (there := self._models.get(request.model)) is not None and (there.sleeping or there.moving):
            raise Refused(f"model {request.model!r} sleeps, or moves its weights: wake it, then load it", Code.SLEEPING)
        for index in self._engines.living():
            if self._engines.engines[index].orders_waiting > _ORDERS:
                raise Busy(f"engine {index} is behind with its orders: try again later")
        held = self._models.add(request.model, settings, configured=request.model in self._settings.models)
        if request.settings_json:
            held.remote = request.remote
        if request.settings_json or request.keep:
            held.until = until
        held.leave_quarantine()
        self._engines.load(held)
        return held.message()

    def _sleep(self, request: pb.SleepRequest) -> None:
        """Order every engine to move a model's weights to host memory. The client polls its state."""
        held = self._models.named(request.model)
        if held.sleeping:
            return
        if held.settings.group is not None:
            raise Refused(
                f"model {held.name!r} is computed with others of group {held.settings.group!r}: it cannot sleep"
            )
        if held.state in ("failed", "quarantined"):
            raise ModelFailed(f"model {held.name!r} is {held.state}: {held.reason}")
        if held.state != "ready" or not held.settled:
            raise Refused(f"model {held.name!r} is {held.state}: it can sleep when it is ready", Code.NOT_READY)
        for index, load in held.fall_asleep().items():
            self._engines.engines[index].send("sleep", model=held.index, load=load, reason=str(asleep(held.name)))

    def _wake(self, request: pb.WakeRequest) -> None:
        """Order every engine to move a model's weights back; engines restarted meanwhile load the model."""
        held = self._models.named(request.model)
        if held.moving:
            raise Refused(f"model {held.name!r} is falling asleep or waking up: try again afterwards", Code.NOT_READY)
        if not held.asleep_in:
            return
        for index, load in held.wake_up().items():
            self._engines.engines[index].send("wake", model=held.index, load=load)
        self._engines.load(held, [index for index in held.asleep_in if index not in held.moving])

    def _bind(self, request: pb.BindRequest) -> pb.BindingMessage:
        """Bind rows of a lease to device memory in every engine of its model, or unbind them."""
        lane = self._leases.held(request.lane, request.lease)
        held = None if lane is None else self._models.numbered(lane.model)
        if lane is None or held is None:
            if request.end:
                return pb.BindingMessage(settled=True)  # the binding ended with the lease
            raise Refused("the lane is not leased to the sender (any more): lease one again", Code.STALE_LEASE)
        living = [index for index in self._engines.living() if index in self._engines.of(held)]
        return self._engines.bindings.handle(request, lane, held, living)

    def _pause(self, request: pb.PauseRequest) -> None:
        """Pause or resume the engines."""
        if request.pause and not is_locked(self._scoreboard.segment.fd, PAUSE_LOCK):
            raise Refused("a pause needs the pause lock of the scoreboard: use Server.pause")
        self._engines.pause(request.pause)

    def look_at_pause(self) -> bool:
        """Resume paused engines if the process that paused them is gone; return whether that was so."""
        if not self._engines.paused or is_locked(self._scoreboard.segment.fd, PAUSE_LOCK):
            return False
        self._engines.pause(False)
        return True

    def _until(self, name: str, keep: float) -> float:
        if not 0 < keep <= LONGEST_KEEP:
            raise Refused(
                f"keep = {keep:g} of model {name!r}, expected seconds, more than 0 and at most {LONGEST_KEEP:g}"
            )
        if name in self._settings.models:
            raise Refused(f"model {name!r} is of the server's configuration and stays loaded: load it without keep")
        return time.monotonic() + keep

    def _require_theirs(self, name: str) -> None:
        """Refuse settings and a time limit from a network for a model that was not loaded from a network."""
        held = self._models.get(name)
        if name in self._settings.models or (held is not None and not held.remote):
            raise Refused(
                f"model {name!r} is this server's own, and its settings are not taken from a network, nor for how "
                "long it is kept: load it as it is, without settings and keep, or another one under a name of its own"
            )

    def _keep(self, request: pb.KeepRequest) -> None:
        """Extend the time for which a client's model is kept."""
        held = self._models.named(request.model)
        until = self._until(request.model, request.keep)
        if held.until is None:
            raise Refused(f"model {request.model!r} was loaded without keep: it stays until it is unloaded")
        held.until = until

    def _require_publication_settings(self, request: pb.LoadRequest) -> None:
        """Refuse settings that would silently end a model's publications or their saving."""
        held, given = self._models.get(request.model), None
        with contextlib.suppress(ValueError, RecursionError):  # already reported by the check of the settings
            given = json.loads(request.settings_json)
        if held is None or not isinstance(given, dict):
            return
        version = held.channel.newest if held.channel else 0
        for name in ("publish", "save_dir"):
            value = getattr(held.settings, name)
            if value is not None and name not in given:
                raise Refused(
                    f"model {held.name!r} has {name} = {value!r} (weights version {version}) and these settings do "
                    f"not name it: expected {name!r}: {value!r}, which keeps it, or {name!r}: null, which ends it"
                )

    def _require_interpreter(self, name: str, settings: ModelSettings) -> None:
        """Refuse an interpreter without an engine, since engines start only with the server."""
        held, python = self._models.get(name), settings.python or ""
        if held is not None and python != (held.settings.python or ""):
            raise Refused(
                f"model {name!r} is run by python = {held.settings.python!r} and cannot move to {settings.python!r}: "
                "name the same, or unload it first"
            )
        if python not in self._engines.pythons:
            raise Refused(
                f"python = {python!r} of model {name!r} is none that the configuration names, and engines start "
                "only with the server: name it there, or leave it out"
            )

    def _known_settings(self, name: str) -> ModelSettings:
        """Return the settings of a loaded model, or of a configured one that was unloaded."""
        configured = self._settings.models.get(name)
        if configured is not None and name not in {held.name for held in self._models}:
            return configured
        return self._models.named(name).settings

    def _unload(self, request: pb.UnloadRequest) -> None:
        if not self._models.forget_failed(request.model):
            self.let_go(self._models.named(request.model))

    def let_go(self, held: HeldModel) -> None:
        """Unload a model, in any state."""
        self._models.remove(held.name)
        for lane in self._leases.revoke(held.index, self._engines.living()):
            self.forget(lane)
        self._engines.order("unload", model=held.index)
        self._models.replaced(held)
        held.placed.clear()
        held.channel = None
        self._weights_saver.drop(held)
        self.let_go_of_loads(held)

    def let_go_of_loads(self, held: HeldModel) -> None:
        """Close the weights channels, and unlock the folders, of loads that are not the model's any more."""
        self._weights_saver.discard(held)
        for channel in self._models.unused(held):
            self._weights_saver.release(channel)
