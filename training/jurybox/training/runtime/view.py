"""How a run goes, for people: a table on a terminal, a line now and then elsewhere, and everything said in one log."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jurybox.training.runtime.board import AT_REST, Board, State, Told, Word
from jurybox.training.runtime.ledger import Ledger
from jurybox.training.runtime.plan import Kind, Plan

_LINE_EVERY = 10.0  # seconds between two lines where there is no terminal
_DRAW_EVERY = 0.25
_SHOWN = ("return_mean", "eval_return", "loss")


class View:
    """Shows a run. Use it in a ``with``.

    Args:
        console: where to; its being a terminal decides between table and lines.
        log: file of everything that is said, with the time; None: none.
    """

    def __init__(
        self,
        plan: Plan,
        board: Board,
        ledger: Ledger,
        console: Console | None,
        log: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._board, self._ledger, self._console = plan, board, ledger, console
        self._clock = clock
        self._began = self._shown = self._lined = clock()
        self._before = (self._began, board.env_steps, board.learner_steps)
        self._live: Live | None = None
        self._log = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("a", encoding="utf-8")

    def say(self, text: str) -> None:
        """One line about what happened."""
        if self._log is not None:
            with suppress(OSError):  # a full disk, of which this line may tell
                self._log.write(f"{datetime.now().isoformat(timespec='milliseconds')} {text}\n")
                self._log.flush()
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False)

    def tick(self) -> None:
        """Show how it goes, if it is time."""
        if self._console is None:
            return
        now = self._clock()
        if self._console.is_terminal and now - self._shown >= _DRAW_EVERY:
            self._shown = now
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(Group(self.table(), Text(self.line(now))), refresh=True)
        elif not self._console.is_terminal and now - self._lined >= _LINE_EVERY:
            self._console.print(self.line(now), highlight=False, markup=False)
            self._lined = now

    def line(self, now: float) -> str:
        """The run in one line; speeds since the line before (on a terminal: in the last seconds)."""
        then, env_steps, learner_steps = self._before
        steps, learned = self._board.env_steps, self._board.learner_steps
        seconds = max(now - then, 1e-9)
        if seconds > 2.0:
            self._before = (now, steps, learned)
        parts = [
            f"{now - self._began:.0f} s",
            f"{steps:,}/{self._plan.budget.steps:,} steps ({(steps - env_steps) / seconds:.0f}/s)",
            f"{learned:,} learned ({(learned - learner_steps) / seconds:.0f}/s)",
            f"{self._board.episodes:,} episodes",
        ]
        parts += [f"{name} {self._ledger.numbers[name]:.3g}" for name in _SHOWN if name in self._ledger.numbers]
        return "  ".join(parts)

    def table(self) -> Table:
        """A row for each role."""
        table = Table(box=None, pad_edge=False)
        for column in ("role", "state", "steps", "busy", "version", "lag", "restarts", "waits for"):
            table.add_column(column, justify="left" if column in ("role", "state", "waits for") else "right")
        now = time.monotonic_ns()
        for number, role in enumerate(self._plan.roles):
            words, orders = self._board.words[number], self._board.orders[number]
            subject, _ = self._board.waits_for(number)
            seconds = (now - words[Word.WAITS_SINCE]) / 1e9
            table.add_row(
                role.name,
                State(words[Word.STATE]).name.lower(),
                f"{words[Word.LEARNER_STEPS if role.kind is Kind.LEARNER else Word.ENV_STEPS]:,}",
                f"{busy(self._board, number):.0%}",
                str(words[Word.VERSION]),
                str(words[Word.LAG]) if role.reads else "",
                str(orders[Told.RESTARTS] or ""),
                "" if subject in AT_REST or seconds < 0.1 else f"{subject.name.lower()} {seconds:.1f} s",
            )
        return table

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._log is not None:
            with suppress(OSError):
                self._log.close()
            self._log = None

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def busy(board: Board, number: int) -> float:
    """The part of a role's running time in which it did not wait, 0 to 1."""
    words = board.words[number]
    return words[Word.BUSY] / max(1, words[Word.BUSY] + words[Word.WAITED])
