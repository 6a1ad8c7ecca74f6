"""The report of a photo training: results and pictures on held-out photos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jurybox.training.recipes.photo_evaluation import KINDS, Case, PhotoEvaluation
from jurybox.training.report import charts, page
from jurybox.training.report.charts import Bar
from jurybox.training.report.page import Answer, Details, Gallery, Legend, Part, Picture, Section, Shot, Table
from jurybox.training.report.verdict import Comparison, Verdict, compare, interval, judge

_BASELINES = ("no edits", "random edits")
_COLUMNS = {"no edits": "Damaged", "random edits": "Random edits", "learned": "Learned", "original": "Original"}
_STYLES = {"no edits": "plain", "random edits": "random", "learned": "learned", "original": "reference"}
_SHOWN = 6
_SIDE = 208
_POINTS = 40  # of the learning curve, at most: more would be a thicket


@dataclass(frozen=True, slots=True)
class PhotoRun:
    """The data of a report.

    Attributes:
        evaluation: on held-out photos.
        metrics: rows of metrics.csv.
        status: the server's status document after the training; None where there was no server.
        model: the juror's name in it.
        settings: of the training, flat.
        facts: what else is worth knowing of the run, in words.
        command: that runs it again.
    """

    evaluation: PhotoEvaluation
    metrics: Sequence[Mapping[str, float]]
    status: Mapping[str, Any] | None
    model: str
    settings: Mapping[str, Any]
    facts: Mapping[str, str]
    command: str


def comparisons(evaluation: PhotoEvaluation) -> list[Comparison]:
    """The learned policy against every baseline, paired by case, with resamples drawn within each photo."""
    learned = evaluation.scores("learned")
    return [compare(name, learned, evaluation.scores(name), evaluation.photos) for name in _BASELINES]


def render(run: PhotoRun) -> str:
    """The report as one HTML document."""
    sections: list[Answer | Section | None] = [
        _answer(run, judge(comparisons(run.evaluation))),
        _pictures(run.evaluation),
        _scores(run.evaluation),
        _learning(run.metrics, run.settings),
        _criteria(run.evaluation),
        _server(run.status, run.model),
        page.the_run(
            run.facts,
            run.settings,
            run.command,
            packages=("torch", "stable_baselines3", "gymnasium", "numpy", "opencv-python-headless"),
            note="Photos, damage, random edits, the policy's first weights and its noise all come from the seed, and "
            "a score does not depend on what else was in its batch: the same command on the same machine gives the "
            "same scores. Another processor rounds differently, and training amplifies that. Times and batch sizes "
            "are never the same twice.",
        ),
    ]
    heading = "Jurybox: a policy learned to edit photos from the scores of a juror"
    return page.render("Jurybox photo report", heading, sections)


def _answer(run: PhotoRun, verdict: Verdict) -> Answer:
    evaluation = run.evaluation
    photos, cases = sorted(set(evaluation.photos)), len(evaluation.cases)
    steps = int(run.metrics[-1]["env_steps"]) if run.metrics else 0
    what = (
        f"{len(photos)} held-out photos ({', '.join(photos)}), each damaged at random in {cases // len(photos)} ways. "
        f"Each policy got the same {cases} damaged pictures; the score is the juror's, from 0 to 1. "
        f"The policy had practised for {steps:,} edit steps on other photos."
    )
    return Answer(verdict.answer, verdict.headline, verdict.sentences, what)


def _pictures(evaluation: PhotoEvaluation) -> Section:
    columns = [(_COLUMNS[kind], _STYLES[kind]) for kind in KINDS]
    shots = [_shot(case, kind) for case in evaluation.cases[:_SHOWN] for kind in KINDS]
    return Section(
        "Before and after",
        [Gallery(columns, shots)],
        f"The first {min(_SHOWN, len(evaluation.cases))} of {len(evaluation.cases)} cases, by seed and not by "
        "result. Below each picture its score. The originals are shown for reference; no policy sees them.",
    )


def _shot(case: Case, kind: str) -> Shot:
    score = case.marks[kind]["score"]
    change = score - case.marks["no edits"]["score"] if kind in ("learned", "random edits") else None
    image = Picture.jpeg(case.pictures[kind], _SIDE, f"{case.photo}, {_COLUMNS[kind].lower()}")
    return Shot(image, _STYLES[kind], f"{score:.2f}", change)


def _scores(evaluation: PhotoEvaluation) -> Section:
    groups = evaluation.photos
    bars = [
        Bar(
            kind if kind in _BASELINES else f"{kind} photo" if kind == "original" else kind,
            interval(evaluation.scores(kind), groups),
            _STYLES[kind],
            evaluation.scores(kind).tolist(),
        )
        for kind in KINDS
    ]
    return Section(
        "Scores on held-out photos",
        [
            charts.intervals(bars, "Mean score of each policy with its 95 % interval, and every case", "juror's score"),
            Details("By photo", [_by_photo(evaluation)]),
        ],
        "Large dots are means with 95 % bootstrap intervals, small dots single pictures. Intervals speak about "
        "further damage to these photos; how it does on other photos, more held-out photos would have to show.",
    )


def _by_photo(evaluation: PhotoEvaluation) -> Table:
    rows = []
    for photo in sorted(set(evaluation.photos)):
        chosen = np.array([other == photo for other in evaluation.photos])
        means = [f"{evaluation.scores(kind)[chosen].mean():.3f}" for kind in KINDS]
        changes = []
        for name in _BASELINES:
            difference = (evaluation.scores("learned") - evaluation.scores(name))[chosen]
            if len(difference) > 1:
                found = interval(difference)
                changes.append(f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})")
            else:
                changes.append(f"{difference.mean():+.3f}")
        rows.append([photo, *means, *changes])
    header = ["photo", *(_COLUMNS[kind].lower() for kind in KINDS), *(f"learned − {name}" for name in _BASELINES)]
    return Table(header, rows)


def _learning(metrics: Sequence[Mapping[str, float]], settings: Mapping[str, Any]) -> Section | None:
    rows = [row for row in metrics if "rollout_return_mean" in row]
    if len(rows) < 2:
        return None
    # A return is the gain in score, times the scale that rewards are given in.
    span = settings["environment.highest_score"] - settings["environment.lowest_score"]
    scale = span / settings["environment.reward_scale"]
    line = charts.stretches(
        "learned",
        [row["env_steps"] for row in rows],
        scale * np.array([row["rollout_return_mean"] for row in rows]),
        errors=scale * np.array([row["rollout_return_error"] for row in rows]),
        points=_POINTS,
    )
    title = "What the policy's edits add to the score of training photos, as training goes on"
    return Section(
        "Learning curve",
        [charts.curves([line], title, "edit steps", "what editing adds to a photo's score", zero="no edits")],
        "Training photos, mean of each stretch of training with its 95 % interval, with the noise by which the "
        "policy explores (the held-out pictures above are edited without it).",
    )


def _criteria(evaluation: PhotoEvaluation) -> Section | None:
    if not evaluation.criteria:
        return None
    shown = {"no edits": "damaged", "learned": "learned", "random edits": "random edits", "original": "original"}
    rows = {
        name: [(label, float(evaluation.scores(kind, name).mean()), _STYLES[kind]) for kind, label in shown.items()]
        for name in evaluation.criteria
    }
    legend = [(label, f"{_STYLES[kind]}{' ring' if at > 1 else ''}") for at, (kind, label) in enumerate(shown.items())]
    return Section(
        "What the juror says, by criterion",
        [Legend(legend), charts.dots_by_row(rows, "Mean mark of each criterion", "mean mark")],
        "The score is their weighted mean. A criterion above the original's mark is a sign of what the juror can "
        "be talked into; one below, of what the tools or the training cannot mend.",
    )


def _server(status: Mapping[str, Any] | None, model: str) -> Section | None:
    if status is None:
        return None
    found = next((each for each in status.get("models", []) if each.get("name") == model), None)
    if found is None or not found.get("batches"):
        return None
    names = {
        "queue": "queue: until its batch began",
        "forward": "forward: the batch in the juror",
        "request": "request: until the answer",
    }
    rows = [
        [label, *(_milliseconds(found["latency"][name].get(key)) for key in ("p50", "p90", "p99"))]
        for name, label in names.items()
        if name in found.get("latency", {})
    ]
    parts: list[Part] = [
        f"{found['rows']:,} rows in {found['batches']:,} batches, {found['rows'] / found['batches']:.1f} a batch; "
        f"errors: {', '.join(f'{found.get(kind, 0)} {kind}' for kind in ('failed', 'expired', 'refused'))}."
    ]
    if bins := _bins(found.get("histograms", {}).get("batch_rows", [])):
        parts.append(charts.histogram(bins, "Share of batches by size", "rows in a batch", "share of batches"))
    if rows:
        parts.append(Table(["time, in ms", "p50", "p90", "p99"], rows))
    return Section(
        "The server",
        parts,
        "A row is a picture. Workers ask one at a time; the engine takes whatever waits the moment it is free. "
        "Half of the times are below p50, 99 % below p99; they are read from histograms whose bins double in width.",
    )


def _bins(counts: Sequence[int]) -> list[tuple[str, int]]:
    """Bin i of the server's histogram counts batches of 2^(i-1) to 2^i - 1 rows."""
    filled = [i for i, count in enumerate(counts) if count]
    if not filled:
        return []
    return [(_bin_name(i), int(counts[i])) for i in range(1, max(filled) + 1)]


def _bin_name(i: int) -> str:
    low, high = 2 ** (i - 1), 2**i - 1
    return str(low) if low == high else f"{low}–{high}"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f}"
