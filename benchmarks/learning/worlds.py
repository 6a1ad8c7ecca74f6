"""Environments of the comparison that no package has."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.wrappers import TransformObservation


def positions() -> gymnasium.Env:
    """CartPole without velocities: the cart's place and the pole's angle alone."""
    env = gymnasium.make("CartPole-v1")
    seen = [0, 2]
    assert isinstance(env.observation_space, gymnasium.spaces.Box)
    low, high = env.observation_space.low[seen], env.observation_space.high[seen]
    return TransformObservation(env, lambda whole: whole[seen], gymnasium.spaces.Box(low, high, dtype=np.float32))
