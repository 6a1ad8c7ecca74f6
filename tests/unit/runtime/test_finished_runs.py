"""--resume of a run that has made all its steps leaves its results as they are."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.runtime.toys import Rows, plan

from jurybox.training.interrupts import Signals
from jurybox.training.runtime.plan import End
from jurybox.training.runtime.progress import COLUMNS
from jurybox.training.runtime.run import run
from jurybox.training.runtime.settings import Settings
from jurybox.training.trainings.recorded_run import recorded_run

KEPT = ("summary.json", "timeline.json", "metrics.csv", "settings.json", "report.html")


def report(outcome, rows, log):
    return f"{outcome.text}: {outcome.evaluation}, {outcome.epochs} epochs, {len(rows)} rows"


def train(folder, steps=100, report=report, **options):
    planned = plan(steps=steps, evaluate=10**9)
    return recorded_run(planned, folder, (*COLUMNS, "eval_w"), Settings(), report, **options)


def contents(folder: Path):
    return {name: (folder / name).read_text() for name in KEPT}


@pytest.mark.parametrize("serial", [True, False])
def test_a_finished_run_is_not_run_again(tmp_path, serial):
    first = train(tmp_path, serial=serial)
    assert first.evaluation["eval_version"] == 9
    before, console = contents(tmp_path), Console(file=io.StringIO(), soft_wrap=True)

    def untouched():
        raise AssertionError("nothing is recorded, so no tracker is made")

    again = train(tmp_path, serial=serial, resume=True, console=console, trackers=untouched)
    assert again == first
    assert contents(tmp_path) == before
    assert f"the run in {tmp_path} has made all its {first.env_steps} steps" in console.file.getvalue()


def test_a_finished_run_goes_on_with_more_steps(tmp_path):
    train(tmp_path, serial=True)
    outcome = train(tmp_path, steps=200, serial=True, resume=True)
    assert outcome.env_steps == 200 and outcome.evaluation["eval_version"] == 19
    assert json.loads((tmp_path / "summary.json").read_text())["env_steps"] == 200


def test_a_finished_run_whose_report_failed_gets_it(tmp_path):
    def fails(outcome, rows, log):
        raise ZeroDivisionError("no games were filmed")

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, report=fails, serial=True)
    summary = (tmp_path / "summary.json").read_text()
    outcome = train(tmp_path, serial=True, resume=True)
    assert (tmp_path / "report.html").read_text() == report(outcome, [{}, {}], None), "of training and evaluation"
    assert (tmp_path / "summary.json").read_text() == summary


def test_a_run_that_was_stopped_at_its_last_step_goes_on(tmp_path):
    """Its learner and its evaluator may not have done all that they had to."""
    train(tmp_path, serial=True)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "end": End.SIGNAL.value}))
    outcome = train(tmp_path, serial=True, resume=True)
    assert outcome.end is End.STEPS and json.loads(path.read_text())["end"] == End.STEPS.value


def test_a_resumed_run_knows_its_last_evaluation(tmp_path):
    planned = plan(steps=100, evaluate=40)
    evaluation = run(planned, tmp_path, Rows(), serial=True).evaluation
    signals = Signals()
    signals.ask()
    outcome = run(planned, tmp_path, Rows(), serial=True, resume=True, signals=signals)
    assert evaluation and outcome.evaluation == evaluation


@pytest.mark.parametrize(("number", "drawn"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_sigterm_is_not_kept_waiting_for_a_report_and_ctrl_c_gets_one(tmp_path, number, drawn):
    signals = Signals()
    signals.ask(number)
    assert train(tmp_path, serial=True, signals=signals).end is End.SIGNAL
    assert (tmp_path / "report.html").exists() == drawn and (tmp_path / "summary.json").exists()
