"""The process of one role, as the orchestrator sees it: started, heard, ended, started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jurybox.training.runtime.board import Board, Order, State, Subject, Told, Word
from jurybox.training.runtime.launching import Launcher, RoleProcess
from jurybox.training.runtime.plan import Plan


class Child:
    """A role's process, and the account of its lives on the board.

    Args:
        launcher: starts it.
        number: of the role in the plan.
        log: file that it writes to, all its lives in one.
        evaluated: folder for weights that were evaluated; None: they are not kept.

    Attributes:
        restart_at: second of the monotonic clock from which it may be started again.
    """

    def __init__(
        self, plan: Plan, number: int, board: Board, log: Path, launcher: Launcher, evaluated: Path | None = None
    ) -> None:
        self.spec = plan.roles[number]
        self.name = self.spec.name
        self.number = number
        self.restart_at = 0.0
        self._plan, self._log, self._launcher, self._evaluated = plan, log, launcher, evaluated
        self._words, self._orders = board.words[number], board.orders[number]
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
        """In a row."""
        return self._orders[Told.FAILURES]

    @property
    def lost(self) -> bool:
        """Whether its machine is gone, and it with that."""
        return self.process is not None and self.process.lost

    def start(self, now: float, state: Path | None) -> None:
        """Start the process; `state` is the file of what the role saved."""
        self._condemned = False
        self._orders[Told.LIFE] += 1
        self._orders[Told.STARTED_AT] = int(now * 1e9)
        self._orders[Told.ORDER] = Order.RUN
        self._words[Word.STATE] = State.STARTING
        self.process = self._launcher.start(self.number, self._orders[Told.LIFE], state, self._log, self._evaluated)

    def order(self, order: Order) -> None:
        """Tell the role what to do; it sees that between two steps."""
        self._orders[Told.ORDER] = order

    def save_to(self, file: Path) -> None:
        """Have a pausing role save to `file`; it answers with a message."""
        self._say("save", file=str(file))

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the role said meanwhile; raises EOFError when it is dead."""
        assert self.process is not None
        yield from self.process.messages()

    def bury(self, now: float) -> str:
        """Clean up after a process whose lifeline ended, plan the restart, and say how it died.

        One that had been at work for `settled` seconds begins its count of failures anew.
        """
        patience = self._plan.patience
        lost, status = self.lost, self._end(timeout=2.0)
        ready = self._words[Word.READY_AT] / 1e9
        started = self._orders[Told.STARTED_AT] / 1e9
        if ready >= started and now - ready > patience.settled:
            self._orders[Told.FAILURES] = 0
        back_off = patience.back_off or (0.0,)
        self.restart_at = now + back_off[min(self.failures, len(back_off) - 1)]
        if not lost:
            self._orders[Told.FAILURES] += 1
        self._orders[Told.RESTARTS] += 1
        self._words[Word.STATE] = State.ABSENT
        self._words[Word.WAITS_FOR] = Subject.NOTHING
        if lost:
            return "is gone with its machine"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"

    def condemn(self) -> bool:
        """Kill it on the watchdog's word; False where that was done already, and it only takes its time to go."""
        first, self._condemned = not self._condemned, True
        self.kill()
        return first

    def kill(self) -> None:
        """End it at once; `messages` then says that it is dead."""
        if self.process is not None:
            self.process.kill()

    def finish(self, timeout: float) -> bool:
        """After the order to stop: wait for its end, or end it; whether it ended by itself."""
        return self.process is None or self._end(timeout) == 0

    def _say(self, kind: str, **fields: Any) -> None:
        # A dead child's message is dropped: its death is noticed by `messages`.
        if self.process is not None:
            try:
                self.process.send(kind, **fields)
            except OSError:
                self.kill()

    def _end(self, timeout: float) -> int:
        assert self.process is not None
        process, self.process = self.process, None
        return process.end(timeout)
