"""Environments whose values encode where and when they were made."""

from __future__ import annotations

import os
import time

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Tuple


class Counter(gymnasium.Env):
    """Observation: [its name, seed of the episode, episode, step]. Episodes of `length` steps; reward the step."""

    def __init__(self, name: int = 0, length: int = 3, slow: float = 0.0, told: bool = True) -> None:
        self.observation_space = Box(-np.inf, np.inf, (4,), np.float64)
        self.action_space = Discrete(10)
        self.name, self.length, self.slow, self.told = name, length, slow, told
        self.episode = self.now = self.seed_of = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed_of = -1 if seed is None else seed
        self.episode += 1
        self.now = 0
        return self._seen(), {"place": np.array([self.name, 0]), "kind": "reset", **(options or {})}

    def step(self, action):
        if action == 9:
            os._exit(7)
        if action == 8:
            raise ValueError("the third wheel came off")
        if action == 7:
            time.sleep(60)
        time.sleep(self.slow)
        self.now += 1
        info = {"place": np.array([self.name, self.now])}
        if self.told and self.now == 2:
            info["two"] = "yes"
        return self._seen(), float(self.now), self.now >= self.length, False, info

    def pid(self):
        return os.getpid()

    def nap(self, seconds, error=False):
        time.sleep(seconds)
        if error:
            raise ValueError("a bad dream")
        return "slept"

    def _seen(self):
        return np.array([self.name, self.seed_of, self.episode, self.now], float)


class Nested(gymnasium.Env):
    """Observation and action are nested; the observation echoes the last action."""

    def __init__(self) -> None:
        self.observation_space = Dict({"a": Box(-1, 1, (2,), np.float32), "b": Tuple((Discrete(5), Discrete(3)))})
        self.action_space = Dict({"a": Box(-1, 1, (2,), np.float32), "b": Discrete(5)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"a": np.zeros(2, np.float32), "b": (0, 0)}, {}

    def step(self, action):
        return {"a": action["a"], "b": (action["b"], 2)}, 0.0, False, False, {}
