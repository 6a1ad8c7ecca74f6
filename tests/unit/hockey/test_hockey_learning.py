"""A short training learns something: minutes, so not in the default suite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jurybox.training.environments.hockey import HockeyGame
from jurybox.training.recipes.hockey_evaluation import evaluate
from jurybox.training.recipes.hockey_serial import COLUMNS, SerialHockey
from jurybox.training.recipes.hockey_settings import HockeyTraining
from jurybox.training.runlog import RunLog


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_short_training_clearly_beats_random_play(tmp_path: Path) -> None:
    settings = HockeyTraining(
        steps=120_000,
        evaluate_every=10**9,
        checkpoint_every=10**9,
    )
    rng = np.random.default_rng(0)
    chance = evaluate([HockeyGame()], lambda rows: rng.uniform(-1, 1, (len(rows), 4)).astype(np.float32), "weak", 200)
    with RunLog(tmp_path, COLUMNS) as log, SerialHockey(settings, log) as training:
        training.train()
        learned = evaluate(training.games, training.learner.numpy_actor(), "weak", 200)
    assert chance.points < -0.1
    assert learned.points > chance.points + 0.2
    assert learned.losses < chance.losses - 0.1
    assert learned.score > chance.score + 3
