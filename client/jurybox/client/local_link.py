"""A connection to a server on this host: calls on its control socket, rows in its shared memory."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from jurybox.client.control import Control
from jurybox.client.lane import Lane
from jurybox.client.link import POLL, ControlLink, Transfer, closed_connection, spec_of, traced, wants_traces
from jurybox.client.transports.transport import Transport
from jurybox.client.transports.zmq import ZmqTransport
from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.control_pb2 import BindRequest, Lease, ModelMessage, PauseRequest, ReleaseRequest, ServerMessage
from jurybox.protocol.descriptors import require
from jurybox.protocol.device_memory import Driver
from jurybox.protocol.errors import Busy, Error, Refused, ServerGone, SharedMemoryError, Timeout, TooManyFiles
from jurybox.protocol.locks import TimedLock
from jurybox.protocol.scoreboard import LANE_LOCK, NORMAL, PAUSE_LOCK, EngineState, Scoreboard
from jurybox.protocol.segment import directory, try_lock, unlock
from jurybox.protocol.spec import ModelSpec
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader

_FILES_OF_A_LANE = 10  # file descriptors: arena, rings, pipe or socket
_PAUSE_POLL = 0.0005  # seconds between two checks whether the engines have paused
_BIND_POLL = 0.005
_RESUME = 5.0  # seconds; longer than a pause's beginning or end takes
_ENTER = 0.1  # seconds for what takes no time, at the end of a time-out
_SPIN_US = 100  # a small model answers a lone client within this time


class _Pause:
    """One caller's pause. It is referenced weakly, so one that is lost to an interrupt keeps no engine paused."""

    __slots__ = ("__weakref__", "scoreboard")

    def __init__(self, scoreboard: Scoreboard) -> None:
        self.scoreboard = scoreboard


class LocalLink(ControlLink):
    """A link to a server on this host: its scoreboard, and lanes in its arenas.

    Args:
        address: an ipc:// address.
        transport: "auto" (what the server's configuration says, or the fastest available), "zmq" or "shm".
        timeout: seconds to wait for a server that is still starting.
    """

    def __init__(self, address: str, transport: str, timeout: float) -> None:
        super().__init__(lambda wires: Control(wires.context, address))
        self._address = address
        self._transport = transport
        self._spin_us = _spin_us()
        self._traces = wants_traces()
        self.scoreboard: Scoreboard | None = None
        self._channels: weakref.WeakSet[WeightsChannel] = weakref.WeakSet()  # each belongs to a publisher or reader
        self._info = ServerMessage()
        self._entering: tuple[Scoreboard, int] | None = None  # a lane that is locked, but has no Lane yet
        self._pauses: weakref.WeakSet[_Pause] = weakref.WeakSet()
        self._pausing = TimedLock("a pause's beginning or end")  # changes of `_pauses` and of the lock of the file
        self._greet_first(timeout)

    def close(self, linger: int = 200) -> None:
        for channel in list(self._channels):
            channel.close()
        self.scoreboard = None
        super().close(linger)

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        self._channels, self._entering = weakref.WeakSet(), None
        self._pauses = weakref.WeakSet()
        self._pausing.anew()
        if self.scoreboard is not None:
            # Closing it drops this process's descriptors of the parent's locks, not the locks themselves.
            self.scoreboard.segment.close()
            self.scoreboard = None

    def publisher(self, name: str, transfer: Transfer, timeout: float, driver: Driver | None = None) -> Publisher:
        """See Link.publisher. It writes to the memory that the engines read, and ignores `transfer`."""
        return Publisher(self._channel(name, timeout)[0], owns=True, driver=driver)

    def weights(self, name: str, timeout: float) -> WeightsReader:
        channel, message = self._channel(name, timeout)
        in_use = functools.partial(self._version_in_use, message.index, list(message.engines))
        return WeightsReader(channel, message.max_lag, in_use, channel.owner_lives, owns=True)

    def _channel(self, name: str, timeout: float) -> tuple[WeightsChannel, ModelMessage]:
        deadline = time.monotonic() + timeout
        while (message := self.describe(name, timeout)).state == "loading" and time.monotonic() < deadline:
            time.sleep(POLL)
        if not message.weights:
            why = (
                "takes no publications: set publish in its configuration"
                if message.state == "ready"
                else message.reason
            )
            raise Refused(f"model {name!r} is {message.state} and {why or 'has no weights channel yet'}")
        channel = WeightsChannel.attach(message.weights)
        self._channels.add(channel)
        if self._closed:  # meanwhile
            channel.close()
        self._require_open()
        return channel, message

    def _version_in_use(self, model: int, engines: list[int]) -> int:
        """Return the oldest weights version that the serving engines answer with; 0 if no engine is serving.

        Args:
            model: the model's index on the scoreboard.
            engines: numbers of the engines that compute it; empty: all.
        """
        scoreboard = self.scoreboard
        if scoreboard is None:
            raise closed_connection()
        serving = scoreboard.engines["state"] == EngineState.SERVING
        if engines:
            serving[[engine for engine in range(len(serving)) if engine not in engines]] = False
        versions = scoreboard.counters["version"][serving, model]
        return int(versions.min()) if len(versions) else 0

    def pause(self, timeout: float) -> Callable[[], None]:
        """See Link.pause. The lock shows that this process is alive; the kernel releases it when the process ends.

        The lock belongs to the open file, not to a caller. So pauses of this link share it, and the last one resumes.
        """
        deadline = time.monotonic() + timeout
        scoreboard = self._served(timeout)
        engines = scoreboard.engines
        pause = _Pause(scoreboard)

        def go_on() -> None:
            if pause not in self._pauses:  # it never began
                return
            with self._pausing.within(_RESUME):
                if pause not in self._pauses:
                    return
                self._pauses.discard(pause)
                if self._paused(scoreboard):
                    return
                try:
                    # If this call fails, the server still notices the released lock, only a little later.
                    with contextlib.suppress(Error):
                        if not self._closed and scoreboard.server_lives():
                            self._call(1.0, pause=PauseRequest(pause=False))
                finally:
                    unlock(scoreboard.segment.fd, PAUSE_LOCK)

        try:
            while not self._joins(pause, deadline):
                if time.monotonic() > deadline:
                    raise Busy(f"another process has had the engines paused for {timeout:.1f} s")
                time.sleep(_PAUSE_POLL)
            self._call(max(0.1, deadline - time.monotonic()), pause=PauseRequest(pause=True))
            while (busy := np.flatnonzero((engines["state"] == EngineState.SERVING) & (engines["paused"] == 0))).size:
                if not scoreboard.server_lives():
                    raise ServerGone("the server ended before its engines paused")
                if time.monotonic() > deadline:
                    raise Timeout(f"engine {busy[0]} has been in a batch for {timeout:.1f} s: increase the time-out")
                time.sleep(_PAUSE_POLL)
        except BaseException:
            go_on()
            raise
        return go_on

    def _joins(self, pause: _Pause, deadline: float) -> bool:
        """Add a pause to those of its server; return False if another process has the lock."""
        with self._pausing.once(deadline - time.monotonic()):
            if not self._paused(pause.scoreboard) and not try_lock(pause.scoreboard.segment.fd, PAUSE_LOCK):
                return False
            self._pauses.add(pause)
            return True

    def _paused(self, scoreboard: Scoreboard) -> bool:
        return any(pause.scoreboard is scoreboard for pause in self._pauses)

    def bind(self, request: BindRequest, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not (binding := self._call(max(0.1, deadline - time.monotonic()), bind=request).binding).settled:
            if time.monotonic() > deadline:
                raise Timeout(f"engines have not opened or released device memory within {timeout:.1f} s")
            time.sleep(_BIND_POLL)
        if binding.reason:
            raise Refused(binding.reason)

    def lease(
        self, name: str, rows: int, timeout: float, *, wait: bool = True, priority: int = NORMAL
    ) -> tuple[Lane, ModelSpec, int]:
        """See Link.lease. The lane is locked and its arena mapped. If the server was replaced, the new one is used."""
        deadline = time.monotonic() + timeout
        self._served(timeout)
        while True:
            lease = self._grant(name, rows, deadline, timeout, wait=wait, priority=priority)
            with self._lock.once(max(_ENTER, deadline - time.monotonic())):
                lane = self.enter(lease)
            if lane is not None:
                return lane, spec_of(lease.model), lease.model.max_batch
            if not wait or time.monotonic() > deadline:
                raise Busy(f"lane {lease.lane} of {name!r} is locked by another client")

    def _served(self, timeout: float) -> Scoreboard:
        """Return the scoreboard of the server, or of the one that has replaced it."""
        until = time.monotonic() + timeout
        with self._lock.once(timeout):
            if self.scoreboard is None or not self.scoreboard.server_lives():
                self._greet(max(_ENTER, until - time.monotonic()))
            if (scoreboard := self.scoreboard) is None:  # closed within this call
                raise closed_connection()
            return scoreboard

    def enter(self, lease: Lease) -> Lane | None:
        """Lock a leased lane and map its arena; return None if another client has it locked.

        That client's lease expired before it locked the lane. The server will find the lane locked and skip it.
        """
        if (scoreboard := self.scoreboard) is None:
            raise closed_connection()
        if (left := self._entering) is not None:  # an earlier attempt was interrupted
            unlock(left[0].segment.fd, LANE_LOCK + left[1])
            self._entering = None
        try:
            require(_FILES_OF_A_LANE, f"a lane of {lease.model.name!r}")
        except TooManyFiles:
            self._release(scoreboard, lease)
            raise
        self._entering = (scoreboard, lease.lane)
        if not try_lock(scoreboard.segment.fd, LANE_LOCK + lease.lane):
            self._entering = None
            return None
        try:
            lane = self._lane(scoreboard, lease)
        except BaseException:
            self._release(scoreboard, lease)
            unlock(scoreboard.segment.fd, LANE_LOCK + lease.lane)
            self._entering = None
            raise
        self._entering = None
        return lane

    def _lane(self, scoreboard: Scoreboard, lease: Lease) -> Lane:
        """Create the lane of a lease whose lock is held. It is closed, or collected, before the lock is released."""
        with ExitStack() as undo:
            arena = Arena.attach(lease.model.arena, ArenaLayout(spec_of(lease.model), lease.model.arena_rows))
            undo.callback(arena.close)
            transport = self._open_transport(scoreboard, lease)
            undo.callback(transport.close)
            if self._traces:
                transport = traced(transport, lease.model.name, scoreboard.segment.name, lease.lane)
            lane = Lane(
                lease.model.name,
                scoreboard,
                arena,
                transport,
                lease.lease,
                lease.first_row,
                lease.rows,
                lambda: self._release(scoreboard, lease),
                leave=lambda: unlock(scoreboard.segment.fd, LANE_LOCK + lease.lane),
                engines=lease.model.engines,
                home=lease.engine,
                leased=(lease.lane, lease.lease),
                charged=scoreboard.lanes["deaths"][lease.lane : lease.lane + 1],
            )
            undo.pop_all()
            return lane

    def _release(self, scoreboard: Scoreboard, lease: Lease) -> None:
        # If this call fails, the server still notices the released lock, only a little later.
        with contextlib.suppress(Error):
            if not self._closed and scoreboard.server_lives():
                request = ReleaseRequest(lane=lease.lane, lease=lease.lease)
                self._control(1.0).call(1.0, scoreboard.server_lives, release=request)

    def _greet(self, timeout: float) -> None:
        """Exchange hello messages and map the scoreboard of the server that answers."""
        missing = ""
        while True:
            self._info = self._call(timeout, hello=self.hello()).server
            self.scoreboard = None  # existing lanes still read it, and see there that their server is gone
            try:
                self.scoreboard = Scoreboard.attach(self._info.scoreboard)
                return
            except SharedMemoryError as error:
                if self._info.scoreboard == missing:
                    raise _foreign_memory(self._address, missing, error) from error
                missing = self._info.scoreboard  # it may have just stopped: the next answer shows it

    def _open_transport(self, scoreboard: Scoreboard, lease: Lease) -> Transport:
        """Open the requested transport; for "auto" the server's, or shm if this install has the native core, or zmq."""
        wanted = self._info.transport if self._transport == "auto" else self._transport
        if wanted != "zmq":
            try:
                from jurybox.client.transports.shm import ShmTransport

                return ShmTransport(scoreboard, lease.lane, lease.lease, self._spin_us)
            except ImportError as error:
                if self._transport == "shm":
                    raise Refused(
                        f"transport='shm' needs the native core, which is missing here ({error}): install a wheel for "
                        "this platform, or use transport='zmq'"
                    ) from error
        return ZmqTransport(self._context, list(self._info.engines), lease.lane, lease.lease)


def _foreign_memory(address: str, scoreboard: str, error: SharedMemoryError) -> SharedMemoryError:
    """Return an error that states why this process cannot map the shared memory of a server that answers."""
    if isinstance(error.__cause__, PermissionError):
        why = f"is closed to user {os.getuid()}: run this process as the server's user"
    else:
        why = (
            f"is not in {directory()}, where this process looks: the server has another folder. Set JURYBOX_SHM_DIR to "
            "the same for both. Containers mount one volume there, as compose.yaml shows; where they share ipc: "
            "instead, a restart of the server gives it a new /dev/shm, so start this container again too. Or connect "
            "to a grpc:// or tcp:// address: those need no shared memory"
        )
    return SharedMemoryError(f"the server at {address} answers, but its shared memory {scoreboard} {why}")


def _spin_us() -> int:
    text = os.environ.get("JURYBOX_SPIN_US", str(_SPIN_US))
    if not text.isdigit():
        raise ValueError(f"JURYBOX_SPIN_US={text!r}: expected microseconds, a whole number of 0 or more")
    return int(text)
