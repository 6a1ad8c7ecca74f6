"""An evaluation of a photo training says which of a folder's files it has not looked at."""

from __future__ import annotations

import cv2
import numpy as np

from jurybox.training.environments.photo import PhotoConfig
from jurybox.training.environments.photo.evaluate import RandomEdits
from jurybox.training.recipes.photo_evaluation import evaluate_policy
from jurybox.training.recipes.progress import Silence

JUROR = "tests.unit.recipes.cheap_juror:middle_grey"


class Lines(Silence):
    """Keeps what it is told to print."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def test_who_evaluates_on_a_folder_is_told_which_files_are_left_out(tmp_path):
    random = np.random.default_rng(0)
    for number in range(3):
        assert cv2.imwrite(str(tmp_path / f"{number}.png"), random.integers(0, 255, (200, 200, 3), np.uint8))
    (tmp_path / "broken.png").write_bytes(b"no picture")
    config = PhotoConfig(scorer="local", juror=JUROR, photos=str(tmp_path), on_broken="skip", steps=1)
    watcher = Lines()
    evaluate_policy(config, RandomEdits(0), 1, watcher)
    (line,) = watcher.lines
    assert line.startswith("3 photos of the folder are used, and not: 1 that are broken") and "broken.png" in line
