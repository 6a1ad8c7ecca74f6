from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurybox.studies.photo.environment.edits import HIGHEST, LOWEST, TOOLS, Edits, apply


def luma(picture):
    return cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY).astype(float)


def chroma(picture):
    return np.ptp(picture.astype(float), axis=2).mean()


def channels(picture):
    return picture.reshape(-1, 3).mean(axis=0)


def detail(picture):
    return cv2.Laplacian(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), cv2.CV_32F).std()


def test_no_edits_give_the_same_image_bit_for_bit(photo):
    assert np.array_equal(apply(photo, Edits()), photo)


def test_the_original_is_never_written_to(photo):
    original = photo.copy()
    apply(photo, Edits.from_vector(HIGHEST))
    assert np.array_equal(photo, original)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_writes_its_picture_into_the_given_array(photo, tool):
    edits = Edits(**{tool: HIGHEST[TOOLS.index(tool)] / 2})
    shared = np.zeros((3, *photo.shape), dtype=np.uint8)
    given_back = apply(photo, edits, out=shared[1])
    assert np.shares_memory(given_back, shared)
    assert np.array_equal(shared[1], apply(photo, edits))
    assert not np.array_equal(shared[1], photo)
    assert not shared[0].any() and not shared[2].any()


def test_all_tools_together_write_into_the_given_array(photo):
    out = np.zeros_like(photo)
    edits = Edits.from_vector(0.3 * HIGHEST)
    assert apply(photo, edits, out=out) is out
    assert np.array_equal(out, apply(photo, edits))


def test_more_exposure_is_more_light(photo):
    dark, plain, bright = (luma(apply(photo, Edits(exposure=stops))).mean() for stops in (-1, 0, 1))
    assert dark < plain - 10 and bright > plain + 10


def test_one_stop_of_exposure_doubles_linear_light():
    grey = np.full((8, 8, 3), 60, dtype=np.uint8)

    def linear(level):
        return ((level / 255 + 0.055) / 1.055) ** 2.4

    brighter = apply(grey, Edits(exposure=1.0))[0, 0, 0]
    assert linear(brighter) / linear(60) == pytest.approx(2.0, rel=0.02)


def test_more_contrast_spreads_the_light_and_keeps_middle_grey(photo):
    flat, plain, hard = (luma(apply(photo, Edits(contrast=stops))).std() for stops in (-1, 0, 0.5))
    assert flat < 0.6 * plain and hard > 1.05 * plain
    grey = np.full((8, 8, 3), 128, dtype=np.uint8)
    assert abs(int(apply(grey, Edits(contrast=1.0))[0, 0, 0]) - 128) <= 1


def test_contrast_restores_values_that_exposure_pushed_past_white():
    steps = np.repeat(np.linspace(200, 250, 8, dtype=np.uint8)[:, None], 8, axis=1)
    picture = np.repeat(steps[:, :, None], 3, axis=2)
    assert len(np.unique(apply(picture, Edits(exposure=1.0)))) == 1
    assert len(np.unique(apply(picture, Edits(exposure=1.0, contrast=-1.0)))) == 8


def test_saturation_moves_colour_and_leaves_grey_alone(photo):
    pale, plain, vivid = (chroma(apply(photo, Edits(saturation=stops))) for stops in (-1, 0, 0.5))
    assert pale == pytest.approx(plain / 2, rel=0.05) and vivid > 1.2 * plain
    grey = np.full((8, 8, 3), 90, dtype=np.uint8)
    assert np.array_equal(apply(grey, Edits(saturation=1.0)), grey)


def test_temperature_warms_and_tint_turns_to_magenta(photo):
    red, green, blue = channels(apply(photo, Edits(temperature=0.6))) - channels(photo)
    assert red > 5 and blue < -5
    red, green, blue = channels(apply(photo, Edits(tint=0.6))) - channels(photo)
    assert green < -2 and red > 2 and blue > 2


@pytest.mark.parametrize("edits", [Edits(temperature=0.8), Edits(tint=-0.6), Edits(temperature=-0.5, tint=0.4)])
def test_white_balance_keeps_the_luminance_of_grey(edits):
    grey = np.full((8, 8, 3), 100, dtype=np.uint8)
    linear = ((apply(grey, edits)[0, 0] / 255 + 0.055) / 1.055) ** 2.4
    assert linear @ [0.2126, 0.7152, 0.0722] == pytest.approx(((100 / 255 + 0.055) / 1.055) ** 2.4, rel=0.02)


def test_sharpness_adds_detail(photo):
    assert detail(apply(photo, Edits(sharpness=1.0))) > 1.3 * detail(photo)


def test_sharpness_does_not_change_flat_areas():
    grey = np.full((16, 16, 3), 90, dtype=np.uint8)
    assert np.array_equal(apply(grey, Edits(sharpness=2.0)), grey)


def test_denoise_removes_noise_and_keeps_edges():
    step = np.zeros((64, 64, 3), dtype=np.uint8)
    step[:, :32], step[:, 32:] = 60, 180
    noisy = np.clip(step + np.random.default_rng(0).normal(0, 6, step.shape), 0, 255).astype(np.uint8)
    smooth = apply(noisy, Edits(denoise=15.0))
    flat = smooth[8:-8, 8:24].astype(float)
    assert flat.std() < 0.4 * noisy[8:-8, 8:24].astype(float).std()
    assert smooth[:, 32].mean() - smooth[:, 31].mean() > 80


def test_denoise_moves_no_pixel_further_than_it_says(photo):
    moved = apply(photo, Edits(denoise=7.0)).astype(int) - photo.astype(int)
    assert 0 < np.abs(moved).max() <= 7


def test_straighten_turns_counter_clockwise_and_leaves_no_empty_corner():
    picture = np.full((384, 384, 3), 200, dtype=np.uint8)
    picture[190:194] = 0
    turned = apply(picture, Edits(straighten=8.0))
    left, right = (luma(turned)[:, column].argmin() for column in (20, 363))
    assert left > 200 > 180 > right  # counter-clockwise: the left end of a level line goes down
    white = np.full((384, 384, 3), 255, dtype=np.uint8)
    assert apply(white, Edits(straighten=15.0)).min() == 255


def test_straighten_undoes_the_same_tilt(photo):
    tilted = apply(photo, Edits(straighten=6.0))
    upright = apply(tilted, Edits(straighten=-6.0))
    zoom = (np.cos(np.radians(6)) + np.sin(np.radians(6))) ** 2
    expected = apply(photo, Edits(crop=float(np.log2(zoom))))
    assert np.abs(upright.astype(float) - expected).mean() < 0.5 * np.abs(tilted.astype(float) - expected).mean()


def test_crop_enlarges_the_middle():
    picture = np.zeros((384, 384, 3), dtype=np.uint8)
    picture[144:240, 144:240] = 255
    enlarged = luma(apply(picture, Edits(crop=0.5)))
    assert (enlarged > 128).sum() == pytest.approx(2 * 96 * 96, rel=0.05)


@given(st.lists(st.floats(-50, 50), min_size=len(TOOLS), max_size=len(TOOLS)))
@settings(max_examples=50, deadline=None)
def test_a_recipe_never_leaves_its_limits(deltas):
    vector = Edits().moved(deltas).moved(deltas).vector()
    assert (vector >= LOWEST).all() and (vector <= HIGHEST).all()


def test_ten_small_steps_render_the_same_as_one_large(photo):
    small = Edits()
    for _ in range(10):
        small = small.moved([0.1, 0.02, 0.05, -0.05, 0.02, 0.1, 0.5, 0.3, 0.0])
    large = Edits().moved([1.0, 0.2, 0.5, -0.5, 0.2, 1.0, 5.0, 3.0, 0.0])
    difference = np.abs(apply(photo, small).astype(int) - apply(photo, large).astype(int))
    assert difference.max() <= 1


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((384, 384, 3), dtype=np.float32),
        np.zeros((383, 384, 3), dtype=np.uint8),
        np.zeros((384, 768, 3), dtype=np.uint8)[:, ::2],
    ],
)
def test_an_unfit_array_is_refused_with_what_was_expected(photo, out):
    with pytest.raises(ValueError, match=r"expected out to be a writable C-contiguous uint8 \(384, 384, 3\)"):
        apply(photo, Edits(), out=out)


def test_rendering_over_the_original_is_refused(photo):
    copy = photo.copy()
    with pytest.raises(ValueError, match="overlaps"):
        apply(copy, Edits(exposure=1.0), out=copy)


def test_a_photo_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="expected a photo of uint8"):
        apply(np.zeros((384, 300, 3), dtype=np.uint8), Edits())


@pytest.mark.parametrize("vector", [[0.0] * 8, [float("nan")] * 9])
def test_a_recipe_from_the_wrong_numbers_is_refused(vector):
    with pytest.raises(ValueError, match="9 finite settings"):
        Edits.from_vector(vector)
