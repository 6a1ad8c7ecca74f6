"""The commands `jurybox train`, which trains a policy, and `jurybox demo`, which shows everything in three minutes.

The command of a training is created from its entry in `TRAININGS`: the common flags and its own, most of which set a
setting. A training's module is imported only when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jurybox.training.recipes.training import train as carry_out
from jurybox.training.recipes.training import until_interrupted

train = typer.Typer(help="Train a policy.", no_args_is_help=True, pretty_exceptions_enable=False)
demo = typer.Typer(
    help="Show everything at once: server, workers, training, report.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@train.callback()
@demo.callback()
def _group() -> None:
    """Make typer keep the name of the training in the command even if there is only one."""


Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the report, logs and checkpoints.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random number generator.")]
# The flags of every training's command in addition to those of its settings; the names are parameters of
# `recipes.training.train`.
_COMMON: dict[str, tuple[Any, Any, typer.models.OptionInfo]] = {
    "out": (Path | None, None, typer.Option("--out", metavar="DIR", help="Output folder; NAME-out by default.")),
    "config": (
        Path | None,
        None,
        typer.Option("--config", metavar="FILE", help="TOML file with settings.", exists=True, dir_okay=False),
    ),
    "changes": (
        list[str] | None,
        None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set one setting, VALUE as TOML or text; repeatable."),
    ),
    "seeds": (
        str | None,
        None,
        typer.Option("--seeds", metavar="0,1,2", help="Run once per seed, in DIR/seed-N; DIR/seeds.csv compares them."),
    ),
    "serial": (bool, False, typer.Option("--serial", help="Run the same algorithm in one process.")),
    "resume": (bool, False, typer.Option("--resume", help="Resume from the newest checkpoint in DIR.")),
    "launcher": (
        str,
        "local",
        typer.Option("--launcher", help="Where processes run: local, or ray (needs the extra)."),
    ),
    "ray_address": (
        str | None,
        None,
        typer.Option("--ray-address", help="Ray cluster, host:port or auto; without it Ray starts here."),
    ),
    "debug_state": (
        bool,
        False,
        typer.Option("--debug-state", help="Print the shared state of the run in DIR, and exit."),
    ),
    "mlflow": (bool, False, typer.Option("--mlflow", help="Also log to MLflow.")),
    "wandb": (bool, False, typer.Option("--wandb", help="Also log to Weights & Biases.")),
}


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that sets a setting; if it is not given, the value from the settings file is used.

    Attributes:
        setting: name of the setting, or "part.NAME" for a nested one. A name that begins with "+" is not a setting, but
            an option of this training only (see `Run.more`).
        kind: type of the value.
        help: the help text.
        name: name of the flag; default: derived from `setting`.
        also: another name of the flag.
    """

    setting: str
    kind: type
    help: str
    name: str = ""
    also: str = ""

    @property
    def option(self) -> str:
        return self.name or "--" + self.setting.removeprefix("+").replace("_", "-")


SEED = Flag("seed", int, "Seed of every random number generator.")
STEPS = Flag("steps", int, "Total env steps.")
WORKERS = Flag("workers", int, "Number of processes that step environments.")
SECONDS = Flag("seconds", float, "Stop training after this many seconds.")
ENVS = Flag("envs", int, "Number of environments, over all workers.")
LEARNING_STARTS = Flag("learning_starts", int, "Env steps with random actions before learning starts.")
INTERVALS = (
    Flag("evaluate_every", int, "Env steps between evaluations."),
    Flag("checkpoint_every", int, "Env steps between checkpoints."),
)
SERVED = (
    Flag("policy", str, "local: actors run the policy themselves; served: a Jurybox server runs it."),
    Flag(
        "server",
        str,
        "Address of a running server (ipc:// or grpc://) for a served policy; without it a private one starts.",
    ),
    Flag("server_http", bool, "Serve HTTP from the private server, too."),
)


@dataclass(frozen=True, slots=True)
class Command:
    """A training's command: its `Training` as "module:attribute", its help text and its flags."""

    training: str
    help: str
    flags: Sequence[Flag]


TRAININGS = {
    "photo": Command(
        "jurybox.training.recipes.photo_run:TRAINING",
        "Train a policy to edit photos for a higher score from the server's juror.",
        (
            *(SEED, STEPS, WORKERS, ENVS),
            Flag(
                "environment.address",
                str,
                "Address of the server; without it JURYBOX_ADDRESS, the default address, or a private server.",
                "--server",
            ),
            Flag("+server_http", bool, "Serve HTTP from the private server, too."),
            Flag("+juror_replicas", int, "Number of engines of the private server."),
            Flag("environment.model", str, "Name of the juror on the server.", "--model"),
            Flag("environment.photos", str, "Folder of photos to use instead of the bundled ones.", "--photos"),
            SECONDS,
            Flag("rollout", int, "Env steps between two updates, over all environments."),
            Flag("damages", int, "Number of degradation seeds in the evaluation."),
            Flag("+network_address", str, "Address of the server for the other machines of a Ray cluster."),
        ),
    ),
    "plan": Command(
        "jurybox.training.recipes.any_plan:TRAINING",
        "Run a plan of your own, with the same options and outputs as the other trainings.",
        (
            Flag("plan", str, "module:function that returns a jurybox.training.runtime.Plan."),
            *(SEED, STEPS, SECONDS),
        ),
    ),
    "marl": Command(
        "jurybox.training.recipes.marl_run:TRAINING",
        "Train many agents in one world, each with its own learner process.",
        (SEED, STEPS, SECONDS, WORKERS, ENVS, Flag("agents", int, "Number of agents in the treasure hunt."), *SERVED),
    ),
    "hockey": Command(
        "jurybox.training.recipes.hockey:TRAINING",
        "Train a hockey policy against bots and its past selves, with collectors and a learner side by side.",
        (
            *(SEED, STEPS, SECONDS, WORKERS, ENVS),
            Flag("target", float, "Stop at this score (wins - losses)."),
            Flag("on_failure", str, "What to do when a process fails too often: end, or go on in serial."),
            Flag("environment", str, "Environment class, module:Class, with the original's constructor.", "--env"),
            Flag("mode", int, "0: whole games, 1: shooting, 2: defence."),
            *SERVED,
            Flag("train_freq", int, "Env steps per gradient_steps learner steps."),
            Flag("gradient_steps", int, "Learner steps per train_freq env steps."),
            LEARNING_STARTS,
            Flag("weight_sync_interval", int, "Collector steps between two checks for new weights."),
            Flag("max_lag", int, "Fetch weights at once when they are this many publications old."),
            *INTERVALS,
        ),
    ),
    "gym": Command(
        "jurybox.training.recipes.gym:TRAINING",
        "Train a policy in any Gymnasium environment, with PPO, DQN, TD3 or SAC.",
        (
            *(SEED, STEPS, SECONDS, WORKERS, ENVS),
            Flag("env", str, "Gymnasium id, or module:factory."),
            Flag("algorithm", str, "ppo, dqn, td3 or sac."),
            *SERVED,
            Flag("learning_rate", float, "Learning rate of Adam."),
            Flag("n_steps", int, "ppo: steps per environment between two updates; else steps of the n-step return."),
            LEARNING_STARTS,
            Flag("train_freq", int, "Steps per environment per gradient_steps learner steps."),
            Flag("gradient_steps", int, "Learner steps per train_freq steps; -1: as many as env steps."),
            Flag("normalize_observations", bool, "Normalize observations to mean 0 and standard deviation 1."),
            *INTERVALS,
        ),
    ),
    "workflow": Command(
        "jurybox.training.recipes.workflow_run:TRAINING",
        "Search for the order of repairs that best defends a network, and train the policy that follows it.",
        (
            *(SEED, WORKERS, ENVS),
            Flag("total_episodes", int, "Total training episodes."),
            Flag("red", str, "Attacker: B_line or Meander.", also="--red-agent"),
            Flag("env", str, "cage: our simulator; cyborg: CybORG, where installed."),
            *SERVED,
            Flag("halves", bool, "Compute actions for half of the networks while the other half steps."),
            Flag("episode_length", int, "Steps per episode."),
            Flag("update_every_steps", int, "Steps per network between two updates; an episode by default."),
            Flag("gate", float, "Share of the judged fixes that must follow the workflow."),
            Flag(
                "max_train_episodes_per_env",
                int,
                "Training episodes per environment after which a workflow is given up.",
            ),
            Flag("align_lambda", float, "Penalty for a judged fix out of order."),
            Flag("head_start", int, "Largest head start of the attacker, in steps."),
            Flag("order_masks", bool, "Mask actions that would be out of order."),
            Flag("evaluation_episodes", int, "Evaluation episodes per workflow; ten times as many at the end."),
            Flag("beta", float, "Exploration coefficient of the search."),
            Flag("inherit", bool, "Start each workflow from the previous one's policy."),
            Flag("use_masks", bool, "Mask actions that are sure to fail.", "--masks"),
            Flag("quirk", bool, "Drop the cost of Impact after Op_Server0 is restored."),
        ),
    ),
}


def command_of(command: Command) -> Callable[..., None]:
    """Create the function for typer; its signature has the common flags and the training's own."""
    own = {flag.option.strip("-").replace("-", "_"): flag for flag in command.flags}

    def run(**given: Any) -> None:
        settings = {flag.setting: given[name] for name, flag in own.items() if not flag.setting.startswith("+")}
        more = {flag.setting[1:]: given[name] for name, flag in own.items() if flag.setting.startswith("+")}
        common = {name: given[name] for name in _COMMON}
        carry_out(command.training, given=settings, more=more, **{**common, "changes": common["changes"] or []})

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option])
        for name, (kind, default, option) in _COMMON.items()
    ]
    for name, flag in own.items():
        option = f"{flag.option}/--no-{flag.option[2:]}" if flag.kind is bool else flag.option
        kind: Any = flag.kind | None
        names = [option, *filter(None, [flag.also])]
        annotation = Annotated[kind, typer.Option(*names, help=flag.help, show_default=False)]
        parameters.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = command.help
    return run


for _name, _command in TRAININGS.items():
    train.command(_name)(command_of(_command))


@demo.command("photo")
def demo_photo(
    out: Out = Path("demo-out"),
    steps: Annotated[int | None, typer.Option(min=64, help="Number of edit steps to train.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Stop training after this many seconds; results then depend on the machine."),
    ] = None,
    seed: Seed = 0,
    damages: Annotated[int | None, typer.Option(min=2, help="Number of degradation seeds in the evaluation.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of env workers.")] = None,
    juror: Annotated[str | None, typer.Option(help="Factory of another juror, package.module:function.")] = None,
    juror_replicas: Annotated[int, typer.Option(min=1, max=64, help="Number of engines.")] = 1,
) -> None:
    """Start a server, train a policy on real photos against its juror, and write a report; about three minutes."""

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.recipes import photo_run
        from jurybox.training.recipes.progress import ConsoleProgress

        verdict = photo_run.demo(
            out,
            ConsoleProgress(console),
            resources,
            seed=seed,
            steps=steps or photo_run.STEPS,
            seconds=seconds,
            damages=damages or photo_run.DAMAGES,
            workers=workers or photo_run.WORKERS,
            juror=juror or photo_run.JUROR,
            replicas=juror_replicas,
        )
        return "\n".join((verdict.headline, *verdict.sentences, "", f"report: {out / 'report.html'}"))

    until_interrupted(work, out, message="stopping the server and the workers", what="the demo")


def main(arguments: list[str] | None = None) -> Any:
    """Run the commands without the server's console script: ``python -m jurybox.training.cli demo photo``."""
    both = typer.Typer(pretty_exceptions_enable=False)
    both.add_typer(train, name="train")
    both.add_typer(demo, name="demo")
    return both(arguments)


if __name__ == "__main__":
    main()
