"""The report of a search over workflows: result, tried workflows, learning curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from jurybox.studies.workflow.cage.tables import UNIT_TYPES
from jurybox.studies.workflow.gp_ucb import WorkflowSearch
from jurybox.studies.workflow.rollouts import share
from jurybox.studies.workflow.searched import Evaluated, Searched
from jurybox.studies.workflow.settings import ORDERS, describe
from jurybox.training.report import charts, page
from jurybox.training.report import verdict as verdicts
from jurybox.training.report.page import Conclusion, Legend, Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 3.0  # times the median: the curve omits returns below that


def conclusion(searched: Searched) -> list[str]:
    """Return the conclusion in sentences; if the goal was missed, with the reason."""
    final, reference, settings = searched.final, searched.reference, searched.settings
    if final is None or searched.best is None:
        return ["The budget ended before a workflow was tried."]
    verdict = searched.verdict_on(final)
    counted, complied = final.counts(settings.gate_on)
    judges = settings.gate_on == "obedience"
    fixes = "fixes that are judged" if judges else "fixes, every Remove and Restore"
    headline = {
        "passed": f"Found: a workflow that is obeyed in {settings.gate:.0%} of the {fixes}.",
        "failed": f"Not found: a workflow that is obeyed in {settings.gate:.0%} of the {fixes}.",
        "not judged": f"Not judged: {counted} {'judged ' if judges else ''}fixes in {final.episodes:,} episodes, "
        f"{settings.min_judged} wanted.",
    }
    sentences = [
        headline[verdict],
        f"The best of {len(searched.tried)} tried is {describe(searched.best)}: return {final.returns:.1f} "
        f"(± {1.96 * final.error:.1f}); {final.obedience:.1%} of {final.judged:,} judged fixes comply. Judged is a fix "
        "that ends or lessens a compromise where hosts of two types or more are compromised.",
        f"By the first description's rule, which counts every Remove and Restore, {final.rate:.1%} of "
        f"{final.fixes:.1f} fixes an episode comply; free Removes of clean hosts can pad that.",
    ]
    if verdict == "failed":
        sentences.append(
            f"{settings.gate_on.capitalize()} stayed {settings.gate - share(complied, counted):.1%} short: the "
            "defender acts on what it sees, it is judged by what is true, and the two differ. A larger --align-lambda "
            "or budget may help, and without --order-masks an --alignment-reward, too."
        )
    if verdict == "not judged":
        sentences.append("A longer --head-start makes more situations in which an order says anything.")
    sentences += [*_rivals(searched), _price(searched, final)]
    if reference is not None:
        sentences.append(
            f"After {settings.reference_share:.0%} of the budget, before it had seen an order, the policy's return was "
            f"{reference.returns:.1f} (± {1.96 * reference.error:.1f}). It has learned more since, so this is no "
            "measure of what an order costs."
        )
    return sentences


def _rivals(searched: Searched) -> list[str]:
    """Return how many other orders may be as good: chance decides which of them a run calls the best."""
    best = max(searched.tried, key=lambda each: each.score, default=None)
    if best is None or len(searched.tried) < 2:
        return []
    near = sum(
        best.score - each.score <= 1.96 * math.hypot(best.evaluated.error, each.evaluated.error)
        for each in searched.tried
        if each is not best
    )
    if not near:
        return ["No other order that was tried has a score within the error of its own."]
    return [
        f"{near} of the {len(searched.tried) - 1} others that were tried have a score within the error of its own, so "
        "another seed, or another processor's rounding, may find one of them."
    ]


def _price(searched: Searched, final: Evaluated) -> str:
    """Return what the order costs: both returns are of the same policy, after all of its training."""
    if not searched.prices:
        return (
            "What the order costs is not known: no policy of as much training acted without one. With --mixed-share "
            "one policy learns both."
        )
    none = searched.prices[0].evaluated
    lost, error = none.returns - final.returns, 1.96 * math.hypot(none.error, final.error)
    said = f"Without an order the same policy's return is {none.returns:.1f} (± {1.96 * none.error:.1f}): "
    if abs(lost) <= error:
        return said + f"no difference is seen (at most {abs(lost) + error:.1f} points)."
    return said + f"the order {'costs' if lost > 0 else 'gains'} {abs(lost):.1f} points (± {error:.1f})."


def render(searched: Searched, metrics: Sequence[Mapping[str, float]], facts: Mapping[str, str], command: str) -> str:
    """Return the report as one HTML document.

    Args:
        searched: at the end of its run. metrics: rows of metrics.csv. command: the command that repeats the run.
        facts: further facts about the run, in words.
    """
    first, *rest = conclusion(searched)
    final = searched.final
    verdict = "failed" if final is None else searched.verdict_on(final)
    packages = ("torch", "gymnasium", "numpy", "scikit-learn")
    answer: dict[str, verdicts.Answer] = {"passed": "yes", "failed": "no", "not judged": "undecided"}
    sections = [
        Conclusion(answer[verdict], first, rest),
        _prices(searched),
        _search(searched),
        _learning(metrics),
        _tried(searched),
        page.the_run(facts, searched.settings.as_dict(), command, packages=packages),
    ]
    return page.render("Jurybox workflow report", "Jurybox: a search over workflows of defence", sections)


def _prices(searched: Searched) -> Section | None:
    if not searched.prices:
        return None
    none = searched.prices[0].evaluated
    rows = []
    for each in searched.prices:
        found = each.evaluated
        cells = [f"{found.returns:.1f} ± {1.96 * found.error:.1f}", f"{found.taken_over:.1f}"]
        if each.first is None:
            rows.append(["no order", "", "", "", "", cells[0], "", cells[1], ""])
            continue
        verdict = searched.verdict(found.judged, found.obeyed)
        rows.append(
            [
                f"{UNIT_TYPES[each.first]} first",
                "not judged" if verdict == "not judged" else f"{found.obedience:.1%}",
                f"{found.judged:,}",
                f"{each.anyway:.1%}",
                f"{found.rate:.1%}",
                cells[0],
                f"{none.returns - found.returns:+.1f}",
                cells[1],
                f"{none.taken_over - found.taken_over:+.1f}",
            ]
        )
    header = ["order", "obedience", "judged fixes", "without order", "all fixes"]
    header += ["return", "price", "taken over", "price"]
    return Section(
        "One policy with each type first in its order",
        [Table(header, rows)],
        f"The final policy with the 24 orders that begin with a type as input, one per episode, in {none.episodes:,} "
        "episodes a row: half of them from the start, half taken over after the attacker was alone for up to "
        f"{searched.settings.longest_head_start} steps. Obedience is the share of the judged fixes that comply; "
        "without order: that share for the same policy without an order as input; all fixes: the share of every Remove "
        "and Restore, in episodes from their start, that complies by the first definition. A price is the cost of the "
        "order in points of return.",
    )


def _search(searched: Searched) -> Section | None:
    if not searched.tried:
        return None
    return Section(
        "The search",
        [
            Legend([("best score", "learned"), ("other scores", "plain"), ("expected", "reference")]),
            belief(searched.search),
        ],
        "The Gaussian process's prediction for every order at the end, with two standard deviations, and the scores of "
        "those that were tried. A score is the return, less a penalty for missing obedience.",
    )


def belief(search: WorkflowSearch) -> charts.Chart:
    """Plot all orders from the best predicted mean to the worst, with two deviations; dots are scores of trials."""
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
            charts.add_tooltip(mark, f"{number + 1}: {describe(trial.order)}: {trial.score:.1f}")

    title = "Expected score of every order with its uncertainty, and the scores found"
    return charts.chart(draw, title, 294)


def _learning(metrics: Sequence[Mapping[str, float]]) -> Section | None:
    metrics = [row for row in metrics if "phase" in row]  # without those of evaluations
    if len(metrics) < 2:
        return None
    # The first episodes lose so much more than all others that they would flatten the curve.
    least = _SHOWN * float(np.median([row["return_mean"] for row in metrics]))
    returns = [row for row in metrics if row["return_mean"] >= least]
    ruled = [row for row in metrics if row["phase"] >= 1]
    drawn = [charts.curves([_curve(returns, "return_mean", "return")], "Return in training", "episodes", "return")]
    if len(ruled) > 1:
        title, up = "Obedience in training, and compliance by the first rule", "share of fixes that comply"
        curves = [_curve(ruled, "obedience", "judged fixes"), _curve(ruled, "compliance", "all fixes", "plain")]
        drawn.append(charts.curves(curves, title, "episodes", up))
    caption = "Means of stretches of training, with the deviation between their updates; the policy explores. "
    if len(returns) < len(metrics):
        caption += f"Updates with returns below {least:.0f}, at the beginning, are left out. "
    if ruled:
        caption += f"From {ruled[0]['episodes']:,.0f} episodes on its input contains workflows"
        last = next((row["episodes"] for row in ruled if row["phase"] >= 3), None)
        caption += ". " if last is None else f", from {last:,.0f} on the best one. "
    return Section("Learning", drawn, caption + "Returns are of episodes from their start.")


def _curve(rows: Sequence[Mapping[str, float]], name: str, label: str, style: str = "learned") -> charts.Curve:
    found = charts.stretches(label, [row["episodes"] for row in rows], [row[name] for row in rows])
    return replace(found, style=style)


def _tried(searched: Searched) -> Section | None:
    rows = []
    for number, each in enumerate(searched.tried, 1):
        found = each.evaluated
        rows.append(
            [
                describe(each.order),
                str(number),
                f"{found.returns:.1f} ± {1.96 * found.error:.1f}",
                f"{found.obedience:.1%}",
                f"{found.judged:,}",
                each.verdict,
                f"{found.rate:.1%}",
                f"{found.fixes:.1f}",
                f"{each.episodes:,}",
                f"{each.mean:.1f} ± {each.std:.1f}",
                f"{each.score:.1f}",
            ]
        )
    if not rows:
        return None
    header = ["workflow", "trial", "return", "obedience", "judged", "gate", "all fixes", "an episode", "episodes"]
    header += ["expected", "score"]
    return Section("Workflows tried", [Table(header, rows)])
