"""Runs that are recorded in a folder: settings, metrics, summary and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from rich.console import Console

from jurybox.protocol.wire import build_version
from jurybox.training.checkpoints import Checkpoint, CheckpointError, Checkpoints, write_atomically
from jurybox.training.interrupts import Signals
from jurybox.training.report import page
from jurybox.training.run_folder import RunLog, RunLogError, Summary, Tracker
from jurybox.training.runtime.launching import Launcher
from jurybox.training.runtime.plan import Outcome, Plan
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import going_on
from jurybox.training.runtime.settings import Settings

_NAME = "settings.json"


# The files and folders that a run writes. Anything else in the folder may be the user's.
_LEFT = (
    "metrics.csv",
    "summary.json",
    "evaluation.csv",
    "workflows.csv",
    "report.html",
    "timeline.json",
    "tensorboard",
    "checkpoints",
    "pool",
)


def begin_anew(folder: Path, settings: Settings) -> str:
    """Prepare a folder for a restart from the beginning, because its run ended before its first checkpoint.

    The run's files are moved to a subfolder ``before-1``, ``before-2``, ...

    Returns:
        A sentence about what was done.

    Raises:
        CheckpointError: no run was started in the folder, or one with other settings.
    """
    left = [folder / name for name in _LEFT if (folder / name).exists()]
    if not left and not (folder / _NAME).exists():
        raise CheckpointError(f"no checkpoint in {folder}, and no run was begun there: start without --resume")
    check_same(folder, settings)
    message = (
        f"the run in {folder} was ended before its first checkpoint, so there is nothing to go on from: it begins anew"
    )
    if not left:
        return message
    number = 1
    while (before := folder / f"before-{number}").exists():
        number += 1
    before.mkdir()
    for path in left:
        path.rename(before / path.name)
    return f"{message}; what it had recorded is in {before}"


def resumed(folder: Path, settings: Settings, notify: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint of the run in a folder; None if it has none and starts from the beginning.

    Args:
        say: called with a message if the run starts from the beginning.

    Raises:
        CheckpointError: no run was started in the folder, or one with other settings.
    """
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.sweep()
    found = checkpoints.latest()
    if found is None:
        notify(begin_anew(folder, settings))
    else:
        check_same(folder, settings)
    return found


def write_settings(folder: Path, settings: Settings) -> None:
    """Write settings.json."""
    write_atomically(folder / _NAME, json.dumps(settings.as_dict(), indent=2) + "\n")


def check_same(folder: Path, settings: Settings) -> None:
    """Check that a run is resumed with the settings that it was started with.

    Raises:
        CheckpointError: a setting differs that may not change (see `Settings.may_change`), or the run was started by
            a release whose settings have other names.
    """
    path = folder / _NAME
    if not path.exists():
        return
    now: dict[str, Any] = json.loads(json.dumps(settings.as_dict()))
    earlier: dict[str, Any] = {}
    for name, value in json.loads(path.read_text(encoding="utf-8")).items():
        parts = value if isinstance(value, dict) and name not in now else None
        earlier |= {name: value} if parts is None else {f"{name}.{inner}": each for inner, each in parts.items()}
    dropped = [name for name in earlier if name not in now]
    if dropped:
        renamed = [f"{name} is now {settings.renamed[name]}" for name in dropped if name in settings.renamed]
        unknown = [f"{name} is no setting any more" for name in dropped if name not in settings.renamed]
        raise CheckpointError(
            f"{path} is of an earlier release: {'; '.join((*renamed, *unknown))}. Resume the run with the release that "
            "began it, or start anew in another folder"
        )
    if settings.may_change is None:
        return
    different = [
        f"{name} was {earlier[name]!r}, is {value!r}"
        for name, value in now.items()
        if name not in settings.may_change and name in earlier and earlier[name] != value
    ]
    if different:
        raise CheckpointError(
            f"{folder} was trained with other settings ({'; '.join(different)}): give the same ones to resume it, or "
            "another folder to start anew"
        )


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
    if (living := going_on(folder)) is not None:
        raise RunLogError(
            f"a run is going on in {folder} (process {living}): wait for its end, or choose another folder"
        )

    console, resume = options.get("console"), options.get("resume", False)

    def notify(text: str) -> None:
        if console is not None:
            console.print(text, highlight=False, markup=False)

    found = resumed(folder, settings, notify) if resume else None
    options["resume"] = found is not None
    with RunLog(folder, columns, resume_at=found.env_steps if found else None) as log:
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
