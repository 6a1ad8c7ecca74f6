"""What a connection to a server is made of, wherever the server is."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np

from jurybox.client.control import Control, Wires
from jurybox.client.lane import Lane
from jurybox.protocol import control_pb2 as pb
from jurybox.protocol import forks
from jurybox.protocol.arena import Columns
from jurybox.protocol.descriptors import require
from jurybox.protocol.device_memory import Driver
from jurybox.protocol.errors import Busy, Code, Refused, ServerGone, Timeout
from jurybox.protocol.scoreboard import ENGINE, EngineState
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.protocol.wire import build_version

if TYPE_CHECKING:
    from jurybox.client.remote.weights import RemotePublisher, RemoteWeightsReader
    from jurybox.protocol.weights.publisher import Publisher
    from jurybox.protocol.weights.reader import WeightsReader

# What of a publication crosses a network: all of it, what changed since the last one, or all of it as bfloat16.
Transfer: TypeAlias = Literal["exact", "changed", "bfloat16"]
_FILES_OF_A_LINK = 16  # libzmq's threads and sockets, the scoreboard; some at once only
POLL = 0.05  # seconds between two questions whether a model is ready


class Link(Protocol):
    """A way to a server: on this host through shared memory, or to another through a network."""

    _closed: bool = False

    def models(self, timeout: float) -> list[str]:
        """Names of the models the server holds."""

    def describe(self, name: str, timeout: float) -> pb.ModelMessage:
        """State, spec and digest of a model."""

    def status(self, timeout: float) -> str:
        """The status document, JSON."""

    def load(self, name: str, settings_json: str, timeout: float, *, keep: float, remote: bool) -> None:
        """Begin to load a model; `describe` says how it goes."""

    def keep(self, name: str, seconds: float, timeout: float) -> None:
        """Hold a model on that was loaded with `keep`."""

    def unload(self, name: str, timeout: float) -> None:
        """Serve a model no longer."""

    def sleep(self, name: str, timeout: float) -> None:
        """Begin to move a model's weights to host memory; `describe` says how it goes."""

    def wake(self, name: str, timeout: float) -> None:
        """Begin to move them back."""

    def pause(self, timeout: float) -> Callable[[], None]:
        """Have the engines pause; gives what lets them go on."""
        raise Refused("engines pause for processes of their own host, which share the device: connect over ipc://")

    def bind(self, request: pb.BindRequest, timeout: float) -> None:
        """Bind rows to device memory in every engine, or end that; returns when it is done."""
        raise Refused("device memory is handed over on one host: connect over ipc://")

    def lease(self, name: str, rows: int, timeout: float) -> tuple[Lane, ModelSpec, int]:
        """A lane of so many rows (0: the server's default), the model's spec, its largest batch."""

    def publisher(
        self, name: str, transfer: Transfer, timeout: float, driver: Driver | None = None
    ) -> Publisher | RemotePublisher:
        """The learner's end of a model's weights channel."""
        raise _out_of_reach(name)

    def weights(self, name: str, timeout: float) -> WeightsReader | RemoteWeightsReader:
        """An actor's end of it."""
        raise _out_of_reach(name)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close every socket."""


def _out_of_reach(model: str) -> Refused:
    """The error for whoever asks for a weights channel over tcp://."""
    return Refused(
        f"the weights of {model!r} are not published over tcp://: connect with the server's grpc:// address, or "
        "with its ipc:// address on its host"
    )


class RowsHere:
    """A lane's rows in this process's own memory, where the server's is out of reach.

    What is written to them is copied into a message when a ticket is sent, and answers are copied to them.
    """

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        self.rows = rows
        self.columns = Columns.here(spec, rows)

    def close(self) -> None:
        """Forget them; who still holds one of the arrays keeps it."""
        self.columns = self.columns.nothing()


class OneEngine:
    """To a lane the scoreboard of a server with one engine, here one that stands for all of a server elsewhere.

    Attributes:
        engines: one record of scoreboard.ENGINE.
    """

    def __init__(self) -> None:
        self.engines = np.zeros(1, ENGINE)
        self.engines["state"], self.engines["incarnation"] = EngineState.SERVING, 1

    @property
    def incarnation(self) -> int:
        return int(self.engines["incarnation"][0])

    def server_lives(self) -> bool:
        """As Scoreboard.server_lives."""
        return True


class ControlLink(Link):
    """The part of a link that is calls on the control socket.

    A link that is lost without `close` closes its sockets when it is collected. In a forked child it opens its own, as
    soon as something is asked; what was leased before is the parent's.

    Args:
        open_control: makes the control channel over wires.
    """

    def __init__(self, open_control: Callable[[Wires], Control]) -> None:
        self._open_control = open_control
        self._lock = threading.RLock()
        self._wires: Wires | None = None
        self._last_resort: weakref.finalize[[], ControlLink] | None = None
        forks.register(self)

    @property
    def _control(self) -> Control:
        """The control channel; made at the first call, and at the first one of a forked child."""
        if self._wires is None:
            with self._lock:
                if self._wires is None:
                    self._wire()
        return self._opened

    def _greet_first(self, timeout: float) -> None:
        try:
            self._greet(timeout)
        except BaseException:
            self.close()
            raise

    def _greet(self, timeout: float) -> None:
        """Say hello to the server, for which it waits that long."""
        raise NotImplementedError

    def close(self, linger: int = 0) -> None:
        if self._wires is not None:
            self._control.close()
        self._unwire(linger)
        self._closed = True

    def _wire(self) -> None:
        if self._closed:
            raise Refused("this connection was closed: connect again")
        require(_FILES_OF_A_LINK, "connecting to a server")
        wires = Wires()
        last_resort = weakref.finalize(self, wires.close)
        try:
            self._opened = self._open_control(wires)
        except BaseException:
            last_resort()
            raise
        self._last_resort, self._wires = last_resort, wires

    def _unwire(self, linger: int = 0) -> None:
        wires, self._wires = self._wires, None
        if wires is not None:
            wires.close(linger)

    def _after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        self._wires = None  # without a word: its sockets are the parent's

    def models(self, timeout: float) -> list[str]:
        return list(self._call(timeout, hello=self.hello()).server.models)

    def describe(self, name: str, timeout: float) -> pb.ModelMessage:
        return self._call(timeout, model=pb.ModelRequest(model=name)).model

    def status(self, timeout: float) -> str:
        return self._call(timeout, status=pb.StatusRequest()).status.json

    def load(self, name: str, settings_json: str, timeout: float, *, keep: float, remote: bool) -> None:
        self._call(timeout, load=pb.LoadRequest(model=name, settings_json=settings_json, keep=keep, remote=remote))

    def keep(self, name: str, seconds: float, timeout: float) -> None:
        self._call(timeout, keep=pb.KeepRequest(model=name, keep=seconds))

    def unload(self, name: str, timeout: float) -> None:
        self._call(timeout, unload=pb.UnloadRequest(model=name))

    def sleep(self, name: str, timeout: float) -> None:
        self._call(timeout, sleep=pb.SleepRequest(model=name))

    def wake(self, name: str, timeout: float) -> None:
        self._call(timeout, wake=pb.WakeRequest(model=name))

    def hello(self) -> pb.Hello:
        """How this client introduces itself."""
        return pb.Hello(client=build_version(), pid=os.getpid())

    def _call(self, timeout: float, **request: Any) -> pb.ControlReply:
        return self._control.call(timeout, **request)

    def _grant(self, name: str, rows: int, deadline: float, timeout: float) -> pb.Lease:
        """A lease, waited for while the model loads or other clients have the rows.

        Raises:
            Busy: the arena had no free rows until `deadline`, s of the monotonic clock; Timeout: the model was loading.
        """
        why: Busy | Timeout | None = None
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                return self._call(left, lease=pb.LeaseRequest(model=name, rows=rows)).lease
            except (Refused, Busy) as error:
                if isinstance(error, Busy):
                    why = error
                elif error.code == Code.NOT_READY:
                    why = Timeout(f"{error} after {timeout:.1f} s")
                else:
                    raise
            except ServerGone:
                # It was there, and had no more time to say once more what it had said before.
                if why is None or time.monotonic() < deadline:
                    raise
            if time.monotonic() > deadline:
                raise why from None
            time.sleep(POLL)  # loading takes seconds; being told would need a channel of its own


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model as the server tells of it, from `Server.describe`.

    Attributes:
        spec: None as long as it was never loaded.
        state: loading, ready, sleeping, failed or quarantined; `reason` says why it failed.
        settled: no engine is still loading it.
        max_batch: rows of the largest batch.
        arena_rows: rows that all clients together can lease.
        digest: of the weights it was loaded with.
        engines: numbers of those that compute it; empty: all.
        takes_publications: whether learners can publish weights to it.
        max_lag: versions its answers may be behind before collectors are held back; 0: any number.
    """

    name: str
    spec: ModelSpec | None
    state: str
    reason: str
    settled: bool
    max_batch: int
    arena_rows: int
    digest: str
    engines: tuple[int, ...]
    takes_publications: bool
    max_lag: int


def described(message: pb.ModelMessage) -> ModelDescription:
    """What a model's message says, for the caller of the client."""
    return ModelDescription(
        message.name,
        spec_of(message) if message.inputs else None,
        message.state,
        message.reason,
        message.settled,
        message.max_batch,
        message.arena_rows,
        message.digest,
        tuple(message.engines),
        bool(message.weights),
        message.max_lag,
    )


def spec_of(message: pb.ModelMessage) -> ModelSpec:
    """The spec that a model's message carries."""
    return ModelSpec(message.name, _specs(message.inputs), _specs(message.outputs), _specs(message.session_state))


def _specs(messages: Any) -> dict[str, TensorSpec]:
    return {
        message.name: TensorSpec(message.dtype, tuple(message.shape), message.capacity, message.finite)
        for message in messages
    }
