"""The picture of a search: what is believed of all 120 orders, and what those that were tried scored."""

from __future__ import annotations

import numpy as np

from jurybox.training.report import svg
from jurybox.training.search.gp_ucb import WorkflowSearch
from jurybox.training.search.settings import ORDERS, describe

_LEFT, _TOP, _BOTTOM = 60.0, 24.0, 260.0


def belief(search: WorkflowSearch) -> str:
    """All orders from the best expected to the worst, with two deviations; dots are scores, by number of the trial."""
    mean, std = search.belief()
    order = np.argsort(-mean, kind="stable")
    place = {ORDERS[index]: position for position, index in enumerate(order)}
    scores = [trial.score for trial in search.trace]
    low = min([*(mean - 2 * std), *scores])
    high = max([*(mean + 2 * std), *scores])
    margin = 0.05 * (high - low) or 1.0
    y = svg.Scale(low - margin, high + margin, _BOTTOM, _TOP)
    lows, highs = ([y(value) for value in (mean + sign * 2 * std)[order]] for sign in (-1, 1))
    best = max(range(len(scores)), key=scores.__getitem__, default=-1)

    def draw(width: float) -> tuple[float, list[str]]:
        x = svg.Scale(0, len(ORDERS) - 1, _LEFT, width - 16)
        marks = [svg.text(0, 12, "score", style="axis")]
        for value in svg.ticks(y.low, y.high):
            marks.append(svg.line(_LEFT, y(value), x.end, y(value), "grid"))
            marks.append(svg.text(_LEFT - 8, y(value) + 4, svg.number(value), anchor="end", style="axis"))
        xs = [x(position) for position in range(len(ORDERS))]
        marks.append(svg.band(xs, lows, highs, "band reference"))
        marks.append(svg.path(list(zip(xs, [y(value) for value in mean[order]], strict=True)), "curve reference"))
        for number, trial in enumerate(search.trace):
            style = "mean learned" if number == best else "mean plain"
            told = f"{number + 1}: {describe(trial.order)}: {trial.score:.1f}"
            marks.append(svg.dot(x(place[trial.order]), y(trial.score), 5 if number == best else 3.5, style, told))
        across = "the 120 orders, best expected first"
        marks.append(svg.text((x.start + x.end) / 2, _BOTTOM + 22, across, anchor="middle", style="axis"))
        return _BOTTOM + 34, marks

    return svg.figure(draw, "Expected score of every order with its uncertainty, and the scores found")
