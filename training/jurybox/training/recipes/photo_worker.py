"""The env worker of the photo training: from plain values to an environment, without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jurybox.training.environments.photo import PhotoConfig, PhotoEdit, build
from jurybox.training.recipes.steady_scorer import SteadyScorer


def environment_maker(config: PhotoConfig, index: int, patience: float) -> Callable[[], PhotoEdit]:
    """A picklable function that makes the i-th environment, seeded ``config.seed + index``."""
    return partial(_make, config, index, patience)


def _make(config: PhotoConfig, index: int, patience: float) -> PhotoEdit:
    environment = build(config, index)
    environment.scorer = SteadyScorer(environment.scorer, patience)
    return environment
