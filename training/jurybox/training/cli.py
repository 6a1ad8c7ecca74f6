"""The commands `jurybox train`, which trains a policy, and `jurybox demo`, which shows everything in three minutes.

The command of a training is created from its entry in `TRAININGS` and its settings, of which each is a flag. A
training's module is imported only when its command is used.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from jurybox.protocol.errors import did_you_mean
from jurybox.training import interrupts
from jurybox.training.trainings.command import train as carry_out
from jurybox.training.trainings.training import ExtraMissing, named, require_extra, until_interrupted

if TYPE_CHECKING:
    from jurybox.training.runtime.settings import Settings
    from jurybox.training.trainings.setting_flags import Setting

_USAGE = 2

demo = typer.Typer(
    help="Show everything at once: server, workers, training, report.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@demo.callback()
def _group() -> None:
    """Make typer keep the name of the training in the command even if there is only one."""


Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the report, logs and checkpoints.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random number generator.")]


def _of_every_training(
    *,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Output folder; NAME-out by default.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="TOML file with settings.", exists=True, dir_okay=False),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set one setting, VALUE as TOML or text; repeatable."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds", metavar="0,1,2", help="Run once per seed, in DIR/seed-N; DIR/report.html compares them."
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary", metavar="NAME=[A,B]", help="Run once per value of a setting, with each seed; repeatable."
        ),
    ] = None,
    at_once: Annotated[
        int, typer.Option("--at-once", metavar="N", min=1, help="Runs of --seeds and --vary that go side by side.")
    ] = 1,
    serial: Annotated[bool, typer.Option("--serial", help="Run the same algorithm in one process.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint in DIR.")] = False,
    launcher: Annotated[
        str, typer.Option("--launcher", help="Where processes run: local, or ray (needs the extra).")
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="Ray cluster, host:port or auto; without it Ray starts here."),
    ] = None,
    debug_state: Annotated[
        bool, typer.Option("--debug-state", help="Print the shared state of the run in DIR, and exit.")
    ] = False,
    mlflow: Annotated[bool, typer.Option("--mlflow", help="Also log to MLflow.")] = False,
    wandb: Annotated[bool, typer.Option("--wandb", help="Also log to Weights & Biases.")] = False,
) -> None:
    """The flags of every training's command beside those of its settings: parameters of `trainings.command.train`."""


_COMMON = inspect.signature(_of_every_training, eval_str=True).parameters


@dataclass(frozen=True, slots=True)
class More:
    """An option of one training that is no setting; see `Run.more`."""

    name: str
    kind: type
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


SEED, SPEED = ("seed", "steps", "seconds"), ("workers", "envs")
SERVED = ("policy", "server", "server_http", "server_group")
LEARNING = ("learning_starts", "train_freq", "gradient_steps")
INTERVALS = ("evaluate_every", "checkpoint_every")


@dataclass(frozen=True, slots=True)
class Command:
    """A training's command: every setting is a flag, ``--learning-rate``, ``--ppo.clip-range``.

    Attributes:
        training: its `Training` as "module:attribute".
        help: the help text.
        first: the settings that the help shows first.
        short: shorter or further names of flags, by setting.
        more: its options that are no settings.
    """

    training: str
    help: str
    first: Sequence[str] = ()
    short: Mapping[str, Sequence[str]] = field(default_factory=dict)
    more: Sequence[More] = ()


TRAININGS = {
    "photo": Command(
        "jurybox.studies.photo.train:TRAINING",
        "Train a policy to edit photos for a higher score from the server's juror.",
        (*SEED, *SPEED, "environment.address", "environment.model", "environment.photos", "rollout", "damages"),
        {
            "environment.address": ("--server",),
            "environment.model": ("--model",),
            "environment.photos": ("--photos",),
        },
        (
            More("server_http", bool, "Serve HTTP from the private server, too."),
            More("juror_replicas", int, "Number of engines of the private server."),
            More("network_address", str, "Address of the server for the other machines of a Ray cluster."),
        ),
    ),
    "plan": Command(
        "jurybox.training.trainings.any_plan:TRAINING",
        "Run a plan of your own, with the same options and outputs as the other trainings.",
        ("plan", "arguments", *SEED),
    ),
    "marl": Command(
        "jurybox.training.trainings.marl_run:TRAINING",
        "Train many agents in one world, each with its own learner process.",
        (*SEED, *SPEED, "env", "agents", "algorithm", *SERVED),
    ),
    "hockey": Command(
        "jurybox.studies.hockey.train:TRAINING",
        "Train a hockey policy against bots and its past selves, with collectors and a learner side by side.",
        (*SEED, *SPEED, "target", "env", "mode", *SERVED, *LEARNING, *INTERVALS),
    ),
    "gym": Command(
        "jurybox.training.trainings.gym:TRAINING",
        "Train a policy in any Gymnasium environment, with PPO, DQN, IQN, TD3, SAC or an algorithm of yours.",
        ("env", "algorithm", *SEED, *SPEED, *SERVED, "learning_rate", "n_steps", *LEARNING, *INTERVALS),
    ),
    "workflow": Command(
        "jurybox.studies.workflow.train:TRAINING",
        "Search for the order of repairs that best defends a network, and train the policy that follows it.",
        ("seed", "total_episodes", *SPEED, "red", "env", *SERVED),
        {"red": ("--red-agent",), "use_masks": ("--masks",)},
    ),
}


def settings_class(command: Command) -> type[Settings]:
    """Import a training, and return the class of its settings."""
    return named(command.training).settings


class TrainCommand(TyperCommand):
    """The command of a training. Its settings are flags; the training is imported when they are needed."""

    of: Command
    _chosen: str | None = None  # the algorithm that is given, whose settings are flags, too
    _groups: dict[str, list[tuple[str, str]]]
    _settings: dict[str, Setting]  # by the name of the flag's parameter

    def get_params(self, ctx: Any) -> list[Any]:
        """Return all options, those of the settings among them."""
        if not hasattr(self, "_groups"):
            self._add_settings()
        return super().get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; an unknown one is answered with the name that it has here, or one that is near."""
        args = list(map(_with_hyphens, args))
        self._chosen = _value_of("--algorithm", args)
        try:
            return list(super().parse_args(ctx, args))
        except Exception as error:
            if (option := getattr(error, "option_name", None)) is None or not hasattr(error, "possibilities"):
                raise
            error.message = f"No such option: {option}{self._instead_of(option)}"  # type: ignore[attr-defined]
            error.possibilities = None
            raise

    def _instead_of(self, option: str) -> str:
        name = option.lstrip("-").replace("-", "_")
        settings = settings_class(self.of)
        if ours := settings.others_names().get(name):
            return f": it is called --{ours.replace('_', '-')} here"
        if (way := settings.other_way(name)) is not None:
            return f": {way}"
        near = did_you_mean(option, [flag for each in self.params for flag in each.opts])
        return near if "did you mean" in near else "; --help lists all"

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in groups, in lines of at most 80 characters."""
        self.get_params(ctx)
        for title, rows in self._groups.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=24)

    def given(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings and the options of this training that were given."""
        settings = {
            each.name: value if isinstance(value, bool) else each.value_of(value)
            for name, each in self._settings.items()
            if (value := values[name]) is not None
        }
        return settings, {more.name: values[_parameter(more.name)] for more in self.of.more}

    def _add_settings(self) -> None:
        try:
            require_extra()
        except ExtraMissing as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(_USAGE) from error
        from jurybox.training.runtime.plan import ConfigError
        from jurybox.training.trainings.setting_flags import settings_of

        try:
            found = settings_of(settings_class(self.of), {"algorithm": self._chosen} if self._chosen else {})
        except ConfigError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(_USAGE) from error
        self._settings = {_parameter(each.name): each for each in found}
        common = [
            (" ".join((*each.opts, each.metavar or "")).strip(), getattr(each, "help", None) or "")
            for each in self.params
        ]
        groups: dict[str, list[tuple[str, str]]] = {"Settings": [], "Run": common}
        groups["Run"].append(("--help", "Show this message and exit."))
        options: list[inspect.Parameter] = []

        def add(title: str, names: Sequence[str], name: str, text: str, kind: type, shown: str) -> None:
            declared = [f"{each}/--no-{each[2:]}" if kind is bool else each for each in names]
            option = typer.Option(*declared, help=text, show_default=False)
            annotation: Any = Annotated[kind | None, option]
            options.append(
                inspect.Parameter(_parameter(name), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
            line = ", ".join(declared) + ("" if kind is bool else f" {shown if '|' in shown else shown.upper()}")
            groups.setdefault(title, []).append((line, text))

        order = {name: place for place, name in enumerate(self.of.first)}
        for each in sorted(found, key=lambda one: order.get(one.name, len(order))):
            part = each.name.rpartition(".")[0]
            title = f"Settings of {part}" if part else "Further settings"
            names = [*self.of.short.get(each.name, ()), each.flag]
            kind = bool if each.kind == "true|false" else str
            text = f"{each.meaning} [default:\N{NO-BREAK SPACE}{each.default}]"
            add("Settings" if each.name in order else title, names, each.name, text, kind, each.kind)
        for more in self.of.more:
            add("Settings", [more.flag], more.name, more.help, more.kind, more.kind.__name__)
        self.params.extend(_command_with(options, lambda **_: None, self.name or "").params)
        self._groups = groups


def _command_with(options: Sequence[inspect.Parameter], call: Callable[..., None], name: str, **more: Any) -> Any:
    """Return a command of these options, made by typer of a function's signature."""
    call.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in options}
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, **more)(call)
    return get_command(single)


def _parameter(name: str) -> str:
    """Return the name of the parameter of a flag: the common options have others."""
    return "setting_" + name.replace(".", "__")


def command_of(name: str, command: Command) -> TrainCommand:
    """Create the command of a training, with the options of all trainings; it adds its own when it needs them."""

    def run(**values: Any) -> None:
        settings, more = made.given(values)
        common = {name: values[name] for name in _COMMON}
        common |= {name: None if common[name] is None else Path(common[name]) for name in ("out", "config")}
        carry_out(
            command.training,
            given=settings,
            more=more,
            **{**common, "changes": common["changes"] or [], "vary": common["vary"] or []},
        )

    run.__doc__ = command.help
    made: Any = _command_with(list(_COMMON.values()), run, name, cls=TrainCommand)
    made.of, made.callback = command, run  # not typer's, which knows the common options alone
    return made  # type: ignore[no-any-return]


def _value_of(flag: str, args: Sequence[str]) -> str | None:
    """Return the value of a flag, before the options are parsed; None: it is not given."""
    for number, option in enumerate(args):
        name, equals, value = option.partition("=")
        if name == flag:
            return value if equals else (args[number + 1] if number + 1 < len(args) else None)
    return None


def _with_hyphens(option: str) -> str:
    """--batch_size=64 is --batch-size=64."""
    name, equals, value = option.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if option.startswith("--") else option


class Trainings(TyperGroup):
    """The group of all trainings."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all trainings."""
        return list(TRAININGS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a training, or None."""
        if cmd_name in TRAININGS and cmd_name not in self.commands:
            self.commands[cmd_name] = command_of(cmd_name, TRAININGS[cmd_name])
        return super().get_command(ctx, cmd_name)


train = typer.Typer(cls=Trainings, help="Train a policy.", no_args_is_help=True, pretty_exceptions_enable=False)


@train.callback()
def _trainings() -> None:
    """Without a callback typer would make no group of it, since its commands are created later."""


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
    """Start a server, improve a photo editor against its juror, and write a report; about two minutes."""
    _demonstrate(
        out, seed=seed, steps=steps, seconds=seconds, damages=damages, workers=workers, juror=juror,
        replicas=juror_replicas,
    )  # fmt: skip


@demo.command("gamed")
def demo_gamed(
    out: Out = Path("demo-gamed"),
    steps: Annotated[int | None, typer.Option(min=64, help="Number of edit steps to train.")] = None,
    seed: Seed = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of env workers.")] = None,
) -> None:
    """The same with a juror that a policy can game, and at no price: its score rises, and the audit catches it."""
    _demonstrate(out, seed=seed, steps=steps, workers=workers, gamed=True)


@demo.command("policy")
def demo_policy(
    out: Annotated[Path, typer.Option(help="Folder for the server's log.")] = Path("demo-policy"),
    seed: Seed = 0,
    stay: Annotated[
        bool | None, typer.Option("--stay/--end", help="Serve on until Ctrl-C; by default in a terminal.")
    ] = None,
) -> None:
    """Serve a small policy and ask it from Python and curl, in ten seconds; then look at its live page."""

    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.training.runtime.local_server import LocalServer
        from jurybox.training.trainings import policy_demo

        out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        server = LocalServer(
            {"cartpole": {"factory": "jurybox.training.trainings.policy_demo:cartpole"}}, out / "server.log"
        )
        resources.callback(server.stop)
        server.start()
        server.wait()

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        say(f"server   {server.address}, ready after {time.monotonic() - began:.1f} s\n")
        policy_demo.show(server, say, seed=seed)
        if console.is_terminal if stay is None else stay:
            say("\nThe server runs on: try the command and the page. Ctrl-C ends it.")
            while server.alive:
                interrupts.check()
                time.sleep(0.1)
        return "The answers are the same."

    until_interrupted(work, out, message="stopping the server", what="the demo")


def _demonstrate(out: Path, **options: Any) -> None:
    def work(console: Console, resources: ExitStack) -> str:
        from jurybox.studies.photo.train import demo as demonstrate
        from jurybox.training.trainings.progress import ConsoleProgress

        given = {name: value for name, value in options.items() if value is not None}
        verdict = demonstrate(out, ConsoleProgress(console), resources, **given)
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
