"""What the roles report, gathered: rows of metrics, the last returns, evaluations, the best one, the target."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from jurybox.training.runtime.board import Board, Told, Word
from jurybox.training.runtime.plan import Kind, Plan
from jurybox.training.runtime.seat import Message

_LAST = 100  # episodes that return_mean and return_std are over

# Columns that every run has; what roles report beside them, and evaluations as eval_<name>, are the recipe's to name.
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


class Sink(Protocol):
    """Where rows go: `jurybox.training.runlog.RunLog`, or whatever else takes them."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers after `step` environment steps."""


class Ledger:
    """Gathers reports and writes rows.

    Attributes:
        returns, lengths: of the last 100 episodes.
        numbers: the newest row and the newest evaluation, for whoever shows them.
        best: the highest value so far of what the plan calls best, whose weights are kept; None before the first.
        keep: keeps the weights of the evaluation that a message tells of, or (told that it is not the best) drops them;
            whether they are kept. None: nobody keeps any.
        target_reached: whether an evaluation has reached the target.
    """

    def __init__(self, plan: Plan, board: Board, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self.returns: deque[float] = deque(maxlen=_LAST)
        self.lengths: deque[float] = deque(maxlen=_LAST)
        self.numbers: dict[str, float] = {}
        self.keep: Callable[[Message, bool], bool] | None = None
        self.target_reached = False
        self._plan, self._board, self._sink, self._clock = plan, board, sink, clock
        self._before = 0.0
        self._began = self._row_began = clock()
        self._row_at = 0
        self._sums: dict[str, tuple[float, int]] = {}
        board.set_best(-math.inf)

    @property
    def best(self) -> float | None:
        return None if math.isinf(self._board.best) else self._board.best

    @property
    def seconds(self) -> float:
        """Spent on the run, earlier parts of a resumed one counted in."""
        return self._before + self._clock() - self._began

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this, as JSON holds it."""
        return {
            "seconds": self.seconds,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "best": self.best,
            "row_at": self._row_at,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._before, self._row_at = state["seconds"], state["row_at"]
        if state["best"] is not None:
            self._board.set_best(state["best"])
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])

    def take(self, message: Message) -> None:
        """Take in a role's report or evaluation; other messages are nothing to this."""
        if message["kind"] == "report":
            for episode in message["episodes"]:
                self.returns.append(episode["return"])
                self.lengths.append(episode["length"])
                for name in episode.keys() - {"return", "length"}:
                    self._add(name, episode[name])
            for name, value in message["metrics"].items():
                self._add(name, value)
        elif message["kind"] == "evaluation":
            self._evaluated(message["env_steps"], message["numbers"])
            self._keep_best(message)

    def row_if_due(self, *, last: bool = False) -> None:
        """Write a row when `log_every` environment steps have been made since the one before."""
        steps = self._board.env_steps
        new = steps - self._row_at
        if new < self._plan.log_every and not (last and (new or self._sums)):
            return
        now = self._clock()
        row = {
            "seconds": self.seconds,
            "steps_per_second": (steps - self._row_at) / max(now - self._row_began, 1e-9),
            "learner_steps": self._board.learner_steps,
            "epochs": self._board.epochs,
            "episodes": self._board.episodes,
            "lag": float(self._board.records[self._plan.of_kind(Kind.ACTOR), Word.LAG].max()),
            "forced_syncs": float(self._board.records[:, Word.FORCED].sum()),
            "restarts": float(self._board.told[:, Told.RESTARTS].sum()),
        }
        if self.returns:
            row |= {
                "return_mean": float(np.mean(self.returns)),
                "return_std": float(np.std(self.returns)),
                "length_mean": float(np.mean(self.lengths)),
            }
        row |= {name: total / count for name, (total, count) in self._sums.items()}
        self._sums, self._row_at, self._row_began = {}, steps, now
        self.numbers |= row
        self._sink.scalars(steps, row)

    def _add(self, name: str, value: float) -> None:
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value, count + 1)

    def _evaluated(self, env_steps: int, numbers: Mapping[str, float]) -> None:
        row = {f"eval_{name}": value for name, value in numbers.items()}
        self.numbers |= row
        self._sink.scalars(env_steps, row)
        target = self._plan.budget.target
        if target is not None and numbers.get(target[0], -np.inf) >= target[1]:
            self.target_reached = True

    def _keep_best(self, message: Message) -> None:
        value = message["numbers"].get(self._plan.best, math.nan)
        better = bool(value > self._board.best)  # never so for a NaN
        kept = self.keep(message, better) if self.keep is not None else True
        if better and kept:
            self._board.set_best(value)
