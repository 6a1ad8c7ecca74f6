"""The figures measured on the public hockey environment hold here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jurybox.studies.hockey.rink import HOLD_STEPS, MAX_ANGLE, SIDES, Rink

STILL = (0.0, 0.0, 0.0, 0.0)


def rink(puck=(0.0, 3.0), velocity=(0.0, 0.0), player0=(-3.0, 0.0), player1=(3.0, 0.0), keep: bool = True) -> Rink:
    made = Rink(keep=keep)
    made.reset(player0, player1, puck, velocity)
    return made


def test_masses_and_inertia_are_the_measured_ones() -> None:
    r = rink()
    for player in r.players:
        assert player.mass == pytest.approx(58.0, abs=0.05)
        assert player.inertia == pytest.approx(4.58, abs=0.01)
    assert r.puck.mass == pytest.approx(1.032, abs=0.001)


@pytest.mark.parametrize("number", [0, 1])
def test_full_force_from_standing_gives_the_measured_speeds(number: int) -> None:
    r = rink()
    speeds = []
    for _ in range(5):
        r.step([(1.0, 0, 0, 0) if player == number else STILL for player in (0, 1)])
        speeds.append(SIDES[number] * r.players[number].linearVelocity.x)
    np.testing.assert_allclose(speeds, [1.9, 3.5, 5.1, 6.4, 7.6], atol=0.06)


def test_no_player_runs_much_faster_than_ten_or_leaves_its_half() -> None:
    r = rink()
    fastest, furthest = 0.0, -9.0
    for _ in range(60):
        r.step([(1.0, 0.4, 0, 0), STILL])
        velocity = r.players[0].linearVelocity
        fastest = max(fastest, math.hypot(velocity.x, velocity.y))
        furthest = max(furthest, r.players[0].position.x)
    assert 9.0 < fastest < 11.5
    assert -0.5 < furthest < 0.0


@pytest.mark.parametrize(("action", "axis", "line"), [((-1.0, 0, 0, 0), 0, -3.5), ((0, 1.0, 0, 0), 1, 2.8)])
def test_forces_outwards_end_at_the_lines(action: tuple, axis: int, line: float) -> None:
    r = rink(puck=(0.0, 0.0), player0=(-3.0, 2.0), player1=(3.0, -2.0))
    for _ in range(100):
        r.step([action, action])
    for number, player in enumerate(r.players):
        assert SIDES[number] * player.position[axis] == pytest.approx(line, abs=0.25)


def test_the_racket_turns_little_beyond_sixty_degrees() -> None:
    r = rink()
    angles = []
    for step in range(200):
        r.step([(0, 0, 1.0 if step < 100 else -1.0, 0), STILL])
        angles.append(r.players[0].angle)
    assert MAX_ANGLE - 0.1 < max(angles) < 1.6
    assert -1.6 < min(angles) < -MAX_ANGLE + 0.1


def test_a_caught_puck_is_held_before_the_racket_and_shot_when_one_step_is_left() -> None:
    r = rink(puck=(-2.0, 0.0), velocity=(-5.0, 0.0))
    for _ in range(40):
        r.step([STILL, STILL])
        if r.caught[0]:
            break
    assert r.hold == [HOLD_STEPS, 0]
    held = 0
    while r.hold[0]:
        r.step([(0.5, 0.5, 0, 0), STILL])
        held += 1
        if r.hold[0]:
            before = r.players[0].GetLocalPoint(r.puck.position)
            assert before.x == pytest.approx(0.317, abs=0.02) and abs(before.y) < 0.1
    assert held == HOLD_STEPS - 1
    assert r.puck.linearVelocity.x > 50


@pytest.mark.parametrize("number", [0, 1])
def test_a_shot_leaves_along_the_racket_at_about_sixty_and_slows_down(number: int) -> None:
    side = SIDES[number]
    r = rink(puck=(-2.0 * side, 0.0), velocity=(-5.0 * side, 0.0))
    while not r.hold[number]:
        r.step([STILL, STILL])
    turn = [(0.0, 0.0, 0.3, 0.0) if player == number else STILL for player in (0, 1)]
    for _ in range(5):
        r.step(turn)
    angle = r.players[number].angle
    r.step([(0, 0, 0, 1.0) if player == number else STILL for player in (0, 1)])
    velocity = r.puck.linearVelocity
    assert math.hypot(velocity.x, velocity.y) == pytest.approx(60.0, abs=2.0)
    assert math.atan2(side * velocity.y, side * velocity.x) == pytest.approx(angle, abs=0.02)
    for _ in range(6):
        r.step([STILL, STILL])
    assert math.hypot(*r.puck.linearVelocity) <= 25.0


def test_a_puck_that_moves_away_is_not_caught() -> None:
    r = rink(puck=(-2.65, 0.0), velocity=(4.0, 0.0))
    for _ in range(5):
        r.step([(1.0, 0, 0, 0), STILL])
        if r.puck.linearVelocity.x >= 0.1:
            assert r.hold == [0, 0]


def test_without_keep_the_puck_bounces_off() -> None:
    r = rink(puck=(-2.0, 0.0), velocity=(-10.0, 0.0), keep=False)
    for _ in range(20):
        r.step([STILL[:3], STILL[:3]])
    assert r.hold == [0, 0]
    assert r.puck.linearVelocity.x > 3.0


def test_the_puck_bounces_off_the_scoreboards_with_little_loss() -> None:
    r = rink(puck=(0.0, 2.0), velocity=(0.0, 20.0))
    for _ in range(8):
        r.step([STILL, STILL])
    assert -20.0 <= r.puck.linearVelocity.y < -17.0


@pytest.mark.parametrize(("x", "scorer"), [(1.0, 0), (-1.0, 1)])
@pytest.mark.parametrize("speed", [5.0, 25.0, 60.0])
def test_a_puck_in_the_mouth_is_a_goal_at_any_speed(x: float, scorer: int, speed: float) -> None:
    r = rink(puck=(x, 0.6), velocity=(speed * x, 0.0), player0=(-3.0, -2.0), player1=(3.0, -2.0))
    for _ in range(60):
        r.step([STILL, STILL])
        if r.scorer is not None:
            break
    assert r.scorer == scorer


def test_a_puck_beside_the_mouth_is_none() -> None:
    r = rink(puck=(1.0, 1.8), velocity=(25.0, 0.0))
    for _ in range(60):
        r.step([STILL, STILL])
        assert r.scorer is None
