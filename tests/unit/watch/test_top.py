"""The terminal's page shows what is in the sample."""

from __future__ import annotations

import io

from rich.console import Console

from jurybox.protocol.board import EngineState
from jurybox.server.commands.top import _bars, screen
from jurybox.server.watch.sample import sample

SECOND = 10**9


def shown(scene, width: int = 160) -> str:
    before = scene.snapshot(taken=0)
    scene.add(0, 3, requests=100, rows=640, batches=10, forward_total_ns=SECOND)
    scene.bucket(0, 3, "batch_rows", 7, 10)
    scene.bucket(0, 3, "request_ns", 20, 100)
    scene.engine(1, state=EngineState.ABSENT, restarts=3)
    scene.events.append({"at": 5.0, "level": "error", "event": "child died", "fields": {"role": "engine-1"}})
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(sample(before, scene.snapshot(taken=2 * SECOND), scene.events)))
    return console.export_text()


def test_top_shows_rates_models_engines_and_events(scene):
    text = shown(scene)
    assert "320 rows/s   50.0 requests/s".replace("50.0", "50") in text
    assert "64.0 of 64" in text
    assert "absent" in text
    assert "50%" in text
    assert "child died role=engine-1" in text


def test_a_narrow_terminal_breaks_nothing(scene):
    assert max(map(len, shown(scene, width=60).splitlines())) <= 60


def test_the_distribution_is_drawn_from_one_row_on():
    assert _bars([0, 1, 0, 8, *[0] * 16]) == "▁·█·"
    assert _bars([0] * 20) == "-"
