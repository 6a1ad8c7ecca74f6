"""`jurybox check`: try what a user brings, before a training does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console

from jurybox.training.trainings.training import until_interrupted

check = typer.Typer(help="Check what you bring.", no_args_is_help=True, pretty_exceptions_enable=False)


@check.callback()
def _group() -> None:
    """Make typer keep the command's name even if there is only one."""


@check.command("env")
def check_env(
    env: Annotated[str, typer.Argument(metavar="ENV", help="A Gymnasium id, or module:factory.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set an argument of the environment; repeatable."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of random steps.")] = 1000,
    max_episode_steps: Annotated[int | None, typer.Option("--max-episode-steps", min=1, help="As `train gym`.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the environment and of the actions.")] = 0,
) -> None:
    """Play an environment at random, and say what a training would stumble over; exit with 1 if it cannot be used."""
    passed = False

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.runtime.settings import changes_of
        from jurybox.training.trainings.environment_check import check as checked

        nonlocal passed
        arguments: dict[str, Any] = changes_of(sets or [], {})
        found = checked(env, arguments, steps=steps, seed=seed, max_episode_steps=max_episode_steps)
        passed = found.passed
        return str(found)

    try:
        until_interrupted(work, None, message="stopping", what="the check")
    except typer.Exit as exited:
        raise typer.Exit(exited.exit_code or int(not passed)) from None
