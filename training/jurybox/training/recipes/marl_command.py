"""What `jurybox train marl` does with its options."""

from __future__ import annotations

import shlex
import signal
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jurybox.training.recipes.marl import ConfigError, MarlTraining
from jurybox.training.recipes.marl_run import train
from jurybox.training.recipes.trackers import require, trackers
from jurybox.training.runtime.outcome import End
from jurybox.training.runtime.stopping import Signals


class RunFailed(RuntimeError):
    """The run could not go on; the message is its reason."""


def settings_of(config: Path | None, changes: Sequence[str], given: Mapping[str, Any]) -> MarlTraining:
    """Settings of a file, then of ``NAME=VALUE`` strings, then of options that were given (not None).

    Raises:
        ConfigError: something in it is unknown, out of its bounds or unreadable.
    """
    changed: dict[str, Any] = {}
    for change in changes:
        try:
            changed |= tomllib.loads(change)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--set {change!r}: expected NAME=VALUE with a value as in TOML ({error})") from error
    return MarlTraining.read(config, {**changed, **{name: value for name, value in given.items() if value is not None}})


def train_agents(
    settings: MarlTraining, console: Console, *, serial: bool, resume: bool, mlflow: bool, wandb: bool
) -> str:
    """Train, and say how it ended.

    Raises:
        RunFailed: a role failed for good.
        KeyboardInterrupt: it was told to stop, and has, in order.
    """
    require(mlflow=mlflow, wandb=wandb)
    signals = Signals()
    outcome = train(
        settings,
        serial=serial,
        resume=resume,
        console=console if settings.logging else None,
        signals=signals,
        command=shlex.join(["jurybox", *sys.argv[1:]]),
        trackers=lambda: trackers(
            "marl", settings.log_dir, settings.model_dump(mode="json"), mlflow=mlflow, wandb=wandb
        ),
    )
    if outcome.end is End.SIGNAL:
        signal.raise_signal(signals.first)  # to whoever handled signals before the run
    if outcome.end is End.FAILED:
        raise RunFailed(outcome.text)
    report = settings.log_dir / "report.html"
    return f"{outcome.text}: {outcome.env_steps:,} turns in {outcome.seconds:.0f} s\n\nreport: {report}"
