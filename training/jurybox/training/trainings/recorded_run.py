"""Runs that are recorded in a folder: settings, metrics, summary and report."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rich.console import Console

from jurybox.protocol.wire import build_version
from jurybox.training.checkpoints import Checkpoint, write_atomically
from jurybox.training.interrupts import Signals
from jurybox.training.report import page
from jurybox.training.run_folder import RunLog, Summary, Tracker, recording, write_settings
from jurybox.training.runtime.launching import Launcher
from jurybox.training.runtime.plan import End, Outcome, Plan
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.settings import Settings
from jurybox.training.runtime.shared_resources import SharedResources, counted

Metrics = Sequence[Mapping[str, float]]

# Attributes of an outcome in summary.json: those of every training's `Summary`, and those beyond it.
_COUNTED = ("env_steps", "learner_steps", "episodes", "seconds", "return_mean", "return_std")
_SAID = ("restarts", "forced_syncs", "busy", "serial", "evaluation", "rows_dropped", "learned")


class RunOptions(TypedDict, total=False):
    """Options that `recorded_run` passes to `runtime.run.run`; see there."""

    serial: bool
    resume: bool
    console: Console | None
    signals: Signals | None
    launcher: Launcher | None
    watch: Callable[[SharedResources], None] | None


class RecordingOptions(RunOptions, total=False):
    """Options that a training passes to `recorded_run`."""

    trackers: Callable[[], Sequence[Tracker]]


def recorded_run(
    planned: Plan,
    folder: Path,
    columns: Sequence[str],
    settings: Settings,
    report: Callable[[Outcome, Metrics, RunLog], str | None],
    *,
    files: Sequence[str] = (),
    notify: Callable[[str], None] | None = None,
    trackers: Callable[[], Sequence[Tracker]] = lambda: (),
    **options: Unpack[RunOptions],
) -> Outcome:
    """Carry out a plan, and write settings.json, metrics.csv, summary.json and report.html to `folder`.

    After SIGTERM no report is written: the run ends within seconds, and continues with `resume`.

    If `resume` is set and the run has made all its steps already, nothing is trained; only its report is written again.

    Args:
        columns: columns of metrics.csv.
        settings: settings of the training, for settings.json.
        report: returns the report's HTML for the outcome and the rows of metrics.csv, and may add to the summary; None:
            there shall be none.
        files: names of further files that it writes to `folder`, for the trackers.
        notify: accepts lines about the folder; None: they go to the console.
        trackers: creates the trackers; called after the folder has been checked.
        options: serial, resume, console, signals, launcher and watch; see `runtime.run.run`.

    Raises:
        RunLogError: the folder holds another run and `resume` is not set, or a run is in progress there.
        CheckpointError: `resume` is set, and no run was started in the folder, or one with other settings.
        ConfigError: a learner would make no step in the whole run.
    """
    planned.check_learns()
    folder = folder.absolute()  # an environment may change the current folder
    console, resume = options.get("console"), options.get("resume", False)

    def to_console(text: str) -> None:
        if console is not None:
            console.print(text, highlight=False, markup=False)

    notify = notify or to_console
    with recording(folder, columns, settings, notify, resume=resume) as (log, found):
        outcome = None if found is None else _finished(folder, planned, found)
        if outcome is None:
            options["resume"] = found is not None
            write_settings(folder, settings)
            log.add_trackers(trackers())
            outcome = run(planned, folder, log, **options)
            numbers = {name: getattr(outcome, name) for name in _COUNTED}
            log.summarise(Summary(**numbers, seed=planned.seed, version=build_version()))
            log.extend_summary(end=outcome.text, **{name: getattr(outcome, name) for name in _SAID})
        else:
            notify(f"the run in {folder} has made all its {outcome.env_steps:,} steps: it stays as it is")
        signals = options.get("signals")
        if outcome.end is End.SIGNAL and signals is not None and signals.first == signal.SIGTERM:
            # Whoever sends it kills what has not ended in time, and drawing takes seconds. Ctrl-C gets its report.
            log.finish([])
            return outcome
        try:
            text = report(outcome, log.rows(), log)
            if text is None:
                log.finish([])
                return outcome
            write_atomically(folder / "report.html", text)
        except Exception as error:
            failed_report(folder, f"{outcome.text}.", error, settings.as_dict())
            raise
        log.finish([folder / "report.html", *(folder / name for name in files)])
    return outcome


def _finished(folder: Path, planned: Plan, found: Checkpoint) -> Outcome | None:
    """The outcome of a run that has made all its steps, from its summary and newest checkpoint; None: it can go on.

    Running it once more would replace its summary and timeline by those of a run that did nothing.
    """
    path = folder / "summary.json"
    if found.env_steps < planned.budget.steps or not path.exists():
        return None
    summary = json.loads(path.read_text(encoding="utf-8"))
    made = found.env_steps, counted(found, Word.LEARNER_STEPS)
    # The summary may be of an earlier part of the run, which was killed later, or a part may have been stopped.
    if (
        "evaluation_failed" in summary
        or not str(summary.get("end")).startswith(End.STEPS.value)
        or (summary["env_steps"], summary["learner_steps"]) != made
    ):
        return None
    known = {name: summary[name] for name in (*_COUNTED, *_SAID) if name in summary}
    return Outcome(end=End.STEPS, text=summary["end"], epochs=counted(found, Word.EPOCHS), **known)


def failed_report(folder: Path, headline: str, error: BaseException, settings: Mapping[str, Any]) -> None:
    """Write a report with the error, for a training that failed after its last step."""
    sentences = [
        headline,
        f"What should follow here could not be made: {type(error).__name__}: {error}",
        "metrics.csv, summary.json and the checkpoints are whole; --resume tries the end again.",
    ]
    sections = [page.Section("How it ended", sentences), page.the_run({}, settings, "")]
    write_atomically(
        folder / "report.html", page.render("Jurybox report", "Jurybox: a training whose end failed", sections)
    )
