"""Hockey trainings small enough for tests."""

from __future__ import annotations

from jurybox.studies.hockey.settings import HockeyTraining

SMALL = {
    "learning_starts": 300,
    "train_freq": 10,
    "batch_size": 16,
    "buffer_size": 20_000,
    "hidden": (16, 16),
    "league": {"pool": 2, "least_games": 2, "anchor_share": 0.5},
    "publish_interval": 5,
    "snapshot_every": 4,
    "evaluate_every": 0,
    "evaluation_games": 2,
    "matrix_games": 0,
    "film_games": 0,
    "checkpoint_every": 0,
    "log_every": 400,
}


def settings(**changes) -> HockeyTraining:
    return HockeyTraining(**{**SMALL, "envs": 4 * changes.get("workers", 1), **changes})


class Nothing:
    """A sink."""

    def scalars(self, step, values): ...
