"""Environments whose values encode where and when they were made."""

from __future__ import annotations

import os
import time

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from tests.descriptors import start_helper


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

    def helper(self):
        """Start a program that lives on, and inherits what it may; return its process id."""
        return start_helper()

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


class Says(gymnasium.Env):
    """Returns what it is told to, in its first step."""

    observation_space = gymnasium.spaces.Dict(
        {"a": gymnasium.spaces.Box(-1, 1, (2,)), "b": gymnasium.spaces.Box(0, 9, (), np.int8)}
    )
    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def __init__(self, **said):
        self.said = {"a": np.zeros(2), "b": 3, "reward": 1.0, "terminated": False, "place": (1, 2), **said}

    def see(self, which=("a", "b")):
        return {name: self.said[name] for name in which if self.said[name] is not KeyError}

    def reset(self, *, seed=None, options=None):
        return {"a": np.zeros(2, np.float32), "b": 0}, {}

    def step(self, action):
        said = self.said
        return self.see(), said["reward"], said["terminated"], False, said.get("info", {"place": said["place"]})


class Reuses(gymnasium.Env):
    """Returns the same arrays at every step, as fast environments do."""

    observation_space, action_space = gymnasium.spaces.Box(-9, 9, (1,)), gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.seen, self.told = np.zeros(1, np.float32), np.zeros(1)

    def reset(self, *, seed=None, options=None):
        self.seen[:] = self.told[:] = -1
        return self.seen, {"told": self.told}

    def step(self, action):
        self.seen += 3
        self.told += 3
        return self.seen, 0.0, True, False, {"told": self.told}
