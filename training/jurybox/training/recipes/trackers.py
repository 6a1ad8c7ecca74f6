"""MLflow and Weights & Biases, for whoever asks for them; neither belongs to the plain install."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jurybox.training.run_folder import Tracker


class TrackerMissing(RuntimeError):
    """A tracker was asked for that is not installed."""


def require(*, mlflow: bool, wandb: bool) -> None:
    """Raise TrackerMissing when one that is wanted is not installed; asked before a training starts."""
    wanted = {"mlflow": mlflow, "wandb": wandb}
    for package in (package for package, asked in wanted.items() if asked):
        if importlib.util.find_spec(package) is None:
            raise TrackerMissing(f"--{package} needs the package {package}: pip install 'jurybox[{package}]'")


def trackers(
    name: str, folder: Path, settings: Mapping[str, Any], *, mlflow: bool = False, wandb: bool = False
) -> list[Tracker]:
    """Those that were asked for, each with a run of its own begun.

    Args:
        name: of the training.
        folder: of the run.
        settings: recorded as the run's parameters.

    Raises:
        TrackerMissing: one of them is not installed.
    """
    require(mlflow=mlflow, wandb=wandb)
    found: list[Tracker] = []
    if mlflow:
        found.append(Mlflow(name, folder, settings))
    if wandb:
        found.append(Wandb(name, folder, settings))
    return found


class Mlflow:
    """Records to MLflow: where ``MLFLOW_TRACKING_URI`` says, or in ``mlruns`` of the run's folder."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        if not self._mlflow.is_tracking_uri_set():
            self._mlflow.set_tracking_uri((folder / "mlruns").resolve().as_uri())
        self._mlflow.set_experiment(f"jurybox-{name}")
        self._mlflow.start_run(run_name=folder.name)
        self._mlflow.log_params(dict(settings))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        numbers = {f"summary_{key}": value for key, value in summary.items() if isinstance(value, int | float)}
        self._mlflow.log_metrics(numbers)
        for file in files:
            self._mlflow.log_artifact(str(file))
        self._mlflow.end_run()


class Wandb:
    """Records to Weights & Biases, in its own configuration (``WANDB_MODE=offline`` keeps it on this machine)."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project=f"jurybox-{name}", name=folder.name, dir=str(folder), config=dict(settings))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None:
        self._run.summary.update(dict(summary))
        for file in files:
            self._run.save(str(file), policy="now")
        self._run.finish()
