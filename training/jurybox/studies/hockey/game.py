"""The game for two players, common to the Gymnasium and PettingZoo environments: starts, observations, rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jurybox.studies.hockey.rink import SHOT_SPEED, SIDES, Rink

Observation = npt.NDArray[np.float32]
Action = npt.NDArray[np.float32]
TimeOut = Literal["truncate", "original"]

GOAL_REWARD = 10.0
_APART = 0.7  # distance of player and puck, so that they do not touch


class Mode(IntEnum):
    """The mode; numbers as in the original."""

    NORMAL = 0
    TRAIN_SHOOTING = 1
    TRAIN_DEFENSE = 2

    @property
    def steps(self) -> int:
        return 250 if self is Mode.NORMAL else 80


class GameStep(NamedTuple):
    """The result of a step, by player.

    Attributes:
        observations: (2, 18) float32, each in its player's own frame.
        rewards: (2,) float.
        terminated: there was a goal (or, with time_out="original", time is up).
        truncated: time is up.
        infos: winner (1 won, -1 lost, 0), reward_closeness_to_puck, reward_touch_puck, reward_puck_direction.
    """

    observations: Observation
    rewards: tuple[float, float]
    terminated: bool
    truncated: bool
    infos: tuple[dict[str, Any], dict[str, Any]]


class Game(Protocol):
    """The interface of a game: `HockeyGame`, or another environment behind it."""

    @property
    def observation_size(self) -> int: ...
    @property
    def action_size(self) -> int:
        """Return the number of values of one player's action."""

    def reset(self, seed: int | None = None, *, first: int | None = None) -> Observation:
        """Begin a game; return (2, observation_size). The puck starts on the side of `first`."""

    def step(self, actions: Sequence[Sequence[float]] | npt.NDArray[Any]) -> GameStep:
        """Let both players act; actions are (2, action_size) from -1 to 1, each in its player's own frame."""

    def close(self) -> None: ...


class HockeyGame:
    """One rink and its rules.

    An observation of 18 values, in the player's own frame, about the rink's centre (units, radians, seconds):

    ====== ==================================================================
    0-2    own x, y, angle
    3-5    own velocity x, y, angular velocity
    6-11   the same of the opponent
    12-15  puck x, y, velocity x, y
    16, 17 steps that I, the opponent, may still hold the puck (15 at a catch)
    ====== ==================================================================

    Without `keep` the last two are missing, and so is the fourth value of actions. Angles are the same in both frames.

    The reward is 10 for a goal and -10 for one conceded. In each step in which the puck is in the own half and does not
    move away, there is a small penalty that grows with its distance. Returns can be compared with the original's.

    Args:
        mode: a whole game, or a drill: shooting (player 0 has the puck), defence (the puck comes at player 0's goal).
        keep: see `Rink`.
        time_out: "truncate": a game ends after its 250 (drills: 80) steps, truncated, since a time limit is not a
            terminal state (Pardo et al., "Time Limits in Reinforcement Learning", ICML 2018).
            "original": one step later and as terminated, as the original does.
        seed: of the first game, and of what follows until `reset(seed)`.
    """

    def __init__(
        self,
        mode: Mode | int = Mode.NORMAL,
        *,
        keep: bool = True,
        time_out: TimeOut = "truncate",
        seed: int | None = None,
    ) -> None:
        if time_out not in ("truncate", "original"):
            raise ValueError(f"time_out={time_out!r} is unknown: expected 'truncate' or 'original'")
        self.mode = Mode(mode)
        self.time_out = time_out
        self.max_steps = self.mode.steps
        self.rink = Rink(keep=keep)
        self.taken = 0
        self.over = True
        self._first = 0
        self._rng = np.random.default_rng(seed)
        # One game's closeness terms sum to about -30 for a player that keeps as far from the puck as the rink allows.
        self._closeness = 30.0 / (250 / 60 * self.max_steps / 2)

    @property
    def observation_size(self) -> int:
        """Return the number of values of an observation."""
        return 18 if self.rink.keep else 16

    @property
    def action_size(self) -> int:
        """Return the number of values of an action."""
        return 4 if self.rink.keep else 3

    def reset(self, seed: int | None = None, *, first: int | None = None) -> Observation:
        """Begin a game; return both observations, (2, 18).

        Args:
            seed: makes this game and those after it repeatable.
            first: the player on whose side the puck lies; None: player 0 after a seed, then in turn. Only NORMAL.
        """
        if seed is not None:
            self._rng = np.random.default_rng(seed)
            self._first = 0
        starter = self._first if first is None else first
        self._first = 1 - starter
        self.taken = 0
        self.over = False
        self._start(starter)
        return self._observations()

    def _start(self, starter: int) -> None:
        u = self._rng.uniform
        left, right = (-3.0, 0.0), (3.0, 0.0)
        if self.mode is Mode.NORMAL:
            self.rink.reset(left, right, (-SIDES[starter] * u(1.0, 2.0), u(-1.0, 1.0)), (0.0, 0.0))
            return
        # The original's range is a little larger and includes overlaps with walls and the other player.
        right = (u(-1 / 3, 3.49), u(-2.0, 2.0))
        if self.mode is Mode.TRAIN_SHOOTING:
            self.rink.reset(left, right, (-u(1.0, 2.0), u(-1.0, 1.0)), (0.0, 0.0))
            return
        puck = right
        while math.dist(puck, right) < _APART:
            puck = (u(0.0, 10 / 3), u(-3.1, 3.1))
        # Aim at a point behind the goal; some shots miss, so that not every shot has to be stopped.
        away = math.atan2(u(-0.75, 0.75) - puck[1], -5.0 - puck[0])
        self.rink.reset(left, right, puck, (0.0, 0.0))
        self.rink.kick((SHOT_SPEED * math.cos(away), SHOT_SPEED * math.sin(away)))

    def step(self, actions: Sequence[Sequence[float]] | npt.NDArray[Any]) -> GameStep:
        """Let both players act.

        Args:
            actions: (2, 4), each in its player's own frame: force x, force y, torque, shoot; clipped to [-1, 1].

        Raises:
            RuntimeError: the game is over.
            ValueError: actions of another shape, or not finite.
        """
        if self.over:
            raise RuntimeError("the game is over (or none was begun): call reset() first")
        array = np.asarray(actions, np.float64)
        if array.shape != (2, self.action_size) or not np.isfinite(array).all():
            raise ValueError(f"expected {self.action_size} finite numbers for each of 2 players, got {actions!r}")
        self.rink.step(np.minimum(np.maximum(array, -1.0), 1.0).tolist())
        self.taken += 1
        scorer = self.rink.scorer
        late = self.taken >= self.max_steps if self.time_out == "truncate" else self.taken > self.max_steps
        terminated = scorer is not None or (late and self.time_out == "original")
        truncated = late and not terminated
        self.over = terminated or truncated
        infos = (self._info(0, scorer), self._info(1, scorer))
        rewards = (
            GOAL_REWARD * infos[0]["winner"] + infos[0]["reward_closeness_to_puck"],
            GOAL_REWARD * infos[1]["winner"] + infos[1]["reward_closeness_to_puck"],
        )
        return GameStep(self._observations(), rewards, terminated, truncated, infos)

    def close(self) -> None:
        """End the game; there is nothing to free."""
        self.over = True

    def _observations(self) -> Observation:
        rink = self.rink
        bodies = []
        for body in rink.players:
            place, velocity = body.position, body.linearVelocity
            bodies.append((place.x, place.y, body.angle, velocity.x, velocity.y, body.angularVelocity))
        (x0, y0, a0, vx0, vy0, w0), (x1, y1, a1, vx1, vy1, w1) = bodies
        place, velocity = rink.puck.position, rink.puck.linearVelocity
        x, y, vx, vy = place.x, place.y, velocity.x, velocity.y
        h0, h1 = rink.hold
        both = np.array(
            (
                (x0, y0, a0, vx0, vy0, w0, x1, y1, a1, vx1, vy1, w1, x, y, vx, vy, h0, h1),
                (-x1, -y1, a1, -vx1, -vy1, w1, -x0, -y0, a0, -vx0, -vy0, w0, -x, -y, -vx, -vy, h1, h0),
            ),
            np.float32,
        )
        return both if rink.keep else both[:, :16].copy()

    def _info(self, player: int, scorer: int | None) -> dict[str, Any]:
        rink, side = self.rink, SIDES[player]
        puck = rink.puck.position
        away = side * rink.puck.linearVelocity.x
        closeness = 0.0
        if side * puck.x < 0 and away <= 0:
            own = rink.players[player].position
            closeness = -self._closeness * math.hypot(own.x - puck.x, own.y - puck.y)
        return {
            "winner": 0 if scorer is None else 1 if scorer == player else -1,
            "reward_closeness_to_puck": closeness,
            "reward_touch_puck": float(rink.caught[player]),
            "reward_puck_direction": away / (self.max_steps * 25.0),
        }


# Factors that swap left and right of the rink; the game is symmetric.
# y, angle, velocity in y and angular velocity of both players; y and velocity in y of the puck.
MIRROR_OBSERVATION = np.array([1, -1, -1, 1, -1, -1] * 2 + [1, -1, 1, -1, 1, 1], np.float32)
# Force in y and torque.
MIRROR_ACTION = np.array([1, -1, -1, 1], np.float32)
