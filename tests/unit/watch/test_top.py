"""The terminal's page shows the sample's values."""

from __future__ import annotations

import io
import os
import re
import termios
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.clocks import Clock, given
from typer.testing import CliRunner

import jurybox.client
from jurybox.protocol.errors import ServerGone
from jurybox.protocol.scoreboard import EngineState
from jurybox.server import commands
from jurybox.server.commands import top
from jurybox.server.commands.app import app
from jurybox.server.commands.top import _bars, _engines, _Keys, _models, screen
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


@pytest.mark.parametrize(
    ("counts", "drawn"),
    [
        ([0, 8, 4, 1, 0, 0], "█▄▁·"),
        ([0, 0, 0, 0, 0, 0, 1, 0], "·····█"),
        ([9, 1], "█"),
        ([0, 100, 1, 0, 0], "█▁··"),
    ],
)
def test_the_distribution_has_a_bar_for_every_size_that_came(counts, drawn):
    assert _bars([*counts, *[0] * (10 - len(counts))][:10]).startswith(drawn)
    assert len(_bars([*counts, *[0] * (10 - len(counts))])) == max(4, len(drawn))


def test_top_tells_what_waits_is_leased_and_takes_memory(scene):
    scene.add(0, 3, requests=1)
    assert "MiB on devices" not in text_of(scene) and "MiB shared" in text_of(scene)
    scene.lease(0, 3, 8)
    scene.add(0, 3, waiting=4)
    scene.engine(0, device_bytes=3 << 20, expected_wait=2_000_000)
    text = text_of(scene)
    assert "4 waiting   1 lanes" in text and "MiB shared, 3 MiB on devices" in text
    first, second = (line.split() for line in text.splitlines() if re.match(r"[01] +serving", line))
    assert first[2:] == ["0%", "0", "2.0", "ms", "3", "MiB", "0"] and second[2:] == ["0%", "0", "0", "us", "-", "0"]


def text_of(scene) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(screen(sample(None, scene.snapshot(), scene.events)))
    return console.export_text()


@pytest.mark.parametrize(
    ("per_second", "shown"), [(0.0, "0"), (0.25, "0.2"), (9.94, "9.9"), (10.0, "10"), (1234.5, "1,234")]
)
def test_small_rates_have_a_decimal_and_large_ones_none(scene, per_second, shown):
    document = sample(None, scene.snapshot())
    document["rates"]["rows"] = document["models"][0]["rates"]["rows"] = per_second
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(screen(document))
    lines = console.export_text().splitlines()
    assert any(line.startswith(f"{shown} rows/s") for line in lines)
    assert next(line.split()[2] for line in lines if line.startswith("photo")) == shown


def test_what_is_wrong_is_coloured(scene):
    document = sample(None, scene.snapshot())
    photo, policy = document["models"]
    photo["weights"]["lag"], policy["weights"]["lag"] = 1, 2
    photo["failures"]["expired"], policy["state"] = 1, "quarantined"
    document["engines"][1]["state"] = "loading"
    cells = {row[0].plain: dict(zip(_models([])._heads, row, strict=True)) for row in _models(document["models"]).rows}
    photo, policy = cells["photo"], cells["policy/agent0"]
    assert [str(one["lag"].style) for one in (photo, policy)] == ["", "yellow"]
    assert [str(one["errors"].style) for one in (photo, policy)] == ["red", ""]
    assert [str(one["state"].style) for one in (photo, policy)] == ["green", "red"]
    assert [str(row[1].style) for row in _engines(document["engines"]).rows] == ["green", "yellow"]


def test_the_last_six_events_are_shown(scene):
    scene.events += [
        {"at": 0.0, "level": "info", "event": "x", "fields": {}, "text": f"event {number}"} for number in range(8)
    ]
    assert re.findall(r"event \d", text_of(scene)) == [f"event {number}" for number in range(2, 8)]


# ----
# The command.


class WatchingTime(Clock):
    """A clock for which a list of functions says what happens in each sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.happens = list[Callable[[], None]]()

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.happens.pop(0)()


@pytest.fixture
def clock(monkeypatch) -> WatchingTime:
    made = WatchingTime()
    given(made, monkeypatch, top)
    return made


@pytest.fixture
def connections(monkeypatch, scene) -> list[Any]:
    """What was opened and closed of connections to the scene's server; `failing` holds errors of its status."""
    calls: list[Any] = []

    def connect(address, timeout):
        calls.append((address, timeout))
        return SimpleNamespace(status=status, close=lambda: calls.append("closed"))

    def status():
        if scene.failing:
            raise scene.failing.pop(0)
        return scene.document()

    scene.failing = []
    monkeypatch.setattr(jurybox.client, "connect", connect)
    return calls


def test_once_is_one_interval_of_a_server(scene, connections, clock):
    scene.add(0, 3, requests=100, rows=100)
    clock.happens = [lambda: scene.add(0, 3, requests=1)]
    result = CliRunner().invoke(app, ["top", "--once", "--interval", "3", "--address", "ipc:///x/engine"])
    assert result.exit_code == 0, result.output
    assert clock.slept == [3.0] and connections == [("ipc:///x/engine", 2.0), "closed"]
    lines = result.stdout.splitlines()
    assert lines[0].startswith("jurybox ") and "serving" in lines[0]
    assert "rows/s" in lines[1] and "sizes" in result.stdout, "as wide as it needs, where there is no terminal"
    assert sum(line.startswith("photo") for line in lines) == 1


def test_a_server_that_goes_is_told_and_looked_for_until_it_is_back(scene, connections, clock, monkeypatch):
    screens = io.StringIO()
    monkeypatch.setattr(top, "Console", partial(Console, file=screens, width=150, force_terminal=True))
    monkeypatch.setattr("sys.stdin", None)

    def seen(*words: str) -> list[bool]:
        text = screens.getvalue()
        screens.truncate(0)
        screens.seek(0)
        return [word in text for word in words]

    def goes() -> None:
        assert seen("photo", "is gone") == [True, False]
        scene.failing = [ServerGone("nobody answers")]

    def comes_back() -> None:
        assert seen("photo", "the server is gone: nobody answers") == [True, True]

    def interrupt() -> None:
        assert seen("photo", "is gone") == [True, False]
        raise KeyboardInterrupt

    clock.happens = [goes, comes_back, interrupt]
    result = CliRunner().invoke(app, ["top", "--interval", "2", "--address", "ipc:///x/engine"])
    assert result.exit_code == 0, result.output
    assert clock.slept == [2.0] * 3 and not clock.happens
    assert connections == [("ipc:///x/engine", 2.0), "closed"] * 2


def test_without_a_server_top_ends_with_its_message(scene, connections, clock):
    scene.failing = [ServerGone("nobody answers")]
    result = CliRunner().invoke(app, ["top", "--address", "ipc:///x/engine"])
    assert (result.exit_code, result.stderr) == (1, "jurybox: nobody answers\n")
    assert connections == [("ipc:///x/engine", 2.0), "closed"]


@pytest.fixture
def terminal(monkeypatch) -> Iterator[int]:
    """The other end of the terminal that standard input is."""
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield ours


@pytest.mark.parametrize(("typed", "quits"), [(b"q", True), (b"xQ", True), (b"x", False), (b"", False)])
def test_q_quits_and_the_terminal_is_as_before(terminal, typed, quits):
    def echoes() -> bool:
        return bool(termios.tcgetattr(terminal)[3] & termios.ECHO)

    with _Keys() as keys:
        assert not echoes()
        os.write(terminal, typed)
        assert keys.quit_within(30.0 if quits else 0.01) == quits
    assert echoes()
    os.close(terminal)


def test_a_terminal_that_is_closed_quits(terminal):
    keys = _Keys()
    os.close(terminal)
    assert keys.quit_within(30.0)
