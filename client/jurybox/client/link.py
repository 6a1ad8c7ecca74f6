"""The parts of a connection to a server that do not depend on where the server is."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import zmq

from jurybox.client.control import Control, Wires
from jurybox.client.lane import Lane
from jurybox.client.transports.transport import Transport
from jurybox.protocol import control_pb2 as pb
from jurybox.protocol import forks
from jurybox.protocol.arena import Columns
from jurybox.protocol.descriptors import require
from jurybox.protocol.device_memory import Driver
from jurybox.protocol.errors import Busy, Code, Error, Refused, ServerGone, Timeout
from jurybox.protocol.locks import TimedLock
from jurybox.protocol.scoreboard import ENGINE, NORMAL, EngineState
from jurybox.protocol.spec import ModelSpec, TensorSpec, parameters_of
from jurybox.protocol.wire import build_version

if TYPE_CHECKING:
    from jurybox.client.remote.weights import RemotePublisher, RemoteWeightsReader
    from jurybox.protocol.weights.publisher import Publisher
    from jurybox.protocol.weights.reader import WeightsReader

# How a publication is sent over a network: in full, as the changes since the last one, or in full as bfloat16.
Transfer: TypeAlias = Literal["exact", "changed", "bfloat16"]
_FILES_OF_A_LINK = 16  # file descriptors: libzmq's threads and sockets, the scoreboard; some only temporarily
_GIVE_BACK = 1.0  # seconds for a lease that is not used
POLL = 0.05  # seconds between two requests for a model's state


class Link(Protocol):
    """A connection to a server: on this host through shared memory, or on another host over a network.

    Attributes:
        waits: whether `load`, `sleep` and `wake` return when they are carried out, not when they have begun.
    """

    waits: bool = False
    _closed: bool = False

    def models(self, timeout: float) -> list[str]:
        """Return the names of the server's models."""

    def describe(self, name: str, timeout: float) -> pb.ModelMessage:
        """Return the state, spec and digest of a model."""

    def status(self, timeout: float) -> str:
        """Return the status document as JSON."""

    def load(self, name: str, settings_json: str, timeout: float, *, keep: float, remote: bool) -> None:
        """Begin to load a model; `describe` reports the progress."""

    def keep(self, name: str, seconds: float, timeout: float) -> None:
        """Keep a model that was loaded with `keep` for `seconds` more."""

    def unload(self, name: str, timeout: float) -> None:
        """Unload a model."""

    def sleep(self, name: str, timeout: float) -> None:
        """Begin to move a model's weights to host memory; `describe` reports the progress."""

    def wake(self, name: str, timeout: float) -> None:
        """Begin to move a sleeping model's weights back to the device."""

    def pause(self, timeout: float) -> Callable[[], None]:
        """Pause the engines; return a function that resumes them."""
        raise Refused("engines can be paused only by processes on their own host: connect over ipc://")

    def bind(self, request: pb.BindRequest, timeout: float) -> None:
        """Bind rows to device memory in every engine, or unbind them; return when it is done."""
        raise Refused("device memory can be shared only on one host: connect over ipc://")

    def lease(
        self, name: str, rows: int, timeout: float, *, wait: bool = True, priority: int = NORMAL
    ) -> tuple[Lane, ModelSpec, int]:
        """Lease a lane of `rows` rows (0: the server's default); return it, the model's spec and its largest batch.

        Args:
            priority: of its tickets, one of scoreboard.PRIORITIES.
            wait: False: the server has `timeout` to answer, but its first answer is final.
        """

    def publisher(
        self, name: str, transfer: Transfer, timeout: float, driver: Driver | None = None
    ) -> Publisher | RemotePublisher:
        """Open the learner's end of a model's weights channel."""
        raise _out_of_reach(name)

    def weights(self, name: str, timeout: float) -> WeightsReader | RemoteWeightsReader:
        """Open an actor's end of a model's weights channel."""
        raise _out_of_reach(name)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close every socket."""


def closed_connection() -> Refused:
    """Return the error of a connection that was closed."""
    return Refused("this connection was closed: connect again")


def _out_of_reach(model: str) -> Refused:
    """Return the error for a weights channel requested over tcp://."""
    return Refused(
        f"the weights of {model!r} are not published over tcp://: connect with the server's grpc:// address, or "
        "with its ipc:// address on its host"
    )


class RowsHere:
    """A lane's rows in this process's own memory, for a server whose shared memory is out of reach.

    Inputs are copied from them into a message when a ticket is sent, and answers are copied into them.
    """

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        self.rows = rows
        self.columns = Columns.here(spec, rows)

    def close(self) -> None:
        """Drop the arrays; those that are still referenced elsewhere stay valid."""
        self.columns = self.columns.nothing()


class OneEngine:
    """A stand-in for the scoreboard of a remote server; it shows the lane a single engine for the whole server.

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
        """Return True; see Scoreboard.server_lives."""
        return True


class ControlLink(Link):
    """The part of a link that makes calls on the control socket.

    A link that is dropped without `close` closes its sockets when it is garbage-collected. In a forked child it opens
    its own sockets on the first call; earlier leases belong to the parent.

    Args:
        open_control: creates the control channel, given the sockets' `Wires`.
    """

    def __init__(self, open_control: Callable[[Wires], Control]) -> None:
        self._open_control = open_control
        self._lock = TimedLock("a connection or a lease")
        self._wires: Wires | None = None
        self._last_resort: weakref.finalize[[], ControlLink] | None = None
        forks.register(self)

    def _control(self, timeout: float) -> Control:
        """Return the control channel, created on the first call, and again on the first call in a forked child."""
        if self._wires is None:
            with self._lock.within(timeout):
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
        """Exchange hello messages with the server, waiting for it up to `timeout` seconds."""
        raise NotImplementedError

    def close(self, linger: int = 0) -> None:
        self._closed = True
        wires, self._wires = self._wires, None
        if wires is not None:
            self._opened.close(partial(wires.close, linger))

    @property
    def _context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """The context of its sockets. Raises Refused if it was closed, perhaps within the present call."""
        if (wires := self._wires) is None:
            raise closed_connection()
        return wires.context

    def _require_open(self) -> None:
        if self._closed:
            raise closed_connection()

    def _wire(self) -> None:
        self._require_open()
        require(_FILES_OF_A_LINK, "connecting to a server")
        wires = Wires()
        last_resort = weakref.finalize(self, wires.leave)
        try:
            self._opened = self._open_control(wires)
        except BaseException:
            last_resort()
            raise
        self._last_resort, self._wires = last_resort, wires

    def _after_fork_in_child(self) -> None:
        self._lock.anew()
        self._wires = None  # without closing them: the sockets are the parent's

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
        """Return this client's hello message."""
        return pb.Hello(client=build_version(), pid=os.getpid())

    def _call(self, timeout: float, **request: Any) -> pb.ControlReply:
        until = time.monotonic() + timeout
        control = self._control(timeout)
        return control.call(max(0.0, until - time.monotonic()), **request)

    def _grant(
        self, name: str, rows: int, deadline: float, timeout: float, *, wait: bool = True, priority: int = NORMAL
    ) -> pb.Lease:
        """Return a lease; wait while the model is loading or other clients have the rows.

        Args:
            deadline: s of the monotonic clock.
            timeout: seconds, for the message.
            wait, priority: see `lease`.

        Raises:
            Refused: the server knows no priorities.
            Busy: the arena had no free rows until `deadline`.
            Timeout: the model was still loading.
        """
        why: Busy | Timeout | None = None
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                asked = 0 if priority == NORMAL else priority
                lease = self._call(left, lease=pb.LeaseRequest(model=name, rows=rows, priority=asked)).lease
                if lease.priority != asked:
                    with contextlib.suppress(Error):  # else the server takes it back, as nobody locks it
                        self._call(_GIVE_BACK, release=pb.ReleaseRequest(lane=lease.lane, lease=lease.lease))
                    raise Refused(
                        f"priority={priority}: this server knows no priorities, and computes requests in the order "
                        f"they come: update its jurybox (here it is {build_version()}), or ask without a priority"
                    )
                return lease
            except (Refused, Busy) as error:
                if isinstance(error, Busy):
                    why = error
                elif error.code == Code.NOT_READY:
                    why = Timeout(f"{error} after {timeout:.1f} s" if wait else str(error))
                else:
                    raise
            except ServerGone:
                # The server has answered before, and only lacked the time to repeat that answer: raise that instead.
                if why is None or time.monotonic() < deadline:
                    raise
            if not wait or time.monotonic() > deadline:
                raise why from None
            time.sleep(POLL)  # loading takes seconds; a notification would need its own channel


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The server's description of a model, returned by `Server.describe`.

    Attributes:
        spec: names, dtypes and row shapes; None until the model has been loaded once.
        state: loading, ready, sleeping, failed or quarantined; `reason` states why it failed.
        settled: whether no engine is still loading it.
        max_batch: rows in the largest batch.
        arena_rows: rows that all clients together can lease.
        digest: digest of the weights that it was loaded with.
        engines: numbers of the engines that compute it; empty: all.
        takes_publications: whether learners can publish weights to it.
        max_lag: how many versions its answers may lag before collectors are held back; 0: any number.
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
    """Convert a model's message to a `ModelDescription`."""
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


def wants_traces() -> bool:
    """Return whether JURYBOX_TRACES asks for traces of tickets. Raises ValueError if it is neither true nor false."""
    text = os.environ.get("JURYBOX_TRACES", "false")
    if text not in ("true", "false"):
        raise ValueError(f"JURYBOX_TRACES={text!r}: expected true or false")
    return text == "true"


def traced(transport: Transport, model: str, scoreboard: str | None = None, lane: int | None = None) -> Transport:
    """Wrap the transport to trace its tickets. OpenTelemetry is imported only here, if it is wanted.

    Args:
        scoreboard: the name of the server's scoreboard; None: the server is elsewhere, and there are only outer spans.
        lane: the number of the lane; None: it has none.

    Raises:
        Refused: OpenTelemetry is missing.
    """
    try:
        from jurybox.client.tracing import traced
    except ImportError as error:
        from jurybox.protocol.revision import install_command

        raise Refused(
            f"JURYBOX_TRACES is true, but OpenTelemetry is missing ({error}): install it with "
            f"{install_command('otel')}, or unset the variable"
        ) from error
    return traced(transport, model, scoreboard, lane)


def spec_of(message: pb.ModelMessage) -> ModelSpec:
    """Return the spec in a model's message."""
    tensors = (_specs(part) for part in (message.inputs, message.outputs, message.session_state))
    return ModelSpec(message.name, *tensors, parameters=parameters_of(message))


def _specs(messages: Any) -> dict[str, TensorSpec]:
    return {
        message.name: TensorSpec(message.dtype, tuple(message.shape), message.capacity, message.finite)
        for message in messages
    }
