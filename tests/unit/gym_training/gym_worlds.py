"""Small environments for tests of the gym training."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class Mixed(gymnasium.Env):
    """Observes a number and two bits; repeating the bit is rewarded. Terminated or truncated after five steps."""

    def __init__(
        self, numbers: bool = False, picture: bool = False, terminates: bool = False, scale: float = 1.0
    ) -> None:
        self._scale = scale
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
        return self._see(), self._scale * paid, over and self._terminates, over and not self._terminates, {}

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


class Corridor(gymnasium.Env):
    """Observes a place and goes on by the one allowed action of six; another ends the episode with -1. Eight places.

    Args:
        how: where its mask is: "info", "method", or "nowhere".
        several: whether an action is two choices, of six with one allowed and of three with two.

    Attributes:
        forbidden: times that a forbidden action was taken, in this process.
    """

    forbidden = 0

    def __init__(self, how: str = "info", several: bool = False) -> None:
        self.observation_space = spaces.Discrete(8)
        self.action_space = spaces.MultiDiscrete([6, 3]) if several else spaces.Discrete(6, start=3)
        self._how, self._several = how, several
        if how == "method":
            self.action_masks = self._mask

    def _mask(self):
        mask = np.arange(6) == self._wanted
        if self._several:
            mask = np.concatenate((mask, np.arange(3) != self._wanted % 3))
        return mask if self._how == "method" else mask.astype(np.int8)

    def _told(self):
        self._wanted = int(self.np_random.integers(6))
        return {"action_mask": self._mask()} if self._how == "info" else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place = 0
        return 0, self._told()

    def step(self, action):
        assert self.action_space.contains(action), action
        if self._several:
            allowed = action[0] == self._wanted and action[1] != self._wanted % 3
        else:
            allowed = action - 3 == self._wanted
        if not allowed:
            type(self).forbidden += 1
            return self._place, -1.0, True, False, {}
        self._place += 1
        return min(self._place, 7), 1.0, False, self._place == 8, self._told()
