"""The hockey training in one process: collect a round, learn from the replay, look how it goes; again.

The serial twin of the asynchronous training: same collector, learner, league and evaluation, and nothing depends on
time, so a run is a function of its settings, and one that goes on from a checkpoint computes bit for bit what it would
have computed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from jurybox.protocol.wire import build_version
from jurybox.training.algorithms.league import League
from jurybox.training.algorithms.td3 import TD3
from jurybox.training.environments.hockey.factory import make_game
from jurybox.training.environments.hockey.matches import Result
from jurybox.training.environments.hockey.symmetry import mirrors
from jurybox.training.recipes import hockey_checkpoint, interrupts
from jurybox.training.recipes.checkpoints import CheckpointError
from jurybox.training.recipes.hockey_checkpoint import HockeyCheckpoint
from jurybox.training.recipes.hockey_collector import Collector, make_replay
from jurybox.training.recipes.hockey_evaluation import Standing, evaluate
from jurybox.training.recipes.hockey_opponents import Opponents
from jurybox.training.recipes.hockey_settings import HockeyTraining
from jurybox.training.recipes.progress import Silence, Watcher
from jurybox.training.replay import Replay, Windows
from jurybox.training.runlog import RunLog, Summary

_LAST = 200  # episodes that running means are over
COLUMNS = (
    "learner_steps",
    "episodes",
    "seconds",
    "cpu_seconds",
    "return_mean",
    "wins",
    "losses",
    "touches",
    "critic_loss",
    "actor_loss",
    "value",
    "pool",
    *(f"{what}_{who}" for who in ("weak", "strong") for what in ("wins", "ties", "losses", "score")),
)


class SerialHockey:
    """One training, step by step. Use it in a ``with``: it owns its games and its replay.

    Args:
        settings: see `HockeyTraining`.
        log: where metrics and checkpoints go.
        resume: go on from this checkpoint.
        watcher: is told how it goes.
        clock: seconds; only the time budget and the report look at it.
    """

    def __init__(
        self,
        settings: HockeyTraining,
        log: RunLog,
        *,
        resume: HockeyCheckpoint | None = None,
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.env_steps = self.episodes = 0
        self.last_evaluation: dict[str, Standing] = {}
        self._log = log
        self._folder = log.folder / "checkpoints"
        self._watcher = watcher or Silence()
        self._clock = clock
        self._resources = ExitStack()
        self._owed = 0.0  # learner steps that the ratio asks for and that are not done yet
        self._evaluated_at = self._saved_at = 0
        self._snapshot_at = 0
        self._best = -np.inf
        self._recent: deque[tuple[int, float, int]] = deque(maxlen=_LAST)
        self._seconds_before = self._cpu_before = 0.0
        self._began, self._cpu_began = clock(), time.process_time()
        with ExitStack() as undo:
            # Networks this small are slower on two threads, and sums in another order would not be the same sums.
            undo.enter_context(threadpool_limits(1))
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            undo.callback(torch.set_flush_denormal, False)
            torch.set_flush_denormal(True)
            self.games = [make_game(settings.environment) for _ in range(settings.games)]
            for game in self.games:
                undo.callback(game.close)
            sizes = self.games[0].observation_size, self.games[0].action_size
            self.learner = TD3(*sizes, settings.learner, seed=settings.seed)
            self.league = League(settings.league)
            self.opponents = Opponents(sizes[1])
            self.replay = self._make_replay(resume, sizes)
            undo.callback(self.replay.close)
            undo.callback(self.replay.unlink)
            self._collector = Collector(self.games, self.replay, settings, self.learner.normaliser.see)
            self._batch = self.replay.batch(
                settings.batch, Windows(n_step=settings.n_step, gamma=settings.discount, next=("observation",))
            )
            self._tensors = self._batch.torch()
            self._weights = None if self._batch.weights is None else torch.from_numpy(self._batch.weights)
            self._mirrors = mirrors(*sizes) if settings.mirror else None
            if resume is not None:
                self._restore(resume)
            self._resources = undo.pop_all()

    def _make_replay(self, resume: HockeyCheckpoint | None, sizes: tuple[int, int]) -> Replay:
        name = f"hockey-{os.getpid()}-{secrets.token_hex(4)}"
        if resume is None:
            return make_replay(name, self.settings, *sizes)
        if resume.replay is None:
            raise CheckpointError("the checkpoint's replay is gone: start a new run")
        return Replay.load(resume.replay, name, threads=1, seed=self.settings.seed)

    def __enter__(self) -> SerialHockey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()

    # ---- the loop

    def train(self) -> None:
        """Train to the end of the settings' steps or seconds; leaves metrics, checkpoints and summary.json."""
        self._watcher.begin("training", self.settings.steps, self.env_steps)
        began = self._clock()
        try:
            while self.env_steps < self.settings.steps:
                interrupts.check()
                self.round()
                self._watcher.advance(self.env_steps, self._shown())
                if self.settings.seconds is not None and self._clock() - began >= self.settings.seconds:
                    break
        finally:
            self._watcher.end()
        if self.env_steps > self._saved_at:
            self.save("last")
        self._log.summarise(self._summary())

    def round(self) -> dict[str, float]:
        """One episode in each game, the learner steps that belong to them, and what is due; its metrics."""
        s = self.settings
        warm = self.env_steps < s.warmup
        policy = None if warm else self.learner.numpy_actor()
        results = self._collector.round(self.episodes, policy, self.league, self.opponents)
        self.learner.refresh_normaliser()
        self._count(results)
        metrics: dict[str, float] = {}
        if self.env_steps >= s.warmup:
            self._owed += s.ratio * sum(result.steps for result in results)
            metrics = self._learn()
            self._snapshot()
        if self.env_steps - self._evaluated_at >= s.evaluate_every:
            self._evaluated_at = self.env_steps
            metrics |= self.evaluate()
            self._log.scalars(self.env_steps, self._row(metrics))
        if self.env_steps - self._saved_at >= s.checkpoint_every:
            self.save("last")
        return metrics

    def _count(self, results: list[Result]) -> None:
        for result in results:
            self.league.record(result.opponent, result.winner)
            self._recent.append((result.winner, result.score, result.touches))
            self.env_steps += result.steps
            self.episodes += 1

    def _learn(self) -> dict[str, float]:
        s, learner = self.settings, self.learner
        # The sampler's chance comes from where the training is, so there is no state of it to be kept.
        for number, part in enumerate(self.replay.parts):
            part.ring.seed(s.seed * 1_000_003 + learner.updates + number)
        half = s.batch // 2
        metrics: dict[str, torch.Tensor] = {}
        n, self._owed = int(self._owed), self._owed % 1.0
        for _ in range(n):
            self.replay.sample(s.batch, self._batch, beta=s.beta)
            if self._mirrors is not None:
                observation, action = self._mirrors
                self._batch["observation"][:half] *= observation
                self._batch["next_observation"][:half] *= observation
                self._batch["action"][:half] *= action
            update = learner.update(self._tensors, self._weights)
            if s.prioritized:
                self.replay.update_priorities(self._batch.indices, update.errors.numpy())
            metrics |= update.metrics
        return {name: float(value) for name, value in metrics.items()}

    def _snapshot(self) -> None:
        if self.settings.league.pool and self.episodes - self._snapshot_at >= self.settings.snapshot_every:
            self._snapshot_at = self.episodes
            name, left = self.league.add(self.learner.updates)
            self.opponents.keep(name, self.learner.numpy_actor(), instead_of=left)

    # ---- looking

    def evaluate(self) -> dict[str, float]:
        """Play against the anchors without noise; the best so far against the weak one is kept as "best"."""
        values: dict[str, float] = {}
        actor = self.learner.numpy_actor()
        for who in self.settings.league.anchors:
            standing = evaluate(self.games, actor, who, self.settings.evaluation_games, seed=self.settings.seed)
            self.last_evaluation[who] = standing
            values |= {
                f"wins_{who}": standing.wins,
                f"ties_{who}": standing.ties,
                f"losses_{who}": standing.losses,
                f"score_{who}": standing.score,
            }
        points = float(np.mean([standing.points for standing in self.last_evaluation.values()]))
        if points > self._best:
            self._best = points
            self.save("best")
        return values

    def _row(self, metrics: dict[str, float]) -> dict[str, float]:
        return {
            "learner_steps": self.learner.updates,
            "episodes": self.episodes,
            "seconds": self.seconds,
            "cpu_seconds": self._cpu_before + time.process_time() - self._cpu_began,
            "pool": len(self.league.pool),
            **self._shown(),
            **metrics,
        }

    def _shown(self) -> dict[str, float]:
        winners, scores, touches = np.array(self._recent).T
        return {
            "return_mean": float(scores.mean()),
            "wins": float((winners > 0).mean()),
            "losses": float((winners < 0).mean()),
            "touches": float(touches.mean()),
        }

    @property
    def seconds(self) -> float:
        """Spent on training, earlier parts counted in."""
        return self._seconds_before + self._clock() - self._began

    def _summary(self) -> Summary:
        scores = [score for _, score, _ in self._recent]
        return Summary(
            env_steps=self.env_steps,
            learner_steps=self.learner.updates,
            episodes=self.episodes,
            seconds=self.seconds,
            return_mean=float(np.mean(scores)) if scores else None,
            return_std=float(np.std(scores)) if scores else None,
            seed=self.settings.seed,
            version=build_version(),
        )

    # ---- going on

    def save(self, which: str) -> Path:
        """Write a checkpoint, between two rounds: every game is over, so there is no game to be kept."""
        if which == "last":
            self._saved_at = self.env_steps
        counted = {
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "owed": self._owed,
            "evaluated_at": self._evaluated_at,
            "saved_at": self._saved_at,
            "snapshot_at": self._snapshot_at,
            "best": self._best,
            "recent": list(self._recent),
            "seconds": self.seconds,
            "cpu_seconds": self._cpu_before + time.process_time() - self._cpu_began,
            "league": self.league.state_dict(),
            "settings": asdict(self.settings),
        }
        tensors = {"learner": self.learner.state_dict(), "pool": _as_tensors(self.opponents.state_dict())}
        with interrupts.held():
            return hockey_checkpoint.save(
                self._folder, which, counted=counted, tensors=tensors, replay=self.replay if which == "last" else None
            )

    def _restore(self, checkpoint: HockeyCheckpoint) -> None:
        counted = checkpoint.counted
        self.env_steps, self.episodes = counted["env_steps"], counted["episodes"]
        self._owed, self._best = counted["owed"], counted["best"]
        self._evaluated_at, self._saved_at = counted["evaluated_at"], counted["saved_at"]
        self._snapshot_at = counted["snapshot_at"]
        self._recent.extend((int(winner), float(score), int(touches)) for winner, score, touches in counted["recent"])
        self._seconds_before, self._cpu_before = counted["seconds"], counted["cpu_seconds"]
        self.league = League.from_state_dict(counted["league"])
        self.learner.load_state_dict(checkpoint.tensors["learner"])
        self.opponents.load_state_dict(_as_arrays(checkpoint.tensors["pool"]))


def _as_tensors(value: Any) -> Any:
    """The same tree with tensors for arrays, which is all that a checked torch.load reads."""
    if isinstance(value, dict):
        return {name: _as_tensors(inner) for name, inner in value.items()}
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_arrays(inner) for name, inner in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
