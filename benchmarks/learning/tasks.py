"""What is learned, and how its time is taken; for every library's Python, so it imports the standard library alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

EVALUATIONS, EPISODES = 10, 20


@dataclass(frozen=True)
class Task:
    """The settings of all sides: they have the same names, except `hidden` (net_arch).

    Attributes:
        score: a mean return that an evaluation has to reach; None: these steps are too few for any.
    """

    env: str
    algorithm: str
    steps: int
    settings: dict[str, Any]
    envs: int = 1
    action_noise: float | None = None
    score: float | None = None

    @property
    def recurrent(self) -> bool:
        return "recurrent" in self.settings

    @property
    def pictures(self) -> bool:
        return self.env.endswith(":pong")

    @property
    def updates(self) -> float:
        """Optimiser steps for an env step: SAC, TD3 and PPO as they are by default, DQN as Stable-Baselines3's."""
        told = self.settings.get
        if self.algorithm == "ppo":
            return float(told("n_epochs", 10) / told("batch_size", 64))
        return float(told("gradient_steps", 1) / told("train_freq", 4 if self.algorithm == "dqn" else 1))

    @property
    def evaluations(self) -> int:
        """How many there are; of PPO none between two rollouts, and an even number."""
        if self.algorithm != "ppo":
            return EVALUATIONS
        return min(EVALUATIONS, self.steps // (2 * self.settings["n_steps"] * self.envs) * 2)

    def short(self, steps: int) -> Task:
        """Return it with so many env steps, in which no score is expected; 0: as it is.

        Raises:
            ValueError: they are less than two rollouts.
        """
        found = replace(self, steps=steps, score=None) if steps else self
        if not found.evaluations:
            least = 2 * self.settings["n_steps"] * self.envs
            raise ValueError(f"{steps} env steps of {self.algorithm}: expected two rollouts or more, {least} steps")
        return found


# CartPole's settings are those of the RL Baselines3 Zoo, without its schedules. Pendulum's too, with smaller networks
# and batches, so that three seeds of both sides are done in half an hour of one core.
_SMALL: dict[str, Any] = {"learning_rate": 1e-3, "batch_size": 128, "hidden": [64, 64]}
TASKS = {
    "cartpole-ppo": Task(
        "CartPole-v1",
        "ppo",
        196 * 256,
        {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "learning_rate": 1e-3},
        envs=8,
        score=475.0,
    ),
    "cartpole-dqn": Task(
        "CartPole-v1",
        "dqn",
        50_000,
        {
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1000,
            "gamma": 0.99,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "hidden": [256, 256],
        },
        score=475.0,
    ),
    "pendulum-sac": Task("Pendulum-v1", "sac", 10_000, _SMALL, score=-200.0),
    "pendulum-sac-256": Task(
        "Pendulum-v1", "sac", 6000, {**_SMALL, "batch_size": 256, "hidden": [256, 256]}, score=-200.0
    ),
    "pendulum-td3": Task("Pendulum-v1", "td3", 10_000, {**_SMALL, "gamma": 0.98}, action_noise=0.1, score=-200.0),
    "pendulum-ppo": Task(
        "Pendulum-v1",
        "ppo",
        24 * 4096,
        {"n_steps": 1024, "gamma": 0.9, "learning_rate": 1e-3, "gae_lambda": 0.95},
        envs=4,
        score=-200.0,
    ),
    # Those of the Zoo for CartPole without velocities, with half the epochs and steps, tanh and orthogonal weights.
    "cartpole-positions-lstm": Task(
        "benchmarks.learning.worlds:positions",
        "ppo",
        160 * 256,
        {
            "recurrent": "lstm",
            "hidden_size": 64,
            "hidden": [64],
            "n_steps": 32,
            "batch_size": 256,
            "gae_lambda": 0.8,
            "gamma": 0.98,
            "n_epochs": 10,
            "learning_rate": "lin_1e-3",
            "clip_range": "lin_0.2",
        },
        envs=8,
        score=200.0,
    ),
    # The Zoo's for Atari, of few steps: nobody learns Pong in them.
    "pong-ppo": Task(
        "benchmarks.learning.worlds:pong",
        "ppo",
        80 * 128,
        {
            "n_steps": 128,
            "batch_size": 256,
            "n_epochs": 4,
            "learning_rate": 2.5e-4,
            "clip_range": 0.1,
            "ent_coef": 0.01,
        },
        envs=8,
    ),
    "cheetah-sac": Task("HalfCheetah-v5", "sac", 3000, {}),  # SAC's own settings: 256 x 256 units, batches of 256
}
CURVES = [name for name, task in TASKS.items() if task.score is not None and not name.endswith("-256")]
"""Those that learn something in their steps, each once."""


def evaluation_seeds(seed: int, episodes: int) -> list[int]:
    """Of the episodes of each evaluation; those that `EnvEvaluator` plays with this seed."""
    import numpy as np

    return np.random.default_rng((1_000_003, seed)).integers(2**31, size=episodes).tolist()


def register_atari() -> None:
    """Register the games of ale-py, which it does not do by itself with Gymnasium 0.29."""
    from ale_py.registration import register_v0_v4_envs

    register_v0_v4_envs()


class Clock:
    """Counts the time of a training, without that of its evaluations; what compilers take as children is in it.

    Attributes:
        evaluations: mean returns so far.
        at: by evaluation, seconds of the processor and of the wall until it began.
    """

    def __init__(self) -> None:
        self.evaluations: list[float] = []
        self.at: list[tuple[float, float]] = []
        self._began, self._out = self._now(), (0.0, 0.0)

    @staticmethod
    def _now() -> tuple[float, float]:
        used = os.times()
        return used.user + used.system + used.children_user + used.children_system, time.monotonic()

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of the processor and of the wall so far."""
        cpu, wall = (now - began - out for now, began, out in zip(self._now(), self._began, self._out, strict=True))
        return cpu, wall

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Stand still."""
        self.at.append(self.seconds)
        before = self._now()
        yield
        cpu, wall = (out + now - began for out, now, began in zip(self._out, self._now(), before, strict=True))
        self._out = cpu, wall

    def told(self, task: Task) -> dict[str, Any]:
        """Return all of it as values of JSON. What came after the last evaluation is not learning."""
        at, count = self.at[: task.evaluations], task.evaluations
        halves = [at[count // 2 - 1], at[-1]] if len(at) == count > 0 else []
        return {"evaluations": self.evaluations[:count], "at": at, "halves": halves, "steps": task.steps}
