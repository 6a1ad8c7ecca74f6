"""Render a report as a self-contained HTML file.

A report consists of the parts below; the template page.html contains all HTML and escapes all text.
"""

from __future__ import annotations

import base64
import functools
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from os import sched_getaffinity
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cv2
import numpy as np
import numpy.typing as npt

from jurybox.protocol.wire import build_version
from jurybox.training.report import charts
from jurybox.training.runtime.plan import Outcome
from jurybox.training.runtime.progress import Timeline

if TYPE_CHECKING:
    from jinja2 import Template

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Table:
    """A table; columns after the first are right-aligned."""

    kind: ClassVar[str] = "table"
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Details:
    """Collapsed parts."""

    kind: ClassVar[str] = "details"
    summary: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Legend:
    """A legend of (name, style) pairs; "ring" in a style draws its mark as a ring."""

    kind: ClassVar[str] = "legend"
    entries: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Picture:
    """An image whose `source` is a data URI; width and height in pixels."""

    kind: ClassVar[str] = "picture"
    source: str
    width: int
    height: int
    alt: str
    style: str = ""

    @classmethod
    def jpeg(cls, pixels: npt.NDArray[np.uint8], side: int, alt: str) -> Picture:
        """Encode pixels, uint8 (height, width, 3) RGB, as a square JPEG with sides of `side` pixels."""
        shrunk = cv2.resize(pixels, (side, side), interpolation=cv2.INTER_AREA)
        done, data = cv2.imencode(".jpg", cv2.cvtColor(shrunk, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 86])
        if not done:
            raise ValueError(f"expected pixels that JPEG can hold, got {pixels.dtype} {pixels.shape}")
        return cls(_data_uri("image/jpeg", data.tobytes()), side, side, alt)

    @classmethod
    def gif(cls, path: Path, width: int, height: int, alt: str) -> Picture:
        """Read an animated GIF from a file."""
        return cls(_data_uri("image/gif", path.read_bytes()), width, height, alt, "film")


@dataclass(frozen=True, slots=True)
class Shot:
    """A picture of a gallery, with a caption and the change of its score, or None."""

    picture: Picture
    style: str
    caption: str
    change: float | None = None


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures in named columns, row by row; `columns` are (name, style) pairs, four of them."""

    kind: ClassVar[str] = "gallery"
    columns: Sequence[tuple[str, str]]
    shots: Sequence[Shot]


@dataclass(frozen=True, slots=True)
class Pair:
    """A picture before and after, with a caption for each, and the change of its score."""

    before: Picture
    after: Picture
    captions: tuple[str, str]
    change: float


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pictures before and after, six in a row on a wide screen, three on a phone."""

    kind: ClassVar[str] = "pairs"
    pairs: Sequence[Pair]


@dataclass(frozen=True, slots=True)
class Figures:
    """Large figures with a few words each, under a heading."""

    kind: ClassVar[str] = "figures"
    heading: str
    figures: Sequence[tuple[str, str]]


# A string is rendered as a paragraph, a mapping as a list of names and values.
Part = str | Mapping[str, Any] | Table | Details | Legend | Picture | Gallery | Pairs | Figures | charts.Chart


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page with a heading; `note` is a sentence in small print below it."""

    kind: ClassVar[str] = "section"
    heading: str
    parts: Sequence[Part]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The result: `answer` ("yes", "no" or "undecided") sets its colour."""

    kind: ClassVar[str] = "answer"
    answer: str
    headline: str
    parts: Sequence[Part]
    note: str = ""


def render(title: str, heading: str, sections: Iterable[Section | Conclusion | None]) -> str:
    """Render a document; sections that are None are omitted."""
    return _template().render(
        title=title,
        heading=heading,
        style=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        sections=[section for section in sections if section is not None],
    )


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template("page.html")


def over_steps(
    rows: Sequence[Mapping[str, float]], column: str, label: str, up: str, title: str, across: str = "env steps"
) -> list[charts.Chart]:
    """Plot a column of metrics.csv over env steps; empty if fewer than two rows have it."""
    found = [row for row in rows if column in row]
    if len(found) < 2:
        return []
    line = charts.stretches(label, [row["env_steps"] for row in found], [row[column] for row in found])
    return [charts.curves([line], title, across, up)]


def return_curve(rows: Sequence[Mapping[str, float]], heading: str, across: str, up: str) -> Section | None:
    """Plot the mean return over env steps; return None if fewer than two rows have it."""
    drawn = over_steps(rows, "return_mean", "return", up, f"mean return over {across}", across)
    return Section(heading, drawn) if drawn else None


def ended(outcome: Outcome, episodes: str = "episodes") -> str:
    """Return a sentence about the end of a run and what it made; `episodes` is the training's name for them."""
    return (
        f"{outcome.text[0].upper()}{outcome.text[1:]}: {outcome.episodes:,} {episodes}, {outcome.env_steps:,} env "
        f"steps and {outcome.learner_steps:,} learner steps in {outcome.seconds:.0f} s."
    )


def worked_when(timeline: Path) -> Section:
    """Create the section with the timeline of the roles from a run's timeline.json."""
    drawn = charts.timeline(Timeline.read(timeline), "when each process worked, in the last seconds")
    note = "Filled: at work. Line: waiting. Percentages are of the whole run."
    return Section("Who worked when", [drawn], note)


def the_run(
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    command: str,
    outcome: Outcome | None = None,
    *,
    steps: str = "Env steps",
    packages: Sequence[str] = ("numpy",),
    note: str = "",
) -> Section:
    """Create the section about the run: facts, counts, machine, package versions, command and settings.

    Args:
        facts: entries that come first, by name.
        settings: settings of the run.
        command: command that repeats the run; may be empty.
        outcome: source of the counts; None: no counts.
        steps: the training's name for env steps.
        packages: packages whose versions are listed.
        note: a sentence in small print.
    """
    counts = (
        {}
        if outcome is None
        else {
            steps: f"{outcome.env_steps:,}",
            "Learner steps": f"{outcome.learner_steps:,}",
            "Time": f"{outcome.seconds:.0f} s",
            "Restarts": outcome.restarts,
        }
    )
    versions = [f"jurybox {build_version()}", f"Python {platform.python_version()}"]
    versions += [f"{name} {metadata.version(name)}" for name in packages]
    every_run = {
        "Machine": f"{len(sched_getaffinity(0))} cores, {platform.machine()}, {platform.system()}",
        "Versions": ", ".join(versions),
        **({"Command": command} if command else {}),
    }
    return Section("The run", [{**facts, **counts, **every_run}, Details("Settings", [settings])], note)


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
