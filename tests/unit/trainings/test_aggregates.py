"""Interquartile means and probabilities of improvement, beside rliable 1.2's."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.training.report.aggregates import improvement, interquartile_mean

# What rliable 1.2.0 gives for the same scores with get_interval_estimates, aggregate_iqm (20,000 resamples) and
# probability_of_improvement (5,000).
RLIABLE = {(10, 1): (0.6808229, -0.2211, 1.9615), (5, 4): (1.1464123, 0.7672, 1.5011)}
BETTER = {(10, 1): (0.67, 0.39, 0.91), (5, 4): (0.58, 0.40, 0.75)}


def drawn(shape):
    """The scores of those figures: each shape's come after those of the shapes before."""
    random = np.random.default_rng(3)
    for runs, tasks in RLIABLE:
        one, other = random.normal(1, 1, (runs, tasks)).T, random.normal(1.3, 1, (runs, tasks)).T
        if (runs, tasks) == shape:
            return one, other
    raise AssertionError(shape)


@pytest.mark.parametrize("shape", RLIABLE)
def test_values_and_intervals_are_rliables(shape):
    one, other = drawn(shape)
    found = interquartile_mean(one)
    from scipy.stats import trim_mean  # not to collect tests: it takes a second

    assert found.mean == pytest.approx(RLIABLE[shape][0]) == pytest.approx(trim_mean(one, 0.25, axis=None))
    assert (found.low, found.high) == pytest.approx(RLIABLE[shape][1:], abs=0.03)
    better = improvement(other, one)
    assert better.mean == pytest.approx(BETTER[shape][0]) and improvement(one, other).mean == pytest.approx(
        1 - better.mean
    )
    assert (better.low, better.high) == pytest.approx(BETTER[shape][1:], abs=0.02)


def test_runs_are_drawn_from_their_own_task_and_tasks_may_have_other_numbers_of_runs():
    found = interquartile_mean([[0.0, 0.0, 0.0], [1.0, 1.0]])
    assert found.low == found.mean == found.high, "a task's share of what is drawn never changes"
    assert improvement([[2.0, 2.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0, 1.0]]).mean == 0.75, "equal ones count half"


@pytest.mark.parametrize("wrong", [[], [[1.0]], [[1.0, np.nan]], [[[1.0, 2.0]]]])
def test_scores_that_say_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="finite scores of at least two runs"):
        interquartile_mean(wrong)
    with pytest.raises(ValueError, match="expected the same tasks in both, got 1 and 2"):
        improvement([[1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]])
