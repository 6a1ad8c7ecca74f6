"""The terminal's page shows the sample's values."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from jurybox.protocol.scoreboard import EngineState
from jurybox.server import commands
from jurybox.server.commands.top import _bars, _engines, _models, screen
from jurybox.server.watch.sample import sample

SECOND = 10**9


def shown(scene, width: int = 160) -> str:
    before = scene.snapshot(taken=0)
    scene.add(0, 3, requests=100, rows=640, batches=10, forward_total_ns=SECOND, failed=3)
    scene.bucket(0, 3, "batch_rows", 7, 10)
    scene.bucket(0, 3, "request_ns", 20, 100)
    scene.engine(1, state=EngineState.ABSENT, restarts=3)
    scene.events.append({"at": 5.0, "level": "error", "event": "x", "fields": {}, "text": "Engine 1 was killed"})
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(sample(before, scene.snapshot(taken=2 * SECOND), scene.events)))
    return console.export_text()


def broken(text: str) -> set[str]:
    """Words of a page that are none of those there are: parts of one that was broken, or cut off."""
    known = re.findall(
        r"\S+",
        "model state rows/s p50 p99 batch sizes waiting lanes version lag errors engine busy requests/s expected wait "
        "device memory restarts ready absent serving hung of us ms s photo policy/agent0 failed",
    )
    return {word for word in re.findall(r"[a-z][a-z0-9/]*", text) if word not in known}


def test_top_shows_rates_models_engines_and_events(scene):
    text = shown(scene)
    assert "320 rows/s   50.0 requests/s".replace("50.0", "50") in text
    assert "64.0 of 64" in text
    assert "absent" in text
    assert "50%" in text
    assert "Engine 1 was killed" in text
    assert "3 failed" in text


@pytest.mark.parametrize("width", [70, 80, 160])
def test_a_narrow_terminal_shows_fewer_columns_and_breaks_no_word(scene, width):
    text = shown(scene, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert text.splitlines()[1].startswith("320 rows/s") and "\nms" not in text
    assert all(re.search(r"(/s|waiting|lanes|shared)$", line.rstrip()) for line in text.splitlines()[1:2])
    tables = text[text.index("model ") : text.index("Engine 1 was killed")]
    assert not broken(tables.replace("01:00:05", ""))
    heads = tables.splitlines()[0].split()
    assert {"model", "state", "rows/s", "p99", "batch", "lag", "errors"} <= set(heads)
    assert ("sizes" in heads) == (width == 160)


def test_page_and_terminal_have_the_same_columns_under_the_same_words():
    page = (Path(commands.__file__).parents[1] / "gateway/page/index.html").read_text()
    tables = [re.findall(r"<th [^>]*>([^<]+)</th>", head) for head in re.findall(r"<thead>.*?</thead>", page, re.S)]
    heads = [[head for head in table._heads if head != "sizes"] for table in (_models([]), _engines([]))]
    assert tables == heads


def test_the_distribution_is_drawn_from_one_row_on():
    assert _bars([0, 1, 0, 8, *[0] * 16]) == "▁·█·"
    assert _bars([0] * 20) == "-"


def test_top_of_an_idle_server_says_how_to_send_a_request(scene):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(sample(None, scene.snapshot())))
    assert "No request yet. From Python" in console.export_text()
    assert "No request yet" not in shown(scene)
