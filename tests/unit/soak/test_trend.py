"""The trend test distinguishes growth from noise."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.soak.trend import trend

SECONDS = np.arange(0, 1800, 10.0)


def test_a_slow_leak_under_noise_grows():
    noise = np.random.default_rng(1).normal(0, 0.5, len(SECONDS))
    found = trend(SECONDS, 100 + SECONDS / 360 + noise, floor=2.0)  # ten an hour
    assert found.grows
    assert found.per_hour == pytest.approx(10, rel=0.1)


def test_noise_does_not_grow_however_large():
    for seed in range(20):
        values = 100 + np.random.default_rng(seed).normal(0, 20, len(SECONDS))
        assert not trend(SECONDS, values, floor=0.1).grows


def test_a_few_outliers_move_nothing():
    values = np.full(len(SECONDS), 40.0)
    values[-20:] += np.resize([0, 500], 20)
    assert trend(SECONDS, values, floor=1.0).rise == 0


def test_a_rise_below_the_floor_is_worth_no_word():
    assert not trend(SECONDS, 100 + SECONDS / 3600, floor=1.0).grows


def test_two_points_are_no_trend():
    with pytest.raises(ValueError, match="run for longer"):
        trend([0, 1], [0, 1], floor=1.0)
