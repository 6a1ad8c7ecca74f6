"""The statistical answer to whether a policy beats baselines: "yes", "no" or "undecided"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Answer = Literal["yes", "no", "undecided"]
Values = npt.NDArray[np.float64]
ENOUGH_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, or another estimate, and its bootstrap confidence interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, estimate: float, drawn: Values) -> Interval:
        """An estimate with the 95 % percentile interval of its resamples (n,)."""
        beyond = (1 - 0.95) / 2
        low, high = np.quantile(drawn, (beyond, 1 - beyond))
        return cls(float(estimate), float(low), float(high))

    def as_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of the learned policy with a baseline on the same cases.

    Attributes:
        baseline: name of the baseline as it is used after "beats", such as "random edits".
        difference: learned score minus baseline score.
        better_share: share of the cases in which the learned policy's score is higher.
        cases: number of cases.
    """

    baseline: str
    difference: Interval
    better_share: float
    cases: int

    @property
    def answer(self) -> Answer:
        """Whether the learned policy beats the baseline: "yes" if the whole interval is above 0, "no" if below 0."""
        if self.difference.low > 0.0:
            return "yes"
        return "no" if self.difference.high < 0.0 else "undecided"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for all baselines together, and the sentences that explain it."""

    answer: Answer
    headline: str
    sentences: tuple[str, ...]


def interval(
    values: npt.ArrayLike,
    groups: Sequence[Any] | None = None,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Compute the mean of values with a 95 % percentile bootstrap interval.

    Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 13 and 14.

    Args:
        values: (n,), at least two.
        groups: a label for each value. With `ENOUGH_GROUPS` or more groups, whole groups are resampled, and the
            interval generalizes to other groups. With fewer, values are resampled within their group, so that the
            groups keep their sizes; the interval then generalizes only to more cases of these groups. If no group has
            two values, they are resampled as one group.
        resamples: number of resamples.
        seed: random seed, so that the same values give the same interval.

    Raises:
        ValueError: there are fewer than two values, a value is not finite, or `groups` has another length.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) < 2 or not np.isfinite(array).all():
        raise ValueError(f"expected at least two finite values in a row, got {array.shape}: {array!r}")
    labels = [0] * len(array) if groups is None else list(groups)
    if len(labels) != len(array):
        raise ValueError(f"expected one group for each of {len(array)} values, got {len(labels)}")
    samples = [array[[other == label for other in labels]] for label in dict.fromkeys(labels)]
    rng = np.random.default_rng(seed)
    if len(samples) >= ENOUGH_GROUPS:
        sums, counts = (np.array([reduce(sample) for sample in samples]) for reduce in (np.sum, len))
        chosen = rng.integers(len(samples), size=(resamples, len(samples)))
        means = sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1)
    else:
        if len(samples) == len(array):  # resampling a single value would not change it, and so claim an exact mean
            samples = [array]
        drawn = [sample[rng.integers(len(sample), size=(resamples, len(sample)))] for sample in samples]
        means = np.sum([sample.sum(axis=1) for sample in drawn], axis=0) / len(array)
    return Interval.of(array.mean(), means)


def compare(
    baseline: str, learned: npt.ArrayLike, other: npt.ArrayLike, groups: Sequence[Any] | None = None
) -> Comparison:
    """Compare two policies case by case.

    Args:
        baseline: name of the other policy.
        learned, other: (n,) scores; element i of both belongs to the same case.
        groups: as in `interval`.

    Raises:
        ValueError: the scores have different lengths; or as in `interval`.
    """
    learned_scores, other_scores = np.asarray(learned, dtype=np.float64), np.asarray(other, dtype=np.float64)
    if learned_scores.shape != other_scores.shape:
        raise ValueError(f"expected scores of the same cases, got {learned_scores.shape} and {other_scores.shape}")
    difference: Values = learned_scores - other_scores
    return Comparison(baseline, interval(difference, groups), float((difference > 0).mean()), len(difference))


def judge(comparisons: Sequence[Comparison]) -> Verdict:
    """Return one answer for several baselines: "yes" if all are beaten, "no" if any beats the learned policy.

    Raises:
        ValueError: `comparisons` is empty.
    """
    if not comparisons:
        raise ValueError("expected at least one comparison")
    answers = [comparison.answer for comparison in comparisons]
    names = " and ".join(comparison.baseline for comparison in comparisons)
    answer: Answer
    if all(each == "yes" for each in answers):
        answer, headline = "yes", f"Yes: the learned policy beats {names}."
    elif "no" in answers:
        stronger = " and ".join(c.baseline for c in comparisons if c.answer == "no")
        answer, headline = "no", f"No: the learned policy does worse than {stronger}."
    else:
        open_ = " and ".join(c.baseline for c in comparisons if c.answer == "undecided")
        answer, headline = "undecided", f"Not shown: the cases it was scored on do not settle whether it beats {open_}."
    return Verdict(answer, headline, tuple(_sentence(comparison) for comparison in comparisons))


@dataclass(frozen=True, slots=True)
class Check:
    """A check of an audit, of something that was not part of the training's reward.

    Attributes:
        answer: whether the check passed.
        sentence: the result as a sentence with its figures.
        fault: description of a failure, as it is used after "its score rose, while".
    """

    answer: Answer
    sentence: str
    fault: str


def audited(verdict: Verdict, checks: Sequence[Check]) -> Verdict:
    """Combine the verdict on a score with an audit of what the score was meant to measure.

    The answer is "yes" only if both are. If the score rose and the audit's answer is "no", the juror was gamed.
    """
    sentences = (*verdict.sentences, *(check.sentence for check in checks))
    answers = {check.answer for check in checks}
    if verdict.answer != "yes" or not checks:
        return Verdict(verdict.answer, verdict.headline, sentences)
    if answers == {"yes"}:
        return Verdict("yes", f"{verdict.headline[:-1]}, and the audit agrees.", sentences)
    if "no" in answers:
        faults = " and ".join(dict.fromkeys(check.fault for check in checks if check.answer == "no"))
        return Verdict("no", f"The juror was gamed: its score rose, while {faults}.", sentences)
    return Verdict("undecided", "Not shown: the juror's score rose, and the audit does not confirm it.", sentences)


def _sentence(comparison: Comparison) -> str:
    difference = comparison.difference
    what = {
        "yes": "It scores higher than",
        "no": "It scores lower than",
        "undecided": "It cannot be distinguished from",
    }[comparison.answer]
    return (
        f"{what} {comparison.baseline}: {difference.mean:+.3f} on average, 95 % interval {difference.low:+.3f} to "
        f"{difference.high:+.3f}, higher in {comparison.better_share:.0%} of {comparison.cases} cases."
    )
