"""Launchers start the processes of roles: the `Launcher` protocol, and `Local` for this machine."""

from __future__ import annotations

import base64
import contextlib
import pickle
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from jurybox.processes import ControlPipe, spawn, thread_limits
from jurybox.training.runtime.plan import Plan
from jurybox.training.runtime.scoreboard import ControlWord, Order, RunScoreboard, State, Subject, Word
from jurybox.training.runtime.shared_resources import SharedResources

MODULE = "jurybox.training.runtime.process"


class RoleProcess(Protocol):
    """The orchestrator's handle of a role's process."""

    @property
    def pid(self) -> int:
        """The process id on its machine; 0 before it has started."""

    @property
    def lost(self) -> bool:
        """Whether it was lost together with its machine."""

    def send(self, kind: str, **fields: Any) -> None:
        """Send it a message; raises OSError when it is gone."""

    def messages(self) -> Iterator[dict[str, Any]]:
        """New messages; raises EOFError when it is gone."""

    def kill(self) -> None:
        """Kill it; `messages` then raises."""

    def end(self, timeout: float) -> int:
        """Wait for its end, kill it after `timeout` seconds, and free its resources; returns the exit status."""


class Launcher(Protocol):
    """Starts the processes of a plan's roles. Each method is called from the orchestrator's thread."""

    def begin(self, plan: Plan, shared: SharedResources) -> None:
        """Begin a run, whose shared memory on this machine is `shared`."""

    def start(self, number: int, life: int, state: Path | None, log: Path, evaluated: Path) -> RoleProcess:
        """Start the process of role `number`. Doesn't wait for it.

        Args:
            state: file of what the role saved.
            evaluated: folder on this machine for weights that an evaluator likes best.
        """

    def wait(self, processes: Sequence[RoleProcess], timeout: float) -> Collection[RoleProcess]:
        """Wait up to `timeout` seconds for processes with messages, or that are gone."""

    def settle(self, timeout: float) -> bool:
        """While all roles are paused: complete all transfers; returns whether that was done in time."""

    def save_replay(self, name: str, path: Path) -> None:
        """Write the replay that the plan calls `name` to a file on this machine."""

    def end(self) -> None:
        """End a run whose processes are gone."""


def configuration(
    plan: Plan, number: int, life: int, scoreboard: str, state: Path | None, evaluated: Path
) -> dict[str, Any]:
    """The first message to a role's process, but for its kind."""
    return {
        "path": sys.path,
        "plan": base64.b64encode(pickle.dumps(plan)).decode(),
        "scoreboard": scoreboard,
        "replays": {},
        "folders": {},
        "number": number,
        "life": life,
        "state": None if state is None else str(state),
        "evaluated": str(evaluated),
    }


def start_process(
    plan: Plan, number: int, configured: dict[str, Any], output: int | None
) -> tuple[subprocess.Popen[bytes], ControlPipe]:
    """Start a role's process on this machine, as a child of the calling thread."""
    spec = plan.roles[number]
    process, control_pipe = spawn(
        MODULE, environment={**thread_limits(spec.threads), **spec.environment}, output=output
    )
    with contextlib.suppress(OSError):  # it died already, which is noticed when it is listened to
        control_pipe.send("configure", **configured)
    return process, control_pipe


def status_of(process: subprocess.Popen[bytes], timeout: float) -> int:
    """Wait for a process, or kill it after `timeout` seconds; returns the exit status."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class LocalProcess:
    """A role's process on this machine."""

    lost = False

    def __init__(self, process: subprocess.Popen[bytes], control_pipe: ControlPipe) -> None:
        self._process, self._control_pipe = process, control_pipe
        self.pid = process.pid

    def fileno(self) -> int:
        return self._control_pipe.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        self._control_pipe.send(kind, **fields)

    @property
    def ended(self) -> bool:
        """Whether the process has ended. Its pipe may be open still, in a process that it forked."""
        return self._process.poll() is not None

    def messages(self) -> Iterator[dict[str, Any]]:
        ended = self.ended  # asked first, so that nothing that it said before its end is missed
        while (message := self._control_pipe.receive(0)) is not None:
            yield message
        if ended:
            raise EOFError("the role's process has ended")

    def kill(self) -> None:
        self._process.kill()

    def end(self, timeout: float) -> int:
        status = status_of(self._process, timeout)
        self._control_pipe.close()
        return status


class Local:
    """All roles on this machine, as children of this process."""

    _plan: Plan
    _shared: SharedResources

    def begin(self, plan: Plan, shared: SharedResources) -> None:
        self._plan, self._shared = plan, shared

    def start(self, number: int, life: int, state: Path | None, log: Path, evaluated: Path) -> LocalProcess:
        scoreboard = self._shared.scoreboard.segment.name
        configured = configuration(self._plan, number, life, scoreboard, state, evaluated)
        with log.open("ab") as file:
            return LocalProcess(*start_process(self._plan, number, configured, file.fileno()))

    def wait(self, processes: Sequence[RoleProcess], timeout: float) -> Collection[RoleProcess]:
        if not processes:
            time.sleep(timeout)
            return ()
        by_descriptor = {process.fileno(): process for process in processes if isinstance(process, LocalProcess)}
        ready = set(wait(list(by_descriptor), timeout))
        return [process for fd, process in by_descriptor.items() if fd in ready or process.ended]

    def settle(self, timeout: float) -> bool:
        return True

    def save_replay(self, name: str, path: Path) -> None:
        self._shared.replay(name).save(path)

    def end(self) -> None:
        """Does nothing."""


class RoleChild:
    """A role's process, and its restarts on the scoreboard.

    Args:
        launcher: starts it.
        number: of the role in the plan.
        log: file that it writes to, all its lives in one.
        evaluated: folder for weights that were evaluated.

    Attributes:
        restart_at: second of the monotonic clock from which it may be started again.
    """

    def __init__(
        self, plan: Plan, number: int, scoreboard: RunScoreboard, log: Path, launcher: Launcher, evaluated: Path
    ) -> None:
        self.spec = plan.roles[number]
        self.name = self.spec.name
        self.number = number
        self.restart_at = 0.0
        self.log = log
        self._plan, self._launcher, self._evaluated = plan, launcher, evaluated
        self._words, self._orders = scoreboard.words[number], scoreboard.orders[number]
        self._condemned = False
        self.process: RoleProcess | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def failures(self) -> int:
        """The number of failures in a row."""
        return self._orders[ControlWord.FAILURES]

    @property
    def lost(self) -> bool:
        """Whether it was lost together with its machine."""
        return self.process is not None and self.process.lost

    def start(self, now: float, state: Path | None) -> None:
        """Start the process; `state` is the file of the role's saved state."""
        self._condemned = False
        self._orders[ControlWord.LIFE] += 1
        self._orders[ControlWord.STARTED_AT] = int(now * 1e9)
        self._orders[ControlWord.ORDER] = Order.RUN
        self._words[Word.STATE] = State.STARTING
        self.process = self._launcher.start(
            self.number, self._orders[ControlWord.LIFE], state, self.log, self._evaluated
        )

    def order(self, order: Order) -> None:
        """Give the role an order, which it reads between two steps."""
        self._orders[ControlWord.ORDER] = order

    def save_to(self, file: Path) -> None:
        """Make a paused role save to `file`; it answers with a message."""
        # A dead child's order is dropped: its death is noticed by `messages`.
        if self.process is not None:
            try:
                self.process.send("save", file=str(file))
            except OSError:
                self.kill()

    def messages(self) -> Iterator[dict[str, Any]]:
        """New messages of the role; raises EOFError when it is dead."""
        assert self.process is not None
        yield from self.process.messages()

    def reap(self, now: float) -> str:
        """Clean up after a dead process, schedule the restart, and return how it died.

        One that had worked well for `settled` seconds begins its count of failures anew.
        """
        timeouts = self._plan.timeouts
        lost, status = self.lost, self._end(timeout=2.0)
        ready = self._words[Word.READY_AT]
        if ready >= self._orders[ControlWord.STARTED_AT] and (self._went_well() - ready) / 1e9 > timeouts.settled:
            self._orders[ControlWord.FAILURES] = 0
        back_off = timeouts.back_off or (0.0,)
        self.restart_at = now + back_off[min(self.failures, len(back_off) - 1)]
        if not lost:
            self._orders[ControlWord.FAILURES] += 1
        self._orders[ControlWord.RESTARTS] += 1
        self._words[Word.STATE] = State.ABSENT
        self._words[Word.WAITS_FOR] = Subject.NOTHING
        if lost:
            return "is gone with its machine"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def _went_well(self) -> int:
        """Until when this life went well, in nanoseconds of the monotonic clock.

        That is its last step: the time in which it hung, or in which it brought about its failure, does not count. One
        that had nothing to do and was killed from outside went well until its last sign of life.
        """
        idle = self._words[Word.WAITS_FOR] != Subject.NOTHING and not self._condemned
        return max(self._words[Word.MOVED_AT], self._words[Word.HEARTBEAT] if idle else 0)

    def condemn(self) -> bool:
        """Kill it for the watchdog; False if that was done before."""
        first, self._condemned = not self._condemned, True
        self.kill()
        return first

    def kill(self) -> None:
        """Kill it; `messages` then raises."""
        if self.process is not None:
            self.process.kill()

    def finish(self, timeout: float) -> bool:
        """After the order to stop: wait for its end, or kill it; returns whether it ended by itself."""
        return self.process is None or self._end(timeout) == 0

    def _end(self, timeout: float) -> int:
        assert self.process is not None
        process, self.process = self.process, None
        return process.end(timeout)
