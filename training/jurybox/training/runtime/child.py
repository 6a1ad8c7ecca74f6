"""The process of one role, as the orchestrator sees it: started, heard, ended, started again."""

from __future__ import annotations

import base64
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jurybox.protocol.lifeline import Lifeline, spawn, thread_limits
from jurybox.training.runtime.board import Board, Order, State, Subject, Told, Word
from jurybox.training.runtime.plan import Plan

_MODULE = "jurybox.training.runtime.process"


class Child:
    """A role's process.

    Args:
        number: of the role in the plan.
        log: file that it writes to, all its lives in one.

    Attributes:
        restart_at: second of the monotonic clock from which it may be started again.
    """

    def __init__(self, plan: Plan, number: int, board: Board, log: Path) -> None:
        self.spec = plan.roles[number]
        self.name = self.spec.name
        self.number = number
        self.restart_at = 0.0
        self._plan, self._board, self._log = plan, board, log
        self._words, self._orders = board.words[number], board.orders[number]
        self._condemned = False
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: Lifeline | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def failures(self) -> int:
        """In a row."""
        return self._orders[Told.FAILURES]

    def fileno(self) -> int:
        assert self._lifeline is not None
        return self._lifeline.fileno()

    def start(self, now: float, state: Path | None) -> None:
        """Start the process; `state` is the file of what the role saved."""
        self._condemned = False
        self._orders[Told.LIFE] += 1
        self._orders[Told.STARTED_AT] = int(now * 1e9)
        self._orders[Told.ORDER] = Order.RUN
        self._words[Word.STATE] = State.STARTING
        environment = {**thread_limits(self.spec.threads), **self.spec.environment}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process, self._lifeline = spawn(_MODULE, environment=environment, output=log.fileno())
        self._say(
            "configure",
            path=sys.path,
            plan=base64.b64encode(pickle.dumps(self._plan)).decode(),
            board=self._board.segment.name,
            number=self.number,
            life=self._orders[Told.LIFE],
            state=str(state) if state else None,
        )

    def order(self, order: Order) -> None:
        """Tell the role what to do; it sees that between two steps."""
        self._orders[Told.ORDER] = order

    def save_to(self, file: Path) -> None:
        """Have a pausing role save to `file`; it answers with a message."""
        self._say("save", file=str(file))

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the role said meanwhile; raises EOFError when it is dead."""
        assert self._lifeline is not None
        while (message := self._lifeline.receive(0)) is not None:
            yield message

    def bury(self, now: float) -> str:
        """Clean up after a process whose lifeline ended, plan the restart, and say how it died.

        One that had been at work for `settled` seconds begins its count of failures anew.
        """
        patience = self._plan.patience
        status = self._end(timeout=2.0)
        ready = self._words[Word.READY_AT] / 1e9
        started = self._orders[Told.STARTED_AT] / 1e9
        if ready >= started and now - ready > patience.settled:
            self._orders[Told.FAILURES] = 0
        back_off = patience.back_off or (0.0,)
        self.restart_at = now + back_off[min(self.failures, len(back_off) - 1)]
        self._orders[Told.FAILURES] += 1
        self._orders[Told.RESTARTS] += 1
        self._words[Word.STATE] = State.ABSENT
        self._words[Word.WAITS_FOR] = Subject.NOTHING
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def condemn(self) -> bool:
        """Kill it on the watchdog's word; False where that was done already, and it only takes its time to go."""
        first, self._condemned = not self._condemned, True
        self.kill()
        return first

    def kill(self) -> None:
        """End it at once; `messages` then says that it is dead."""
        if self._process is not None:
            self._process.kill()

    def finish(self, timeout: float) -> bool:
        """After the order to stop: wait for its end, or end it; whether it ended by itself."""
        return self._process is None or self._end(timeout) == 0

    def _say(self, kind: str, **fields: Any) -> None:
        # A dead child's message is dropped: its death is noticed by `messages`.
        if self._lifeline is not None:
            try:
                self._lifeline.send(kind, **fields)
            except OSError:
                self.kill()

    def _end(self, timeout: float) -> int:
        assert self._process is not None
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if self._lifeline is not None:
            self._lifeline.close()
        self._process = self._lifeline = None
        return status
