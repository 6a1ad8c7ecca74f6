from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from jurybox.studies.photo.environment.audit import distance, registered
from jurybox.studies.photo.environment.edits import Degradation, apply, cure, degrade, draw


def test_the_same_seed_draws_the_same_damage(photo):
    one, other = (draw(np.random.default_rng(4)) for _ in range(2))
    assert one == other and one != draw(np.random.default_rng(5))
    assert np.array_equal(degrade(photo, one), degrade(photo, other))


def test_no_fault_is_no_damage_and_still_a_copy(photo):
    same = degrade(photo, Degradation())
    assert np.array_equal(same, photo) and not np.shares_memory(same, photo)


@pytest.mark.parametrize(
    "fault",
    [
        Degradation(exposure=-1.0),
        Degradation(haze=0.4),
        Degradation(saturation=-1.0),
        Degradation(temperature=0.5),
        Degradation(tint=0.3),
        Degradation(blur=1.0),
        Degradation(noise=8.0),
        Degradation(tilt=5.0),
    ],
    ids=str,
)
def test_every_fault_is_visible_and_leaves_the_photo_itself_alone(photo, fault):
    before = photo.copy()
    damaged = degrade(photo, fault)
    assert np.abs(damaged.astype(int) - photo.astype(int)).mean() > 1.0
    assert damaged.dtype == np.uint8 and damaged.shape == photo.shape
    assert np.array_equal(photo, before)


def test_two_to_four_faults_at_a_time_and_every_fault_sometimes():
    rng = np.random.default_rng(0)
    seen: set[str] = set()
    for _ in range(300):
        fault = draw(rng)
        groups = [
            fault.exposure != 0,
            fault.haze != 0,
            fault.temperature != 0,
            fault.saturation != 0,
            fault.blur != 0 or fault.noise != 0,
            fault.tilt != 0,
        ]
        assert 2 <= sum(groups) <= 4
        seen |= {field.name for field in fields(fault) if getattr(fault, field.name) != field.default}
    assert seen == {field.name for field in fields(Degradation)}


@pytest.mark.parametrize("seed", range(12))
def test_strength_scales_every_fault_and_changes_nothing_else(seed):
    one, half = (draw(np.random.default_rng(seed), strength).as_dict() for strength in (1.0, 0.5))
    for name in ("veil", "noise_seed"):
        assert one.pop(name) == half.pop(name)
    assert half == {name: pytest.approx(value / 2) for name, value in one.items()}


def test_a_strength_of_nothing_is_refused():
    with pytest.raises(ValueError, match="positive strength"):
        draw(np.random.default_rng(0), 0.0)


def test_the_cure_of_a_damage_brings_the_picture_nearer_to_its_photo(photo):
    nearer = []
    for seed in range(20):
        fault = draw(np.random.default_rng(seed), tilted=0.5)
        damaged, mended = degrade(photo, fault), cure(fault)
        assert mended.straighten == -fault.tilt
        before = distance(damaged, registered(photo, fault.tilt, {}))
        after = distance(apply(damaged, mended), registered(photo, fault.tilt, mended.as_dict()))
        nearer.append(after < before)
    assert np.mean(nearer) >= 0.9
    assert not any(cure(Degradation()).vector())
