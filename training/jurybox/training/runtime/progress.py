"""Progress of a run: metrics from the roles' reports, the terminal view, and the timeline for the report."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jurybox.protocol.forks import Closing
from jurybox.training.checkpoints import write_atomically
from jurybox.training.runtime.plan import Kind, Plan
from jurybox.training.runtime.role_context import Message
from jurybox.training.runtime.scoreboard import AT_REST, ControlWord, RunScoreboard, State, Subject, Word

_LAST = 100  # episodes that return_mean and return_std are over

# What roles report beside them, and evaluations as eval_<name>, are the recipe's to name.
COLUMNS = (
    "seconds",
    "steps_per_second",
    "learner_steps",
    "epochs",
    "episodes",
    "return_mean",
    "return_std",
    "length_mean",
    "lag",
    "forced_syncs",
    "restarts",
)
"""Columns of metrics.csv that every run has; what roles report beside them is the plan's to name."""


class Sink(Protocol):
    """Receives rows of metrics, such as `jurybox.training.run_folder.RunLog`."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers after `step` environment steps."""


class RunMetrics:
    """Collects reports and writes rows.

    Attributes:
        returns, lengths: of the last 100 episodes.
        numbers: the newest row and the newest evaluation, for displays.
        best: the highest value so far of what the plan calls best, whose weights are kept; None before the first.
        keep: keeps the weights of the evaluation of a message, or drops them if it is not the best; returns whether
            they are kept. None: weights are not kept.
        target_reached: whether an evaluation has reached the target.
    """

    def __init__(
        self, plan: Plan, scoreboard: RunScoreboard, sink: Sink, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.returns: deque[float] = deque(maxlen=_LAST)
        self.lengths: deque[float] = deque(maxlen=_LAST)
        self.numbers: dict[str, float] = {}
        self.keep: Callable[[Message, bool], bool] | None = None
        self.target_reached = False
        self._plan, self._scoreboard, self._sink, self._clock = plan, scoreboard, sink, clock
        self._before = 0.0
        self._began = self._row_began = clock()
        self._row_at = 0
        self._counted_from = scoreboard.env_steps  # steps at `_row_began`: of a resumed run more than `_row_at`
        self._sums: dict[str, tuple[float, int]] = {}
        scoreboard.set_best(-math.inf)

    @property
    def best(self) -> float | None:
        return None if math.isinf(self._scoreboard.best) else self._scoreboard.best

    @property
    def evaluation(self) -> dict[str, float]:
        """The newest evaluation's numbers, as eval_<name>; of a resumed run, perhaps of an earlier part."""
        return {name: value for name, value in self.numbers.items() if name.startswith("eval_")}

    @property
    def seconds(self) -> float:
        """Seconds of the run, earlier parts of a resumed one included."""
        return self._before + self._clock() - self._began

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        return {
            "seconds": self.seconds,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "best": self.best,
            "row_at": self._row_at,
            "sums": self._sums,
            "evaluation": self.evaluation,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, after the scoreboard's counters."""
        self._before, self._row_at = state["seconds"], state["row_at"]
        self._counted_from = self._scoreboard.env_steps
        self.numbers |= state.get("evaluation", {})
        if state["best"] is not None:
            self._scoreboard.set_best(state["best"])
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        for name, (total, count) in state.get("sums", {}).items():
            self._add(name, total, count)

    def take(self, message: Message) -> None:
        """Process a role's report or evaluation; other messages are ignored."""
        if message["kind"] == "report":
            for episode in message["episodes"]:
                self.returns.append(episode["return"])
                self.lengths.append(episode["length"])
                for name in episode.keys() - {"return", "length"}:
                    self._add(name, episode[name])
            for name, (total, count) in message["metrics"].items():
                self._add(name, total, count)
        elif message["kind"] == "evaluation":
            self._evaluated(message["env_steps"], message["numbers"])
            self._keep_best(message)

    def row_if_due(self, *, last: bool = False) -> None:
        """Write a row if `log_every` environment steps have been made since the last one."""
        steps = self._scoreboard.env_steps
        new = steps - self._row_at
        if new < self._plan.log_every and not (last and (new or self._sums)):
            return
        now = self._clock()
        row = {
            "seconds": self.seconds,
            "steps_per_second": (steps - self._counted_from) / max(now - self._row_began, 1e-9),
            "learner_steps": self._scoreboard.learner_steps,
            "epochs": self._scoreboard.epochs,
            "episodes": self._scoreboard.episodes,
            "lag": float(self._scoreboard.records[self._plan.of_kind(Kind.ACTOR), Word.LAG].max(initial=0)),
            "forced_syncs": float(self._scoreboard.records[:, Word.FORCED].sum()),
            "restarts": float(self._scoreboard.control[:, ControlWord.RESTARTS].sum()),
        }
        if self.returns:
            row |= {
                "return_mean": float(np.mean(self.returns)),
                "return_std": float(np.std(self.returns)),
                "length_mean": float(np.mean(self.lengths)),
            }
        row |= {name: total / count for name, (total, count) in self._sums.items()}
        self._sums, self._row_at, self._counted_from, self._row_began = {}, steps, steps, now
        self.numbers |= row
        self._sink.scalars(steps, row)

    def _add(self, name: str, total: float, count: int = 1) -> None:
        before, counted = self._sums.get(name, (0.0, 0))
        self._sums[name] = (before + total, counted + count)

    def _evaluated(self, env_steps: int, numbers: Mapping[str, float]) -> None:
        row = {f"eval_{name}": value for name, value in numbers.items()}
        self.numbers |= row
        self._sink.scalars(env_steps, row)
        target = self._plan.budget.target
        if target is not None and numbers.get(target[0], -np.inf) >= target[1]:
            self.target_reached = True

    def _keep_best(self, message: Message) -> None:
        value = message["numbers"].get(self._plan.best, math.nan)
        better = bool(value > self._scoreboard.best)  # never so for a NaN
        kept = self.keep(message, better) if self.keep is not None else True
        if better and kept:
            self._scoreboard.set_best(value)


@dataclass(frozen=True, slots=True)
class RoleTimeline:
    """The timeline of one role.

    Attributes:
        role: its name.
        busy: part of all its running time in which it did not wait, 0 to 1.
        intervals: (start, end, what): seconds from the timeline's beginning; "" for work, else what it waited for.
            The newest ones; waits below a tenth of a millisecond are counted in `busy` and not drawn.
    """

    role: str
    busy: float
    intervals: Sequence[tuple[float, float, str]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The timelines of all roles, on one clock."""

    lanes: tuple[RoleTimeline, ...]

    @classmethod
    def of(cls, scoreboard: RunScoreboard) -> Timeline:
        """The timeline on the scoreboard."""
        everything = [scoreboard.intervals(number) for number in range(len(scoreboard.named.roles))]
        first = min((int(rows["start"][0]) for rows in everything if len(rows)), default=0)
        lanes = []
        for number, rows in enumerate(everything):
            intervals = [
                (
                    round((int(row["start"]) - first) / 1e9, 5),
                    round((int(row["end"]) - first) / 1e9, 5),
                    Subject(int(row["subject"])).name.lower() if row["subject"] else "",
                )
                for row in rows
            ]
            lanes.append(RoleTimeline(scoreboard.named.roles[number][0], busy(scoreboard, number), intervals))
        return cls(tuple(lanes))

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_atomically(path, json.dumps([asdict(lane) for lane in self.lanes]))

    @classmethod
    def read(cls, path: Path) -> Timeline:
        """Read what `save` wrote."""
        return cls(tuple(RoleTimeline(**lane) for lane in json.loads(path.read_text(encoding="utf-8"))))


_LINE_EVERY = 10.0  # seconds between two lines where there is no terminal
_DRAW_EVERY = 0.25
_SHOWN = ("return_mean", "eval_return", "loss")


class View(Closing):
    """Shows a run. Use it in a ``with``.

    Args:
        console: where to; its being a terminal decides between table and lines.
        log: file of everything that is said, with the time; None: none.
    """

    def __init__(
        self,
        plan: Plan,
        scoreboard: RunScoreboard,
        metrics: RunMetrics,
        console: Console | None,
        log: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._scoreboard, self._metrics, self._console = plan, scoreboard, metrics, console
        self._clock = clock
        self._began = self._shown = self._lined = clock()
        self._before = (self._began, scoreboard.env_steps, scoreboard.learner_steps)
        self._live: Live | None = None
        self._log = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = log.open("a", encoding="utf-8")

    def log(self, text: str) -> None:
        """Print a line."""
        if self._log is not None:
            with suppress(OSError):  # a full disk, of which this line may tell
                self._log.write(f"{datetime.now().isoformat(timespec='milliseconds')} {text}\n")
                self._log.flush()
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False)

    def tick(self) -> None:
        """Update the view, if it is due."""
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
        """The state of the run in one line; speeds since the line before (on a terminal: in the last seconds)."""
        then, env_steps, learner_steps = self._before
        steps = self._scoreboard.env_steps + self._scoreboard.under_way
        learned = self._scoreboard.learner_steps
        seconds = max(now - then, 1e-9)
        if seconds > 2.0:
            self._before = (now, steps, learned)
        parts = [
            f"{now - self._began:.0f} s",
            f"{steps:,}/{self._plan.budget.steps:,} steps ({(steps - env_steps) / seconds:.0f}/s)",
            f"{learned:,} learned ({(learned - learner_steps) / seconds:.0f}/s)",
            f"{self._scoreboard.episodes:,} episodes",
        ]
        parts += [f"{name} {self._metrics.numbers[name]:.3g}" for name in _SHOWN if name in self._metrics.numbers]
        parts += [f"{name} dropped {count:,} rows" for name, count in self._scoreboard.rows_dropped.items()]
        return "  ".join(parts)

    def table(self) -> Table:
        """A row for each role."""
        table = Table(box=None, pad_edge=False)
        for column in ("role", "state", "steps", "busy", "version", "lag", "dropped", "restarts", "waits for"):
            table.add_column(column, justify="left" if column in ("role", "state", "waits for") else "right")
        now = time.monotonic_ns()
        for number, role in enumerate(self._plan.roles):
            words, orders = self._scoreboard.words[number], self._scoreboard.orders[number]
            subject, _ = self._scoreboard.waits_for(number)
            seconds = (now - words[Word.WAITS_SINCE]) / 1e9
            table.add_row(
                role.name,
                State(words[Word.STATE]).name.lower(),
                f"{words[Word.LEARNER_STEPS if role.kind is Kind.LEARNER else Word.ENV_STEPS]:,}",
                f"{busy(self._scoreboard, number):.0%}",
                str(words[Word.VERSION]),
                str(words[Word.LAG]) if role.reads else "",
                f"{words[Word.ROWS_DROPPED]:,}" if words[Word.ROWS_DROPPED] else "",
                str(orders[ControlWord.RESTARTS] or ""),
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


def busy(scoreboard: RunScoreboard, number: int) -> float:
    """The share of a role's running time without waits, 0 to 1."""
    words = scoreboard.words[number]
    return words[Word.BUSY] / max(1, words[Word.BUSY] + words[Word.WAITED])
