"""The report of a photo training: results and pictures on held-out photos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.studies.photo.environment.audit import DAMAGES, MEASURES, damages_of
from jurybox.studies.photo.evaluation import KINDS, Case, PhotoEvaluation, straightening_of
from jurybox.training.report import charts, page
from jurybox.training.report.charts import Bar
from jurybox.training.report.page import (
    Conclusion,
    Details,
    Figures,
    Gallery,
    Legend,
    Pair,
    Pairs,
    Part,
    Picture,
    Section,
    Shot,
    Table,
)
from jurybox.training.report.verdict import (
    ENOUGH_GROUPS,
    Check,
    Comparison,
    Verdict,
    audited,
    compare,
    interval,
    judge,
)
from jurybox.training.report.verdict import Answer as Said

_BASELINES = ("no edits", "random edits")
_COLUMNS = {"no edits": "Damaged", "random edits": "Random edits", "learned": "Learned", "original": "Original"}
_STYLES = {"no edits": "plain", "random edits": "random", "learned": "learned", "original": "reference"}
_SHOWN = 6
_EVIDENCE = 3
_LEFT_ALONE = 3.0  # CIEDE2000 up to which an intact photo counts as left alone
_NAMES = {"psnr": "PSNR", "ssim": "SSIM", "ciede2000": "CIEDE2000", "perceptual": "the learned distance"}
_UNITS = {"psnr": " dB", "ssim": "", "ciede2000": ""}
_DIGITS = {"psnr": 1, "ciede2000": 1}  # others: 3
_LESS_IS_BETTER = ("ciede2000", "perceptual")
_SIDE = 208
_POINTS = 40  # maximum number of points of a learning curve, so that it stays readable


@dataclass(frozen=True, slots=True)
class PhotoRun:
    """The data of a report.

    Attributes:
        evaluation: evaluation on held-out photos.
        metrics: rows of metrics.csv.
        status: the server's status document after the training; None without a server.
        model: the juror's name in the status document.
        settings: the training's settings, flat.
        facts: further facts about the run, as text by name.
        command: command line that repeats the run.
        seconds: those of the training, for the server's rates.
    """

    evaluation: PhotoEvaluation
    metrics: Sequence[Mapping[str, float]]
    status: Mapping[str, Any] | None
    model: str
    settings: Mapping[str, Any]
    facts: Mapping[str, str]
    command: str
    seconds: float = 0.0


def comparisons(evaluation: PhotoEvaluation) -> list[Comparison]:
    """Compare the learned policy with every baseline, paired by case, with resamples drawn within each photo."""
    learned = evaluation.scores("learned")
    return [compare(name, learned, evaluation.scores(name), evaluation.photos) for name in _BASELINES]


def verdict_of(evaluation: PhotoEvaluation) -> Verdict:
    """Return the verdict of the jury and the audit together."""
    return audited(judge(comparisons(evaluation)), checks(evaluation))


def checks(evaluation: PhotoEvaluation) -> list[Check]:
    """Return the checks of the audit.

    They ask whether the edited pictures are nearer to the undamaged photos than the damaged ones, and whether intact
    photos are left alone.
    """
    found = []
    for name in MEASURES:
        change, sign = interval(_change(evaluation, name), evaluation.photos), _better(name)
        low, high = sorted((sign * change.low, sign * change.high))
        answer: Said = "yes" if low > 0 else "no" if high < 0 else "undecided"
        which = {"yes": "nearer to", "no": "further from", "undecided": "as far as before from"}[answer]
        found.append(
            Check(
                answer,
                f"By {_NAMES[name]} the edited pictures are {which} the undamaged photos: {_signed(name, change.mean)}"
                f"{_UNITS[name]} on average, 95 % interval {_signed(name, change.low)} to "
                f"{_signed(name, change.high)}, better in {_share_better(evaluation, name):.0%} of the cases.",
                f"pictures moved away from the undamaged photos by {_NAMES[name]}",
            )
        )
    if len(evaluation.intact) > 1:
        moved = interval([each.audit["ciede2000"] for each in evaluation.intact], [e.photo for e in evaluation.intact])
        intact: Said = "yes" if moved.high <= _LEFT_ALONE else "no" if moved.low > _LEFT_ALONE else "undecided"
        found.append(
            Check(
                intact,
                f"Intact photos are moved by {moved.mean:.1f} CIEDE2000 on average ({moved.low:.1f} to "
                f"{moved.high:.1f}; up to {_LEFT_ALONE:g} they count as left alone).",
                "intact photos were not left alone",
            )
        )
    return found


def _change(evaluation: PhotoEvaluation, name: str) -> npt.NDArray[np.float64]:
    return evaluation.audited("learned", name) - evaluation.audited("no edits", name)


def _share_better(evaluation: PhotoEvaluation, name: str) -> float:
    return float((_better(name) * _change(evaluation, name) > 0).mean())


def _gains(evaluation: PhotoEvaluation) -> npt.NDArray[np.float64]:
    return evaluation.scores("learned") - evaluation.scores("no edits")


def _signed(name: str, value: float) -> str:
    return f"{value:+.{_DIGITS.get(name, 3)}f}"


def render(run: PhotoRun) -> str:
    """Return the report as one HTML document."""
    verdict = verdict_of(run.evaluation)
    sections: list[Conclusion | Section | None] = [
        _answer(run, verdict),
        _grounds(run, verdict),
        _pictures(run.evaluation),
        _server(run),
        _scores(run.evaluation),
        _audit(run.evaluation),
        _by_damage(run.evaluation),
        _evidence(run.evaluation),
        _learning(run.metrics, run.settings),
        _overoptimisation(run.metrics),
        _criteria(run.evaluation),
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


def _answer(run: PhotoRun, verdict: Verdict) -> Conclusion:
    """What a reader sees first: the answer, six photographs before and after, and what the server did."""
    parts: list[Part] = [_in_short(run.evaluation), Pairs([_pair(case) for case in _chosen(run.evaluation)])]
    if (found := _served(run)) is not None:
        parts.append(Figures("What the server did meanwhile", _figures(run, found)))
    return Conclusion(verdict.answer, verdict.headline, parts)


def _in_short(evaluation: PhotoEvaluation) -> str:
    gain = _gains(evaluation)
    said = [f"Of {len(gain)} damaged pictures it raised the score in {(gain > 0).mean():.0%}"]
    if names := [name for name in MEASURES if name in evaluation.cases[0].audit.get("learned", {})]:
        each = ", ".join(f"{_NAMES[name]} {_share_better(evaluation, name):.0%}" for name in names)
        said.append(f"and came nearer to the undamaged photo ({each})")
    if evaluation.intact:
        moved = float(np.mean([intact.audit["ciede2000"] for intact in evaluation.intact]))
        said.append(f"; it moved intact photos by {moved:.1f} CIEDE2000")
    return " ".join(said).replace(" ;", ";") + "."


def _better(name: str) -> float:
    return -1.0 if name in _LESS_IS_BETTER else 1.0


def _grounds(run: PhotoRun, verdict: Verdict) -> Section:
    """What the answer rests on."""
    evaluation = run.evaluation
    photos, cases = sorted(set(evaluation.photos)), len(evaluation.cases)
    steps = int(run.metrics[-1]["env_steps"]) if run.metrics else 0
    what = (
        f"{len(photos)} held-out photos ({', '.join(photos)}), each damaged at random in {cases // len(photos)} ways. "
        f"Each policy got the same {cases} damaged pictures; the score is the juror's. "
        f"The policy had practised for {steps:,} edit steps on other photos."
    )
    if (start := run.settings.get("start")) == "shipped":
        what += (
            " It began as the shipped policy, which had been shown the cures of 126 other photographs (docs/photo.md); "
            "neither the juror nor the policy was trained on the held-out ones."
        )
    elif start:
        what += f" It began as the policy in {start}."
    return Section("What the answer rests on", verdict.sentences, what)


def _chosen(evaluation: PhotoEvaluation) -> list[Case]:
    """The cases that are shown: the first of each photo, by seed and not by result."""
    firsts = {case.photo: number for number, case in reversed(list(enumerate(evaluation.cases)))}.values()
    order = sorted(range(len(evaluation.cases)), key=lambda number: number not in firsts)
    return [evaluation.cases[number] for number in order[:_SHOWN]]


def _pair(case: Case) -> Pair:
    before, after = (case.marks[kind]["score"] for kind in ("no edits", "learned"))
    captions = f"before {before:.2f}", f"after {after:.2f}"
    return Pair(_picture(case, "no edits"), _picture(case, "learned"), captions, after - before)


def _picture(case: Case, kind: str) -> Picture:
    return Picture.jpeg(case.pictures[kind], _SIDE, f"{case.photo}, {_COLUMNS[kind].lower()}")


def _pictures(evaluation: PhotoEvaluation) -> Section:
    columns = [(_COLUMNS[kind], _STYLES[kind]) for kind in KINDS]
    chosen = _chosen(evaluation)
    shots = [_shot(case, kind) for case in chosen for kind in KINDS]
    return Section(
        "Before and after, beside random edits and the original",
        [Gallery(columns, shots)],
        f"{len(chosen)} of {len(evaluation.cases)} cases: the first of each photo, by seed and not by result. Below "
        "each picture its score. The originals are shown for reference; no policy sees them.",
    )


def _shot(case: Case, kind: str) -> Shot:
    score = case.marks[kind]["score"]
    change = score - case.marks["no edits"]["score"] if kind in ("learned", "random edits") else None
    return Shot(_picture(case, kind), _STYLES[kind], f"{score:.2f}", change)


def _audit(evaluation: PhotoEvaluation) -> Section | None:
    names = list(evaluation.cases[0].audit.get("learned", {}))
    if not names:
        return None
    rows = []
    shown = [kind for kind in KINDS if evaluation.cases[0].audit.get(kind)]  # the original has no distance from itself
    for name in names:
        distance = "no edits" in evaluation.cases[0].audit and name in (*MEASURES, "perceptual")
        means = [
            _signed(name, evaluation.audited(kind, name).mean()).lstrip("+")
            if name in evaluation.cases[0].audit[kind]
            else ""
            for kind in shown
        ]
        change = interval(_change(evaluation, name), evaluation.photos)
        label = _NAMES.get(name, name) if distance else f"audit juror {name}"
        signed = [_signed(name, value) for value in (change.mean, change.low, change.high)]
        rows.append(
            [label, *means, f"{signed[0]} ({signed[1]} to {signed[2]})", f"{_share_better(evaluation, name):.0%}"]
        )
    header = ["", *(_COLUMNS[kind].lower() for kind in shown), "change (95 % interval)", "better"]
    parts: list[Part] = [Table(header, rows)]
    if evaluation.intact:
        parts.append(_on_intact(evaluation))
    parts += [part for part in _straightening(evaluation) if part]
    return Section(
        "The audit: what no juror scored",
        parts,
        "Each picture against the photo as it was before its damage, turned and enlarged as the picture is. PSNR and "
        "SSIM: more is better; CIEDE2000, the mean difference of colours: less, and 1 is just noticeable. Nothing here "
        "was rewarded.",
    )


def _on_intact(evaluation: PhotoEvaluation) -> str:
    intact = evaluation.intact
    gains = np.array([each.after - each.before for each in intact])
    moved = np.array([each.audit["ciede2000"] for each in intact])
    kept = np.array([each.audit["psnr"] for each in intact])
    return (
        f"Intact photos ({len(intact)} crops without damage): the score rises in {float((gains > 0).mean()):.0%} of "
        f"them, by {gains.mean():+.3f} on average, while they move {moved.mean():.1f} CIEDE2000 ({moved.max():.1f} at "
        f"most) and keep {kept.mean():.1f} dB."
    )


def _straightening(evaluation: PhotoEvaluation) -> list[str]:
    found = straightening_of(evaluation.tilted)
    if found is None:
        return []
    of = "photos" if found.photos >= ENOUGH_GROUPS else "pairs of pictures of these photos"
    follows, undone = found.follows, found.undone
    return [
        f"Straightening, measured on {found.pictures} pictures: {found.photos} photos, each damaged in "
        f"{found.pictures // (2 * found.photos)} ways and tilted to both sides by the same angle, "
        f"{found.before:.1f}° on average. It follows the tilt with a correlation of {follows.mean:+.2f} "
        f"({follows.low:+.2f} to {follows.high:+.2f} over {of}); of every degree of tilt {undone.mean:.2f}° are turned "
        f"back ({undone.low:+.2f} to {undone.high:+.2f}), and the pictures are left tilted by {found.left:.1f}°.",
        _by_chance(evaluation),
    ]


def _by_chance(evaluation: PhotoEvaluation) -> str:
    """Describe the cases that happen to be tilted.

    These are too few, and by chance unevenly distributed to both sides, to show how well the straightening follows.
    """
    pairs = np.array(
        [(case.degradation.get("tilt", 0.0), case.edits.get("straighten", 0.0)) for case in evaluation.cases]
    )
    tilted = pairs[:, 0] != 0
    if tilted.sum() < 2:
        return ""
    tilts, turned = pairs[tilted].T
    follows = float(np.corrcoef(-tilts, turned)[0, 1]) if min(turned.std(), tilts.std()) > 0 else 0.0
    straight = float(np.abs(pairs[~tilted, 1]).mean()) if not tilted.all() else 0.0
    return (
        f"Of the cases above {int(tilted.sum())} happen to be tilted, by {np.abs(tilts).mean():.1f}° on average and "
        f"not evenly to both sides; they are left tilted by {np.abs(tilts + turned).mean():.1f}°, with a "
        f"correlation of {follows:+.2f}. Straight ones were turned by {straight:.1f}°."
    )


def _by_damage(evaluation: PhotoEvaluation) -> Section | None:
    rows = []
    found = [damages_of(case.degradation) for case in evaluation.cases]
    chosen_by = {kind: np.array([kind in kinds for kinds in found]) for kind in DAMAGES}
    # Every juror of the panel reacts to these two; without them, repairs can gain little.
    chosen_by["neither exposure nor haze"] = ~(chosen_by["exposure"] | chosen_by["haze"])
    for kind, chosen in chosen_by.items():
        if not chosen.any() or not any(found):
            continue
        score = _gains(evaluation)[chosen]
        changes = [_change(evaluation, name)[chosen] for name in MEASURES]
        rows.append(
            [kind, str(int(chosen.sum())), f"{score.mean():+.3f}", *map(_signed, MEASURES, (c.mean() for c in changes))]
        )
    if not rows:
        return None
    header = ["damage", "cases", "score", *(_NAMES[name] for name in MEASURES)]
    return Section(
        "The audit by kind of damage",
        [Table(header, rows)],
        "What the learned edits change on average in the pictures that have this damage, alone or with others.",
    )


def _evidence(evaluation: PhotoEvaluation) -> Section | None:
    """Show the cases in which the score rose most clearly against the audit.

    First the pictures that moved furthest away from the undamaged photo, then the intact photos that changed most.
    """
    whole = {(each.photo, each.seed): each for each in evaluation.intact}
    cases = [case for case in evaluation.cases if (case.photo, case.seed) in whole and case.audit]
    gamed = sorted((case for case in cases if _gain(case) > 0 and _nearer(case) < 0), key=_nearer)[:_EVIDENCE]

    def moved(case: Case) -> float:
        intact = whole[case.photo, case.seed]
        return intact.audit["ciede2000"] if intact.after > intact.before else 0.0

    changed = sorted((case for case in cases if moved(case) > _LEFT_ALONE and case not in gamed), key=moved)
    gamed += changed[::-1][:_EVIDENCE]
    if not gamed:
        return None
    shots = []
    for case in gamed:
        intact = whole[case.photo, case.seed]
        shots += [
            _shown(case.photo, case.pictures["original"], "reference", f"{case.marks['original']['score']:.2f}"),
            _shown(case.photo, case.pictures["no edits"], "plain", _score_and_distance(case, "no edits")),
            _shown(case.photo, case.pictures["learned"], "learned", _score_and_distance(case, "learned"), _gain(case)),
            _shown(
                case.photo,
                intact.edited,
                "learned",
                f"{intact.after:.2f}, {intact.audit['psnr']:.1f} dB, ΔE {intact.audit['ciede2000']:.1f}",
                intact.after - intact.before,
            ),
        ]
    columns = [("Original", "reference"), ("Damaged", "plain"), ("Learned", "learned"), ("Original, edited", "learned")]
    return Section(
        "Where score and audit part",
        [Gallery(columns, shots)],
        "First the pictures that moved furthest from the undamaged photo while their score rose, then those whose "
        "undamaged photo was changed most while its score rose: on the right, what the policy does to it. Below each "
        "its score, its PSNR, what the edits did to the score, and on the right CIEDE2000 (ΔE).",
    )


def _gain(case: Case) -> float:
    return case.marks["learned"]["score"] - case.marks["no edits"]["score"]


def _nearer(case: Case) -> float:
    return case.audit["learned"]["psnr"] - case.audit["no edits"]["psnr"]


def _score_and_distance(case: Case, kind: str) -> str:
    return f"{case.marks[kind]['score']:.2f}, {case.audit[kind]['psnr']:.1f} dB"


def _shown(name: str, pixels: npt.NDArray[np.uint8], style: str, caption: str, change: float | None = None) -> Shot:
    return Shot(Picture.jpeg(pixels, _SIDE, f"{name}: {caption}"), style, caption, change)


def _overoptimisation(metrics: Sequence[Mapping[str, float]]) -> Section | None:
    """Plot the score and the audited measures over the training."""
    rows = [row for row in metrics if "score_after" in row and "audit_psnr" in row]
    if len(rows) < 2:
        return None
    steps = [row["env_steps"] for row in rows]
    charted: list[Part] = []
    jurors = [
        name for name in rows[0] if f"{name}_before" in rows[0] and name.startswith("audit_") and name != "audit_psnr"
    ]
    for names, title, up in (
        (["score", *jurors], "What edits add to the scores of training photos", "change of the score"),
        (["audit_psnr"], "What edits add to the PSNR of training photos", "decibels"),
    ):
        curves = []
        for at, name in enumerate(names):
            before, after = ("score_before", "score_after") if name == "score" else (f"{name}_before", name)
            label = {"score": "rewarded juror", "audit_psnr": "PSNR"}.get(name, name.removeprefix("audit_"))
            changes = [row[after] - row[before] for row in rows]
            style = "learned" if name == "score" else ("random", "reference", "plain")[(at - 1) % 3]
            curves.append(replace(charts.stretches(label, steps, changes, points=_POINTS), style=style))
        charted.append(charts.curves(curves, title, "edit steps", up, zero="no edits"))
    return Section(
        "Is the juror overoptimised?",
        charted,
        "Where the rewarded score goes on rising while what is audited falls, the policy learns what this juror likes "
        "and no longer what makes a photo better. Audit jurors are asked and logged, and never rewarded.",
    )


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
        "Large dots are means with 95 % bootstrap intervals, small dots single pictures. "
        + (
            "The intervals are over photos."
            if len(set(groups)) >= ENOUGH_GROUPS
            else "Intervals speak about further damage to these photos; how it does on other photos, more held-out "
            "photos would have to show."
        ),
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
    # A return is the gain in score, multiplied by the rewards' scale.
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


def _served(run: PhotoRun) -> Mapping[str, Any] | None:
    """The juror in the server's status; None without a server, or if it computed nothing."""
    models = [] if run.status is None else run.status.get("models", [])
    found = next((each for each in models if each.get("name") == run.model), None)
    return found if found and found.get("batches") else None


def _figures(run: PhotoRun, found: Mapping[str, Any]) -> list[tuple[str, str]]:
    workers = run.settings.get("envs") or run.settings.get("workers")
    latency = found.get("latency", {}).get("request", {})
    bins = _bins(found.get("histograms", {}).get("batch_rows", []))
    name, most = max(bins, key=lambda each: each[1], default=("", 0))
    mostly = f", in {most / sum(count for _, count in bins):.0%} {name}" if most else ""
    figures = [
        (str(workers), "env workers") if workers else None,
        (f"{found.get('requests', found['rows']):,}", "requests"),
        (f"{found['rows'] / run.seconds:,.0f}", "rows a second") if run.seconds else None,
        (
            f"{found['rows'] / found['batches']:.1f}",
            f"rows a batch{mostly}",
        ),
        (
            f"{_milliseconds(latency.get('p50'))} / {_milliseconds(latency.get('p99'))}",
            "ms a request, p50 / p99",
        ),
        (f"version {found.get('weights', {}).get('version', 0)}", "of the juror served"),
    ]
    return [each for each in figures if each is not None]


def _server(run: PhotoRun) -> Section | None:
    found = _served(run)
    if found is None:
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
    said = [
        f"{found['rows']:,} rows in {found['batches']:,} batches",
        f"errors: {', '.join(f'{found.get(kind, 0)} {kind}' for kind in ('failed', 'expired', 'refused'))}",
    ]
    parts: list[Part] = ["; ".join(said) + "."]
    if bins := _bins(found.get("histograms", {}).get("batch_rows", [])):
        parts.append(charts.histogram(bins, "Share of batches by size", "rows in a batch", "share of batches"))
    if rows:
        parts.append(Table(["time, in ms", "p50", "p90", "p99"], rows))
    return Section(
        "The server's batches and times",
        parts,
        "A row is a picture. Workers ask one at a time; the engine takes whatever waits the moment it is free. "
        "Half of the times are below p50, 99 % below p99; they are read from histograms whose bins double in width.",
    )


def _bins(counts: Sequence[int]) -> list[tuple[str, int]]:
    """Return names and counts of the histogram's bins. Bin i counts batches of 2^(i-1) to 2^i - 1 rows."""
    filled = [i for i, count in enumerate(counts) if count]
    if not filled:
        return []
    return [(_bin_name(i), int(counts[i])) for i in range(1, max(filled) + 1)]


def _bin_name(i: int) -> str:
    low, high = 2 ** (i - 1), 2**i - 1
    return str(low) if low == high else f"{low}–{high}"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.{1 if seconds < 0.1 else 0}f}"
