"""The charts of a report, drawn by Matplotlib as SVG with the colours of the page.

A chart is drawn in the light colours of page.css, and each of them is then replaced by its CSS variable, so that one
drawing works in light and dark mode. Text stays text: it can be searched, copied and read by screen readers. A chart is
drawn twice, for wide screens and for phones, because a wide chart scaled to a phone's screen is unreadable; the page
shows one of them.

Importing Matplotlib takes most of a second, so it is imported when the first chart is drawn.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from jurybox.training.report.verdict import Interval
from jurybox.training.runtime.progress import Timeline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, NARROW = 640.0, 344.0  # width in units, which are pixels if the drawing is not scaled
_POINTS = 72.0  # units per Matplotlib inch, in SVG
# The light colours of page.css, by the names of its variables.
COLOURS = {
    "learned": "#0b7a53", "plain": "#6b7280", "random": "#c2570c", "reference": "#3556b8",
    "ink": "#1c1d21", "soft": "#5f636d", "rule": "#e2e0da", "card": "#fffffe",
}  # fmt: skip
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # show a dollar sign in a name as it is
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # part of Matplotlib; wider than the browsers' fonts, so labels have room
    "font.size": 12,
    "text.color": COLOURS["ink"],
    "axes.labelpad": 8,
    "axes.labelcolor": COLOURS["soft"],
    "axes.edgecolor": COLOURS["soft"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "grid.color": COLOURS["rule"],
    "grid.linewidth": 1,
    **{f"{axis}tick.{what}": value for axis in "xy" for what, value in (("color", COLOURS["soft"]), ("major.size", 0))},
    "lines.linewidth": 2.5,
    "lines.solid_joinstyle": "round",
    "lines.solid_capstyle": "round",
}
# Arguments of `annotate` for a text next to a row or the end of a line.
_BESIDE: Any = {
    "xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "size": 13, "weight": 700
}  # fmt: skip
_LETTER = 7.4  # average width of a letter in units, rounded up
_TOOLTIP_PREFIX = "tooltip:"  # prefix of an id that contains a tooltip
_BINS_OF_LANE = 400  # maximum number of bars in a timeline's row; gaps between more would be narrower than a pixel


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing as SVG, for wide screens and for narrow ones. If `narrow` is empty, the wide one scrolls on a phone."""

    kind: ClassVar[str] = "chart"
    wide: str
    narrow: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of `intervals`; `style` is one of the page's colour names: learned, plain, random, reference."""

    label: str
    value: Interval
    style: str
    dots: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of `curves`; xs, ys and errors are (n,) each. `errors` draws a band of this half-width."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    errors: Sequence[float] | None = None


class Shares(Protocol):
    """Shares of wins, ties and losses, which sum to 1."""

    @property
    def wins(self) -> float: ...
    @property
    def ties(self) -> float: ...
    @property
    def losses(self) -> float: ...


def chart(draw: Callable[[Axes, float], None], title: str, height: float, *, narrow: bool = True) -> Chart:
    """Draw a chart.

    Args:
        draw: draws on the axes; called with the axes and the width in units.
        title: description for screen readers.
        height: height in units.
        narrow: whether to draw the chart for phones, too.
    """
    if not narrow:
        return Chart(_drawing(draw, title, "", WIDTH, height), "")
    return Chart(_drawing(draw, title, "wide", WIDTH, height), _drawing(draw, title, "narrow", NARROW, height))


def _drawing(draw: Callable[[Axes, float], None], title: str, style: str, width: float, height: float) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()  # ignore the user's matplotlibrc
        mpl.rcParams.update(_STYLE)
        mpl.rcParams["svg.hashsalt"] = f"{title} {width}"  # ids that are unique on the page, and reproducible
        figure = Figure((width / _POINTS, height / _POINTS), layout="constrained")
        draw(figure.subplots(), width)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return _inline(drawn.getvalue(), title, style, f"0 0 {width:.0f} {height:.0f}")


def _inline(drawn: bytes, title: str, style: str, box: str) -> str:
    """Convert Matplotlib's SVG file to an element of the page, without namespaces and its own colours and fonts."""
    root = ElementTree.fromstring(drawn)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # a style element would apply to the whole page
                parent.remove(child)
    wanted = set(re.findall(rb'(?:href="#|url\(#)([^")]+)', drawn))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        name = element.get("id", "")
        if name.startswith(_TOOLTIP_PREFIX):
            tooltip = ElementTree.Element("title")
            tooltip.text = name.removeprefix(_TOOLTIP_PREFIX)
            element.insert(0, tooltip)
        if name.encode() not in wanted:
            element.attrib.pop("id", None)
        if "style" in element.attrib:
            # Marks inside a ring have their own tooltips, so the ring's inside must not receive pointer events.
            css = element.get("style", "").replace("fill-opacity: 0;", "fill: none;")
            element.set("style", css.replace("'DejaVu Sans'", "system-ui"))
    root.attrib = {"class": style, "viewBox": box, "role": "img", "aria-label": title}
    text = ElementTree.tostring(root, encoding="unicode")
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def add_tooltip(mark: Artist, text: str) -> None:
    """Add a tooltip to a mark."""
    mark.set_gid(_TOOLTIP_PREFIX + text)


def intervals(bars: Sequence[Bar], title: str, axis: str) -> Chart:
    """Draw means with their intervals, one per row, over the individual cases as faint dots."""
    everything = [value for bar in bars for value in (bar.value.low, bar.value.high, *bar.dots)]

    def draw(axes: Axes, width: float) -> None:
        _rows(axes, width, [bar.label for bar in bars], [f"{bar.value.mean:.3f}" for bar in bars])
        _across(axes, width, _padded(min(everything), max(everything)), axis)
        for y, bar in enumerate(bars):
            colour = COLOURS[bar.style]
            # Spread by the golden ratio: successive dots are far apart, and the result is reproducible.
            spread = (np.arange(len(bar.dots)) * 0.618034 % 1.0 - 0.5) * 0.62
            axes.scatter(bar.dots, y + spread, s=18, color=colour, alpha=0.45, linewidths=0, zorder=2)
            text = f"{bar.label}: {bar.value.mean:.3f}, 95 % interval {bar.value.low:.3f} to {bar.value.high:.3f}"
            add_tooltip(axes.plot([bar.value.low, bar.value.high], [y, y], color=colour, linewidth=3)[0], text)
            add_tooltip(dot(axes, bar.value.mean, y, 12, bar.style), text)

    return chart(draw, title, 52 + 54.0 * len(bars))


def curves(lines: Sequence[Curve], title: str, across: str, up: str, *, zero: str = "") -> Chart:
    """Draw lines over a common axis, each labelled at its end; `zero` is the label of an additional line at 0."""
    xs = [value for line in lines for value in line.xs]
    ys = [
        y + sign * error
        for line in lines
        for y, error in zip(line.ys, line.errors or [0.0] * len(line.ys), strict=True)
        for sign in (-1, 1)
    ]
    low, high = _padded(*((min(0.0, *ys), max(0.0, *ys)) if zero else (min(ys), max(ys))))

    def draw(axes: Axes, width: float) -> None:
        upright(axes, up, (low, high))
        _across(axes, width, (min(0.0, *xs), max(xs)), across, grid=False)
        ends = [(0.0, zero, COLOURS["plain"])] if zero else []
        if zero:
            axes.axhline(0.0, color=COLOURS["soft"], linewidth=1)
        for line in lines:
            colour = COLOURS[line.style]
            if line.errors is not None:
                values, errors = np.asarray(line.ys), np.asarray(line.errors)
                axes.fill_between(line.xs, values - errors, values + errors, color=colour, alpha=0.16, linewidth=0)
            axes.plot(line.xs, line.ys, color=colour)
            ends.append((line.ys[-1], line.label, colour))
        # This computes the height of the axes, which is needed to keep the labels from overlapping.
        cast("Figure", axes.figure).draw_without_rendering()
        least = -math.inf
        for value, label, colour in sorted(ends):
            y = axes.transData.transform((0.0, value))[1]
            least = max(y, least + 16)
            axes.annotate(label, (1.0, value), (8, least - y), color=colour, **_BESIDE)

    return chart(draw, title, 286)


def stretches(
    label: str,
    xs: npt.ArrayLike,
    ys: npt.ArrayLike,
    *,
    errors: npt.ArrayLike | None = None,
    points: int = 60,
) -> Curve:
    """Create a curve of at most `points` points, which are the means of consecutive groups at the groups' last x.

    Args:
        label: name of the curve.
        xs, ys: (n,).
        errors: standard error of each value, (n,); the band is then the 95 % interval of the mean. By default it is the
            standard deviation within each group; if all of these are 0, there is no band.
        points: maximum number of points.
    """
    across, values = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
    groups = np.array_split(np.arange(len(values)), min(points, len(values)))
    if errors is not None:
        squares = np.asarray(errors, np.float64) ** 2
        band = [float(1.96 * np.sqrt(squares[group].sum()) / len(group)) for group in groups]
    else:
        band = [float(values[group].std()) for group in groups]
    ends, means = [float(across[group[-1]]) for group in groups], [float(values[group].mean()) for group in groups]
    return Curve(label, ends, means, "learned", band if any(band) else None)


def dots_by_row(rows: Mapping[str, Sequence[tuple[str, float, str]]], title: str, axis: str) -> Chart:
    """Draw named values on a common scale in rows.

    The first two values of a row are dots joined by a line. The others are rings, each wider than the last, so that
    equal values are all visible.

    Args:
        rows: for each label a list of (name, value, style).
        title: description for screen readers.
        axis: label of the axis.
    """
    everything = [value for marks in rows.values() for _, value, _ in marks]

    def draw(axes: Axes, width: float) -> None:
        _rows(axes, width, list(rows), [""] * len(rows))
        _across(axes, width, _padded(min(everything), max(everything)), axis)
        for y, values in enumerate(rows.values()):
            (_, start, _), (_, end, style) = values[0], values[1]
            axes.plot([start, end], [y, y], color=COLOURS[style], linewidth=2, alpha=0.55)
            for order, (name, value, style) in enumerate(values):
                if order < 2:
                    mark = dot(axes, value, y, 10, style)
                else:
                    wide = 16 + 7 * (order - 2)
                    (mark,) = axes.plot(value, y, "o", ms=wide, mfc="none", mec=COLOURS[style], mew=2.5, clip_on=False)
                add_tooltip(mark, f"{name}: {value:.3f}")

    return chart(draw, title, 52 + 44.0 * len(rows))


def histogram(counts: Sequence[tuple[str, int]], title: str, across: str, up: str) -> Chart:
    """Draw bars over named bins, each labelled with its share."""
    total = sum(count for _, count in counts) or 1

    def draw(axes: Axes, width: float) -> None:
        upright(axes, up)
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(True)
        axes.set_yticks([])
        axes.set_xlabel(across)
        step = width / max(len(counts), 1)
        bars = axes.bar(range(len(counts)), [n for _, n in counts], min(0.7, 90 / step), color=COLOURS["learned"])
        axes.bar_label(bars, [_share(n / total) for _, n in counts], padding=3, size=12, weight=700)
        axes.set_xlim(-0.5, max(len(counts), 1) - 0.5)
        every = math.ceil(max((_LETTER * len(label) for label, _ in counts), default=0.0) / step) or 1
        axes.set_xticks(range(0, len(counts), every), [label for label, _ in counts[::every]])
        for bar, (label, count) in zip(bars, counts, strict=True):
            add_tooltip(bar, f"{label}: {count}")

    return chart(draw, title, 236)


def matrix(rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Shares | None]], title: str) -> Chart:
    """Draw the results between players, one row per player: wins minus losses in percent.

    The larger the absolute value, the stronger the colour. A cell that is None was not played and stays empty.
    """

    def draw(axes: Axes, width: float) -> None:
        _rows(axes, width, rows, [""] * len(rows))
        axes.grid(visible=False)
        axes.xaxis.tick_top()
        axes.set_xticks(range(len(columns)), columns)
        axes.set_xlim(-0.5, len(columns) - 0.5)
        for y, (name, row) in enumerate(zip(rows, cells, strict=True)):
            for x, cell in enumerate(row):
                if cell is None:
                    continue
                points = cell.wins - cell.losses
                tone = COLOURS["learned" if points >= 0 else "random"]
                bar = axes.barh(y, 0.97, 0.94, x - 0.485, color=tone, alpha=0.05 + 0.53 * abs(points))
                shares = f"{cell.wins:.0%} won, {cell.ties:.0%} tied, {cell.losses:.0%} lost"
                add_tooltip(bar[0], f"{name} against {columns[x]}: {shares}")
                shown = f"{round(100 * points):+d}" if points else "0"
                axes.text(x, y, shown, ha="center", va="center_baseline", size=13, weight=700)

    return chart(draw, title, 40 + 40.0 * len(rows), narrow=False)


def timeline(run: Timeline, title: str, seconds: float = 5.0) -> Chart:
    """Draw a row for each role, filled while it was working, with its busy share of the whole run next to it.

    Args:
        run: the run's timeline.
        title: description for screen readers.
        seconds: length of the interval to draw, which ends before the roles that work most of the time stop.
    """
    high = _end(run)
    low = max(0.0, high - seconds)

    def draw(axes: Axes, width: float) -> None:
        _rows(axes, width, [lane.role for lane in run.lanes], [f"{lane.busy:.0%}" for lane in run.lanes])
        _across(axes, width, (low, high), "seconds")
        for y, lane in enumerate(run.lanes):
            axes.axhline(y, color=COLOURS["soft"], linewidth=1)
            shown = [each for each in lane.intervals if each[1] > low and each[0] < high and not each[2]]
            worked = [
                (max(start, low), min(end, high) - max(start, low))
                for start, end, _ in _joined(shown, (high - low) / _BINS_OF_LANE)
            ]
            bars = axes.broken_barh(worked, (y - 0.26, 0.52), color=COLOURS["learned"], linewidth=0)
            add_tooltip(bars, f"{lane.role}: at work for {lane.busy:.0%} of the run")

    return chart(draw, title, 52 + 34.0 * len(run.lanes))


def upright(axes: Axes, up: str, limits: tuple[float, float] | None = None) -> None:
    """Set the label of the y axis, which is above the drawing, and its limits."""
    axes.figure.suptitle(up, x=0.0, ha="left", size=12, color=COLOURS["soft"])
    axes.grid(visible=False, axis="x")
    if limits is not None:
        axes.set_ylim(*limits)
        _ticks(axes.yaxis, 6)


def _across(axes: Axes, width: float, limits: tuple[float, float], label: str, *, grid: bool = True) -> None:
    axes.set_xlabel(label)
    axes.set_xlim(*(limits if limits[0] < limits[1] else _padded(*limits)))
    axes.grid(visible=grid, axis="x")
    _ticks(axes.xaxis, 6 if width == WIDTH else 4)


def _ticks(axis: Any, most: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))


def _rows(axes: Axes, width: float, labels: Sequence[str], values: Sequence[str]) -> None:
    """Set up labelled rows from top to bottom, each with a value at its right end."""
    letters = 32 if width == WIDTH else 16
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), [textwrap.fill(label, letters) for label in labels])
    axes.tick_params(axis="y", labelsize=13, labelcolor=COLOURS["ink"], pad=10)
    axes.grid(visible=False, axis="y")
    for y, value in enumerate(values):
        axes.annotate(value, (1.0, y), (12, 0), **_BESIDE)


def dot(axes: Axes, x: float, y: float, wide: float, style: str) -> Artist:
    """Draw a dot of diameter `wide` with a thin rim, on top of everything else."""
    colour, rim = COLOURS[style], COLOURS["card"]
    return axes.plot(x, y, "o", ms=wide, mfc=colour, mec=rim, mew=1.5, clip_on=False, zorder=3)[0]


def _end(run: Timeline) -> float:
    """Return the time at which the first of the mostly busy roles stopped working, before any final evaluation."""
    worked = [
        max((end for _, end, what in lane.intervals if not what), default=0.0) for lane in run.lanes if lane.busy > 0.5
    ]
    return min(worked or [lane.intervals[-1][1] for lane in run.lanes if lane.intervals], default=1.0)


def _joined(intervals: list[tuple[float, float, str]], gap: float) -> list[tuple[float, float, str]]:
    """Merge neighbours that are too close to be distinguished."""
    joined: list[tuple[float, float, str]] = []
    for start, end, what in intervals:
        if joined and start - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], end, what)
        else:
            joined.append((start, end, what))
    return joined


def _number(value: float) -> str:
    """Format a number briefly for an axis."""
    if abs(value) >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{round(value, 10):g}"


def _share(share: float) -> str:
    return "<1%" if 0.0 < share < 0.005 else f"{share:.0%}"


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin
