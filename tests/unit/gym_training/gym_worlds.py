"""Small environments for tests of the gym training."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class Mixed(gymnasium.Env):
    """Observes a number and two bits; repeating the bit is rewarded. Terminated or truncated after five steps."""

    def __init__(self, numbers: bool = False, picture: bool = False, terminates: bool = False) -> None:
        self.observation_space = spaces.Dict(
            {
                "bit": spaces.Discrete(2),
                "noise": spaces.Box(-np.inf, np.inf, (2,), np.float64),
                **({"picture": spaces.Box(0, 255, (36, 36, 1), np.uint8)} if picture else {}),
            }
        )
        self.action_space = spaces.Box(-3, 5, (1,)) if numbers else spaces.Discrete(2)
        self._numbers, self._picture, self._terminates = numbers, picture, terminates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._see(), {}

    def step(self, action):
        wanted = self._bit
        paid = -abs(float(action[0]) - (3.0 if wanted else -1.0)) if self._numbers else float(action == wanted)
        self._steps += 1
        over = self._steps == 5
        return self._see(), paid, over and self._terminates, over and not self._terminates, {}

    def _see(self):
        self._bit = int(self.np_random.integers(2))
        seen = {"bit": self._bit, "noise": 5 + 100 * self.np_random.standard_normal(2)}
        if self._picture:
            seen["picture"] = np.full((36, 36, 1), 255 * self._bit, np.uint8)
        return seen


def mixed(**arguments) -> gymnasium.Env:
    return Mixed(**arguments)


class Audited(Mixed):
    """Reports at the end of an episode values without a reward."""

    def step(self, action):
        *told, terminated, truncated, info = super().step(action)
        return (*told, terminated, truncated, {**info, "audit": {"other": 0.25}} if terminated or truncated else info)


class Levers(gymnasium.Env):
    """Observes where each of three levers has to be; every lever that is there is rewarded. One step."""

    def __init__(self, bits: bool = False) -> None:
        counts = [2, 2, 2] if bits else [2, 3, 4]
        self.observation_space = spaces.MultiDiscrete(counts)
        self.action_space = spaces.MultiBinary(3) if bits else spaces.MultiDiscrete(counts)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._wanted = self.np_random.integers(self.observation_space.nvec)
        return self._wanted, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self._wanted, float((action == self._wanted).mean()), True, False, {}
