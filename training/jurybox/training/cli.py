"""Train a policy (`train`), or see it all happen in three minutes (`demo`).

The command of a training is made from its row in `TRAININGS`: the common flags, and its own, each of which sets a
setting. A training is imported when it runs.
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
    help="See it all at once: server, workers, training, report.", no_args_is_help=True, pretty_exceptions_enable=False
)


@train.callback()
@demo.callback()
def _group() -> None:
    """Makes typer keep the name of the training in the command if there is only one."""


Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the report, logs and checkpoints.")]
Seed = Annotated[int, typer.Option(min=0, help="Everything random comes from it.")]
# What every training's command takes beside the flags of settings; `recipes.training.train` has the same names.
_COMMON: dict[str, tuple[Any, Any, typer.models.OptionInfo]] = {
    "out": (Path | None, None, typer.Option("--out", metavar="DIR", help="Folder for everything; NAME-out.")),
    "config": (
        Path | None,
        None,
        typer.Option("--config", metavar="FILE", help="Settings, as TOML.", exists=True, dir_okay=False),
    ),
    "changes": (
        list[str] | None,
        None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change one setting; VALUE as in TOML."),
    ),
    "seeds": (
        str | None,
        None,
        typer.Option("--seeds", metavar="0,1,2", help="A run for each of these, in DIR/seed-0, ...; DIR/seeds.csv."),
    ),
    "serial": (bool, False, typer.Option("--serial", help="The same algorithm in one process.")),
    "resume": (bool, False, typer.Option("--resume", help="Go on from the newest checkpoint in DIR.")),
    "launcher": (str, "local", typer.Option("--launcher", help="Where processes run: local, or ray (an extra).")),
    "ray_address": (
        str | None,
        None,
        typer.Option("--ray-address", help="Of the Ray cluster: host:port or auto; else this machine."),
    ),
    "debug_state": (
        bool,
        False,
        typer.Option("--debug-state", help="Print what the run in DIR shares at this moment, and end."),
    ),
    "mlflow": (bool, False, typer.Option("--mlflow", help="Record to MLflow too.")),
    "wandb": (bool, False, typer.Option("--wandb", help="Record to Weights & Biases too.")),
}


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag for a setting; without it the value of the file is used.

    Attributes:
        setting: its name, "part.NAME" for one of a part; the flag's name too, where `name` is empty. One that begins
            with "+" is no setting, but an option of this training alone (see `Run.more`).
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


SEED = Flag("seed", int, "Everything random comes from it.")
STEPS = Flag("steps", int, "Env steps in all.")
WORKERS = Flag("workers", int, "Processes that hold environments.")
SECONDS = Flag("seconds", float, "Stop training after so many.")
ENVS = Flag("envs", int, "Environments, of all workers together.")
LEARNING_STARTS = Flag("learning_starts", int, "Env steps at random, without learning.")
INTERVALS = (
    Flag("evaluate_every", int, "Env steps between evaluations."),
    Flag("checkpoint_every", int, "Env steps between checkpoints."),
)
SERVED = (
    Flag("policy", str, "local: whoever acts computes; served: a server."),
    Flag("server", str, "Of a served policy: ipc:// or grpc:// of a server that runs; else a private one."),
    Flag("server_http", bool, "A private server serves HTTP, too."),
)


@dataclass(frozen=True, slots=True)
class Command:
    """A training's command: where its `Training` is, what it does, its flags."""

    training: str
    help: str
    flags: Sequence[Flag]


TRAININGS = {
    "photo": Command(
        "jurybox.training.recipes.photo_run:TRAINING",
        "Teach a policy to edit photos so that the server's juror likes them better.",
        (
            *(SEED, STEPS, WORKERS, ENVS),
            Flag("environment.address", str, "The server; else JURYBOX_ADDRESS, or a private one.", "--server"),
            Flag("+server_http", bool, "A private server serves HTTP, too."),
            Flag("+juror_replicas", int, "Engines of a private server, each with the juror."),
            Flag("environment.model", str, "The juror's name on the server.", "--model"),
            Flag("environment.photos", str, "A folder of photos to use instead of those that ship.", "--photos"),
            SECONDS,
            Flag("rollout", int, "Steps of all environments together between two updates."),
            Flag("damages", int, "Seeds of degradation in the evaluation."),
            Flag("+network_address", str, "The server's address for a Ray cluster's other machines."),
        ),
    ),
    "plan": Command(
        "jurybox.training.recipes.any_plan:TRAINING",
        "Carry out a plan of your own, with everything that the other trainings have.",
        (
            Flag("plan", str, "module:function that gives a jurybox.training.runtime.Plan."),
            *(SEED, STEPS, SECONDS),
        ),
    ),
    "marl": Command(
        "jurybox.training.recipes.marl_run:TRAINING",
        "Teach many agents in one world, a learner process for each.",
        (SEED, STEPS, SECONDS, WORKERS, ENVS, Flag("agents", int, "Agents in the treasure hunt."), *SERVED),
    ),
    "hockey": Command(
        "jurybox.training.recipes.hockey:TRAINING",
        "Teach a policy to play hockey against bots and its past selves, collecting and learning at the same time.",
        (
            *(SEED, STEPS, SECONDS, WORKERS, ENVS),
            Flag("target", float, "Stop at so many points (wins - losses)."),
            Flag("on_failure", str, "end or serial, when a process fails too often."),
            Flag("environment", str, "module:Class made like the original.", "--env"),
            Flag("mode", int, "0 whole games, 1 shooting, 2 defence."),
            *SERVED,
            Flag("train_freq", int, "Env steps for gradient_steps learner steps."),
            Flag("gradient_steps", int, "Learner steps for train_freq env steps."),
            LEARNING_STARTS,
            Flag("weight_sync_interval", int, "A collector's steps between looks for new weights."),
            Flag("max_lag", int, "Staler than so many publications: sync at once."),
            *INTERVALS,
        ),
    ),
    "gym": Command(
        "jurybox.training.recipes.gym:TRAINING",
        "Teach a policy any Gymnasium environment, with PPO, DQN, TD3 or SAC.",
        (
            *(SEED, STEPS, SECONDS, WORKERS, ENVS),
            Flag("env", str, "A name that Gymnasium knows, or module:factory."),
            Flag("algorithm", str, "ppo, dqn, td3 or sac."),
            *SERVED,
            Flag("learning_rate", float, "Of Adam."),
            Flag("n_steps", int, "ppo: steps of each environment between two updates; else of a return."),
            LEARNING_STARTS,
            Flag("train_freq", int, "Steps of each environment for gradient_steps learner steps."),
            Flag("gradient_steps", int, "Learner steps for train_freq steps; -1: as many as env steps."),
            Flag("normalize_observations", bool, "Numbers of observations to mean 0 and deviation 1."),
            *INTERVALS,
        ),
    ),
    "workflow": Command(
        "jurybox.training.recipes.workflow_run:TRAINING",
        "Search the order of repairs that best defends a network, and the policy that keeps to it.",
        (
            *(SEED, WORKERS, ENVS),
            Flag("total_episodes", int, "Episodes of training in all."),
            Flag("red", str, "The attacker: B_line or Meander.", also="--red-agent"),
            Flag("env", str, "cage: our simulator; cyborg: the real one, where installed."),
            *SERVED,
            Flag("halves", bool, "Act for half of the networks while the other half steps."),
            Flag("episode_length", int, "Steps of an episode."),
            Flag("update_every_steps", int, "Steps of each network between two updates; else an episode's."),
            Flag("gate", float, "Share of the judged fixes that must comply."),
            Flag("max_train_episodes_per_env", int, "Then a workflow is given up."),
            Flag("align_lambda", float, "What a judged fix out of order costs."),
            Flag("head_start", int, "Most steps for which the attacker is alone at first."),
            Flag("order_masks", bool, "Leave out fixes that may be out of order."),
            Flag("evaluation_episodes", int, "After a workflow's training; ten times as many at the end."),
            Flag("beta", float, "How far the search explores."),
            Flag("inherit", bool, "Begin each workflow with the last one's policy."),
            Flag("use_masks", bool, "Leave out actions that are sure to fail.", "--masks"),
            Flag("quirk", bool, "No Impact costs after Op_Server0's restore."),
        ),
    ),
}


def command_of(command: Command) -> Callable[..., None]:
    """The function for typer, whose signature has the common flags and the training's own."""
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
    steps: Annotated[int | None, typer.Option(min=64, help="Edit steps to train.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Train no longer than this; the numbers then depend on the machine.")
    ] = None,
    seed: Seed = 0,
    damages: Annotated[int | None, typer.Option(min=2, help="Seeds of degradation in the evaluation.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Env workers.")] = None,
    juror: Annotated[str | None, typer.Option(help="Another juror: package.module:function.")] = None,
    juror_replicas: Annotated[int, typer.Option(min=1, max=64, help="Engines, each with the juror.")] = 1,
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

    until_interrupted(work, out, told="stopping the server and the workers")


def main(arguments: list[str] | None = None) -> Any:
    """``python -m jurybox.training.cli demo photo``: the same commands without the server's console script."""
    both = typer.Typer(pretty_exceptions_enable=False)
    both.add_typer(train, name="train")
    both.add_typer(demo, name="demo")
    return both(arguments)


if __name__ == "__main__":
    main()
