"""No play, however odd, gets more out of the rink than it puts in: what a training would find and live on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from Box2D import b2PolygonShape

from jurybox.studies.hockey import Bot, HockeyGame, RandomPlayer
from jurybox.studies.hockey.rink import PUCK_RADIUS, SIDES, Rink

# A shot adds 60 to its holder's velocity, and no player runs faster than 11.7. The original's puck is never faster than
# 71.3 in a thousand games of actions at their bounds, nor than 68 in thousands of random play and of bots' (the docs).
FASTEST_PUCK, FASTEST_PLAYER = 72.0, 11.8
SLOP = 0.02  # Box2D lets bodies overlap by this much: its slop, and the skin of polygons

Action = list[float]


class Bounds:
    """Extreme actions, each held for a while: runs into walls at full speed, turns as far as it goes."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._left = 0

    def act(self, seen: np.ndarray) -> Action:
        if not self._left:
            self._left = int(self._rng.integers(1, 25))
            self._action = [float(value) for value in self._rng.choice([-1.0, 0.0, 1.0], 3, p=[0.4, 0.2, 0.4])]
            self._action.append(float(self._rng.uniform() < 0.3))
        self._left -= 1
        return self._action


class Cornered:
    """Takes the puck to a wall, turns its racket to it, and shoots: as close as can be."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._had = False

    def act(self, seen: np.ndarray) -> Action:
        u = self._rng.uniform
        if seen[16]:
            if not self._had:
                self._wall, self._back, self._at = float(self._rng.choice([-1, 1])), u() < 0.5, u(1, 14)
            self._had = True
            return [-1.0 if self._back else u(-1, 1), self._wall, self._wall, float(seen[16] <= self._at)]
        self._had = False
        dx, dy = seen[12:14] - seen[:2]
        return [float(np.clip(10 * dx + 1, -1, 1)), float(np.clip(5 * dy, -1, 1)), float(-np.sign(seen[2])), 0.0]


PLAYS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "random": lambda seed: (RandomPlayer(4, seed), RandomPlayer(4, seed + 1)),
    "at the bounds": lambda seed: (Bounds(seed), Bounds(seed + 1)),
    "cornered": lambda seed: (Cornered(seed), Cornered(seed + 1)),
    "cornered against strong": lambda seed: (Cornered(seed), Bot("strong", seed)),
    "strong against weak": lambda seed: (Bot("strong", seed), Bot("weak", seed + 1)),
}


def energy(body: Any, *, faster: float = 0.0, spun: float = 0.0, times: float = 1.0) -> float:
    """Of a body's motion, after its speed was multiplied and something was added to it."""
    own_inertia = body.inertia - body.mass * body.localCenter.lengthSquared
    speed = times * math.hypot(*body.linearVelocity) + faster
    return float(body.mass * speed**2 + own_inertia * (abs(body.angularVelocity) + spun) ** 2) / 2


def at_most(rink: Rink, actions: np.ndarray) -> float:
    """The most energy after a step if contacts and damping only remove it: the present energy, and what actions add."""
    total, before = 0.0, math.hypot(*rink.puck.linearVelocity)
    for player, action, hold in zip(rink.players, actions, rink.hold, strict=True):
        push = 6000 / 50 / player.mass * math.hypot(*action[:2])
        own_inertia = player.inertia - player.mass * player.localCenter.lengthSquared
        # Beyond 60 degrees a spring turns the racket back; at the centre line one pushes players that leave it.
        spring = 5 * player.mass * abs(player.angle) if abs(player.angle) > math.pi / 3 else 400 * abs(action[2])
        at_centre = 1.5 if abs(player.position.x) < 0.5 else 1.0
        total += energy(player, faster=push, spun=spring / 50 / own_inertia, times=at_centre)
        if hold:
            shot = 60.0 if hold <= 2 or action[3] > 0.5 else 0.0
            before = max(before, math.hypot(*player.linearVelocity) + shot)
    spin = rink.puck.inertia * rink.puck.angularVelocity**2 / 2
    return total + float(rink.puck.mass * before**2) / 2 + spin


def depth(rink: Rink, body: Any) -> float:
    """How deep the puck is in a body's polygons; negative: it does not touch them."""
    deepest = -math.inf
    x, y = body.GetLocalPoint(rink.puck.position)
    for fixture in body.fixtures:
        if fixture.sensor or not isinstance(fixture.shape, b2PolygonShape) or fixture.filterData.maskBits & 1 == 0:
            continue
        corners = np.array(fixture.shape.vertices)
        sides = np.roll(corners, -1, 0) - corners
        outwards = np.stack((sides[:, 1], -sides[:, 0]), 1) / np.hypot(*sides.T)[:, None]
        away = (((x, y) - corners) * outwards).sum(1)
        if away.max() > 0:  # the centre is outside: the distance is to the nearest point of the edge
            share = np.clip((((x, y) - corners) * sides).sum(1) / (sides**2).sum(1), 0.0, 1.0)
            far = np.hypot(*((x, y) - corners - share[:, None] * sides).T).min()
        else:
            far = away.max()
        deepest = max(deepest, PUCK_RADIUS - far)
    return deepest


def walls(rink: Rink) -> Iterator[Any]:
    return (body for body in rink._world.bodies if body.type == 0)


def step_and_check(game: HockeyGame, actions: np.ndarray) -> None:
    rink = game.rink
    held, bound = list(rink.hold), at_most(rink, actions)
    game.step(actions)
    assert math.hypot(*rink.puck.linearVelocity) < FASTEST_PUCK
    for player in rink.players:
        assert math.hypot(*player.linearVelocity) < FASTEST_PLAYER
    now = sum(energy(body) for body in (*rink.players, rink.puck))
    assert now <= bound * 1.001 + 0.01
    if any(held) and not any(rink.hold):
        assert max(depth(rink, body) for body in walls(rink)) < SLOP
        holder = held.index(max(held))
        body, (vx, vy) = rink.players[holder], rink.puck.linearVelocity
        ahead = SIDES[holder] * (vx * math.cos(body.angle) + vy * math.sin(body.angle)) / math.hypot(vx, vy)
        # A shot at a near wall returns within the step, and may then hit its player.
        assert ahead < 0.9 or depth(rink, body) < SLOP


QUICK = ("cornered against strong", "at the bounds")


@pytest.mark.parametrize("play", [pytest.param(play, marks=[pytest.mark.runs] * (play not in QUICK)) for play in PLAYS])
def test_no_play_gets_more_out_of_the_rink_than_it_puts_in(play: str) -> None:
    game = HockeyGame()
    for seed in range(8):
        players = PLAYS[play](2 * seed)
        seen = game.reset(seed, first=seed % 2)
        while not game.over:
            actions = np.array([player.act(row) for player, row in zip(players, seen, strict=True)])
            step_and_check(game, actions)
            seen = game._observations()


def test_the_fastest_learned_shot_is_a_running_shot() -> None:
    """The cross-entropy method looks for the actions of a holder by a wall that make the puck fastest."""
    game, steps = HockeyGame(), 14

    def fastest(plan: np.ndarray) -> float:
        game.reset(0)
        game.rink.reset((-2.5, 2.5), (3.0, 0.0), (-2.1, 2.5), (-5.0, 0.0))
        game.rink.players[0].angle = 1.0
        best = 0.0
        for action in np.clip(plan, -1, 1):
            step_and_check(game, np.stack((action, np.zeros(4))))
            best = max(best, math.hypot(*game.rink.puck.linearVelocity))
            if game.over:
                break
        return best

    rng = np.random.default_rng(0)
    mean, spread = np.zeros((steps, 4)), np.ones((steps, 4))
    for _ in range(6):
        plans = mean + spread * rng.normal(size=(20, steps, 4))
        elite = plans[np.argsort([-fastest(plan) for plan in plans])[:5]]
        mean, spread = elite.mean(0), elite.std(0) + 0.05
    assert 62.0 < fastest(mean) < FASTEST_PUCK
