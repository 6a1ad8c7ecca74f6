"""The table of what a juror gives for mending a cast."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.photo_damages import judged

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
