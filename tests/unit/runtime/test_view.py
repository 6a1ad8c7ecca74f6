"""The display of a run: a table on a terminal, lines elsewhere, and all messages in one file."""

from __future__ import annotations

import io
import time
import uuid

import pytest
from rich.console import Console
from tests.unit.runtime.toys import Rows, plan

from jurybox.protocol.segment import segment_name
from jurybox.training.runtime import progress
from jurybox.training.runtime.progress import RunMetrics, View
from jurybox.training.runtime.scoreboard import ControlWord, RunScoreboard, State, Subject, Word

PLAN = plan(actors=2)


@pytest.fixture
def scoreboard():
    scoreboard = RunScoreboard.create(segment_name(uuid.uuid4().hex[:8], "run"), PLAN, {"rows": "x"}, {"policy": "y"})
    scoreboard.words[0][Word.STATE] = State.RUNNING
    scoreboard.words[0][Word.ENV_STEPS] = 1234
    scoreboard.words[0][Word.BUSY], scoreboard.words[0][Word.WAITED] = 3, 1
    scoreboard.words[2][Word.WAITS_FOR] = Subject.STEPS << 32
    scoreboard.words[2][Word.WAITS_SINCE] = time.monotonic_ns() - 5 * 10**9
    scoreboard.orders[1][ControlWord.RESTARTS] = 7
    yield scoreboard
    scoreboard.close()


def shown(scoreboard, terminal, folder, moments):
    clock = iter(moments)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    metrics = RunMetrics(PLAN, scoreboard, Rows())
    metrics.numbers["return_mean"] = 2.5
    with View(PLAN, scoreboard, metrics, console, folder / "run.log", clock=lambda: next(clock)) as view:
        view.tick()
        view.log("learner [bold]failed[/bold]")
        view.tick()
    return out.getvalue()


def test_elsewhere_than_on_a_terminal_there_is_a_line_now_and_then(scoreboard, tmp_path):
    text = shown(scoreboard, False, tmp_path, [0.0, 1.0, 11.0])
    assert text.splitlines() == [
        "learner [bold]failed[/bold]",
        "11 s  1,234/300 steps (0/s)  0 learned (0/s)  0 episodes  return_mean 2.5",
    ]
    assert (tmp_path / "run.log").read_text().endswith(" learner [bold]failed[/bold]\n")


def test_a_terminal_gets_a_table_of_all_roles(scoreboard, tmp_path, monkeypatch):
    now = int(scoreboard.words[2][Word.WAITS_SINCE]) + 5 * 10**9  # or a slow machine shows more seconds
    monkeypatch.setattr(progress.time, "monotonic_ns", lambda: now)
    text = shown(scoreboard, True, tmp_path, [0.0, 1.0, 11.0])
    for part in ("actor-0", "running", "1,234", "75%", "steps 5.0 s", "7", "return_mean 2.5"):
        assert part in text


@pytest.mark.parametrize(("terminal", "part"), [(False, "  learner dropped 5,678 rows\n"), (True, " 5,678 ")])
def test_rows_that_a_learner_dropped_are_shown(scoreboard, tmp_path, terminal, part):
    scoreboard.words[2][Word.ROWS_DROPPED] = 5678
    assert part in shown(scoreboard, terminal, tmp_path, [0.0, 1.0, 11.0])
    assert scoreboard.rows_dropped == {"learner": 5678}


def test_the_first_speed_after_a_resume_is_that_of_the_steps_since(scoreboard):
    moments, rows = [0.0], Rows()
    scoreboard.words[0][Word.ENV_STEPS] = 900
    metrics = RunMetrics(plan(actors=2, log_every=1000), scoreboard, rows, clock=lambda: moments[0])
    metrics.restore({"seconds": 90.0, "returns": [], "lengths": [], "best": None, "row_at": 0})
    moments[0], scoreboard.words[0][Word.ENV_STEPS] = 10.0, 1000
    metrics.row_if_due()
    moments[0], scoreboard.words[0][Word.ENV_STEPS] = 60.0, 2000
    metrics.row_if_due()
    speeds = [(step, values["seconds"], values["steps_per_second"]) for step, values in rows]
    assert speeds == [(1000, 100.0, 10.0), (2000, 150.0, 20.0)]


def test_a_row_has_the_mean_of_all_numbers_however_many_came_in_each_report(scoreboard):
    rows = Rows()
    metrics = RunMetrics(plan(actors=2, log_every=1000), scoreboard, rows)
    for total, count in ((9.0, 9), (0.0, 1)):
        metrics.take({"kind": "report", "episodes": [], "metrics": {"loss": (total, count)}})
    metrics.row_if_due()
    assert rows[0][1]["loss"] == 0.9
