"""Environments of the comparison that no package has."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation, TransformObservation


def positions() -> gymnasium.Env:
    """CartPole without velocities: the cart's place and the pole's angle alone."""
    env = gymnasium.make("CartPole-v1")
    seen = [0, 2]
    assert isinstance(env.observation_space, gymnasium.spaces.Box)
    low, high = env.observation_space.low[seen], env.observation_space.high[seen]
    return TransformObservation(env, lambda whole: whole[seen], gymnasium.spaces.Box(low, high, dtype=np.float32))


def pong() -> gymnasium.Env:
    """Pong as Mnih et al. 2015 play it: the four newest gray pictures of 84 x 84, each of four frames of the game."""
    import ale_py  # (`pip install ale-py` has the game)

    gymnasium.register_envs(ale_py)
    frames = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    return FrameStackObservation(AtariPreprocessing(frames), 4)
