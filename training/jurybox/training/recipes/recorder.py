"""Watching a Stable-Baselines3 training from inside: counts, metrics, checkpoints, progress, and the order to stop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback

from jurybox.training import interrupts
from jurybox.training.recipes import checkpoints
from jurybox.training.recipes.progress import Watcher
from jurybox.training.run_folder import RunLog

# What SB3's PPO records while it updates, and what it is called in metrics.csv.
_LEARNER = {
    "train/learning_rate": "learning_rate",
    "train/policy_gradient_loss": "policy_loss",
    "train/value_loss": "value_loss",
    "train/explained_variance": "explained_variance",
    "train/approx_kl": "approximate_kl",
    "train/clip_fraction": "clip_fraction",
    "train/std": "action_deviation",
}
COLUMNS = (
    "learner_steps",
    "episodes",
    "seconds",
    "steps_per_second",
    "return_mean",
    "return_std",
    "rollout_episodes",
    "rollout_return_mean",
    "rollout_return_error",
    *_LEARNER.values(),
)
_LAST = 100  # episodes that return_mean and return_std are over


class Recorder(BaseCallback):
    """Writes a row of metrics for every rollout and its update, and checkpoints between them.

    Args:
        log: where rows go.
        watcher: is told of every step of the workers.
        checkpoint_folder: None for no checkpoints.
        checkpoint_every: env steps between two of them, at least.
        counted: what an earlier part of the run had counted, from its checkpoint.
        episode_numbers: further numbers of a finished episode, from its last info; their means get columns.
        seconds: stop after so many seconds of training; None for no limit.

    Attributes:
        cut: episodes that ended because their worker was replaced (``info["restarted"]``). They count nowhere else.
    """

    def __init__(
        self,
        log: RunLog,
        watcher: Watcher,
        *,
        checkpoint_folder: Path | None = None,
        checkpoint_every: int = 1,
        counted: Mapping[str, Any] | None = None,
        episode_numbers: Callable[[Mapping[str, Any]], Mapping[str, float]] = lambda info: {},
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        counted = counted or {}
        self.episodes = int(counted.get("episodes", 0))
        self.cut = 0
        self.returns: deque[float] = deque(counted.get("returns", ()), maxlen=_LAST)
        self._seconds_before = float(counted.get("seconds", 0.0))
        self._log = log
        self._watcher = watcher
        self._folder = checkpoint_folder
        self._every = checkpoint_every
        self._episode_numbers = episode_numbers
        self._limit = seconds
        self._clock = clock
        self._began = self._row_began = clock()
        self._saved_at = self._row_at = 0
        self._sums = np.zeros(0)
        self._finished: list[dict[str, float]] = []

    @property
    def seconds(self) -> float:
        """Spent on training, earlier parts counted in."""
        return self._seconds_before + self._clock() - self._began

    def counted(self) -> dict[str, Any]:
        """What a checkpoint has to keep of this."""
        return {"episodes": self.episodes, "returns": list(self.returns), "seconds": self.seconds}

    def _on_training_start(self) -> None:
        self._sums = np.zeros(self.training_env.num_envs)
        self._saved_at = self._row_at = self.num_timesteps
        self._began = self._row_began = self._clock()

    def _on_step(self) -> bool:
        interrupts.check()
        self._sums += self.locals["rewards"]
        for index in np.flatnonzero(self.locals["dones"]):
            total, self._sums[index] = float(self._sums[index]), 0.0
            if self.locals["infos"][index].get("restarted"):
                self.cut += 1
                continue
            self.episodes += 1
            self.returns.append(total)
            self._finished.append({"return": total, **self._episode_numbers(self.locals["infos"][index])})
        shown = {"return": float(np.mean(self.returns))} if self.returns else {}
        self._watcher.advance(self.num_timesteps, shown)
        return self._limit is None or self._clock() - self._began < self._limit

    def _on_rollout_start(self) -> None:
        self._row_and_checkpoint()  # of the rollout before, now that its update is complete

    def _on_training_end(self) -> None:
        self._row_and_checkpoint(last=True)

    def _row_and_checkpoint(self, *, last: bool = False) -> None:
        if self.num_timesteps > self._row_at:
            self._log.scalars(self.num_timesteps, self._row())
        if self._folder is not None and (
            self.num_timesteps - self._saved_at >= self._every or (last and self.num_timesteps > self._saved_at)
        ):
            try:
                with interrupts.held():
                    checkpoints.save(self._folder, self.model, self.counted())
            except OSError as error:  # a full disk costs a checkpoint, not the training
                self._watcher.say(f"no checkpoint at {self.num_timesteps} steps, the one before stands: {error}")
            self._saved_at = self.num_timesteps

    def _row(self) -> dict[str, float]:
        now = self._clock()
        row: dict[str, float] = {
            "learner_steps": learner_steps(self.model),
            "episodes": self.episodes,
            "seconds": self.seconds,
            "steps_per_second": (self.num_timesteps - self._row_at) / max(now - self._row_began, 1e-9),
        }
        if self.returns:
            row |= {"return_mean": float(np.mean(self.returns)), "return_std": float(np.std(self.returns))}
        row |= self._of_rollout()
        for name, column in _LEARNER.items():
            if (value := self.model.logger.name_to_value.get(name)) is not None:
                row[column] = float(value)
        self.model.logger.dump(self.num_timesteps)  # forgets them; it has nowhere to write to
        self._row_at, self._row_began, self._finished = self.num_timesteps, now, []
        return row

    def _of_rollout(self) -> dict[str, float]:
        n = len(self._finished)
        row: dict[str, float] = {"rollout_episodes": n}
        if n:
            returns = [episode["return"] for episode in self._finished]
            row["rollout_return_mean"] = float(np.mean(returns))
            row["rollout_return_error"] = float(np.std(returns, ddof=1) / n**0.5) if n > 1 else 0.0
            for name in self._finished[0].keys() - {"return"}:
                row[name] = float(np.mean([episode[name] for episode in self._finished]))
        return row


def learner_steps(model: BaseAlgorithm) -> int:
    """Optimiser steps so far, as Adam counts them; its state travels in checkpoints."""
    states = list(model.policy.optimizer.state.values())
    return int(states[0]["step"]) if states else 0
