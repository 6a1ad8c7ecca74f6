"""The rink and its bots do what the public hockey environment does: single steps of it, recorded as numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from jurybox.studies.hockey import Bot, HockeyGame
from jurybox.studies.hockey.rink import MAX_ANGLE

RECORDED = json.loads((Path(__file__).parent / "data" / "original_steps.json").read_text())
KINDS = sorted({step["kind"] for step in RECORDED["steps"]})


def test_the_record_covers_every_rule() -> None:
    rules = {"free", "centre line", "side lines", "turned far", "too fast", "fast puck", "held", "goal"}
    assert set(KINDS) == rules
    assert len(RECORDED["steps"]) == 128 and "hockey-env 2.6" in RECORDED["source"]
    assert {step["over"] for step in RECORDED["steps"] if step["kind"] == "goal"} == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_from_the_same_state_ends_as_the_originals(kind: str) -> None:
    game = HockeyGame()
    for step in RECORDED["steps"]:
        if step["kind"] == kind:
            game.reset(0)
            game.rink.set_state(step["state"])
            turn = game.step(step["actions"])
            np.testing.assert_allclose(turn.observations[0], step["seen"], atol=1e-3)
            assert turn.terminated == step["over"]


def test_the_bots_act_as_the_originals() -> None:
    for case in RECORDED["bots"]:
        action = Bot(case["bot"], 0).act(np.array(case["seen"], np.float32))
        np.testing.assert_allclose(action[[0, 1, 3]], case["action"], atol=1e-3)


def test_a_bot_brakes_its_turn_within_a_second_of_its_target() -> None:
    still = np.zeros(18, np.float32)
    still[0], still[12] = -3.5, 1.0
    for angle, spin in ((0.0, 1.2), (-0.3, -1.5), (1.2, 0.2), (-1.3, 0.1)):
        turning = still.copy()
        still[2] = turning[2] = angle
        turning[5] = spin
        for seed in range(20):
            error = (float(Bot("weak", seed).act(still)[2])) / 0.25
            brakes = abs(error) < abs(spin + 0.01)
            expected = 0.25 * error - (0.5 * spin if brakes else 0.0)
            assert Bot("weak", seed).act(turning)[2] == pytest.approx(np.clip(expected, -1, 1), abs=1e-5)


def test_a_bots_racket_swings_by_up_to_a_fifth_of_a_radian_a_step() -> None:
    bot, still = Bot("weak", 3), np.zeros(18, np.float32)
    swing = np.array([bot.act(still)[2] for _ in range(5000)]) / (0.25 * MAX_ANGLE)
    crossings = int((np.diff(np.sign(swing)) != 0).sum())
    assert crossings * math.pi / 5000 == pytest.approx(0.1, rel=0.05)
    steep = np.abs(swing[:-1]) < 0.1  # where the sine is about as steep as its phase
    moved = np.abs(np.diff(swing))[steep]
    assert moved.max() < 0.201 and moved.max() > 0.18 and moved.min() < 0.02


def test_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="18 numbers"):
        HockeyGame().rink.set_state([0.0] * 17)
