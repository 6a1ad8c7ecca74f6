"""Aggregates of several runs with intervals: the interquartile mean, and the probability of improvement.

Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", NeurIPS 2021. Definitions and
intervals are those of its library, rliable (github.com/google-research/rliable). The intervals are percentiles of a
stratified bootstrap, which draws the runs of each task anew from those of that task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.training.report.verdict import Interval, Values

Scores = Sequence[npt.ArrayLike]  # of each task, those of its runs

_RESAMPLES = 10_000


def interquartile_mean(scores: Scores, *, resamples: int = _RESAMPLES) -> Interval:
    """Return the mean of the middle half of all scores, and its 95 % interval.

    It is less sensitive to single runs than the mean, and has narrower intervals than the median.

    Args:
        scores: for each task the scores of its runs, (runs,); of several tasks they need a common scale.
        resamples: number of resamples; the same scores give the same interval.

    Raises:
        ValueError: there is no task, one has fewer than two runs, or a score is not finite.

    Example:
        interquartile_mean([[1.0, 2.0, 3.0, 40.0]]).mean == 2.5
    """
    tasks = _checked(scores)
    random = np.random.default_rng(0)
    drawn = [task[random.integers(len(task), size=(resamples, len(task)))] for task in tasks]
    return Interval.of(_middle_mean(np.concatenate(tasks)), _middle_mean(np.concatenate(drawn, axis=1)))


def improvement(scores: Scores, others: Scores) -> Interval:
    """Return the probability that a run has a higher score than one of the others, as the mean over all tasks.

    Equal scores count half, as in Mann and Whitney's U.

    Args:
        scores, others: for each task the scores of its runs; both have the same tasks in the same order.

    Raises:
        ValueError: the numbers of tasks differ; or as in `interquartile_mean`.
    """
    ours, theirs = _checked(scores), _checked(others)
    if len(ours) != len(theirs):
        raise ValueError(f"expected the same tasks in both, got {len(ours)} and {len(theirs)}")
    random = np.random.default_rng(0)
    whole, drawn = 0.0, np.zeros(_RESAMPLES)
    for one, two in zip(ours, theirs, strict=True):
        better = (one[:, None] > two) + 0.5 * (one[:, None] == two)
        # How often each run is drawn is enough, and smaller than all pairs of what is drawn.
        counts = [random.multinomial(len(each), np.full(len(each), 1 / len(each)), _RESAMPLES) for each in (one, two)]
        drawn += np.einsum("ri,ij,rj->r", counts[0], better, counts[1]) / better.size
        whole += float(better.mean())
    return Interval.of(whole / len(ours), drawn / len(ours))


def _checked(scores: Scores) -> list[Values]:
    tasks = [np.asarray(each, np.float64) for each in scores]
    if not tasks or any(task.ndim != 1 or len(task) < 2 or not np.isfinite(task).all() for task in tasks):
        raise ValueError(f"expected at least one task, and finite scores of at least two runs for each, got {tasks}")
    return tasks


def _middle_mean(values: Values) -> Any:
    """The mean of the last axis without the lowest and the highest quarter."""
    cut = values.shape[-1] // 4
    return np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut].mean(axis=-1)
