"""Built-in opponents: a controller that chases the puck, weak or strong, and a random player."""

from __future__ import annotations

import math
from random import Random
from typing import Literal, Protocol

import numpy as np

from jurybox.studies.hockey.game import Action, Observation
from jurybox.studies.hockey.rink import MAX_ANGLE

BotName = Literal["weak", "strong", "random"]
BOTS: tuple[BotName, ...] = ("weak", "strong", "random")
"""Names of the opponents that need no learning."""

_HOME = -3.5
_PAST = 0.2  # distance of the target behind the puck, so that the player hits it at speed
_BRAKE, _BRAKE_SECONDS = 0.5, (0.1, 0.1, 1.0)  # for x, y and the angle
_SWING = 0.2  # maximum phase step of the racket's slow sine, in radians


class Opponent(Protocol):
    """An opponent."""

    def reset(self, seed: int) -> None:
        """Begin a game."""

    def act(self, observation: Observation) -> Action:
        """Return an action (4,) for an observation (18,) in the player's own frame."""


class Bot:
    """Hits the puck when it is behind it, else returns to defend the goal.

    A proportional controller on x, y and angle whose gains are those measured on the original's opponents (weak has a
    twentieth of strong's), and which brakes as well where it would be at its target within a tenth of a second (the
    angle: a second). The racket swings slowly and not evenly, so that shots go to all sides.
    """

    def __init__(self, strength: Literal["weak", "strong"] = "weak", seed: int = 0) -> None:
        if strength not in ("weak", "strong"):
            raise ValueError(f"strength={strength!r} is unknown: expected 'weak' or 'strong'")
        self.strength = strength
        gain = 10.0 if strength == "strong" else 0.5
        self._gains = (gain, gain / 5, gain / 2)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        self._chance = Random(seed).random
        self._phase = 2.0 * math.pi * self._chance()

    def act(self, observation: Observation) -> Action:
        seen = observation.tolist()
        x, y, angle, vx, vy, spin = seen[:6]
        puck_x, puck_y, puck_vx, puck_vy = seen[12:16]
        target_x, target_y = _HOME, 0.0
        if puck_vx < 0.5:
            target_y = puck_y
            if x < puck_x and abs(y - puck_y) < 0.5:
                target_x = puck_x + _PAST
                target_y += puck_vy * math.hypot(puck_x - x, puck_y - y) * 0.1
        self._phase += _SWING * self._chance()
        errors = (target_x - x, target_y - y, MAX_ANGLE * math.sin(self._phase) - angle)
        action = [
            gain * error - (_BRAKE * speed if abs(error) < abs(speed + 0.01) * seconds else 0.0)
            for gain, error, speed, seconds in zip(self._gains, errors, (vx, vy, spin), _BRAKE_SECONDS, strict=True)
        ]
        if len(seen) > 16:
            action.append(1.0 if 1 <= seen[16] <= 6 else 0.0)
        return np.array([min(max(value, -1.0), 1.0) for value in action], np.float32)


class RandomPlayer:
    """Uniform actions, as a baseline."""

    def __init__(self, action_size: int = 4, seed: int = 0) -> None:
        self._size = action_size
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Begin a game; draws depend on the seed."""
        self._rng = np.random.default_rng(seed)

    def act(self, observation: Observation) -> Action:
        """Sample a random action, float32 (action_size,) in [-1, 1]."""
        return self._rng.uniform(-1.0, 1.0, self._size).astype(np.float32)


def make_opponent(name: str, seed: int = 0, action_size: int = 4) -> Opponent:
    """Return the built-in opponent of that name: "weak", "strong" or "random".

    Raises:
        ValueError: there is none.
    """
    if name == "random":
        return RandomPlayer(action_size, seed)
    if name == "weak":
        return Bot("weak", seed)
    if name == "strong":
        return Bot("strong", seed)
    raise ValueError(f"there is no opponent {name!r}: expected one of {', '.join(BOTS)}")
