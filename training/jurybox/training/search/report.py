"""The report of a search over workflows: what it ended with, what it tried, how it learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from jurybox.training.report import charts, page
from jurybox.training.report.charts import Curve
from jurybox.training.search.picture import belief
from jurybox.training.search.settings import describe
from jurybox.training.search.trainer import WorkflowTrainer

_POINTS = 60  # of a curve, at most
_SHOWN = 3.0  # times the median: returns below that are left out of the curve
_WITHIN = 0.15  # of the unconstrained return that a workflow may cost


@dataclass(frozen=True, slots=True)
class WorkflowRun:
    """Everything that a report is made of.

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
    """What came of it, in sentences; where the goal was missed, why."""
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
    sections = [
        "<h1>Jurybox: a search over workflows of defence</h1>",
        f'<section class="verdict {"yes" if passed else "no"}"><p class="headline">{escape(first)}</p>'
        + "".join(page.paragraph(sentence) for sentence in rest)
        + "</section>",
        _picture(run),
        _curves(run.metrics),
        _tried(run),
        page.section(
            "The run",
            page.facts(run.facts),
            page.details("Settings", page.facts(trainer.settings.as_dict())),
            f"<pre>{escape(run.command)}</pre>" if run.command else "",
        ),
    ]
    return page.page("Jurybox workflow report", [section for section in sections if section])


def _picture(run: WorkflowRun) -> str:
    if not run.trainer.tried:
        return ""
    return page.section(
        "The search",
        charts.legend([("best score", "learned"), ("other scores", "plain"), ("expected", "reference")]),
        belief(run.trainer.search),
        note="What the Gaussian process believes of every order at the end, with two deviations, and the scores of "
        "those that were tried. A score is the return, less a penalty for what compliance lacks.",
    )


def _curves(metrics: Sequence[Mapping[str, float]]) -> str:
    if len(metrics) < 2:
        return ""
    # The first episodes lose so much more than all others that they would press the curve flat.
    least = _SHOWN * float(np.median([row["return_mean"] for row in metrics]))
    returns = [row for row in metrics if row["return_mean"] >= least]
    ruled = [row for row in metrics if row["phase"] >= 1]
    drawn = [
        charts.curves([_curve(returns, "return_mean", "return")], "Return in training", "episodes", "return"),
    ]
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
    return page.section("Learning", *drawn, note=told + "Dips are where a new workflow begins.")


def _curve(rows: Sequence[Mapping[str, float]], name: str, label: str) -> Curve:
    groups = [group for group in np.array_split(np.arange(len(rows)), min(_POINTS, len(rows))) if len(group)]
    values = np.array([row[name] for row in rows])
    means = [float(values[group].mean()) for group in groups]
    xs = [rows[group[-1]]["episodes"] for group in groups]
    return Curve(label, xs, means, "learned", [float(values[group].std()) for group in groups])


def _tried(run: WorkflowRun) -> str:
    rows = []
    for number, each in enumerate(run.trainer.tried, 1):
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
        return ""
    header = ["workflow", "trial", "return", "compliance", "fixes", "episodes", "passed", "expected", "score"]
    return page.section("Workflows tried", page.table(header, rows))
