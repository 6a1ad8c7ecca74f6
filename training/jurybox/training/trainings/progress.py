"""Progress of a training in the terminal, and trackers for MLflow and Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from jurybox.protocol.revision import install_command
from jurybox.training.errors import UsageError
from jurybox.training.run_folder import Tracker

_LINE_EVERY = 10.0  # seconds between two lines if the console is not a terminal


class Watcher:
    """An observer of a run's progress. This one does nothing; subclasses override what they show."""

    def log(self, text: str) -> None:
        """Print a line."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Begin a phase of `total` steps."""

    def advance(self, done: int, numbers: Mapping[str, float] | None = None) -> None:
        """Report that `done` steps of the phase are done, and show `numbers`."""

    def end(self) -> None:
        """End the phase."""


class ConsoleProgress(Watcher):
    """A watcher that shows progress on a console: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._what = ""
        self._total = self._first = 0
        self._began = self._lined = 0.0
        self._numbers: dict[str, float] = {}

    def log(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)  # paths and errors may contain square brackets

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.end()
        self._what, self._total, self._first = what, total, done
        self._began = self._lined = time.monotonic()
        self._numbers = {}
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(what, total=total, completed=done, numbers="")
            self._bar.start()
        else:
            self.log(f"{what}: {total - done} steps")

    def advance(self, done: int, numbers: Mapping[str, float] | None = None) -> None:
        self._numbers.update(numbers or {})
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, numbers=self._described(done, now))
        elif now - self._lined >= _LINE_EVERY:
            self._lined = now
            share = done / self._total if self._total else 1.0
            self.log(f"{self._what}: {done}/{self._total} ({share:.0%}) {self._described(done, now)}")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _described(self, done: int, now: float) -> str:
        rate = (done - self._first) / (now - self._began) if now > self._began else 0.0
        shown = [f"{name} {value:.3f}" for name, value in self._numbers.items()]
        return "  ".join([*shown, f"{rate:.0f}/s"])


class TrackerMissing(UsageError, RuntimeError):
    """A requested tracker is not installed."""


def require(*, mlflow: bool, wandb: bool) -> None:
    """Raise TrackerMissing if a requested tracker is not installed. Called before a training starts."""
    for package, requested in {"mlflow": mlflow, "wandb": wandb}.items():
        if requested and importlib.util.find_spec(package) is None:
            raise TrackerMissing(f"--{package} needs the package {package}: {install_command(package)}")


def trackers(
    name: str, folder: Path, settings: Mapping[str, Any], *, mlflow: bool = False, wandb: bool = False
) -> list[Tracker]:
    """Create the requested trackers, each with a new run. Call `require` first to check that they are installed.

    Args:
        name: name of the training.
        folder: folder of the run.
        settings: recorded as the run's parameters.
    """
    wanted: list[tuple[type[Mlflow] | type[Wandb], bool]] = [(Mlflow, mlflow), (Wandb, wandb)]
    return [kind(name, folder, settings) for kind, requested in wanted if requested]


class Mlflow:
    """A tracker that records to MLflow, at ``MLFLOW_TRACKING_URI`` or in ``mlruns`` in the run's folder."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        if not self._mlflow.is_tracking_uri_set():
            self._mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
        self._mlflow.set_experiment(f"jurybox-{name}")
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params(dict(settings))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._log(values, step=step)

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._log({f"summary_{key}": value for key, value in summary.items() if isinstance(value, int | float)})
        for file in files:
            self._mlflow.log_artifact(str(file))
        self._mlflow.end_run()

    def _log(self, values: Mapping[str, float], **step: int) -> None:
        # MLflow raises an error for other characters, such as "+" in the names of agents that share a learner.
        self._mlflow.log_metrics({re.sub(r"[^\w./ -]", "_", name): value for name, value in values.items()}, **step)


class Wandb:
    """A tracker that records to Weights & Biases, with its own configuration (``WANDB_MODE=offline`` stays local)."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project=f"jurybox-{name}", name=folder.name, dir=str(folder), config=dict(settings))
        # The x-axis is a value: W&B drops rows whose `step` is below the last one, and an evaluation is recorded at
        # the env steps that it began at.
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"env_steps": step, **values})

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._run.summary.update(dict(summary))
        for file in files:
            self._run.save(str(file), policy="now")
        self._run.finish()
