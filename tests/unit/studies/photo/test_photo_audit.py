"""Measures without a juror are computed as in the literature, and are not rewarded."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from jurybox.studies.photo.environment import PhotoConfig, PhotoEdit, no_edits
from jurybox.studies.photo.environment.audit import damages_of, load_perceptual, measure, psnr, registered
from jurybox.studies.photo.environment.edits import Degradation, Edits, apply, degrade
from jurybox.studies.photo.environment.evaluate import evaluate
from jurybox.studies.photo.environment.photo_edit import AUDITED
from jurybox.studies.photo.learning import PhotoTraining, description

PHOTO = cv2.GaussianBlur(np.random.default_rng(2).integers(0, 256, (384, 384, 3), dtype=np.uint8), (0, 0), 4)


class Constant:
    """A scorer with a constant score that counts its calls."""

    def __init__(self, says: float = 0.5) -> None:
        self.says, self.asked, self.closed = says, 0, False
        self.buffer = np.zeros((384, 384, 3), np.uint8)

    def score(self) -> float:
        self.asked += 1
        return self.says

    def close(self) -> None:
        self.closed = True


def test_rotation_and_enlargement_do_not_count_as_distance() -> None:
    tilted = degrade(PHOTO, Degradation(tilt=5.0))
    edits = Edits(straighten=-3.0, crop=0.2)
    edited = apply(tilted, edits)
    assert psnr(edited, registered(PHOTO, 5.0, edits.as_dict())) == 60.0
    assert psnr(edited, PHOTO) < 40.0, "unregistered it would be another picture"


def test_measures_are_those_of_the_literature() -> None:
    lighter = np.clip(PHOTO.astype(np.int16) + 10, 0, 255).astype(np.uint8)
    found = measure(lighter, PHOTO)
    assert found["psnr"] == pytest.approx(20 * np.log10(255 / 10), abs=0.05)
    assert 0.9 < found["ssim"] < 1.0 and 1.0 < found["ciede2000"] < 6.0
    same = measure(PHOTO, PHOTO)
    assert same == {"psnr": 60.0, "ssim": 1.0, "ciede2000": 0.0}


def test_a_learned_distance_is_used_if_available() -> None:
    assert "perceptual" not in measure(PHOTO, PHOTO)
    assert measure(PHOTO, PHOTO, lambda picture, reference: 0.25)["perceptual"] == 0.25
    with pytest.raises(ValueError, match="'package.module:function'"):
        load_perceptual("no_such_module:lpips")


def test_damage_is_reported_by_kind() -> None:
    assert damages_of(Degradation(tint=0.2, noise=9.0, noise_seed=3).as_dict()) == ("colour cast", "noise")
    assert damages_of(Degradation().as_dict()) == (), "the seed of no noise is no damage"


def test_an_intact_photo_is_the_crop_that_would_have_been_damaged() -> None:
    environment = PhotoEdit(Constant(), steps=1)
    (damaged,) = evaluate(environment, no_edits, [3]).outcomes[:1]
    (intact,) = evaluate(environment, no_edits, [3], intact=True).outcomes[:1]
    assert intact.photo == damaged.photo and not damages_of(intact.degradation)
    np.testing.assert_array_equal(degrade(intact.damaged, Degradation(**damaged.degradation)), damaged.damaged)


def test_audit_jurors_are_used_and_logged_and_never_rewarded() -> None:
    juror, auditor = Constant(), Constant(0.9)
    environment = PhotoEdit(juror, steps=2, auditors={"other": auditor}, seed=1)
    told = []
    for _ in range(2 * AUDITED):
        environment.reset()
        rewards = []
        for _ in range(2):
            *_, reward, _, _, info = (None, *environment.step(np.zeros(9, np.float32)))
            rewards.append(reward)
        assert rewards == [0.0, 0.0], "what the auditor says is no part of it"
        told.append(info.get("audit"))
    audited = [each for each in told if each is not None]
    assert len(audited) == 2 and auditor.asked == 4
    assert audited[0]["other"] == audited[0]["other_before"] == 0.9
    assert audited[0]["psnr"] == audited[0]["psnr_before"] < 60.0
    environment.close()
    assert juror.closed and auditor.closed


def test_playing_a_policy_uses_no_audit_juror() -> None:
    settings = PhotoTraining(environment=PhotoConfig(audit={"other": "no_such_package:juror"}))
    assert description(settings).environment_arguments["audit"] == {}
