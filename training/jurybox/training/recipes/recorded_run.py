"""Runs that are recorded in a folder: settings, metrics, summary and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rich.console import Console

from jurybox.protocol.wire import build_version
from jurybox.training.checkpoints import write_atomically
from jurybox.training.interrupts import Signals
from jurybox.training.report import page
from jurybox.training.run_folder import Summary, Tracker, recording, write_settings
from jurybox.training.runtime.launching import Launcher
from jurybox.training.runtime.plan import Outcome, Plan
from jurybox.training.runtime.run import run
from jurybox.training.runtime.settings import Settings

Metrics = Sequence[Mapping[str, float]]


class RunOptions(TypedDict, total=False):
    """Options that `recorded_run` passes to `runtime.run.run`; see there."""

    serial: bool
    resume: bool
    console: Console | None
    signals: Signals | None
    launcher: Launcher | None


class RecordingOptions(RunOptions, total=False):
    """Options that a training passes to `recorded_run`."""

    trackers: Callable[[], Sequence[Tracker]]


def recorded_run(
    planned: Plan,
    folder: Path,
    columns: Sequence[str],
    settings: Settings,
    report: Callable[[Outcome, Metrics], str],
    *,
    trackers: Callable[[], Sequence[Tracker]] = lambda: (),
    **options: Unpack[RunOptions],
) -> Outcome:
    """Carry out a plan, and write settings.json, metrics.csv, summary.json and report.html to `folder`.

    Args:
        columns: columns of metrics.csv.
        settings: settings of the training, for settings.json.
        report: returns the report's HTML for the outcome and the rows of metrics.csv.
        trackers: creates the trackers; called after the folder has been checked.
        options: serial, resume, console, signals and launcher; see `runtime.run.run`.

    Raises:
        RunLogError: the folder holds another run and `resume` is not set, or a run is in progress there.
        CheckpointError: `resume` is set, and no run was started in the folder, or one with other settings.
    """
    console, resume = options.get("console"), options.get("resume", False)

    def notify(text: str) -> None:
        if console is not None:
            console.print(text, highlight=False, markup=False)

    with recording(folder, columns, settings, notify, resume=resume) as (log, found):
        options["resume"] = found is not None
        write_settings(folder, settings)
        log.add_trackers(trackers())
        outcome = run(planned, folder, log, **options)
        counted = ("env_steps", "learner_steps", "episodes", "seconds", "return_mean", "return_std")
        numbers = {name: getattr(outcome, name) for name in counted}
        log.summarise(Summary(**numbers, seed=planned.seed, version=build_version()))
        log.extend_summary(
            end=outcome.text,
            restarts=outcome.restarts,
            forced_syncs=outcome.forced_syncs,
            busy=outcome.busy,
            serial=outcome.serial,
            evaluation=outcome.evaluation,
        )
        try:
            write_atomically(folder / "report.html", report(outcome, log.rows()))
        except Exception as error:
            failed_report(folder, f"{outcome.text}.", error, settings.as_dict())
            raise
        log.finish([folder / "report.html"])
    return outcome


def failed_report(
    folder: Path, headline: str, error: BaseException, settings: Mapping[str, Any], command: str = ""
) -> None:
    """Write a report with the error, for a training that failed after its last step."""
    sentences = [
        headline,
        f"What should follow here could not be made: {type(error).__name__}: {error}",
        "metrics.csv, summary.json and the checkpoints are whole; --resume tries the end again.",
    ]
    sections = [page.Section("How it ended", sentences), page.the_run({}, settings, command)]
    write_atomically(
        folder / "report.html", page.render("Jurybox report", "Jurybox: a training whose end failed", sections)
    )
