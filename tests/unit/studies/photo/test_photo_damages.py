"""The tables of what a juror gives for mending a cast, and of what a picture tells of its cast without a network."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.photo_damages import GREYS, estimated, fitted, judged

from jurybox.studies.photo.environment.edits import Edits, Image, apply
from jurybox.studies.photo.environment.photo_edit import STEP_SIZES


def test_the_gain_of_a_mended_cast_is_what_an_episode_that_mends_it_is_rewarded(make):
    environment = make(split="held_out", price=0.02, steps=1, reward_scale=1.0)
    photo, damaged, gain = judged(environment, 1, {"temperature": 0.4}).T
    for number, name in enumerate(environment.photos):
        seed = 4_000_000 + 1000 * number
        assert environment.reset(seed=seed, options={"photo": name, "degradation": {}})[1]["score"] == photo[number]
        damage = {"temperature": 0.4}
        info = environment.reset(seed=seed, options={"photo": name, "degradation": damage})[1]
        assert info["score"] == damaged[number] != photo[number]
        mending = np.zeros(9)
        mending[3] = -0.4 / STEP_SIZES[3]
        reward = environment.step(mending)[1]
        assert reward == pytest.approx(gain[number], abs=1e-6)


def lit(seed: int, own: float = 0.0) -> Image:
    """A picture of 96 pixels a side whose surfaces, and so their edges, are grey on average; `own`: its temperature."""
    rng = np.random.default_rng(seed)
    surfaces = np.repeat(np.repeat(rng.integers(60, 120, (12, 12, 1)) + rng.normal(0, 5, (12, 12, 3)), 8, 0), 8, 1)
    return apply(surfaces.astype(np.uint8), Edits(temperature=own))


@pytest.mark.parametrize("name", GREYS)
def test_a_cast_adds_itself_to_an_estimate_of_the_light(name):
    photo = lit(0)
    cast = apply(photo, Edits(temperature=0.6, tint=-0.2))
    added = estimated(cast, *GREYS[name]) - estimated(photo, *GREYS[name])
    assert added == pytest.approx([0.6, -0.2], abs=0.06)


@pytest.mark.parametrize("name", GREYS)
def test_an_estimate_is_trusted_as_far_as_the_training_photographs_agree(name):
    alike = [(apply(lit(seed), Edits(temperature=cast)), lit(seed)) for seed in (0, 1) for cast in (-0.8, 0.8)]
    # Photographs whose own colours differ by as much as the casts: what looks like a cast belongs there.
    own = [(lit(seed, warm), lit(seed, warm)) for seed in (0, 1) for warm in (-0.8, 0.8)]
    whole, none = fitted(*GREYS[name], alike + own, [[1.0] * 4 + [0.1] * 4, [0.1] * 4 + [1.0] * 4])
    assert whole.factor >= 0.9
    assert whole(apply(lit(9), Edits(temperature=0.8))).temperature == pytest.approx(-0.8, abs=0.15)
    assert none.factor == 0.0


def test_what_is_burnt_out_does_not_count_for_the_light():
    photo = lit(0)
    burnt = photo.copy()
    burnt[:32] = (255, 255, 90)
    for how in ((1.0, False), (6.0, False)):
        assert estimated(burnt, *how) == pytest.approx(estimated(photo[32:], *how), abs=0.2)
    white = np.full((96, 96, 3), 255, np.uint8)
    assert all(estimated(white, *how) == pytest.approx([0.0, 0.0]) for how in GREYS.values())
