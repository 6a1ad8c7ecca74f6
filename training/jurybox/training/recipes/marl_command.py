"""What `jurybox train marl` does with its options."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jurybox.training.interrupts import Signals
from jurybox.training.recipes.launchers import launcher_named
from jurybox.training.recipes.marl import MarlTraining
from jurybox.training.recipes.marl_run import train
from jurybox.training.recipes.run_command import changes_of, conclude
from jurybox.training.recipes.trackers import require, trackers
from jurybox.training.runtime.plan import refuse_unused


def settings_of(config: Path | None, changes: Sequence[str], given: Mapping[str, Any]) -> MarlTraining:
    """Settings of a file, then of ``NAME=VALUE`` strings, then of options that were given (not None).

    Raises:
        ConfigError: something in it is unknown, out of its bounds or unreadable.
    """
    return MarlTraining.read(config, changes_of(changes, given))


def train_agents(
    settings: MarlTraining,
    console: Console,
    *,
    serial: bool,
    resume: bool,
    mlflow: bool,
    wandb: bool,
    launcher: str = "local",
    address: str | None = None,
) -> str:
    """Train, and say how it ended.

    Args:
        launcher: "local", or "ray" with the `address` of a cluster (None: Ray on this machine).

    Raises:
        RunError: there is no such launcher, or no such cluster.
        RunFailed: a role failed for good.
        KeyboardInterrupt: it was told to stop, and has, in order.
    """
    require(mlflow=mlflow, wandb=wandb)
    if serial:
        refuse_unused(() if launcher == "local" else ("--launcher",), {"--launcher": "--serial runs in this process"})
    signals = Signals()
    with launcher_named(launcher, address) as chosen:
        outcome = train(
            settings,
            serial=serial,
            launcher=chosen,
            resume=resume,
            console=console if settings.logging else None,
            signals=signals,
            command=shlex.join(["jurybox", *sys.argv[1:]]),
            trackers=lambda: trackers(
                "marl", settings.log_dir, settings.model_dump(mode="json"), mlflow=mlflow, wandb=wandb
            ),
        )
    conclude(outcome, signals)
    report = settings.log_dir / "report.html"
    return f"{outcome.text}: {outcome.env_steps:,} turns in {outcome.seconds:.0f} s\n\nreport: {report}"
