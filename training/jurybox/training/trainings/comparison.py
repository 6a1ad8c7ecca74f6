"""The comparison of a fleet's runs: seeds.csv, comparison.json and report.html in the fleet's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jurybox.training.checkpoints import write_atomically, write_table
from jurybox.training.report.aggregates import improvement, interquartile_mean
from jurybox.training.run_folder import read_metrics
from jurybox.training.trainings.members import FleetMember

if TYPE_CHECKING:
    from jurybox.training.report.page import Section
    from jurybox.training.report.verdict import Interval

_EVALUATED = ("eval_return", "eval_points")  # what trainings call the score of an evaluation
_TASK = "env"  # a variation of it is another task: scores of different ones are compared on a common scale
_POINTS = 20
_STYLES = ("learned", "reference", "random", "plain")


@dataclass(frozen=True, slots=True)
class _Run:
    member: FleetMember
    summary: Mapping[str, Any]
    score: float | None
    curve: Sequence[tuple[float, float]]

    @property
    def task(self) -> str:
        return str(self.member.variation.get(_TASK, ""))

    @property
    def variation(self) -> str:
        """Its variation but for the task."""
        return ",".join(part for part in self.member.labels if not part.startswith(f"{_TASK}="))


def write(folder: Path, members: Sequence[FleetMember], command: str) -> str:
    """Compare runs that ended by their scores, and return sentences about them.

    A run's score is that of its last evaluation, and without one the mean return of its last episodes.

    Args:
        folder: the fleet's; each run is in its member's folder there.
        command: command line that repeats it, for the report.
    """
    runs = [_read(folder, member) for member in members]
    _write_table(folder / "seeds.csv", runs)
    scored = _scaled([run for run in runs if run.score is not None and math.isfinite(run.score)])
    named: dict[str, dict[str, list[float]]] = {}
    for run, score in scored:
        named.setdefault(run.variation, {}).setdefault(run.task, []).append(score)
    tasks = {run.task for run, _ in scored}
    # One run says nothing about others, and a variation without all tasks cannot be compared.
    whole = {
        name: [found[task] for task in sorted(tasks)]
        for name, found in named.items()
        if found.keys() == tasks and min(map(len, found.values())) > 1
    }
    means = {name: interquartile_mean(scores) for name, scores in whole.items()}
    first = next(iter(whole), "")
    better = {name: improvement(scores, whole[first]) for name, scores in whole.items() if name != first}
    what = "score" if len(tasks) > 1 else "return"
    document = {
        "runs": [{"run": run.member.name, "score": run.score} for run in runs],
        "interquartile_means": {name: found.as_dict() for name, found in means.items()},
        "improvement": {"over": first, "probabilities": {name: found.as_dict() for name, found in better.items()}},
    }
    write_atomically(folder / "comparison.json", json.dumps(document, indent=2) + "\n")
    write_atomically(folder / "report.html", _report(runs, named, means, better, first, command, len(tasks)))
    files = f"({folder / 'seeds.csv'}, {folder / 'report.html'})"
    if not means:
        returns = [run.score for run in runs if run.score is not None]
        told = f": {what} {returns[0]:.4g}" if len(returns) == 1 else ""
        return f"{'1 run' if len(runs) == 1 else f'{len(runs)} runs'}{told} {files}"
    lines = [
        f"{f'{name}: ' if name else ''}interquartile mean of the {what} {found.mean:.4g}, "
        f"95 % interval {found.low:.4g} to {found.high:.4g}, {sum(map(len, whole[name]))} runs"
        for name, found in means.items()
    ]
    lines += [
        f"{name} is better than {first} with probability {found.mean:.2f}, 95 % interval {found.low:.2f} to "
        f"{found.high:.2f}"
        for name, found in better.items()
    ]
    return "\n".join([*lines, files])


def _read(folder: Path, member: FleetMember) -> _Run:
    run = folder / member.name
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    evaluation = summary.get("evaluation") or {}
    name = next((name for name in _EVALUATED if name in evaluation), "return_mean")
    score = evaluation.get(name, summary.get("return_mean"))
    rows = read_metrics(run / "metrics.csv") if (run / "metrics.csv").exists() else []
    curve = [(row["env_steps"], row[name]) for row in rows if name in row]
    return _Run(member, summary, None if score is None else float(score), curve)


def _scaled(runs: Sequence[_Run]) -> list[tuple[_Run, float]]:
    """Return runs with their scores; of several tasks from 0, the lowest of that task's, to 1, the highest."""
    by_task: dict[str, list[float]] = {}
    for run in runs:
        assert run.score is not None
        by_task.setdefault(run.task, []).append(run.score)
    if len(by_task) < 2:
        return [(run, run.score) for run in runs if run.score is not None]
    found = []
    for run in runs:
        low, high = min(by_task[run.task]), max(by_task[run.task])
        found.append((run, ((run.score or 0.0) - low) / (high - low or 1.0)))
    return found


def _write_table(path: Path, runs: Sequence[_Run]) -> None:
    """Write a row for each run: seed, variation, and the numbers of its summary.json."""
    summary = runs[0].summary
    shared = [name for name, value in summary.items() if name != "seed" and type(value) in (int, float)]
    varied = list(runs[0].member.variation)
    rows = []
    for run in runs:
        own = [run.member.variation[name] for name in varied]
        rows.append([run.member.seed, *own, run.score, *(run.summary.get(name) for name in shared)])
    write_table(path, ["seed", *varied, "score", *shared], rows)


def _report(
    runs: Sequence[_Run],
    named: Mapping[str, Mapping[str, Sequence[float]]],
    means: Mapping[str, Interval],
    better: Mapping[str, Interval],
    first: str,
    command: str,
    tasks: int,
) -> str:
    from jurybox.training.report import charts, page
    from jurybox.training.report.page import Section, Table

    styles = {name: _STYLES[place % len(_STYLES)] for place, name in enumerate(named)}
    sections: list[Section | None] = []
    if means:
        dots = {name: [score for scores in named[name].values() for score in scores] for name in means}
        bars = [charts.Bar(name or "all runs", found, styles[name], dots[name]) for name, found in means.items()]
        drawn = charts.intervals(bars, "interquartile means of the runs' scores, with 95 % intervals", "score")
        note = (
            "The mean of the middle half of the runs' scores, which are the dots, with 95 % stratified bootstrap "
            "intervals (Agarwal et al., 2021). A score is that of a run's last evaluation, else its last episodes'."
        )
        if tasks > 1:
            note += " In each environment 0 is the lowest run of the fleet, and 1 the highest."
        sections.append(Section("Interquartile means", [drawn], note))
    if better:
        rows = [[name, f"{p.mean:.2f}", f"{p.low:.2f} to {p.high:.2f}"] for name, p in better.items()]
        note = f"The probability that a run has a higher score than one with {first}; equal ones count half."
        sections.append(Section("Which is better", [Table(["", "probability", "95 % interval"], rows)], note))
    sections.append(_curves(runs, styles) if tasks == 1 else None)
    rows = [
        [run.member.name, "-" if run.score is None else f"{run.score:.4g}", f"{run.summary.get('seconds', 0):.0f} s"]
        for run in runs
    ]
    sections.append(Section("The runs", [Table(["", "score", "time"], rows), {"Command": command}]))
    return page.render("Jurybox fleet report", f"Jurybox: {len(runs)} runs", sections)


def _curves(runs: Sequence[_Run], styles: Mapping[str, str]) -> Section | None:
    """Draw the interquartile mean over env steps, of runs with two points or more."""
    from jurybox.training.report import charts
    from jurybox.training.report.page import Section

    lines = []
    for name, style in styles.items():
        curves = [np.array(run.curve) for run in runs if run.variation == name and len(run.curve) > 1]
        if len(curves) < 2:
            continue
        # Where all of them have a value.
        begin, end = max(each[0, 0] for each in curves), min(each[-1, 0] for each in curves)
        steps = np.linspace(begin, end, _POINTS)
        values = np.array([np.interp(steps, each[:, 0], each[:, 1]) for each in curves])
        found = [interquartile_mean([column], resamples=1000) for column in values.T]
        ys, errors = [each.mean for each in found], [(each.high - each.low) / 2 for each in found]
        lines.append(charts.Curve(name or "all runs", steps.tolist(), ys, style, errors))
    if not lines:
        return None
    drawn = charts.curves(lines, "interquartile mean of the score over env steps", "env steps", "score")
    return Section("While learning", [drawn], "Bands are half as wide as the 95 % intervals to each side.")
