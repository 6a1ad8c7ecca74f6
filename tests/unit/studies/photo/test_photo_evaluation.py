"""An evaluation of a photo training: which files it has not looked at, and how straightening is measured."""

from __future__ import annotations

import csv
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import pytest
from tests.unit.studies.photo.test_photo_resume import few_photos  # noqa: F401

from jurybox.studies.photo import evaluation as photo_evaluation
from jurybox.studies.photo.environment import PhotoConfig
from jurybox.studies.photo.environment.edits import Degradation, degrade
from jurybox.studies.photo.environment.evaluate import RandomEdits, Straightened
from jurybox.studies.photo.evaluation import angles_of, evaluate_policy, straightening_of
from jurybox.training.trainings.progress import Watcher

JUROR = "tests.unit.studies.photo.cheap_juror:middle_grey"


class Lines(Watcher):
    """Keeps the lines to print."""

    def __init__(self):
        self.lines = []

    def log(self, text):
        self.lines.append(text)


def test_an_evaluation_on_a_folder_names_the_ignored_files(tmp_path):
    random = np.random.default_rng(0)
    for number in range(3):
        assert cv2.imwrite(str(tmp_path / f"{number}.png"), random.integers(0, 255, (200, 200, 3), np.uint8))
    (tmp_path / "broken.png").write_bytes(b"no picture")
    config = PhotoConfig(scorer="local", juror=JUROR, photos=str(tmp_path), on_broken="skip", steps=1)
    watcher = Lines()
    evaluate_policy(config, RandomEdits(0), 1, watcher)
    (line,) = watcher.lines
    assert line.startswith("3 photos of the folder are used, and not: 1 that are broken") and "broken.png" in line


def test_ctrl_c_while_its_threads_start_ends_an_evaluation_at_once(monkeypatch):
    class Interrupted(ThreadPoolExecutor):
        def submit(self, *given):
            super().submit(*given)
            raise KeyboardInterrupt

    acts = []

    def act(seen):
        acts.append(seen)
        return RandomEdits(0)(seen)

    monkeypatch.setattr(photo_evaluation, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate_policy(PhotoConfig(scorer="local", juror=JUROR, steps=1), act, 8, Watcher())
    assert len(acts) < 8, "not all pictures were edited first"


@pytest.fixture(scope="module")
def evaluated():
    config = PhotoConfig(scorer="local", juror=JUROR, steps=1)
    return evaluate_policy(config, RandomEdits(0), 4, Watcher())


def test_the_original_of_a_case_is_the_crop_that_was_damaged(evaluated):
    for case in evaluated.cases:
        damaged = degrade(case.pictures["original"], Degradation(**case.degradation))
        np.testing.assert_array_equal(damaged, case.pictures["no edits"])


def test_every_held_out_photo_is_tilted_to_both_sides_by_the_same_angles(evaluated):
    photos = set(evaluated.photos)
    assert {each.photo for each in evaluated.tilted} == photos
    for photo in photos:
        found = [each.tilt for each in evaluated.tilted if each.photo == photo]
        assert sorted(found) == [-7.5, -4.5, 4.5, 7.5], "two angles for four seeds, evenly from 3 to 9 degrees"
    told = straightening_of(evaluated.tilted)
    assert told.pictures == 4 * len(photos) and told.photos == len(photos) and told.before == 6.0


def test_the_tilts_are_written_beside_the_rotations(evaluated, tmp_path):
    evaluated.save(tmp_path / "evaluation.csv")
    with (tmp_path / "evaluation.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file) if "tilted " in line["kind"]]
    assert len(lines) == 2 * len(evaluated.tilted)
    gentle = [line for line in lines if line["kind"] == "tilted clockwise, learned" and line["mark"] == "-4.50000"]
    assert {line["photo"] for line in gentle} == set(evaluated.photos)
    assert {line["criterion"] for line in lines} == {"tilt", "straighten"}


def test_the_angles_are_spread_evenly_over_those_of_the_damage():
    assert list(angles_of(range(16)).values()) == [3.375 + 0.75 * number for number in range(8)]
    assert angles_of([1_000_000]) == {1_000_000: 6.0}


def turned(turn, photos=10, angles=(4.0, 6.0, 8.0)):
    """Photos that are tilted to both sides, and turned by `turn(photo, tilt)`."""
    return [
        Straightened(str(photo), seed, tilt, turn(photo, tilt))
        for photo in range(photos)
        for seed, angle in enumerate(angles)
        for tilt in (angle, -angle)
    ]


def test_a_photos_own_tilt_does_not_count_as_straightening():
    slants = np.random.default_rng(0).normal(0.0, 5.0, 10)
    blind = straightening_of(turned(lambda photo, tilt: slants[photo]))
    assert blind.follows.mean == pytest.approx(0.0, abs=1e-12) and blind.undone.mean == pytest.approx(0.0, abs=1e-12)
    mixed = straightening_of(turned(lambda photo, tilt: slants[photo] - 0.5 * tilt))
    assert mixed.undone.mean == pytest.approx(0.5) and mixed.undone.low == pytest.approx(mixed.undone.high)
    assert 0.3 < mixed.follows.mean < 0.7, "own slants stay in the correlation as error"
    assert mixed.follows.low < mixed.follows.mean < mixed.follows.high


def test_a_photo_that_is_tilted_to_one_side_only_is_refused():
    both = turned(lambda photo, tilt: -tilt)
    for wrong in (both[:-1], [each for each in both if each.tilt > 0], [*both[:-1], both[-2]]):
        with pytest.raises(ValueError, match="to both sides by one angle"):
            straightening_of(wrong)
    assert straightening_of([]) is None


def test_straightening_is_reported_as_correlation_share_and_remaining_tilt():
    told = straightening_of(turned(lambda photo, tilt: -tilt / 4))
    assert told.follows.mean == pytest.approx(1.0) and told.undone.mean == pytest.approx(0.25)
    assert (told.pictures, told.photos, told.before, told.left) == (60, 10, 6.0, 4.5)
    against = straightening_of(turned(lambda photo, tilt: tilt, photos=2))
    assert against.follows.mean == pytest.approx(-1.0) and against.undone.mean == pytest.approx(-1.0)
