"""Defenders that do not learn, to hold the simulator and what was learned against."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jurybox.training.environments.cage import tables as t
from jurybox.training.environments.cage.network import RedName
from jurybox.training.environments.cage.vector import CageVectorEnv, Observations

Actions = npt.NDArray[np.int64]


class Defender(Protocol):
    """From observations int8 (n, 52) to actions int64 (n,)."""

    def __call__(self, observations: Observations) -> Actions: ...


class Sleeping:
    """Does nothing."""

    def __call__(self, observations: Observations) -> Actions:
        return np.zeros(len(observations), np.int64)


class UniformlyRandom:
    """Draws from all 145 actions."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, observations: Observations) -> Actions:
        return self._random.integers(0, t.N_ACTIONS, len(observations))


def episode_returns(
    defender: Defender, red: RedName, *, episodes: int, episode_length: int, seed: int, quirk: bool = False
) -> npt.NDArray[np.float64]:
    """Sums of rewards over whole episodes, float64 (episodes,)."""
    env = CageVectorEnv(episodes, red, episode_length=episode_length, quirk=quirk, autoreset_mode="Disabled")
    observations, _ = env.reset(seed=seed)
    total = np.zeros(episodes)
    for _ in range(episode_length):
        observations, rewards, *_rest = env.step(defender(observations))
        total += rewards
    return total


def describe(action: Any) -> str:
    """An action's name: 'Restore User1'."""
    return t.ACTION_NAMES[int(action)]
