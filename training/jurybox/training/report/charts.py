"""The charts of a report: intervals on a scale, a curve, dots by row, a histogram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jurybox.training.report import svg
from jurybox.training.report.verdict import Interval


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of `intervals`; `style` is one of the page's colour names: learned, plain, random, reference."""

    label: str
    value: Interval
    style: str
    dots: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of `curves`: (n,) each; `errors` draws a band of that half-width."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    errors: Sequence[float] | None = None


def intervals(bars: Sequence[Bar], title: str, axis: str) -> str:
    """Means with their intervals, one row each, over the single cases as faint dots."""
    everything = [value for bar in bars for value in (bar.value.low, bar.value.high, *bar.dots)]
    low, high = _padded(min(everything), max(everything))
    left = svg.margin(bar.label for bar in bars)
    row, top = 54.0, 8.0
    bottom = top + row * len(bars)

    def draw(width: float) -> tuple[float, list[str]]:
        x = svg.Scale(low, high, left, width - 70)
        marks = _grid_across(x, top, bottom, axis)
        for index, bar in enumerate(bars):
            y = top + row * (index + 0.5)
            marks.append(svg.text(left - 12, y + 4, bar.label, anchor="end", style="label"))
            for order, value in enumerate(bar.dots):
                # Spread by the golden ratio: neighbours land far apart, and the picture is the same every time.
                spread = ((order * 0.618034) % 1.0 - 0.5) * row * 0.62
                marks.append(svg.dot(x(value), y + spread, 2.4, f"case {bar.style}"))
            told = f"{bar.label}: {bar.value.mean:.3f}, 95 % interval {bar.value.low:.3f} to {bar.value.high:.3f}"
            marks.append(svg.line(x(bar.value.low), y, x(bar.value.high), y, f"whisker {bar.style}", told))
            marks.append(svg.dot(x(bar.value.mean), y, 6, f"mean {bar.style}", told))
            marks.append(svg.text(width - 4, y + 5, f"{bar.value.mean:.3f}", anchor="end", style="value"))
        return bottom + 44, marks

    return svg.figure(draw, title)


def curves(lines: Sequence[Curve], title: str, across: str, up: str, *, zero: str = "") -> str:
    """Lines over a common axis, each named at its end; `zero` names a line at 0."""
    xs = [value for line in lines for value in line.xs]
    ys = [
        y + sign * error
        for line in lines
        for y, error in zip(line.ys, line.errors or [0.0] * len(line.ys), strict=True)
        for sign in (-1, 1)
    ]
    low, high = _padded(*((min(0.0, *ys), max(0.0, *ys)) if zero else (min(ys), max(ys))))
    left, top, bottom = 60.0, 24.0, 240.0
    y = svg.Scale(low, high, bottom, top)

    def draw(width: float) -> tuple[float, list[str]]:
        right = width - svg.margin([zero, *(line.label for line in lines)])
        x = svg.Scale(min(0.0, *xs), max(xs), left, right)
        marks = [svg.text(0, 12, up, style="axis")]
        for value in svg.ticks(low, high):
            marks.append(svg.line(left, y(value), right, y(value), "grid"))
            marks.append(svg.text(left - 8, y(value) + 4, svg.number(value), anchor="end", style="axis"))
        for value in svg.ticks(x.low, x.high, _ticks(right - left)):
            marks.append(svg.text(x(value), bottom + 18, svg.number(value), anchor="middle", style="axis"))
        marks.append(svg.text((left + right) / 2, bottom + 38, across, anchor="middle", style="axis"))
        ends: list[float] = []
        if zero:
            marks.append(svg.line(left, y(0.0), right, y(0.0), "base"))
            marks.append(svg.text(right + 8, y(0.0) + 4, zero, style="label plain"))
        for line in sorted(lines, key=lambda each: -each.ys[-1]):
            positions = [x(value) for value in line.xs]
            if line.errors is not None:
                lows = [y(value - error) for value, error in zip(line.ys, line.errors, strict=True)]
                highs = [y(value + error) for value, error in zip(line.ys, line.errors, strict=True)]
                marks.append(svg.band(positions, lows, highs, f"band {line.style}"))
            points = [(px, y(v)) for px, v in zip(positions, line.ys, strict=True)]
            marks.append(svg.path(points, f"curve {line.style}"))
            at = max(y(line.ys[-1]) + 4, ends[-1] + 16 if ends else 0.0)  # names must not lie on each other
            ends.append(at)
            marks.append(svg.text(right + 8, at, line.label, style=f"label {line.style}"))
        return bottom + 46, marks

    return svg.figure(draw, title)


def dots_by_row(rows: Mapping[str, Sequence[tuple[str, float, str]]], title: str, axis: str) -> str:
    """For each row some named values on one scale; the first two are dots, joined by a line, all others rings around
    them, each wider than the last: values that are the same are all seen.

    Args:
        rows: by label, a list of (name, value, style).
    """
    everything = [value for marks in rows.values() for _, value, _ in marks]
    low, high = _padded(min(everything), max(everything))
    left = svg.margin(rows)
    row, top = 44.0, 8.0
    bottom = top + row * len(rows)

    def draw(width: float) -> tuple[float, list[str]]:
        x = svg.Scale(low, high, left, width - 24)
        marks = _grid_across(x, top, bottom, axis)
        for index, (label, values) in enumerate(rows.items()):
            y = top + row * (index + 0.5)
            marks.append(svg.text(left - 12, y + 4, label, anchor="end", style="label"))
            (_, start, _), (_, end, style) = values[0], values[1]
            marks.append(svg.line(x(start), y, x(end), y, f"arrow {style}"))
            for order, (name, value, style) in enumerate(values):
                told = f"{name}: {value:.3f}"
                if order < 2:
                    marks.append(svg.dot(x(value), y, 5, f"mean {style}", told))
                else:
                    marks.append(svg.ring(x(value), y, 8 + 3.5 * (order - 2), style, told))
        return bottom + 44, marks

    return svg.figure(draw, title)


def histogram(counts: Sequence[tuple[str, int]], title: str, across: str, up: str) -> str:
    """Bars over named bins, each with its share."""
    total = sum(count for _, count in counts) or 1
    top, bottom = 44.0, 190.0
    tallest = max((count for _, count in counts), default=1) or 1

    def draw(width: float) -> tuple[float, list[str]]:
        left, right = 16.0, width - 16.0
        step = (right - left) / max(len(counts), 1)
        named = svg.every([label for label, _ in counts], step)
        marks = [svg.text(0, 12, up, style="axis"), svg.line(left, bottom, right, bottom, "base")]
        for index, (label, count) in enumerate(counts):
            middle = left + step * (index + 0.5)
            height = (bottom - top) * count / tallest
            wide = min(step * 0.7, 90.0)
            marks.append(svg.box(middle - wide / 2, bottom - height, wide, height, "fill learned", f"{label}: {count}"))
            marks.append(svg.text(middle, bottom - height - 6, _share(count / total), anchor="middle", style="value"))
            if index % named == 0:
                marks.append(svg.text(middle, bottom + 18, label, anchor="middle", style="axis"))
        marks.append(svg.text((left + right) / 2, bottom + 38, across, anchor="middle", style="axis"))
        return bottom + 46, marks

    return svg.figure(draw, title)


def _share(share: float) -> str:
    return "<1%" if 0.0 < share < 0.005 else f"{share:.0%}"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """HTML of (name, style) pairs; "ring" in a style makes its mark one."""
    return '<p class="legend">' + "".join(f'<span class="{style}">{name}</span>' for name, style in entries) + "</p>"


def _grid_across(x: svg.Scale, top: float, bottom: float, axis: str) -> list[str]:
    marks = []
    for value in svg.ticks(x.low, x.high, _ticks(x.end - x.start)):
        marks.append(svg.line(x(value), top, x(value), bottom, "grid"))
        marks.append(svg.text(x(value), bottom + 18, svg.number(value), anchor="middle", style="axis"))
    marks.append(svg.text((x.start + x.end) / 2, bottom + 38, axis, anchor="middle", style="axis"))
    return marks


def _ticks(units: float) -> int:
    """How many labels an axis of that length has room for."""
    return max(3, min(5, int(units / 70)))


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin
