"""Connecting to a server, and what it offers."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any

import zmq

from jurybox.client.control import Control
from jurybox.client.doors.door import Door
from jurybox.client.doors.zmq import ZmqDoor
from jurybox.client.lane import Lane
from jurybox.client.model import Model
from jurybox.client.publisher import Publisher
from jurybox.client.weights_reader import WeightsReader
from jurybox.protocol.address import default_address
from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.board import LANE_LOCK, Board, EngineState
from jurybox.protocol.control_pb2 import (
    ControlReply,
    Hello,
    Lease,
    LeaseRequest,
    LoadRequest,
    ModelMessage,
    ModelRequest,
    ReleaseRequest,
    ServerMessage,
    StatusRequest,
    UnloadRequest,
)
from jurybox.protocol.errors import Busy, Code, Error, ModelFailed, Refused, SharedMemoryError, Timeout
from jurybox.protocol.locks import try_lock, unlock
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.wire import build_version

_SPIN_US = 100  # a small model answers a lone client within it
DOORS = ("auto", "zmq", "native")
_POLL = 0.05  # seconds between two questions whether a model is ready


def connect(address: str | None = None, *, door: str = "auto", timeout: float = 10.0) -> Server:
    """Connect to a server; waits up to `timeout` seconds for one that is still starting.

    Args:
        address: where the server is; JURYBOX_ADDRESS or the default ipc address without it.
        door: "auto" (the best there is), "zmq" or "native".
        timeout: seconds, also the default of every later call.

    Raises:
        ServerGone: no server answers there in time.
        ProtocolMismatch: one of another protocol version does.
        ValueError: an unknown door.
    """
    if door not in DOORS:
        raise ValueError(f"door={door!r}: expected one of {', '.join(map(repr, DOORS))}")
    return Server(address or default_address(), door, timeout)


class Server:
    """A connection to one server; close it, or use it in a ``with``."""

    def __init__(self, address: str, door: str, timeout: float) -> None:
        self.address = address
        self.timeout = timeout
        self._door = door
        self._spin_us = _spin_us()
        self._traces = _wants_traces()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._models: list[Model] = []
        self._ends: list[Publisher] = []
        self._channels: list[WeightsChannel] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._board: Board | None = None
        self._info = ServerMessage()
        try:
            self._control = Control(self._context, address)
            self._greet(timeout)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    # ---- what the server offers

    def model(self, name: str, *, rows: int = 0, timeout: float | None = None) -> Model:
        """Lease a lane of a model; waits for one that is still loading.

        Args:
            rows: how many rows may be in flight at once. Without it the server's default, few rows, and more as soon
                as an `infer` brings more.
            timeout: seconds to wait; the connection's without it.

        Raises:
            ModelNotFound: the server holds no such model; the message lists those it holds.
            ModelFailed: the model could not be loaded; the message says why.
            Busy: the arena has no free rows.
            Timeout: the model is still loading.
        """
        wait = self.timeout if timeout is None else timeout
        model = Model(name, lambda n, patient: self._lease(name, n, wait if patient else 0.0), rows, self.timeout)
        self._models.append(model)
        return model

    def models(self) -> list[str]:
        """Names of the models the server holds."""
        return list(self._call(hello=Hello(client=build_version(), pid=os.getpid())).server.models)

    def describe(self, name: str) -> ModelMessage:
        """State, spec and digest of a model. Raises ModelNotFound."""
        return self._call(model=ModelRequest(model=name)).model

    def status(self) -> dict[str, Any]:
        """The server's status document, as ``jurybox status --json`` prints it."""
        document: dict[str, Any] = json.loads(self._call(status=StatusRequest()).status.json)
        return document

    def load(self, name: str, settings: dict[str, Any] | None = None, *, timeout: float = 60.0) -> None:
        """Load a model, or load it again with new settings (those of the config's [models.NAME]).

        A model that is serving goes on serving until the new one is ready, and after a failure.

        Raises:
            ModelFailed: it could not be loaded; Timeout: not within `timeout` seconds.
        """
        text = json.dumps(settings) if settings is not None else ""
        self._call(load=LoadRequest(model=name, settings_json=text))
        self._until_settled(name, time.monotonic() + timeout)

    def unload(self, name: str) -> None:
        """Serve a model no longer; tickets that wait for it are refused. Raises ModelNotFound."""
        self._call(unload=UnloadRequest(model=name))

    def publisher(self, name: str) -> Publisher:
        """The learner's end of a model's weights channel; there is one at a time.

        Raises:
            ModelNotFound; Refused: the model takes no publications, or has a living publisher.
        """
        publisher = Publisher(self._channel(name)[0])
        self._ends.append(publisher)
        return publisher

    def weights(self, name: str) -> WeightsReader:
        """An actor's end of a model's weights channel, for actors that run the policy themselves.

        Raises:
            ModelNotFound; Refused: the model takes no publications.
        """
        channel, message = self._channel(name)
        return WeightsReader(channel, message.max_lag, lambda: self._version_in_use(message.index))

    def close(self) -> None:
        """Give back every lane and close every socket. Harmless when done already."""
        with self._lock:
            if self._context.closed:
                return
            for model in self._models:
                model.close()
            self._models.clear()
            for publisher in self._ends:
                publisher.close()
            for channel in self._channels:
                channel.close()
            self._control.close()
            if self._board is not None:
                self._board.close()
                self._board = None
            self._context.destroy(linger=200)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside

    def _greet(self, timeout: float) -> None:
        """Say hello and map the board of the server that answers."""
        reply = self._control.call(timeout, hello=Hello(client=build_version(), pid=os.getpid()))
        self._info = reply.server
        if self._board is not None:
            self._board.close()
        self._board = Board.attach(self._info.board)

    def _call(self, **request: Any) -> ControlReply:
        self._check_process()
        return self._control.call(self.timeout, **request)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Refused("this connection was made before a fork: connect in the process that uses it")
        if self._context.closed:
            raise Refused("this connection was closed: connect again")

    def _version_in_use(self, model: int) -> int:
        """Of the weights that engines answer with; of the one furthest behind where there are several."""
        board = self._board
        if board is None:
            raise Refused("this connection was closed: connect again")
        versions = board.counters["version"][board.engines["state"] == EngineState.SERVING, model]
        return int(versions.min()) if len(versions) else 0

    def _channel(self, name: str) -> tuple[WeightsChannel, ModelMessage]:
        deadline = time.monotonic() + self.timeout
        while (message := self.describe(name)).state == "loading" and time.monotonic() < deadline:
            time.sleep(_POLL)
        if not message.weights:
            why = (
                "takes no publications: set publish in its configuration"
                if message.state == "ready"
                else message.reason
            )
            raise Refused(f"model {name!r} is {message.state} and {why or 'has no weights channel yet'}")
        channel = WeightsChannel.attach(message.weights)
        self._channels.append(channel)
        return channel, message

    def _lease(self, name: str, rows: int, timeout: float) -> tuple[Lane, ModelSpec, int]:
        """Lease a lane, lock it, and map its arena; from a new server where the old one is gone."""
        self._check_process()
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._board is None or not self._board.server_lives():
                self._greet(timeout)
            while True:
                left = max(0.1, deadline - time.monotonic())
                try:
                    lease = self._control.call(left, lease=LeaseRequest(model=name, rows=rows)).lease
                    break
                except (Refused, Busy) as error:
                    if error.code not in (Code.NOT_READY, Code.BUSY):
                        raise
                    if time.monotonic() > deadline:
                        raise (
                            error if error.code == Code.BUSY else Timeout(f"{error} after {timeout:.1f} s")
                        ) from None
                time.sleep(_POLL)  # loading takes seconds; being told would need a channel of its own
            return self._enter(lease, deadline, name, rows)

    def _enter(self, lease: Lease, deadline: float, name: str, rows: int) -> tuple[Lane, ModelSpec, int]:
        board = self._board
        assert board is not None
        spec = ModelSpec(name, _specs(lease.model.inputs), _specs(lease.model.outputs))
        if not try_lock(board.segment.fd, LANE_LOCK + lease.lane):
            # Its last holder let the grant lapse and locked it late; the server will find it locked and skip it.
            if time.monotonic() > deadline:
                raise Busy(f"lane {lease.lane} of {name!r} is locked by another client")
            return self._lease(name, rows, max(0.1, deadline - time.monotonic()))
        try:
            arena = Arena.attach(lease.model.arena, ArenaLayout(spec, lease.model.arena_rows))
        except SharedMemoryError:
            unlock(board.segment.fd, LANE_LOCK + lease.lane)
            raise
        door = self._open_door(board, lease)
        if self._traces:
            door = _traced(door, name, self._info.server_id, lease.lane)

        def give_back() -> None:
            if board.segment.fd >= 0 and board.server_lives():
                # Unanswered, the server still notices by the lock, only a little later.
                with contextlib.suppress(Error):
                    request = ReleaseRequest(lane=lease.lane, lease=lease.lease)
                    self._control.call(1.0, board.server_lives, release=request)
                unlock(board.segment.fd, LANE_LOCK + lease.lane)

        lane = Lane(name, board, arena, door, lease.lease, lease.first_row, lease.rows, give_back)
        return lane, spec, lease.model.max_batch

    def _open_door(self, board: Board, lease: Lease) -> Door:
        """The door that was asked for; with "auto" the native one where this install has it."""
        if self._door in ("auto", "native"):
            try:
                from jurybox.client.doors.native import NativeDoor

                return NativeDoor(board, self._info.server_id, lease.lane, lease.lease, self._spin_us)
            except ImportError as error:
                if self._door == "native":
                    raise Refused(
                        f"door='native' needs the native core, which this install lacks ({error}): install a wheel for "
                        "this platform, or use door='zmq'"
                    ) from error
        return ZmqDoor(self._context, list(self._info.engines), lease.lane, lease.lease)

    def _until_settled(self, name: str, deadline: float) -> None:
        while not (message := self.describe(name)).settled:
            if time.monotonic() > deadline:
                raise Timeout(f"model {name!r} is still {message.state}")
            time.sleep(_POLL)
        if message.reason:
            raise ModelFailed(f"model {name!r} could not be loaded: {message.reason}")


def _spin_us() -> int:
    text = os.environ.get("JURYBOX_SPIN_US", str(_SPIN_US))
    if not text.isdigit():
        raise ValueError(f"JURYBOX_SPIN_US={text!r}: expected microseconds, a whole number of 0 or more")
    return int(text)


def _wants_traces() -> bool:
    text = os.environ.get("JURYBOX_TRACES", "false")
    if text not in ("true", "false"):
        raise ValueError(f"JURYBOX_TRACES={text!r}: expected true or false")
    return text == "true"


def _traced(door: Door, model: str, server_id: str, lane: int) -> Door:
    """The door with traces around it; OpenTelemetry is imported here, and nowhere where it is not wanted."""
    try:
        from jurybox.client.tracing import traced
    except ImportError as error:
        raise Refused(
            f"JURYBOX_TRACES is true, but OpenTelemetry is missing ({error}): install it with "
            "pip install 'jurybox[otel]', or unset the variable"
        ) from error
    return traced(door, model, server_id, lane)


def _specs(messages: Any) -> dict[str, TensorSpec]:
    return {message.name: TensorSpec(message.dtype, tuple(message.shape)) for message in messages}
