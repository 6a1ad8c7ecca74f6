"""The command of every training: a single run, or the runs of a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from jurybox.training.trainings.training import carried_out, left_in, named, until_interrupted


def train(
    training: str,
    *,
    out: Path | None,
    config: Path | None,
    changes: Sequence[str],
    given: Mapping[str, Any],
    debug_state: bool = False,
    seeds: str | None = None,
    vary: Sequence[str] = (),
    at_once: int = 1,
    **options: Any,
) -> None:
    """Run the command of a training, and exit with its status.

    Args:
        training: import path of the `Training`, "package.module:NAME". It is imported after the extra was checked.
        out: folder of the run; None: the setting ``log_dir``, or "NAME-out".
        config: TOML file with settings.
        changes: ``NAME=VALUE`` strings, which override `config`.
        given: settings from command-line options, which override both; None: not given.
        debug_state: report the current shared state of the run in that folder instead of training.
        seeds: "0,1,2": one run per seed, in subfolders ``seed-0``, ...; see `fleet`.
        vary: ``NAME=[VALUE, VALUE]`` strings: one run for each of them.
        at_once: how many of these runs run side by side.
        options: further arguments of `carried_out`.
    """

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.runtime.plan import ConfigError
        from jurybox.training.runtime.settings import changes_of
        from jurybox.training.trainings import fleet
        from jurybox.training.trainings.members import members_of
        from jurybox.training.trainings.progress import require

        require(mlflow=options.get("mlflow", False), wandb=options.get("wandb", False))
        found, changed = named(training), changes_of(changes, given)
        settings = found.settings.read(config, changed)
        folder: Path = out or getattr(settings, "log_dir", None) or Path(f"{found.name}-out")
        if debug_state:
            from jurybox.training.runtime.scoreboard import debug_state as state_of

            return state_of(folder)
        members = members_of(seeds, vary, changed, settings.seed)
        if members:
            return fleet.carried_out(
                training, members, config, changed, folder, console, folders, at_once=at_once, **options
            )
        if at_once != 1:
            raise ConfigError("--at-once: this is a single run; several are of --seeds 0,1,2 or --vary NAME=[...]")
        folders.append(folder)
        return carried_out(found, settings, folder, console, **options)

    folders: list[Path] = []  # of the run, or those of several

    def left() -> str:
        if len(folders) > 1 and at_once > 1:
            return "stopped; --resume goes on from the newest checkpoint of each run"
        return left_in(folders[-1]) if folders else "stopped before it began"

    until_interrupted(work, out, message="stopping", left=left)
