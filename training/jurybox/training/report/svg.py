"""The few marks that our charts are made of, as inline SVG that takes its colours from the page.

Colours are CSS classes, never literals, so one drawing serves light and dark. Text is text: it can be read aloud,
searched and copied. A figure is drawn twice, for a wide screen and for a phone's, since what is scaled to fit a phone
cannot be read there; the page shows one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, NARROW = 640.0, 344.0
_LETTER = 7.4  # units that a letter of a label takes on average, generously


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to positions, linear.

    Attributes:
        low, high: values at the ends.
        start, end: positions of the ends; may run backwards.
    """

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.5)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values inside [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def margin(labels: Iterable[str], least: float = 0.0) -> float:
    """Room for the longest of some labels beside a drawing."""
    return max([least, *(20.0 + _LETTER * len(label) for label in labels)])


def every(labels: Sequence[str], step: float) -> int:
    """1 where each of the labels has room in `step` units, 2 where every second one has, and so on."""
    return max(1, math.ceil(max((_LETTER * len(label) for label in labels), default=0.0) / step))


def figure(draw: Callable[[float], tuple[float, Iterable[str]]], title: str) -> str:
    """A drawing for wide screens and for narrow ones.

    Args:
        draw: gives height and marks for a width, in units.
        title: what it shows, for whoever cannot see it.
    """
    return f'<div class="figure">{"".join(_drawing(draw, title, *kind) for kind in _KINDS)}</div>'


def wide_figure(draw: Callable[[float], tuple[float, Iterable[str]]], title: str) -> str:
    """A drawing that a phone has to scroll; as `figure`."""
    return f'<div class="figure scroll">{_drawing(draw, title, "", WIDTH)}</div>'


_KINDS = (("wide", WIDTH), ("narrow", NARROW))


def _drawing(draw: Callable[[float], tuple[float, Iterable[str]]], title: str, style: str, width: float) -> str:
    height, marks = draw(width)
    head = f'<svg class="{style}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return f"{head}{''.join(marks)}</svg>"


def text(x: float, y: float, content: str, *, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str, title: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}">{_title(title)}</line>'


def box(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    size = f'width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="2" class="{style}">{_title(title)}</rect>'


def ring(x: float, y: float, radius: float, style: str, title: str = "") -> str:
    """A circle that hides nothing: what lies inside is seen, and shows its own title to the pointer."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="ring {style}">{_title(title)}</circle>'


def dot(x: float, y: float, radius: float, style: str, title: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{style}">{_title(title)}</circle>'


def path(points: Sequence[tuple[float, float]], style: str) -> str:
    """A polyline; empty for no points."""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" class="{style}"/>' if points else ""


def band(xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], style: str) -> str:
    """The area between two lines."""
    corners = [*zip(xs, highs, strict=True), *reversed(list(zip(xs, lows, strict=True)))]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return f'<polygon points="{joined}" class="{style}"/>' if corners else ""


def number(value: float) -> str:
    """A short number for an axis."""
    if abs(value) >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{round(value, 10):g}"


def _title(content: str) -> str:
    return f"<title>{escape(content)}</title>" if content else ""
