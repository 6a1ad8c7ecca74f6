"""Who beats whom, as a table of colours: each cell is what its row's player made of its column's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jurybox.training.report import svg

_LEFT, _TOP, _ROW = 110.0, 34.0, 40.0
_STEPS = 10  # of shade


class Shares(Protocol):
    """Shares of wins, ties and losses, which are 1 together."""

    @property
    def wins(self) -> float: ...
    @property
    def ties(self) -> float: ...
    @property
    def losses(self) -> float: ...


def matrix(rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Shares | None]], title: str) -> str:
    """One row a player: won minus lost in percent, the more of either, the deeper the colour; None: not played.

    Args:
        title: what it shows, for whoever cannot see it.
    """
    left = svg.margin(rows, _LEFT)

    def draw(width: float) -> tuple[float, list[str]]:
        wide = (width - left - 4) / len(columns)
        marks = [
            svg.text(left + wide * (index + 0.5), _TOP - 12, name, anchor="middle", style="axis")
            for index, name in enumerate(columns)
        ]
        for number, (name, row) in enumerate(zip(rows, cells, strict=True)):
            y = _TOP + _ROW * number
            marks.append(svg.text(left - 10, y + _ROW / 2 + 4, name, anchor="end", style="label"))
            for index, cell in enumerate(row):
                if cell is None:
                    continue
                x, points = left + wide * index, cell.wins - cell.losses
                tone = "learned" if points >= 0 else "random"
                shares = f"{cell.wins:.0%} won, {cell.ties:.0%} tied, {cell.losses:.0%} lost"
                told = f"{name} against {columns[index]}: {shares}"
                shade = f"fill {tone} shade{round(abs(points) * _STEPS)}"
                marks.append(svg.box(x + 1, y + 1, wide - 2, _ROW - 2, shade, told))
                shown = f"{round(100 * points):+d}" if points else "0"
                marks.append(svg.text(x + wide / 2, y + _ROW / 2 + 5, shown, anchor="middle", style="value"))
        return _TOP + _ROW * len(rows) + 6, marks

    return svg.wide_figure(draw, title)
