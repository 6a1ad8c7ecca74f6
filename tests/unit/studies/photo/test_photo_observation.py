from __future__ import annotations

import cv2
import numpy as np
import pytest

from jurybox.studies.photo.environment import observation
from jurybox.studies.photo.environment.edits import HIGHEST, Edits, apply
from jurybox.studies.photo.environment.observation import _LIT, NAMES, measure


def of(picture, name):
    return measure(picture)[NAMES.index(name)]


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        ("luma_mean", Edits(exposure=0.5)),
        ("luma_quantile_50", Edits(exposure=0.5)),
        ("luma_deviation", Edits(contrast=0.3)),
        ("clipped_dark", Edits(exposure=-2.0)),
        ("clipped_bright", Edits(exposure=1.0)),
        ("warmth_of_neutrals", Edits(temperature=0.3)),
        ("magenta_of_neutrals", Edits(tint=0.3)),
        ("chroma_mean", Edits(saturation=0.3)),
        ("fine_detail", Edits(sharpness=0.5)),
        ("warm_stops_neutrals", Edits(temperature=0.3)),
        ("magenta_stops_neutrals", Edits(tint=0.3)),
        ("stops_quantile_50", Edits(exposure=0.5)),
    ],
)
def test_each_statistic_rises_with_the_edit_it_is_meant_to_guide(photo, name, edits):
    assert of(apply(photo, edits), name) > of(photo, name) + 0.03


def test_a_cast_and_an_exposure_add_the_same_to_dark_and_bright_light(photo):
    grey = (photo // 4 + 90).astype(np.uint8)  # nothing is black, clipped or very colourful
    for edits, names, wanted in (
        (Edits(temperature=0.4), [f"warm_stops_{part}" for part in _LIT], 0.5 * 0.4),
        (Edits(tint=0.2), [f"magenta_stops_{part}" for part in _LIT], 0.2),
        (Edits(exposure=-0.6), [f"stops_quantile_{q}" for q in (25, 50, 75, 95)], 0.25 * -0.6),
    ):
        changed = apply(grey, edits)
        found = [of(changed, name) - of(grey, name) for name in names]
        assert found == pytest.approx([wanted] * len(names), abs=0.15 * abs(wanted)), (edits, found)


def test_the_slant_of_lines_follows_a_turn_and_its_sign():
    bars = np.full((384, 384, 3), 60, np.uint8)
    for at in range(0, 384, 48):
        bars[:, at : at + 24] = 190
    for name in ("slant", "slant_of_lines"):
        left, none, right = (of(apply(bars, Edits(straighten=degrees)), name) for degrees in (-4.0, 0.0, 4.0))
        assert abs(none) < 0.1 and left > 0.5 and left == pytest.approx(-right, abs=0.15)


def test_noise_is_seen(photo):
    noisy = np.clip(photo + np.random.default_rng(0).normal(0, 8, photo.shape), 0, 255).astype(np.uint8)
    assert of(noisy, "noise") > of(photo, "noise") + 0.2


def test_the_direction_of_a_tilt_is_seen():
    lines = np.full((384, 384, 3), 200, dtype=np.uint8)
    lines[::24] = lines[1::24] = lines[2::24] = 40
    left, right = (of(apply(lines, Edits(straighten=degrees)), "tilt") for degrees in (6.0, -6.0))
    assert left * right < -0.01


@pytest.mark.parametrize("level", [0, 7, 255])
def test_statistics_of_a_flat_picture_are_finite_and_within_bounds(level):
    numbers = measure(np.full((384, 384, 3), level, dtype=np.uint8))
    assert numbers.shape == (len(NAMES),) and np.isfinite(numbers).all() and np.abs(numbers).max() <= 1.0


def test_the_observation_matches_its_slices(photo):
    edits = Edits(exposure=1.5, straighten=-15.0)
    seen = observation.observe(photo, edits, 0.25, 0.4)
    assert seen.shape == (observation.SIZE,) and seen in observation.space()
    assert np.array_equal(seen[observation.STATISTICS], measure(photo))
    assert seen[observation.EDITS].tolist() == [0.5, 0, 0, 0, 0, 0, 0, -1.0, 0]
    assert seen[observation.TIME].tolist() == [-0.5]
    assert seen[observation.SCORE] == pytest.approx(0.4)


@pytest.mark.parametrize("score", [-7.0, 3.0])
def test_a_score_beyond_its_range_stays_within_the_space(photo, score):
    assert observation.observe(photo, Edits.from_vector(HIGHEST), 1.0, score) in observation.space()


def test_the_view_inside_an_observation_is_the_small_picture(photo):
    seen = observation.observe(photo, Edits(), 0.0, 0.0)[observation.VIEW]
    view = np.rint((seen.reshape(16, 16, 3) / observation.VIEW_SCALE + 1.0) * 127.5)
    assert np.array_equal(view, cv2.resize(photo, (16, 16), interpolation=cv2.INTER_AREA))


def test_a_mirrored_observation_is_that_of_the_mirrored_picture(photo):
    edits, mirrored_edits = Edits(exposure=0.5, straighten=6.0), Edits(exposure=0.5, straighten=-6.0)
    seen = observation.observe(photo, edits, 0.5, 0.2)
    other = observation.observe(np.ascontiguousarray(photo[:, ::-1]), mirrored_edits, 0.5, 0.2)
    apart, unlike = np.abs(observation.mirrored(seen[None])[0] - other), np.abs(seen - other)
    # The directions are taken at every second pixel, and those are others from the other side.
    assert apart[: observation.DIRECTIONS.start].max() < 0.05 and apart[observation.DIRECTIONS].max() < 0.25
    assert unlike[: observation.DIRECTIONS.start].max() > 0.2
    assert unlike[observation.DIRECTIONS].mean() > 2 * apart[observation.DIRECTIONS].mean()
    assert np.array_equal(observation.mirrored(observation.mirrored(seen[None]))[0], seen)
