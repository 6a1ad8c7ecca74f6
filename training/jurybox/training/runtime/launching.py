"""Where the processes of roles run, and how the orchestrator reaches them: on this machine, or wherever a launcher puts
them."""

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

from jurybox.protocol.lifeline import Lifeline, spawn, thread_limits
from jurybox.training.runtime.commons import Commons
from jurybox.training.runtime.plan import Plan

MODULE = "jurybox.training.runtime.process"


class RoleProcess(Protocol):
    """The process of one role, as its orchestrator holds it."""

    @property
    def pid(self) -> int:
        """On the machine where it runs; 0 while it is not there yet."""

    @property
    def lost(self) -> bool:
        """Whether it is gone with the machine that it ran on, through no fault of its own."""

    def send(self, kind: str, **fields: Any) -> None:
        """Send it a message; raises OSError when it is gone."""

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it said meanwhile; raises EOFError when it is gone."""

    def kill(self) -> None:
        """End it at once; `messages` then says that it is gone."""

    def end(self, timeout: float) -> int:
        """Wait for its end, kill it after `timeout` seconds, and free what is kept for it; gives its exit status."""


class Launcher(Protocol):
    """Starts the processes of a plan's roles. Each method is called from the orchestrator's thread."""

    def begin(self, plan: Plan, commons: Commons) -> None:
        """A run begins, whose shared memory on this machine is `commons`."""

    def start(
        self, number: int, life: int, state: Path | None, log: Path, evaluated: Path | None = None
    ) -> RoleProcess:
        """Start the process of role `number`. Doesn't wait for it.

        Args:
            state: file of what the role saved.
            evaluated: folder on this machine for weights that an evaluator likes best; None: they are not kept.
        """

    def wait(self, processes: Sequence[RoleProcess], timeout: float) -> Collection[RoleProcess]:
        """Those that said something or are gone, waited for up to `timeout` seconds."""

    def settle(self, timeout: float) -> bool:
        """While all roles rest: bring what is under way to where it belongs; whether that was done in time."""

    def save_replay(self, name: str, path: Path) -> None:
        """Write the replay that the plan calls `name` to a file on this machine."""

    def end(self) -> None:
        """The run is over and every process is gone."""


def configuration(
    plan: Plan, number: int, life: int, board: str, state: str | None, evaluated: str | None = None
) -> dict[str, Any]:
    """The first message to a role's process, but for its kind."""
    return {
        "path": sys.path,
        "plan": base64.b64encode(pickle.dumps(plan)).decode(),
        "board": board,
        "replays": {},
        "folders": {},
        "number": number,
        "life": life,
        "state": state,
        "evaluated": evaluated,
    }


def start_process(
    plan: Plan, number: int, configured: dict[str, Any], output: int | None
) -> tuple[subprocess.Popen[bytes], Lifeline]:
    """Start a role's process on this machine, as a child of the calling thread."""
    spec = plan.roles[number]
    process, lifeline = spawn(MODULE, environment={**thread_limits(spec.threads), **spec.environment}, output=output)
    with contextlib.suppress(OSError):  # it died already, which is noticed when it is listened to
        lifeline.send("configure", **configured)
    return process, lifeline


def status_of(process: subprocess.Popen[bytes], timeout: float) -> int:
    """Wait for a process's end, or end it after `timeout` seconds; its exit status."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class LocalProcess:
    """A role's process on this machine."""

    lost = False

    def __init__(self, process: subprocess.Popen[bytes], lifeline: Lifeline) -> None:
        self._process, self._lifeline = process, lifeline
        self.pid = process.pid

    def fileno(self) -> int:
        return self._lifeline.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        self._lifeline.send(kind, **fields)

    def messages(self) -> Iterator[dict[str, Any]]:
        while (message := self._lifeline.receive(0)) is not None:
            yield message

    def kill(self) -> None:
        self._process.kill()

    def end(self, timeout: float) -> int:
        status = status_of(self._process, timeout)
        self._lifeline.close()
        return status


class Local:
    """All roles on this machine, as children of this process."""

    _plan: Plan
    _commons: Commons

    def begin(self, plan: Plan, commons: Commons) -> None:
        self._plan, self._commons = plan, commons

    def start(
        self, number: int, life: int, state: Path | None, log: Path, evaluated: Path | None = None
    ) -> LocalProcess:
        board = self._commons.board.segment.name
        files = (None if path is None else str(path) for path in (state, evaluated))
        configured = configuration(self._plan, number, life, board, *files)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            return LocalProcess(*start_process(self._plan, number, configured, file.fileno()))

    def wait(self, processes: Sequence[RoleProcess], timeout: float) -> Collection[RoleProcess]:
        if not processes:
            time.sleep(timeout)
            return ()
        by_descriptor = {process.fileno(): process for process in processes if isinstance(process, LocalProcess)}
        return [by_descriptor[ready] for ready in wait(list(by_descriptor), timeout) if isinstance(ready, int)]

    def settle(self, timeout: float) -> bool:
        return True

    def save_replay(self, name: str, path: Path) -> None:
        self._commons.replay(name).save(path)

    def end(self) -> None:
        """Nothing is left to do."""
