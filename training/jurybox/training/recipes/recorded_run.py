"""A plan carried out with everything that a training leaves in its folder: settings, metrics, summary, report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jurybox.protocol.wire import build_version
from jurybox.training.interrupts import Signals
from jurybox.training.recipes import settings_file
from jurybox.training.report import page
from jurybox.training.run_folder import RunLog, RunLogError, Summary, Tracker, write_atomically
from jurybox.training.runtime.checkpoints import Checkpoints
from jurybox.training.runtime.launching import Launcher
from jurybox.training.runtime.plan import Outcome, Plan
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import going_on

Metrics = Sequence[Mapping[str, float]]


def recorded_run(
    planned: Plan,
    folder: Path,
    columns: Sequence[str],
    settings: Mapping[str, Any],
    report: Callable[[Outcome, Metrics], str],
    *,
    serial: bool = False,
    resume: bool = False,
    may_change: Collection[str] | None = None,
    console: Console | None = None,
    signals: Signals | None = None,
    trackers: Callable[[], Sequence[Tracker]] = lambda: (),
    launcher: Launcher | None = None,
) -> Outcome:
    """Carry out a plan; leaves settings.json, metrics.csv, summary.json and report.html in `folder`.

    Args:
        columns: of metrics.csv.
        settings: as JSON holds them.
        report: gives the report's HTML, from the outcome and the rows of metrics.csv.
        serial, resume, console, signals, launcher: see `run`.
        may_change: settings that may be others when a run is resumed; None: all.
        trackers: made when the folder is known to be usable.

    Raises:
        RunLogError: the folder holds another run, and `resume` is not set; or a run is going on there.
        CheckpointError: no run was begun there, or with other settings.
    """
    if (living := going_on(folder)) is not None:
        raise RunLogError(
            f"a run is going on in {folder} (process {living}): wait for its end, or choose another folder"
        )
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.sweep()
    found = checkpoints.latest() if resume else None
    if found is not None and may_change is not None:
        settings_file.check_same(folder, settings, may_change)
    if resume and found is None:
        said = settings_file.begin_anew(folder, settings, may_change)
        resume = False
        if console is not None:
            console.print(said, highlight=False, markup=False)
    with RunLog(folder, columns, resume_at=found.env_steps if found else None) as log:
        settings_file.write(folder, settings)
        log.add_trackers(trackers())
        outcome = run(
            planned, folder, log, serial=serial, resume=resume, console=console, signals=signals, launcher=launcher
        )
        log.summarise(
            Summary(
                env_steps=outcome.env_steps,
                learner_steps=outcome.learner_steps,
                episodes=outcome.episodes,
                seconds=outcome.seconds,
                return_mean=outcome.return_mean,
                return_std=outcome.return_std,
                seed=planned.seed,
                version=build_version(),
            )
        )
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
            failed_report(folder, f"{outcome.text}.", error, settings)
            raise
        log.finish([folder / "report.html"])
    return outcome


def failed_report(
    folder: Path, headline: str, error: BaseException, settings: Mapping[str, Any], command: str = ""
) -> None:
    """The report of a training whose end failed: what there is, and why there is no more."""
    sections = [
        "<h1>Jurybox: a training whose end failed</h1>",
        page.section(
            "How it ended",
            page.paragraph(headline),
            page.paragraph(f"What should follow here could not be made: {type(error).__name__}: {error}"),
            page.paragraph("metrics.csv, summary.json and the checkpoints are whole; --resume tries the end again."),
        ),
        page.section("The run", page.facts({"Command": command} if command else {}), page.facts(settings)),
    ]
    write_atomically(folder / "report.html", page.page("Jurybox report", sections))
