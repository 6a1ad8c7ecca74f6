"""The page itself: one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt


def page(title: str, sections: Iterable[str]) -> str:
    """A whole document; `sections` are HTML."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An empty icon: without one, a browser asks the host for its favicon.
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def section(heading: str, *content: str, note: str = "") -> str:
    """A part of the page under a heading; `note` is a sentence in small print below it."""
    small = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(heading)}</h2>{''.join(content)}{small}</section>"


def paragraph(text: str, style: str = "") -> str:
    return f'<p class="{style}">{escape(text)}</p>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """A table; columns after the first are set flush right when they are numbers."""
    kind = "numbers" if numbers else "words"
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def facts(values: Mapping[str, Any]) -> str:
    """Names and values in two columns."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in values.items())
    return f"<dl>{rows}</dl>"


def details(summary: str, *content: str) -> str:
    """Content that is shown when asked for."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(content)}</details>"


def picture(pixels: npt.NDArray[np.uint8], side: int, alt: str) -> str:
    """An image as JPEG in a data URI.

    Args:
        pixels: uint8 (height, width, 3) RGB, square.
        side: pixels of the JPEG.
    """
    shrunk = cv2.resize(pixels, (side, side), interpolation=cv2.INTER_AREA)
    done, data = cv2.imencode(".jpg", cv2.cvtColor(shrunk, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 86])
    if not done:
        raise ValueError(f"expected pixels that JPEG can hold, got {pixels.dtype} {pixels.shape}")
    source = base64.b64encode(data.tobytes()).decode()
    return f'<img src="data:image/jpeg;base64,{source}" width="{side}" height="{side}" alt="{escape(alt)}">'
