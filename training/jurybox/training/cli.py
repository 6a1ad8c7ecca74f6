"""Train a policy against a running server (`train`), or see it all happen in three minutes (`demo`)."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from jurybox.training.recipes.command import check_server, until_interrupted

train = typer.Typer(
    help="Train a policy against a running server.", no_args_is_help=True, pretty_exceptions_enable=False
)
demo = typer.Typer(
    help="See it all at once: server, workers, training, report.", no_args_is_help=True, pretty_exceptions_enable=False
)


@train.callback()
@demo.callback()
def _group() -> None:
    """Keeps the name of the training a part of the command where there is only one."""


Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the report, logs and checkpoints.")]
Seed = Annotated[int, typer.Option(min=0, help="Everything random comes from it.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in DIR.")]
Mlflow = Annotated[bool, typer.Option("--mlflow", help="Record to MLflow too.")]
Wandb = Annotated[bool, typer.Option("--wandb", help="Record to Weights & Biases too.")]
Serial = Annotated[bool, typer.Option("--serial", help="The same algorithm in one process.")]
# Where settings come from a file, an option that is not given leaves what stands there.
SeedOfFile = Annotated[int | None, typer.Option(min=0, help="Everything random comes from it.")]
Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings, as TOML.", exists=True, dir_okay=False)
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change one setting; VALUE as in TOML.")
]
Launched = Annotated[str, typer.Option("--launcher", help="Where processes run: local, or ray (jurybox[ray]).")]
ClusterAddress = Annotated[
    str | None,
    typer.Option("--address", "--ray-address", help="Of the Ray cluster: host:port or auto; else this machine."),
]


@train.command("photo")
def train_photo(
    out: Out,
    workers: Annotated[int, typer.Option("--workers", "--n-envs", min=1, help="Environments, a process each.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Edit steps in all, rounded up to whole rollouts.")] = 40_000,
    seed: Seed = 0,
    resume: Resume = False,
    single_process: Annotated[
        bool, typer.Option("--single-process", help="All environments in this process, for debugging.")
    ] = False,
    address: Annotated[str | None, typer.Option(help="The server; JURYBOX_ADDRESS or the default without it.")] = None,
    model: Annotated[str, typer.Option(help="The juror's name on the server.")] = "photo",
    photos: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Photos to use instead of those that ship.", exists=True)
    ] = None,
    rollout: Annotated[int, typer.Option(min=1, help="Steps of all workers together between two updates.")] = 4000,
    damages: Annotated[int, typer.Option(min=2, help="Seeds of degradation in the evaluation.")] = 24,
    launcher: Launched = "local",
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="Of the Ray cluster: host:port or auto; else this machine.")
    ] = None,
    network_address: Annotated[
        str | None, typer.Option("--network-address", help="The server's for the cluster's other machines.")
    ] = None,
    envs_per_worker: Annotated[int | None, typer.Option(min=1, help="Environments of a Ray actor; 2.")] = None,
    mlflow: Mlflow = False,
    wandb: Wandb = False,
) -> None:
    """Teach a policy to edit photos so that the server's juror likes them better."""
    if single_process and launcher != "local":
        raise typer.BadParameter("environments of this process need no launcher", param_hint="--single-process")
    for name, value in (("--network-address", network_address), ("--envs-per-worker", envs_per_worker)):
        if value is not None and launcher == "local":
            raise typer.BadParameter("would have no effect: it goes with --launcher ray", param_hint=name)

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.recipes.progress import require, trackers

        require(mlflow=mlflow, wandb=wandb)
        check_server(address, model)
        from jurybox.training.environments.photo import PhotoConfig
        from jurybox.training.recipes.launchers import spread_named
        from jurybox.training.recipes.photo import PhotoTraining
        from jurybox.training.recipes.photo_run import run
        from jurybox.training.recipes.progress import ConsoleProgress

        config = PhotoConfig(model=model, address=address, photos=str(photos) if photos else None, seed=seed)
        settings = PhotoTraining(
            config,
            steps,
            workers,
            single_process,
            envs_per_worker or 2,
            rollout,
            checkpoint_every=min(rollout, steps),
        )
        spread = resources.enter_context(spread_named(launcher, ray_address))
        verdict = run(
            settings,
            out,
            ConsoleProgress(console),
            command=shlex.join(["jurybox", *sys.argv[1:]]),
            damages=damages,
            resume=resume,
            trackers=lambda: trackers("photo", out, settings.as_dict(), mlflow=mlflow, wandb=wandb),
            spread=spread,
            far=network_address,
        )
        return "\n".join((verdict.headline, *verdict.sentences))

    until_interrupted(work, out, told="stopping; --resume goes on from the newest checkpoint")


@train.command("marl")
def train_marl(
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for everything; log_dir.")] = None,
    config: Config = None,
    change: Changes = None,
    agents: Annotated[int | None, typer.Option(min=1, help="Agents in the treasure hunt.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Turns of the world.")] = None,
    seed: SeedOfFile = None,
    serial: Serial = False,
    resume: Resume = False,
    debug_state: Annotated[
        bool, typer.Option("--debug-state", help="Print what the run in DIR shares at this moment, and end.")
    ] = False,
    launcher: Launched = "local",
    address: ClusterAddress = None,
    mlflow: Mlflow = False,
    wandb: Wandb = False,
) -> None:
    """Teach many agents in one world, a learner process for each."""

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.runtime.scoreboard import debug_state as state_of

        if debug_state and out is not None:
            return state_of(out)
        from jurybox.training.recipes.marl_run import settings_of, train_agents

        given = {"log_dir": out, "agents": agents, "steps": steps, "seed": seed}
        settings = settings_of(config, change or [], given)
        if debug_state:
            return state_of(settings.log_dir)
        return train_agents(
            settings,
            console,
            serial=serial,
            resume=resume,
            mlflow=mlflow,
            wandb=wandb,
            launcher=launcher,
            address=address,
        )

    until_interrupted(work, None, told="stopping; --resume goes on from here")


@train.command("hockey")
def train_hockey(
    out: Out = Path("hockey-out"),
    config: Config = None,
    change: Changes = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Collecting processes.")] = None,
    envs_per_worker: Annotated[int | None, typer.Option(min=2, help="Games of each, stepped in two halves.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Env steps in all.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so many.")] = None,
    target: Annotated[float | None, typer.Option(help="Stop at so many points (wins - losses).")] = None,
    seed: SeedOfFile = None,
    serial: Serial = False,
    resume: Resume = False,
    on_failure: Annotated[str | None, typer.Option(help="end or serial, when a process fails too often.")] = None,
    env: Annotated[str | None, typer.Option(help="module:Class made like the original.")] = None,
    mode: Annotated[int | None, typer.Option(min=0, max=2, help="0 whole games, 1 shooting, 2 defence.")] = None,
    policy: Annotated[str | None, typer.Option(help="local: collectors act; served: a policy server.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Learner steps for each env step.")] = None,
    warmup: Annotated[int | None, typer.Option(min=1, help="Env steps at random, without learning.")] = None,
    weight_sync_interval: Annotated[
        int | None, typer.Option(min=1, help="A collector's steps between looks for new weights.")
    ] = None,
    max_lag: Annotated[int | None, typer.Option(min=0, help="Staler than so many publications: sync at once.")] = None,
    evaluate_every: Annotated[int | None, typer.Option(min=0, help="Env steps between evaluations.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(min=0, help="Env steps between checkpoints.")] = None,
    launcher: Launched = "local",
    address: ClusterAddress = None,
    mlflow: Mlflow = False,
    wandb: Wandb = False,
) -> None:
    """Teach a policy to play hockey against bots and its past selves, collecting and learning at the same time."""
    given = {
        "workers": workers,
        "envs_per_worker": envs_per_worker,
        "steps": steps,
        "minutes": minutes,
        "target": target,
        "seed": seed,
        "on_failure": on_failure,
        "environment": env,
        "mode": mode,
        "policy": policy,
        "ratio": ratio,
        "warmup": warmup,
        "weight_sync_interval": weight_sync_interval,
        "max_lag": max_lag,
        "evaluate_every": evaluate_every,
        "checkpoint_every": checkpoint_every,
    }

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.recipes.hockey import settings_of, train_hockey

        settings = settings_of(config, change or [], given)
        return train_hockey(
            settings,
            out,
            console,
            serial=serial,
            resume=resume,
            mlflow=mlflow,
            wandb=wandb,
            launcher=launcher,
            address=address,
        )

    until_interrupted(work, out, told="stopping; --resume goes on from here")


@train.command("workflow")
def train_workflow(
    out: Out,
    n_envs: Annotated[int, typer.Option("--n-envs", min=1, help="Networks defended at once.")] = 100,
    total_episodes: Annotated[int, typer.Option(min=1, help="Episodes of training in all.")] = 100_000,
    red: Annotated[str, typer.Option(help="The attacker: B_line or Meander.")] = "B_line",
    seed: Seed = 0,
    resume: Resume = False,
    env: Annotated[str, typer.Option(help="cage: our simulator; cyborg: the real one, where installed.")] = "cage",
    policy: Annotated[str, typer.Option(help="local: acts in this process; served: from a server.")] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, with --env cyborg; actors, with --launcher ray.")
    ] = None,
    halves: Annotated[
        bool, typer.Option("--halves", help="Act for half of the networks while the other half steps.")
    ] = False,
    episode_length: Annotated[int, typer.Option(min=1, help="Steps of an episode.")] = 100,
    gate: Annotated[float, typer.Option(min=0.01, max=1, help="Share of fixes that must comply.")] = 0.95,
    max_train_episodes_per_env: Annotated[int, typer.Option(min=1, help="Then a workflow is given up.")] = 100,
    align_lambda: Annotated[float, typer.Option(min=0, help="What full compliance is worth in an episode.")] = 30.0,
    strict: Annotated[bool, typer.Option("--strict", help="A fix complies only on a compromised host.")] = False,
    beta: Annotated[float, typer.Option(min=0, help="How far the search explores.")] = 2.0,
    inherit: Annotated[bool, typer.Option(help="Begin each workflow with the last one's policy.")] = True,
    masks: Annotated[bool, typer.Option("--masks", help="Leave out actions that are sure to fail.")] = False,
    quirk: Annotated[bool, typer.Option("--quirk", help="No Impact costs after Op_Server0's restore.")] = False,
    launcher: Launched = "local",
    address: ClusterAddress = None,
    mlflow: Mlflow = False,
    wandb: Wandb = False,
) -> None:
    """Search the order of repairs that best defends a network, and the policy that keeps to it."""
    for name, value, known in (
        ("--red", red, ("B_line", "Meander")),
        ("--env", env, ("cage", "cyborg")),
        ("--policy", policy, ("local", "served")),
    ):
        if value not in known:
            raise typer.BadParameter(f"expected {' or '.join(known)}, got {value!r}", param_hint=name)

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.recipes.launchers import spread_named
        from jurybox.training.recipes.progress import ConsoleProgress, require, trackers
        from jurybox.training.recipes.workflow_run import run
        from jurybox.training.search.settings import WorkflowTraining

        require(mlflow=mlflow, wandb=wandb)
        settings = WorkflowTraining(
            env=cast("Any", env),
            red=cast("Any", red),
            quirk=quirk,
            n_envs=n_envs,
            episode_length=episode_length,
            total_episodes=total_episodes,
            max_train_episodes_per_env=max_train_episodes_per_env,
            gate=gate,
            align_lambda=align_lambda,
            strict=strict,
            inherit=inherit,
            use_masks=masks,
            beta=beta,
            workers=workers,
            halves=halves,
            served=policy == "served",
            seed=seed,
        )
        spread = resources.enter_context(spread_named(launcher, address))
        return run(
            settings,
            out,
            ConsoleProgress(console),
            command=shlex.join(["jurybox", *sys.argv[1:]]),
            resume=resume,
            trackers=lambda: trackers("workflow", out, settings.as_dict(), mlflow=mlflow, wandb=wandb),
            spread=spread,
        )

    until_interrupted(work, out, told="stopping; --resume goes on from the newest checkpoint")


@demo.command("photo")
def demo_photo(
    out: Out = Path("demo-out"),
    steps: Annotated[int | None, typer.Option(min=64, help="Edit steps to train.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Train no longer than this; the numbers then depend on the machine.")
    ] = None,
    seed: Seed = 0,
    damages: Annotated[int | None, typer.Option(min=2, help="Seeds of degradation in the evaluation.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", "--n-envs", min=1, help="Env workers.")] = None,
    juror: Annotated[str | None, typer.Option(help="Another juror: package.module:function.")] = None,
) -> None:
    """Start a server, train a policy on real photos against its juror, and write a report; about three minutes."""

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.recipes import photo_run as photo_demo
        from jurybox.training.recipes.progress import ConsoleProgress

        verdict = photo_demo.demo(
            out,
            ConsoleProgress(console),
            resources,
            seed=seed,
            steps=steps or photo_demo.STEPS,
            seconds=seconds,
            damages=damages or photo_demo.DAMAGES,
            workers=workers or photo_demo.WORKERS,
            juror=juror or photo_demo.JUROR,
        )
        return "\n".join((verdict.headline, *verdict.sentences))

    until_interrupted(work, out, told="stopping the server and the workers")


def main(arguments: list[str] | None = None) -> Any:
    """``python -m jurybox.training.cli demo photo``: the same commands without the server's console script."""
    both = typer.Typer(pretty_exceptions_enable=False)
    both.add_typer(train, name="train")
    both.add_typer(demo, name="demo")
    return both(arguments)


if __name__ == "__main__":
    main()
