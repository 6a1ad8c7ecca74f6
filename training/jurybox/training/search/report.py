"""The report of a search over workflows: result, tried workflows, learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jurybox.training.report import charts, page
from jurybox.training.report.page import Answer, Legend, Section, Table
from jurybox.training.search.gp_ucb import WorkflowSearch
from jurybox.training.search.settings import ORDERS, describe
from jurybox.training.search.trainer import WorkflowTrainer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 3.0  # times the median: returns below that are left out of the curve
_WITHIN = 0.15  # of the unconstrained return that a workflow may cost


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """The data of a report.

    Attributes:
        trainer: at the end of its run.
        metrics: rows of metrics.csv.
        facts: what else is worth knowing of the run, in words.
        command: that runs it again.
    """

    trainer: WorkflowTrainer
    metrics: Sequence[Mapping[str, float]]
    facts: Mapping[str, str]
    command: str


def conclusion(trainer: WorkflowTrainer) -> list[str]:
    """The conclusion in sentences; if the goal was missed, the reason."""
    final, reference, settings = trainer.final, trainer.reference, trainer.settings
    if final is None or trainer.best is None:
        return ["The budget ended before a workflow was tried."]
    passed = trainer.passes(final.rate, final.fixes)
    said = [
        f"{'Found' if passed else 'Not found'}: a workflow that is complied with in {settings.gate:.0%} of all fixes.",
        f"The best of {len(trainer.tried)} tried is {describe(trainer.best)}: return {final.returns:.1f} "
        f"(± {1.96 * final.error:.1f}), compliance {final.rate:.1%} over {final.fixes:.1f} fixes an episode.",
    ]
    if not passed and final.fixes < settings.min_fixes:
        said.append(
            f"It fixes too seldom to be judged: {final.fixes:.2f} fixes an episode, {settings.min_fixes:g} wanted."
        )
    elif not passed:
        said.append(
            f"Compliance stayed {settings.gate - final.rate:.1%} short: the defender acts on what it sees, compliance "
            "is judged by what is true, and the two differ. A larger --align-lambda or budget may help."
        )
    if reference is not None:
        cost = (reference.returns - final.returns) / abs(reference.returns)
        close = "within" if cost <= _WITHIN else "not within"
        said.append(
            f"Without a workflow the return was {reference.returns:.1f} (± {1.96 * reference.error:.1f}) after "
            f"{settings.reference_share:.0%} of the budget; the workflow's is {cost:.0%} worse, {close} {_WITHIN:.0%}."
            if cost > 0
            else f"Without a workflow the return was {reference.returns:.1f} (± {1.96 * reference.error:.1f}) after "
            f"{settings.reference_share:.0%} of the budget; the workflow's is no worse."
        )
    return said


def render(run: WorkflowRun) -> str:
    """The report as one HTML document."""
    trainer = run.trainer
    first, *rest = conclusion(trainer)
    passed = trainer.final is not None and trainer.passes(trainer.final.rate, trainer.final.fixes)
    packages = ("torch", "gymnasium", "numpy", "scikit-learn")
    sections = [
        Answer("yes" if passed else "no", first, rest),
        _search(trainer),
        _learning(run.metrics),
        _tried(trainer),
        page.the_run(run.facts, trainer.settings.as_dict(), run.command, packages=packages),
    ]
    return page.render("Jurybox workflow report", "Jurybox: a search over workflows of defence", sections)


def _search(trainer: WorkflowTrainer) -> Section | None:
    if not trainer.tried:
        return None
    return Section(
        "The search",
        [
            Legend([("best score", "learned"), ("other scores", "plain"), ("expected", "reference")]),
            belief(trainer.search),
        ],
        "What the Gaussian process believes of every order at the end, with two deviations, and the scores of "
        "those that were tried. A score is the return, less a penalty for what compliance lacks.",
    )


def belief(search: WorkflowSearch) -> charts.Chart:
    """All orders from the best expected to the worst, with two deviations; dots are scores, by number of the trial."""
    mean, std = search.belief()
    order = np.argsort(-mean, kind="stable")
    place = {ORDERS[index]: position for position, index in enumerate(order)}
    scores = [trial.score for trial in search.trace]
    low, high = min([*(mean - 2 * std), *scores]), max([*(mean + 2 * std), *scores])
    margin = 0.05 * (high - low) or 1.0
    best = max(range(len(scores)), key=scores.__getitem__, default=-1)

    def draw(axes: Axes, width: float) -> None:
        charts.upright(axes, "score", (low - margin, high + margin))
        axes.set_xlabel("the 120 orders, best expected first")
        axes.set_xticks([])
        axes.set_xlim(-0.5, len(ORDERS) - 0.5)
        xs, colour = range(len(ORDERS)), charts.COLOURS["reference"]
        axes.fill_between(xs, (mean - 2 * std)[order], (mean + 2 * std)[order], color=colour, alpha=0.16, linewidth=0)
        axes.plot(xs, mean[order], color=colour)
        for number, trial in enumerate(search.trace):
            style, wide = ("learned", 10) if number == best else ("plain", 7)
            mark = charts.dot(axes, place[trial.order], trial.score, wide, style)
            charts.told(mark, f"{number + 1}: {describe(trial.order)}: {trial.score:.1f}")

    title = "Expected score of every order with its uncertainty, and the scores found"
    return charts.chart(draw, title, 294)


def _learning(metrics: Sequence[Mapping[str, float]]) -> Section | None:
    if len(metrics) < 2:
        return None
    # The first episodes lose so much more than all others that they would press the curve flat.
    least = _SHOWN * float(np.median([row["return_mean"] for row in metrics]))
    returns = [row for row in metrics if row["return_mean"] >= least]
    ruled = [row for row in metrics if row["phase"] >= 1]
    drawn = [charts.curves([_curve(returns, "return_mean", "return")], "Return in training", "episodes", "return")]
    if len(ruled) > 1:
        title, up = "Compliance in training", "share of fixes that comply"
        drawn.append(charts.curves([_curve(ruled, "compliance", "compliance")], title, "episodes", up))
    told = "Means of stretches of training, with the deviation between their updates; the policy explores. "
    if len(returns) < len(metrics):
        told += f"Updates with returns below {least:.0f}, at the beginning, are left out. "
    if ruled:
        told += f"From {ruled[0]['episodes']:,.0f} episodes on it is told a workflow"
        last = next((row["episodes"] for row in ruled if row["phase"] >= 2), None)
        told += ". " if last is None else f", from {last:,.0f} on the best one. "
    return Section("Learning", drawn, told + "Dips are where a new workflow begins.")


def _curve(rows: Sequence[Mapping[str, float]], name: str, label: str) -> charts.Curve:
    return charts.stretches(label, [row["episodes"] for row in rows], [row[name] for row in rows])


def _tried(trainer: WorkflowTrainer) -> Section | None:
    rows = []
    for number, each in enumerate(trainer.tried, 1):
        found = each.evaluated
        rows.append(
            [
                describe(each.order),
                str(number),
                f"{found.returns:.1f} ± {1.96 * found.error:.1f}",
                f"{found.rate:.1%}",
                f"{found.fixes:.1f}",
                f"{each.episodes:,}",
                "yes" if each.passed else "no",
                f"{each.mean:.1f} ± {each.std:.1f}",
                f"{each.score:.1f}",
            ]
        )
    if not rows:
        return None
    header = ["workflow", "trial", "return", "compliance", "fixes", "episodes", "passed", "expected", "score"]
    return Section("Workflows tried", [Table(header, rows)])
