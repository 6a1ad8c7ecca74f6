"""The supervisor's children: standby processes, starts and restarts, and the watchdog."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jurybox.processes import ControlPipe, encode_message, spawn
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.server.memory import MemoryKills
from jurybox.server.security.access import Access
from jurybox.server.settings.config import Configuration

_AGAIN = 10.0  # seconds between two starts of a standby process that ends early


class Standby:
    """At most one standby process that has done its imports, for any child of the same module and environment.

    Most of a child's start time is the import of torch, or of a web framework. A child that takes over the standby
    process does not spend it.

    Args:
        module: what ``python -m`` runs.
        environment: variables set for it.
        ahead: names of modules that it imports while it waits, in addition to those that it always needs.
    """

    def __init__(self, module: str, environment: dict[str, str] | None = None, ahead: Sequence[str] = ()) -> None:
        self._module = module
        self._environment = environment
        self._ahead = list(ahead)
        self._waiting: tuple[subprocess.Popen[bytes], ControlPipe] | None = None
        self._start_at = 0.0

    def look(self, now: float) -> None:
        """Start a standby process if none is waiting.

        Raises:
            OSError: there is not enough memory, or too many files are open. It is retried ten seconds later.
        """
        if self._waiting is not None and self._waiting[0].poll() is not None:
            self.close()
        if self._waiting is None and now >= self._start_at:
            self._start_at = now + _AGAIN
            self._waiting = spawn(self._module, self._ahead, self._environment)

    def take(self) -> tuple[subprocess.Popen[bytes], ControlPipe] | None:
        """Take the standby process; None if there is none, or it has died."""
        taken, self._waiting = self._waiting, None
        if taken is not None and taken[0].poll() is not None:
            taken[1].close()
            return None
        if taken is not None:
            self._start_at = 0.0  # it did not end early, so the next one can start at once
        return taken

    def close(self) -> None:
        """End the standby process, if there is one."""
        if self._waiting is None:
            return
        process, control_pipe = self._waiting
        self._waiting = None
        process.kill()
        process.wait()
        control_pipe.close()


# Seconds before the first, second, ... restart in a row; the last value repeats.
_BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
_PROVEN = 1.0  # seconds of service after which a child counts as working; a ticket that kills engines returns sooner
_SHORT = 1.0  # seconds until the next attempt after a lack of memory or files


def killed_from_outside(status: int, served: float, *, by_supervisor: bool, memory: MemoryKills, short: str) -> bool:
    """Return whether a dead child was killed from outside: by a kill -9 while it was serving.

    The kernel's out-of-memory killer also sends SIGKILL. Such a death counts as the process's own failure, like a
    crash, or the kill of a process that hangs.

    Args:
        status: its exit status.
        served: seconds that it had served.
        by_supervisor: whether its parent killed it.
        short: what `memory` has said about its death.
    """
    return status == -signal.SIGKILL and served > _PROVEN and not by_supervisor and memory.known and not short


@dataclass(eq=False)
class Child:
    """A process that should run.

    Args:
        role: its name in logs ("engine-0", "gateway").
        module: what ``python -m`` runs.
        configure: returns the fields of the first message; called at every start.
        environment: variables set for it; those that are None are removed.
        standby: the standby process of the same module and environment; a start uses it if it is there.
        python: the interpreter that runs it.
    """

    role: str
    module: str
    configure: Callable[[], dict[str, Any]]
    environment: Mapping[str, str | None] | None = None
    standby: Standby | None = None
    python: str = sys.executable
    serving: bool = field(default=False, init=False)
    drained: bool = field(default=False, init=False)  # it has answered everything that it had accepted
    served_at: float = field(default=0.0, init=False)  # s of the monotonic clock; when it began to serve
    killed_by_supervisor: bool = field(default=False, init=False)
    failures: int = field(default=0, init=False)  # deaths in a row
    restart_at: float = field(default=0.0, init=False)
    started_at: float = field(default=0.0, init=False)
    heard_at: float = field(default=0.0, init=False)  # s of the monotonic clock; only gateway and relay
    # At most one for each lane, and a few more; of the first one, what has not been sent.
    _orders: deque[memoryview] = field(default_factory=deque, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _control_pipe: ControlPipe | None = field(default=None, init=False)

    @property
    def alive(self) -> bool:
        return self._control_pipe is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def exited(self) -> bool:
        """Whether the process has ended. Its pipe may still be open, in a process that a model has forked."""
        return self._process is not None and self._process.poll() is not None

    @property
    def orders_waiting(self) -> int:
        """The number of orders that could not be sent yet, or only in part."""
        return len(self._orders)

    def fileno(self) -> int:
        assert self._control_pipe is not None
        return self._control_pipe.fileno()

    def start(self, now: float) -> None:
        """Start the process and send its configuration.

        Raises:
            Error, OSError: there is not enough memory, or too many files are open. Nothing was started; the next
                attempt is due a second later.
        """
        self.serving = self.drained = self.killed_by_supervisor = False
        self.started_at = now
        self.restart_at = now + _SHORT
        configuration = self.configure()
        waiting = self.standby.take() if self.standby else None
        self._process, self._control_pipe = waiting or spawn(
            self.module, environment=self.environment, python=self.python
        )
        self._orders.clear()
        self.send("configure", **configuration)

    def serves(self, now: float) -> None:
        """Record that the child serves."""
        self.serving, self.served_at = True, now

    def send(self, kind: str, **fields: Any) -> None:
        """Send an order of any size, now or when the child reads again: a stopped child cannot block its parent.

        Orders to a dead child are dropped; `messages` reports its death.
        """
        if self._control_pipe is not None:
            self._orders.append(memoryview(encode_message(kind, **fields)))
            self.send_waiting()

    def send_waiting(self) -> None:
        """Send waiting orders, as far as the child reads them; call it when the pipe is writable."""
        try:
            while self._orders and self._control_pipe is not None:
                if rest := self._control_pipe.send_part(self._orders.popleft()):
                    self._orders.appendleft(rest)
                    return
        except OSError:
            self.serving = False
            self._orders.clear()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the child's messages.

        Raises:
            EOFError: the child is dead.
        """
        assert self._control_pipe is not None
        while (message := self._control_pipe.receive(0)) is not None:
            yield message

    def reap(self, now: float, *, settled_after: float) -> int:
        """Clean up after a dead child, schedule its restart, and return its exit status.

        The count of failures starts anew if it served and had started more than `settled_after` seconds ago.
        """
        status = self._end(timeout=2.0)
        if self.serving and now - self.started_at > settled_after:
            self.failures = 0
        self.serving = False
        self.restart_at = now + _BACK_OFF[min(self.failures, len(_BACK_OFF) - 1)]
        self.failures += 1
        return status

    def excuse_last_death(self, now: float) -> None:
        """Do not count the last death, and restart at once."""
        self.failures -= 1
        self.restart_at = now

    def kill(self) -> None:
        """Kill the child; `messages` then raises EOFError."""
        if self._process is not None:
            self.killed_by_supervisor = True
            self._process.kill()

    def stop(self, timeout: float) -> None:
        """Ask the child to stop, and kill it after `timeout` seconds."""
        if self._process is not None:
            self.send("stop")
            self._end(timeout)
        self.serving = False

    def _end(self, timeout: float) -> int:
        assert self._process is not None
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._control_pipe is not None:
            self._control_pipe.close()
        self._process = self._control_pipe = None
        return status


_BOTH = {"address", "log_level", "log_format"}
_GATEWAY, _RELAY = "jurybox.server.gateway", "jurybox.server.relay"
_OF_GRPC = tuple(
    f"{_GATEWAY}.{name}" for name in ("grpc_server", "remote_weights", "inference.grpc_inference")
)  # modules that a gateway imports only if it serves gRPC


def services(settings: Configuration, listening: Mapping[str, Any]) -> list[Child]:
    """Return the gateway and the relay, if the settings ask for them.

    Args:
        listening: the addresses of "http", "grpc" and "tcp", and those of all "robots" and "dialects" with a port of
            their own: first as configured, later as reported. So a restarted service gets the port that it had, to
            which its clients reconnect.
    """
    server, robots = settings.server, settings.robots

    def gateway() -> dict[str, Any]:
        dialects, own = settings.plain_dialects(), listening["dialects"]
        return {
            **server.model_dump(mode="json", include=_BOTH | {"sequence_idle", "sessions_share", "grpc_http2", "runs"}),
            "http": listening["http"],
            "grpc": listening["grpc"],
            "panels": settings.plain_panels(),
            "dialects": {name: {**dialect, "listen": own.get(name, "")} for name, dialect in dialects.items()},
            "robots": {
                name: {**robot.model_dump(mode="json"), "listen": listening["robots"][name]}
                for name, robot in robots.items()
            },
            "access": asdict(Access.of(server)),
        }

    def relay() -> dict[str, Any]:
        given = server.model_dump(mode="json", include=_BOTH | {"curve_key", "curve_clients", "sessions_share"})
        return {**given, "tcp": listening["tcp"], "max_message": server.max_message}

    children = []
    if server.http or server.grpc or robots or listening["dialects"]:
        # gRPC creates and ends thread pools, which fragments malloc's arenas. With one arena the gateway's memory stays
        # constant over any number of calls; with an arena for each thread it grows for a hundred thousand calls. One
        # arena costs nothing, since the GIL lets only one thread at a time allocate.
        environment = {"MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")}
        standby = Standby(_GATEWAY, environment, _OF_GRPC if server.grpc else ()) if server.standby else None
        children.append(Child("gateway", _GATEWAY, gateway, environment, standby))
    if server.tcp:
        children.append(Child("relay", _RELAY, relay, standby=Standby(_RELAY) if server.standby else None))
    return children


# Detection of children that hang: they are alive, but do not work.
#
# Time in which the supervisor itself did not run (stopped, a paused container, a machine without a free core) does not
# count: its children may not have run either, and killing them would turn a pause into an outage.


_AHEAD = 1.0  # seconds that a heartbeat may be later than `now`, which is read before it
_AWAY = 2.0  # seconds between two checks from which on the supervisor counts as having been stopped


class Watchdog:
    """Finds children that hang; called several times a second.

    Args:
        scoreboard: where engines write their heartbeats, ns of CLOCK_MONOTONIC.
        silence: seconds without a heartbeat after which a serving child hangs.
        start_timeout: seconds from its start after which a child that does not serve hangs.
        now: seconds of CLOCK_MONOTONIC, as later for `hanging`.
    """

    def __init__(self, scoreboard: Scoreboard, silence: float, start_timeout: float, now: float) -> None:
        self._scoreboard = scoreboard
        self._silence = silence
        self._start_timeout = start_timeout
        self._beats = [0.0] * len(scoreboard.engines)  # seconds of CLOCK_MONOTONIC
        self._looked = now
        self._since = now  # when the supervisor last continued after being stopped

    def hanging(self, engines: Sequence[Child], services: Sequence[Child], now: float) -> Iterator[tuple[Child, str]]:
        """Yield the children that hang, each with the reason."""
        if now - self._looked > _AWAY:
            self._since = now
        self._looked = now
        # Other processes can write to the scoreboard, so a heartbeat that goes back or lies in the future is ignored.
        shown = [int(beat) / 1e9 for beat in self._scoreboard.engines["heartbeat"]]
        self._beats = beats = [
            beat if last <= beat <= now + _AHEAD else last for last, beat in zip(self._beats, shown, strict=True)
        ]
        for child, heard in [*zip(engines, beats, strict=True), *((service, service.heard_at) for service in services)]:
            silent = now - max(heard, self._since)
            waited = now - max(child.started_at, self._since)
            if child.alive and child.serving and silent > self._silence:
                yield child, f"no sign of life for {silent:.1f} s"
            elif child.alive and not child.serving and waited > self._start_timeout:
                yield child, f"does not serve {waited:.1f} s after its start"
