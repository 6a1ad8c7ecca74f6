"""What `jurybox train hockey` does with its options."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jurybox.training.interrupts import Signals
from jurybox.training.recipes.hockey_run import train
from jurybox.training.recipes.hockey_settings import HockeyTraining
from jurybox.training.recipes.launchers import launcher_named
from jurybox.training.recipes.run_command import changes_of, conclude
from jurybox.training.recipes.trackers import require, trackers
from jurybox.training.runtime.plan import refuse_unused


def settings_of(config: Path | None, changes: Sequence[str], given: Mapping[str, Any]) -> HockeyTraining:
    """Settings of a file, then of ``NAME=VALUE`` strings, then of options that were given (not None).

    Raises:
        ConfigError: something in it is unknown, out of its bounds or unreadable.
    """
    return HockeyTraining.read(config, changes_of(changes, given))


def train_hockey(
    settings: HockeyTraining,
    folder: Path,
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
            folder,
            serial=serial,
            resume=resume,
            console=console,
            signals=signals,
            command=shlex.join(["jurybox", *sys.argv[1:]]),
            trackers=lambda: trackers("hockey", folder, settings.as_dict(), mlflow=mlflow, wandb=wandb),
            launcher=chosen,
        )
    conclude(outcome, signals)
    said = [f"{outcome.text}: {outcome.episodes:,} games, {outcome.env_steps:,} steps in {outcome.seconds:.0f} s"]
    for who in settings.league.anchors:
        won, lost = (outcome.evaluation.get(f"eval_{what}_{who}") for what in ("wins", "losses"))
        if won is not None and lost is not None:
            said.append(f"against {who}: {won:.0%} won, {lost:.0%} lost")
    return "\n".join(said)
