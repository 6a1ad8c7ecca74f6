"""A sorrel experiment: its settings, and its run, in several processes if its configuration enables that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field
from rich.console import Console

from jurybox.processes.surroundings import kept
from jurybox.protocol.weights import WeightsLayout
from jurybox.studies.sorrel.models import GlobalRandom, acting_part, fields_of, is_on_policy, learned
from jurybox.studies.sorrel.roles import put_back
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.replay import Field as ReplayField
from jurybox.training.roles.checking import place_of
from jurybox.training.run_folder import recording, write_settings
from jurybox.training.runtime.plan import (
    Budget,
    ChannelSpec,
    ConfigError,
    Kind,
    Outcome,
    Pace,
    Plan,
    ReplaySpec,
    RoleSpec,
    RunError,
    Timeouts,
    load,
)
from jurybox.training.runtime.progress import COLUMNS
from jurybox.training.runtime.run import run
from jurybox.training.runtime.settings import Settings
from jurybox.training.spaces import ContractBroken, number

PublishMode = Literal["double_buffer", "snapshot"]


class SorrelError(RunError):
    """The environment or its configuration does not support several processes; the message states the reason."""


class Multiprocessing(Settings):
    """Settings in addition to sorrel's. Without `enabled`, sorrel itself runs the experiment."""

    title = "sorrel"
    ways: ClassVar = {
        "num_learner_processes": "each model has a learner process of its own, so agents with one model share one"
    }

    enabled: bool = False
    publish_mode: PublishMode | dict[str, PublishMode] = Field(
        "double_buffer", description="Of all models, or of some by name: {agent_0: snapshot}; others: double_buffer."
    )
    publish_interval: int = Field(10, ge=0, description="Learner steps between two publications; 0: only the first.")
    buffer_size: int = Field(10_000, ge=1, description="Capacity of the replay from the actor to a learner, in rows.")
    train_freq: int = Field(4, ge=1, description="Turns per train_step; on-policy models take whole epochs.")
    learning_starts: int = Field(100, ge=0, description="Turns before the first train_step.")
    learner_nice: int = Field(
        10, ge=0, le=19, description="Niceness of the learner processes, so that the actor runs first."
    )
    max_ahead: int | None = Field(None, ge=0, description="Turns by which the actor may be ahead; none: no limit.")
    max_lag: int | None = Field(None, ge=0, description="Publications by which the actor may lag.")
    actor_timeout: float = Field(
        30.0, gt=0, description="Seconds without a heartbeat after which the actor counts as hung."
    )
    learner_timeout: float = Field(60.0, gt=0)
    reset_timeout: float = Field(
        600.0, gt=0, description="Seconds that a reset of the environment, or building it, may take."
    )
    check_steps: int = Field(20, ge=0, description="Turns that check the environment before the training; 0: none.")
    checkpoint_every: int = Field(0, ge=0, description="Turns between two checkpoints; 0: one at the end.")
    log_every: int = Field(100, ge=1, description="Turns between two rows of metrics.")
    log_dir: Path = Path("sorrel-out")

    @classmethod
    def of(cls, config: Any) -> Multiprocessing:
        """Read the settings from a sorrel configuration (an OmegaConf DictConfig); missing ones have their defaults.

        Raises:
            SorrelError: a setting is unknown or out of range.
        """
        given = config.get("multiprocessing") or {}
        try:
            return cls.checked({str(name): given[name] for name in given})
        except ConfigError as error:
            raise SorrelError(f"config.multiprocessing: {error}") from error

    def publish_modes(self, models: Sequence[str]) -> dict[str, PublishMode]:
        """How each of these models publishes its weights.

        Raises:
            SorrelError: `publish_mode` names a model that is not there.
        """
        given = self.publish_mode
        if not isinstance(given, dict):
            return dict.fromkeys(models, given)
        if unknown := sorted(set(given) - set(models)):
            raise SorrelError(
                f"config.multiprocessing: publish_mode names {', '.join(unknown)}; the models that learn are "
                f"{', '.join(models)}"
            )
        return {name: given.get(name, "double_buffer") for name in models}


_ROLES = "jurybox.studies.sorrel.roles"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A finished experiment.

    Attributes:
        env: the environment with the learned models.
        outcome: outcome of the run in several processes; None if sorrel ran it.
    """

    env: Any
    outcome: Outcome | None


def run_experiment(
    make: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    serial: bool = False,
    resume: bool = False,
    console: Console | None = None,
    **sequential: Any,
) -> Experiment:
    """Run the experiment of a sorrel environment.

    With ``config.multiprocessing.enabled``, an actor process takes its turns, and each model is trained in its own
    process; `config.experiment` and `config.model.epsilon_decay` have the same meaning as in sorrel. Otherwise this
    calls ``env.run_experiment(**sequential)``.

    Args:
        make: "package.module:callable" that returns the environment; every process creates its own.
        arguments: keyword arguments of the callable; JSON-serializable.
        serial: run the same roles in this process.
        resume: resume from the newest checkpoint in the log_dir; if the run ended before its first, it begins anew.
        console: shows the progress.
        sequential: arguments for sorrel: animate, logging, logger, output_dir.

    Raises:
        SorrelError: the settings are invalid, or no agent has a model that can be trained.
        RunLogError: the log_dir holds another run and `resume` is not set, or a run is in progress there.
        CheckpointError: `resume` is set, and no run was started in the log_dir.
    """
    arguments = dict(arguments or {})
    env = load(make)(**arguments)
    settings = Multiprocessing.of(env.config)
    if not settings.enabled:
        env.run_experiment(**sequential)
        return Experiment(env, None)
    planned, folder = plan(env, settings, make, arguments), settings.log_dir
    planned.check_learns()
    check(make, arguments, settings.check_steps, settings.seed)
    names = [channel.name for channel in planned.channels]
    columns = (*COLUMNS, "epsilon", *(f"{what}_{name}" for what in ("loss", "missed") for name in names))

    def notify(text: str) -> None:
        if console is not None:
            console.print(text, highlight=False, markup=False)

    with recording(folder, columns, settings, notify, resume=resume) as (log, found):
        write_settings(folder, settings)
        outcome = run(planned, folder, log, serial=serial, resume=found is not None, console=console)
    last = Checkpoints(folder / "checkpoints").latest()
    for name, members in learned(env.agents).items():
        state = last.state(f"learner-{name}") if last else None
        if state is not None:
            put_back(env.agents[members[0]].model, state)
    return Experiment(env, outcome)


def check(make: str, arguments: Mapping[str, Any], steps: int, seed: int) -> None:
    """Play an environment of its own for so many turns, with models that have not learned, and drop it.

    Raises:
        SorrelError: it raised something, or its reward is no finite number; the message says where.
    """
    if not steps:
        return
    try:
        with kept(), GlobalRandom(seed)():
            env = load(make)(**arguments)
            for turn in range(steps):
                if turn == 0 or env.turn >= env.config.experiment.max_turns or env.world.is_done:
                    env.reset()
                    for agent in env.agents:
                        env._model_start_epoch_action(agent, 0)
                env.take_turn(0)
                number(env.world.total_reward, "the world's total_reward")
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, ContractBroken) else f"it raised {type(error).__name__}: {error}"
        raise SorrelError(
            f"{make} cannot be trained in: {what} ({place_of(error)}). It was played before the training, at most "
            f"{steps} turns (multiprocessing.check_steps)"
        ) from error


def plan(env: Any, settings: Multiprocessing, make: str, arguments: Mapping[str, Any]) -> Plan:
    """Create the plan that runs an environment's experiment in several processes."""
    groups = learned(env.agents)
    if not groups:
        raise SorrelError(
            "no agent of this environment has a model with weights and a memory: there is nothing to learn; "
            "leave out multiprocessing.enabled"
        )
    models = {name: env.agents[members[0]].model for name, members in groups.items()}
    turns = int(env.config.experiment.max_turns)
    on_policy = any(is_on_policy(model) for model in models.values())
    if on_policy and settings.buffer_size < 2 * max(len(group) for group in groups.values()) * (turns + 2):
        raise SorrelError(
            f"buffer_size {settings.buffer_size} is too small for models that learn from whole epochs of "
            f"{turns} turns: two of them have to fit"
        )
    names = tuple(groups)
    modes = settings.publish_modes(names)
    made = (make, dict(arguments))
    fields: dict[str, dict[str, ReplayField]] = {name: fields_of(model.memory) for name, model in models.items()}
    return Plan(
        roles=(
            RoleSpec(
                "actor",
                Kind.ACTOR,
                f"{_ROLES}:SorrelActor",
                {"make": made, "groups": groups},
                writes=names,
                reads=names,
            ),
            *(
                RoleSpec(
                    f"learner-{name}",
                    Kind.LEARNER,
                    f"{_ROLES}:SorrelLearner",
                    {"make": made, "group": name, "members": members},
                    samples=(name,),
                    publishes=name,
                    publish_every=min(1, settings.publish_interval)
                    if is_on_policy(models[name])
                    else settings.publish_interval,
                    nice=settings.learner_nice,
                )
                for name, members in groups.items()
            ),
        ),
        replays=tuple(ReplaySpec(name, settings.buffer_size, fields[name]) for name in names),
        channels=tuple(
            ChannelSpec(name, WeightsLayout.of(acting_part(models[name]).state_dict()), modes[name]) for name in names
        ),
        # sorrel counts epochs from 0 to `epochs` inclusive.
        budget=Budget((int(env.config.experiment.epochs) + 1) * turns),
        pace=Pace(turns, 1, 0, settings.max_ahead)
        if on_policy
        else Pace(settings.train_freq, 1, settings.learning_starts, settings.max_ahead),
        timeouts=Timeouts(actor=settings.actor_timeout, learner=settings.learner_timeout).with_resets(
            settings.reset_timeout
        ),
        seed=settings.seed,
        max_lag=settings.max_lag,
        save_every=settings.checkpoint_every,
        log_every=settings.log_every,
    )
