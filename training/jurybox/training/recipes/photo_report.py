"""The report of a photo training: what was learned, shown and counted on photos that training never saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from jurybox.training.recipes.photo_evaluation import KINDS, Case, PhotoEvaluation
from jurybox.training.report import charts, page
from jurybox.training.report.charts import Bar, Curve
from jurybox.training.report.verdict import Comparison, Verdict, compare, interval, judge

_BASELINES = ("no edits", "random edits")
_COLUMNS = {"no edits": "Damaged", "random edits": "Random edits", "learned": "Learned", "original": "Original"}
_STYLES = {"no edits": "plain", "random edits": "random", "learned": "learned", "original": "reference"}
_SHOWN = 6
_SIDE = 208
_POINTS = 40  # of the learning curve, at most: more would be a thicket


@dataclass(frozen=True, slots=True)
class PhotoRun:
    """Everything that a report is made of.

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
    verdict = judge(comparisons(run.evaluation))
    sections = [
        _answer(run, verdict),
        _pictures(run.evaluation),
        _scores(run.evaluation),
        _learning(run.metrics, run.settings),
        _criteria(run.evaluation),
        _server(run.status, run.model),
        _run(run),
    ]
    return page.page("Jurybox photo report", [section for section in sections if section])


def _answer(run: PhotoRun, verdict: Verdict) -> str:
    evaluation = run.evaluation
    photos, cases = sorted(set(evaluation.photos)), len(evaluation.cases)
    steps = int(run.metrics[-1]["env_steps"]) if run.metrics else 0
    what = (
        f"{len(photos)} held-out photos ({', '.join(photos)}), each damaged at random in {cases // len(photos)} ways. "
        f"Each policy got the same {cases} damaged pictures; the score is the juror's, from 0 to 1. "
        f"The policy had practised for {steps:,} edit steps on other photos."
    )
    return (
        "<h1>Jurybox: a policy learned to edit photos from the scores of a juror</h1>"
        f'<section class="verdict {verdict.answer}"><p class="headline">{escape(verdict.headline)}</p>'
        + "".join(page.paragraph(sentence) for sentence in verdict.sentences)
        + page.paragraph(what, "note")
        + "</section>"
    )


def _pictures(evaluation: PhotoEvaluation) -> str:
    cells = [f'<div class="head {_STYLES[kind]}">{_COLUMNS[kind]}</div>' for kind in KINDS]
    cells += [_picture(case, kind) for case in evaluation.cases[:_SHOWN] for kind in KINDS]
    return page.section(
        "Before and after",
        f'<div class="photos">{"".join(cells)}</div>',
        note=f"The first {min(_SHOWN, len(evaluation.cases))} of {len(evaluation.cases)} cases, by seed and not by "
        "result. Below each picture its score. The originals are shown for reference; no policy sees them.",
    )


def _picture(case: Case, kind: str) -> str:
    score = case.marks[kind]["score"]
    change = score - case.marks["no edits"]["score"]
    tone = "gain" if change > 0 else "loss" if change < 0 else ""
    gain = f' <b class="{tone}">{change:+.2f}</b>' if kind in ("learned", "random edits") else ""
    image = page.picture(case.pictures[kind], _SIDE, f"{case.photo}, {_COLUMNS[kind].lower()}")
    return f'<figure class="{_STYLES[kind]}">{image}<figcaption>{score:.2f}{gain}</figcaption></figure>'


def _scores(evaluation: PhotoEvaluation) -> str:
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
    return page.section(
        "Scores on held-out photos",
        charts.intervals(bars, "Mean score of each policy with its 95 % interval, and every case", "juror's score"),
        page.details("By photo", _by_photo(evaluation)),
        note="Large dots are means with 95 % bootstrap intervals, small dots single pictures. Intervals speak about "
        "further damage to these photos; how it does on other photos, more held-out photos would have to show.",
    )


def _by_photo(evaluation: PhotoEvaluation) -> str:
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
    return page.table(header, rows)


def _learning(metrics: Sequence[Mapping[str, float]], settings: Mapping[str, Any]) -> str:
    rows = [row for row in metrics if "rollout_return_mean" in row]
    if len(rows) < 2:
        return ""
    steps = np.array([row["env_steps"] for row in rows])
    # A return is the gain in score, times the scale that rewards are given in.
    span = settings["environment.highest_score"] - settings["environment.lowest_score"]
    scale = span / settings["environment.reward_scale"]
    gains = scale * np.array([row["rollout_return_mean"] for row in rows])
    errors = scale * np.array([row["rollout_return_error"] for row in rows])
    groups = [group for group in np.array_split(np.arange(len(rows)), min(_POINTS, len(rows))) if len(group)]
    line = Curve(
        "learned",
        [float(steps[group[-1]]) for group in groups],
        [float(gains[group].mean()) for group in groups],
        "learned",
        [float(1.96 * np.sqrt((errors[group] ** 2).sum()) / len(group)) for group in groups],
    )
    return page.section(
        "Learning curve",
        charts.curves(
            [line],
            "What the policy's edits add to the score of training photos, as training goes on",
            "edit steps",
            "what editing adds to a photo's score",
            zero="no edits",
        ),
        note="Training photos, mean of each stretch of training with its 95 % interval, with the noise by which the "
        "policy explores (the held-out pictures above are edited without it).",
    )


def _criteria(evaluation: PhotoEvaluation) -> str:
    if not evaluation.criteria:
        return ""
    shown = {"no edits": "damaged", "learned": "learned", "random edits": "random edits", "original": "original"}
    rows = {
        name: [(label, float(evaluation.scores(kind, name).mean()), _STYLES[kind]) for kind, label in shown.items()]
        for name in evaluation.criteria
    }
    return page.section(
        "What the juror says, by criterion",
        charts.legend(
            [(label, f"{_STYLES[kind]}{' ring' if at > 1 else ''}") for at, (kind, label) in enumerate(shown.items())]
        ),
        charts.dots_by_row(rows, "Mean mark of each criterion", "mean mark"),
        note="The score is their weighted mean. A criterion above the original's mark is a sign of what the juror can "
        "be talked into; one below, of what the tools or the training cannot mend.",
    )


def _server(status: Mapping[str, Any] | None, model: str) -> str:
    if status is None:
        return ""
    found = next((each for each in status.get("models", []) if each.get("name") == model), None)
    if found is None or not found.get("batches"):
        return ""
    bins = _bins(found.get("histograms", {}).get("batch_rows", []))
    chart = charts.histogram(bins, "Share of batches by size", "rows in a batch", "share of batches") if bins else ""
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
    counted = (
        f"{found['rows']:,} rows in {found['batches']:,} batches, {found['rows'] / found['batches']:.1f} a batch; "
        f"errors: {', '.join(f'{found.get(kind, 0)} {kind}' for kind in ('failed', 'expired', 'refused'))}."
    )
    timed = page.table(["time, in ms", "p50", "p90", "p99"], rows) if rows else ""
    return page.section(
        "The server",
        page.paragraph(counted),
        chart,
        timed,
        note="A row is a picture. Workers ask one at a time; the engine takes whatever waits the moment it is free. "
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


def _run(run: PhotoRun) -> str:
    return page.section(
        "The run",
        page.facts(run.facts),
        f"<p class='note'>Run it again: <code>{escape(run.command)}</code></p>",
        page.details("All settings", page.facts(run.settings)),
        note="Photos, damage, random edits, the policy's first weights and its noise all come from the seed, and a "
        "score does not depend on what else was in its batch: the same command on the same machine gives the same "
        "scores. Another processor rounds differently, and training amplifies that. Times and batch sizes are never "
        "the same twice.",
    )
