"""A plan carried out with everything that a training leaves in its folder: settings, metrics, summary, report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jurybox.protocol.wire import build_version
from jurybox.training.recipes import settings_file
from jurybox.training.runlog import RunLog, Summary, Tracker, write_atomically
from jurybox.training.runtime.checkpoints import Checkpoints
from jurybox.training.runtime.launching import Launcher
from jurybox.training.runtime.outcome import Outcome
from jurybox.training.runtime.plan import Plan
from jurybox.training.runtime.run import run
from jurybox.training.runtime.stopping import Signals

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
        RunLogError: the folder holds another run, and `resume` is not set.
        NothingToResume: there is no checkpoint to go on from.
        CheckpointError: it was begun with other settings.
    """
    found = Checkpoints(folder / "checkpoints").latest() if resume else None
    if found is not None and may_change is not None:
        settings_file.check_same(folder, settings, may_change)
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
        write_atomically(folder / "report.html", report(outcome, log.rows()))
        log.finish([folder / "report.html"])
    return outcome
