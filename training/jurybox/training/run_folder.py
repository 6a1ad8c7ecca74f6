"""The folder of a run: its lock, settings.json, metrics.csv, TensorBoard files and summary.json; and how it resumes."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from jurybox.training.checkpoints import Checkpoint, CheckpointError, Checkpoints, write_atomically, write_table
from jurybox.training.errors import UsageError
from jurybox.training.spaces import audits

_LOCK = ".lock"
_SETTINGS = "settings.json"
# What a run records, in files and folders. Anything else in the folder may be the user's.
_RECORDED = (
    *("metrics.csv", "summary.json", "evaluation.csv", "workflows.csv", "report.html", "timeline.json"),
    *("tensorboard", "checkpoints", "pool"),
)


class RunLogError(UsageError, RuntimeError):
    """The folder of a run cannot be used as it is; the message contains a remedy."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder. Use it in a ``with`` statement.

    The folder is created if it does not exist. The lock ends with the process, also after ``kill -9``.

    Raises:
        RunLogError: a run is going on in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunLogError(
                f"a run is going on in {folder} (process {file.read()}): wait for its end, or choose another folder"
            ) from error
        except OSError:
            pass  # a file system without locks, where runs must keep apart themselves
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def check_alone(folder: Path) -> None:
    """Raise RunLogError if a run is going on in a folder. Creates nothing."""
    if (folder / _LOCK).exists():
        with alone_in(folder):
            pass


def recorded(folder: Path) -> list[Path]:
    """Return the files and folders that a run has recorded in its folder."""
    return [folder / name for name in _RECORDED if (folder / name).exists()]


def is_begun(folder: Path) -> bool:
    """Return whether a run was started in a folder. One that was killed before leaves at most a lock and a log."""
    return bool(recorded(folder)) or (folder / _SETTINGS).exists()


class RunSettings(Protocol):
    """The settings of a run, such as `jurybox.training.runtime.settings.Settings`."""

    @property
    def may_change(self) -> Sequence[str] | None:
        """Names of settings that may differ when the run is resumed; None: all of them."""

    def as_dict(self) -> dict[str, Any]:
        """Return flat JSON values."""


def write_settings(folder: Path, settings: RunSettings) -> None:
    """Write settings.json."""
    write_atomically(folder / _SETTINGS, json.dumps(settings.as_dict(), indent=2) + "\n")


def check_same(folder: Path, settings: RunSettings) -> None:
    """Check that a run is resumed with the settings that it was started with.

    Raises:
        CheckpointError: a setting differs that may not change (see `may_change`), or the run has settings that this
            build does not know.
    """
    path = folder / _SETTINGS
    if not path.exists():
        return
    now: dict[str, Any] = json.loads(json.dumps(settings.as_dict()))
    earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    may_change = now.keys() if settings.may_change is None else settings.may_change
    different = [
        f"{name} was {earlier[name]!r}, is {value!r}"
        for name, value in now.items()
        if name not in may_change and name in earlier and earlier[name] != value
    ]
    if different:  # first, since another algorithm has other settings
        raise CheckpointError(
            f"{folder} was trained with other settings ({'; '.join(different)}): give the same ones to resume it, or "
            "another folder to start anew"
        )
    if unknown := earlier.keys() - now.keys():
        raise CheckpointError(
            f"{path} has settings that this build does not know: {', '.join(sorted(unknown))}. Resume the run with the "
            "build that began it, or start anew in another folder"
        )


def resumed(folder: Path, settings: RunSettings, notify: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint of the run in a folder; None if it has none and starts from the beginning.

    Args:
        notify: called with a message if the run starts from the beginning.

    Raises:
        CheckpointError: no run was started in the folder, or one with other settings.
    """
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.sweep()
    found = checkpoints.latest()
    if found is None:
        notify(_begin_anew(folder, settings))
    else:
        check_same(folder, settings)
    return found


def _begin_anew(folder: Path, settings: RunSettings) -> str:
    """Prepare a folder for a restart from the beginning, because its run ended before its first checkpoint.

    What the run recorded is moved to a subfolder ``before-1``, ``before-2``, ...

    Returns:
        A sentence about what was done.

    Raises:
        CheckpointError: no run was started in the folder, or one with other settings.
    """
    if not is_begun(folder):
        raise CheckpointError(f"no checkpoint in {folder}, and no run was begun there: start without --resume")
    left = recorded(folder)
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


@dataclass(frozen=True, slots=True)
class Summary:
    """The contents of summary.json.

    Attributes:
        env_steps: steps of all environments together.
        learner_steps: optimiser steps.
        episodes: number of finished episodes.
        seconds: duration of the training, including earlier parts of a resumed run.
        return_mean, return_std: over the last episodes; None if none has finished.
        seed: base seed of the run.
        version: version of Jurybox.
    """

    env_steps: int
    learner_steps: int
    episodes: int
    seconds: float
    return_mean: float | None
    return_std: float | None
    seed: int
    version: str


def audited(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the values under ``audit`` in the last info of an episode, named for columns ``audit_NAME``.

    They are the scores of audit jurors, or anything else that is logged but never rewarded.
    """
    return {f"audit_{name}": value for name, value in audits(info).items()}


class Tracker(Protocol):
    """An experiment tracker such as MLflow or Weights & Biases."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers."""

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Record the end of the run; called once."""


class RunLog:
    """Records a run. Use it in a ``with`` statement.

    Args:
        folder: the run's folder; created if it does not exist.
        columns: columns of metrics.csv. `scalars` writes only these to it, but all names to TensorBoard and trackers.
        resume_at: None for a new run, whose folder must not contain another run. Else the number of env steps from
            which the run resumes: later rows are dropped, because they will be recorded again.

    Raises:
        RunLogError: a new run's folder contains a run, or the metrics.csv of a resumed one has other columns.
    """

    def __init__(self, folder: Path, columns: Sequence[str], *, resume_at: int | None = None) -> None:
        self.folder = folder
        self._columns = ["env_steps", *columns]
        self._trackers: list[Tracker] = []
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / "metrics.csv"
        if resume_at is None:
            if metrics.exists():
                raise RunLogError(
                    f"{folder} holds a run already: choose another folder, remove this one, or go on with it (--resume)"
                )
            kept: list[dict[str, str]] = []
        else:
            kept = self._kept(metrics, resume_at)
        write_table(metrics, self._columns, (row.values() for row in kept))
        self._file = metrics.open("a", newline="", encoding="utf-8")
        self._csv = csv.DictWriter(self._file, self._columns, extrasaction="ignore")
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(
            str(folder / "tensorboard"), purge_step=None if resume_at is None else resume_at + 1
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers after `step` env steps in metrics.csv, TensorBoard and all trackers."""
        self._csv.writerow({"env_steps": step, **values})
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.scalars(step, values)

    def summarise(self, summary: Summary) -> None:
        """Write summary.json."""
        write_atomically(self.folder / "summary.json", json.dumps(asdict(summary), indent=2) + "\n")

    def extend_summary(self, **more: Any) -> None:
        """Add to the summary.json that `summarise` wrote."""
        path = self.folder / "summary.json"
        known = json.loads(path.read_text(encoding="utf-8"))
        write_atomically(path, json.dumps({**known, **more}, indent=2) + "\n")

    def add_trackers(self, trackers: Sequence[Tracker]) -> None:
        """Record to these trackers, too, from now on."""
        self._trackers += trackers

    def finish(self, files: Sequence[Path] = ()) -> None:
        """Finish the trackers and pass them the files of the run."""
        path = self.folder / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for tracker in self._trackers:
            tracker.finish(summary, files)
        self._trackers = []

    def rows(self) -> list[dict[str, float]]:
        """Return the rows of metrics.csv; see `read_metrics`."""
        return read_metrics(self.folder / "metrics.csv")

    def close(self) -> None:
        """Close metrics.csv and the TensorBoard files."""
        self._file.close()
        self._board.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept(self, metrics: Path, resume_at: int) -> list[dict[str, str]]:
        if not metrics.exists():
            return []
        text = metrics.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a killed run may have left an incomplete last line
        with io.StringIO(whole, newline="") as file:
            reader = csv.DictReader(file)
            if list(reader.fieldnames or ()) != self._columns:
                raise RunLogError(
                    f"{metrics} has the columns {', '.join(reader.fieldnames or ())}; expected "
                    f"{', '.join(self._columns)}: it is of another training or another version"
                )
            return [row for row in reader if int(row["env_steps"]) <= resume_at]


@contextmanager
def recording(
    folder: Path, columns: Sequence[str], settings: RunSettings, notify: Callable[[str], None], *, resume: bool
) -> Iterator[tuple[RunLog, Checkpoint | None]]:
    """Begin or resume the run in a folder. Use it in a ``with`` statement, at whose end the folder is free again.

    It yields the log, and the checkpoint to go on from; None: the run starts from the beginning.

    Args:
        columns: columns of metrics.csv, see `RunLog`.
        notify: called with a message if a resumed run starts from the beginning.
        resume: go on from the newest checkpoint.

    Raises:
        RunLogError: the folder holds another run and `resume` is not set, or a run is going on there.
        CheckpointError: `resume` is set, and no run was started in the folder, or one with other settings.
    """
    with alone_in(folder):
        found = resumed(folder, settings, notify) if resume else None
        with RunLog(folder, columns, resume_at=None if found is None else found.env_steps) as log:
            yield log, found


def clear(folder: Path) -> None:
    """Remove the files of an earlier run from a folder."""
    for path in (*recorded(folder), folder / _SETTINGS, folder / "server.log"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.csv as numbers; empty cells are omitted."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
