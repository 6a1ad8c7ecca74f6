"""Hockey trainings small enough for tests."""

from __future__ import annotations

from jurybox.training.recipes.hockey_settings import HockeyTraining

SMALL = {
    "envs_per_worker": 4,
    "warmup": 300,
    "ratio": 0.1,
    "batch": 16,
    "capacity": 20_000,
    "learner": {"hidden_actor": (16, 16), "hidden_critic": (16, 16)},
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
    return HockeyTraining(**{**SMALL, **changes})


class Nothing:
    """A sink."""

    def scalars(self, step, values): ...
