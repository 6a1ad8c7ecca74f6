from __future__ import annotations

import json

import numpy as np
import pytest

from jurybox.training.algorithms.acting import coloured_noise
from jurybox.training.algorithms.statistics import Normaliser


def test_pieces_give_the_statistics_of_the_whole() -> None:
    rows = np.random.default_rng(0).normal([3.0, -100.0, 0.0], [1.0, 50.0, 1e-3], (5000, 3))
    normaliser = Normaliser(3)
    for piece in np.array_split(rows, 37):
        normaliser.update(piece)
    np.testing.assert_allclose(normaliser.mean, rows.mean(0), rtol=1e-9)
    np.testing.assert_allclose(normaliser.std, rows.std(0), rtol=1e-9)
    mean, scale = normaliser.shift_and_scale()
    assert mean.dtype == scale.dtype == np.float32
    assert ((rows - mean) * scale).std() == pytest.approx(1.0, abs=1e-3)


def test_constant_values_stay_unchanged() -> None:
    normaliser = Normaliser(2)
    np.testing.assert_array_equal(normaliser.std, 1.0)
    normaliser.update(np.full((10, 2), 4.0))
    np.testing.assert_array_equal(normaliser.shift_and_scale(), [[4.0, 4.0], [1.0, 1.0]])


def test_statistics_survive_json() -> None:
    normaliser = Normaliser(3)
    normaliser.update(np.random.default_rng(0).normal(size=(50, 3)))
    again = Normaliser(3)
    again.load_state_dict(json.loads(json.dumps(normaliser.state_dict())))
    more = np.random.default_rng(1).normal(size=(50, 3))
    for each in (normaliser, again):
        each.update(more)
    np.testing.assert_array_equal(again.std, normaliser.std)
    assert again.count == 100


def test_observations_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(n, 3\)"):
        Normaliser(3).update(np.zeros((2, 4)))
    with pytest.raises(ValueError, match="expected 3"):
        Normaliser(3).load_state_dict(Normaliser(4).state_dict())


@pytest.mark.parametrize(("colour", "low"), [(0.0, -0.1), (1.0, 0.4), (2.0, 0.8)])
@pytest.mark.parametrize("steps", [251, 252])
def test_noise_has_unit_variance_and_the_given_colour(colour: float, low: float, steps: int) -> None:
    rng = np.random.default_rng(0)
    noise = np.stack([coloured_noise(rng, steps, 4, colour) for _ in range(100)])
    assert noise.shape == (100, steps, 4) and noise.dtype == np.float32
    assert noise.std() == pytest.approx(1.0, abs=0.12)
    assert abs(noise.mean()) < 0.1
    neighbours = (noise[:, 1:] * noise[:, :-1]).mean() / noise.var()
    assert low < neighbours < low + 0.5


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_short_noise_has_unit_variance_at_each_step(steps: int) -> None:
    rng = np.random.default_rng(0)
    noise = np.stack([coloured_noise(rng, steps, 4, 1.0) for _ in range(3000)])
    np.testing.assert_allclose(noise.std((0, 2)), 1.0, atol=0.04)
