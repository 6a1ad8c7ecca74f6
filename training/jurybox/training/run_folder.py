"""The files that a training writes to its folder: metrics.csv, TensorBoard files and summary.json."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from jurybox.training.checkpoints import write_atomically


class RunLogError(RuntimeError):
    """The folder of a run cannot be used as it is; the message contains a remedy."""


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
    return {f"audit_{name}": float(value) for name, value in info.get("audit", {}).items()}


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
        write_atomically(metrics, _csv(self._columns, kept))
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


def clear(folder: Path) -> None:
    """Remove the files of an earlier run from a folder."""
    for name in ("metrics.csv", "summary.json", "settings.json", "evaluation.csv", "report.html", "server.log"):
        (folder / name).unlink(missing_ok=True)
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.csv as numbers; empty cells are omitted."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:

    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
