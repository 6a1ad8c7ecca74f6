"""Losses of each algorithm on fixed batches are those that were recorded before it became one object."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import algorithm, spec_of

from jurybox.training.algorithms.base import Progress, Rollout

ROWS, STEPS = 16, 6
SMALL = {"hidden": (8, 8), "batch_size": ROWS, "learning_rate": 0.003}
DISCRETE = ("dqn", "iqn", "ppo")
# The sixth update's metrics, after five others.
RECORDED: dict[str, dict[str, float]] = {
    "dqn": {"loss": 0.43725646},
    "iqn": {"loss": 1.8542161},
    "td3": {"critic_loss": 0.9818927, "value": 0.41021621, "actor_loss": -0.43155462},
    "sac": {
        "ent_coef": 0.98511577,
        "entropy": 1.3912283,
        "critic_loss": 2.0580211,
        "actor_loss": -1.7964207,
        "value": 0.45810607,
    },
    "ppo": {
        "policy_loss": -0.01756049,
        "value_loss": 1.0904192,
        "entropy": 1.0910182,
        "approx_kl": 0.013099793,
        "clip_fraction": 0.2,
        "explained_variance": -0.0020968914,
    },
    "ppo of numbers": {
        "policy_loss": 0.21120768,
        "value_loss": 1.6099187,
        "entropy": 3.0850703,
        "approx_kl": 0.2077962,
        "clip_fraction": 0.7125,
        "explained_variance": -0.014732838,
    },
}


def batch(rng: np.random.Generator, discrete: bool) -> dict[str, torch.Tensor]:
    """Return transitions of four numbers, with three actions or two numbers."""
    action = rng.integers(3, size=ROWS) if discrete else rng.uniform(-1, 1, (ROWS, 2)).astype(np.float32)
    made = {name: rng.normal(size=(ROWS, 4)).astype(np.float32) for name in ("observation", "next_observation")}
    ends = (rng.random(ROWS) < 0.9).astype(np.float32)
    made |= {"action": action, "reward": rng.normal(size=ROWS).astype(np.float32), "discount": 0.99 * ends}
    return {name: torch.from_numpy(np.asarray(column)) for name, column in made.items()}


def rollout(rng: np.random.Generator, discrete: bool) -> Rollout:
    """Return eight steps of two environments."""
    shape = (8, 2)
    action: Any = rng.integers(3, size=shape) if discrete else rng.normal(size=(*shape, 2)).astype(np.float32)

    def numbers() -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return Rollout(
        observation=rng.normal(size=(*shape, 4)).astype(np.float32),
        action=action,
        log_prob=numbers() * 0.1 - (1.1 if discrete else 2.8),
        value=numbers() * 0.1,
        reward=numbers(),
        terminated=rng.random(shape) < 0.1,
        ended=rng.random(shape) < 0.2,
        next_value=numbers(),
        last_value=rng.normal(size=2).astype(np.float32),
    )


def losses(name: str) -> dict[str, float]:
    """Return the metrics of the sixth update of an algorithm."""
    kind, discrete = name.split(maxsplit=1)[0], name.split(maxsplit=1)[0] in DISCRETE and "numbers" not in name
    made = algorithm(kind, spec_of(4, (), False, discrete, 3 if discrete else 2), **SMALL)
    made.setup(5, "cpu")
    rng = np.random.default_rng(1)
    for number in range(STEPS):
        given = rollout(rng, discrete) if made.on_policy else batch(rng, discrete)
        found = made.update(given, Progress(4 * number + 4, 100))
    return {metric: float(value) for metric, value in found.metrics.items()}


@pytest.mark.parametrize("name", ["dqn", "iqn", "td3", "sac", "ppo", "ppo of numbers"])
def test_losses_on_fixed_batches_are_those_that_were_recorded(name) -> None:
    assert losses(name) == pytest.approx(RECORDED[name], rel=1e-5, abs=1e-5)
