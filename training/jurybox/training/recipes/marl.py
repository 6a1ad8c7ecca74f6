"""The multi-agent training: one world, agents that move one after another, an isolated learner for each of them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jurybox.protocol.weights import WeightsLayout
from jurybox.training.recipes.marl_roles import make_network
from jurybox.training.replay import Episodes
from jurybox.training.replay import Field as ReplayField
from jurybox.training.runtime.errors import RunError
from jurybox.training.runtime.plan import (
    Budget,
    ChannelSpec,
    Kind,
    Pace,
    Patience,
    Plan,
    ReplaySpec,
    RoleSpec,
    load,
)

_ROLES = "jurybox.training.recipes.marl_roles"
TREASURE = "jurybox.training.environments.treasure:TreasureHunt"


class ConfigError(RunError):
    """Settings that don't go together, or a file that cannot be read; the message says which."""


class MarlTraining(BaseModel):
    """Settings of a multi-agent training; a TOML file and the command line hold the same names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    environment: str = Field(TREASURE, description="A PettingZoo AEC environment: package.module:Class.")
    world: dict[str, Any] = Field({}, description="Keyword arguments of the environment.")
    agents: int = Field(2, ge=1, description="Agents in the treasure hunt.")
    share: tuple[tuple[str, ...], ...] = Field((), description="Groups of agents that one learner serves.")
    algorithm: Literal["dqn", "iqn"] = "dqn"
    steps: int = Field(200_000, ge=1, description="Turns of the world.")
    seconds: float | None = Field(None, gt=0, description="Stop after so many.")
    seed: int = Field(0, ge=0)

    publish_mode: Literal["double_buffer", "snapshot"] = "double_buffer"
    publish_interval: int = Field(10, ge=0, description="Learner steps between two publications; 0: only the first.")
    buffer_capacity: int = Field(10_000, ge=1, description="Transitions of a learner's replay.")
    batch_size: int = Field(64, ge=1)
    train_interval: int = Field(4, ge=1, description="Turns for one step of every learner.")
    learning_rate: float = Field(0.00025, gt=0)
    learning_starts: int = Field(1000, ge=1, description="Transitions before a learner's first step.")
    discount: float = Field(0.95, ge=0, le=1)
    n_step: int = Field(3, ge=1)
    target_interval: int = Field(200, ge=1)
    frames: int = Field(2, ge=1, description="Observations that are stacked.")
    hidden: tuple[int, ...] = (128, 128)
    epsilon: tuple[float, float, int] = Field((1.0, 0.05, 5000), description="First, last, learner steps in between.")

    device_per_agent: bool = Field(True, description="Learner i on cuda:(i modulo devices); without CUDA on the CPU.")
    learner_nice: int = Field(5, ge=0, le=19, description="By how much learners give way to the actor.")
    max_ahead: int | None = Field(None, ge=0, description="Turns that the actor may be ahead; none: it never waits.")
    max_lag: int | None = Field(None, ge=0, description="Publications that the actor may be behind.")
    actor_timeout: float = Field(30.0, gt=0, description="Seconds without a sign of life.")
    learner_timeout: float = Field(60.0, gt=0)
    checkpoint_interval: int = Field(0, ge=0, description="Turns between two checkpoints; 0: one at the end.")
    evaluate_interval: int = Field(0, ge=0, description="Turns between two evaluations; 0: one at the end.")
    evaluate_episodes: int = Field(20, ge=1)
    logging: bool = Field(True, description="Show how it goes.")
    log_interval: int = Field(100, ge=1, description="Turns between two rows of metrics.")
    log_dir: Path = Path("marl-out")

    @model_validator(mode="after")
    def _agents_exist(self) -> MarlTraining:
        named = [agent for group in self.share for agent in group]
        if len(named) != len(set(named)):
            raise ValueError(f"share names an agent twice: {named}")
        return self

    @classmethod
    def read(cls, path: Path | None, changes: Mapping[str, Any]) -> MarlTraining:
        """Settings of a TOML file (if there is one) with `changes`, which win.

        Raises:
            ConfigError: the file cannot be read, or a setting is unknown or out of its bounds.
        """
        try:
            said = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
            return cls(**{**said, **changes})
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except ValidationError as error:
            told = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise ConfigError(f"settings of the multi-agent training: {told}") from error

    @property
    def world_settings(self) -> dict[str, Any]:
        """Keyword arguments of the environment."""
        return {"agents": self.agents, **self.world} if self.environment == TREASURE else dict(self.world)


def plan(settings: MarlTraining) -> Plan:
    """The run that these settings ask for.

    Raises:
        ConfigError: the environment's agents see or do different things, or `share` names others.
    """
    env = load(settings.environment)(**settings.world_settings)
    agents, groups = list(env.possible_agents), {agent: agent for agent in env.possible_agents}
    for shared in settings.share:
        for agent in shared:
            if agent not in groups:
                raise ConfigError(f"share names {agent!r}; the agents are {', '.join(agents)}")
            groups[agent] = "+".join(shared)
    seen, does = env.observation_space(agents[0]), env.action_space(agents[0])
    if any(env.observation_space(agent) != seen or env.action_space(agent) != does for agent in agents):
        raise ConfigError(f"the agents of {settings.environment} see or do different things: one network fits none")
    env.close()
    network: dict[str, Any] = {
        "algorithm": settings.algorithm,
        "shape": (settings.frames, *seen.shape),
        "actions": int(does.n),
        "hidden": settings.hidden,
    }
    names = list(dict.fromkeys(groups.values()))
    layout = WeightsLayout.of(make_network(**network, seed=0).state_dict())
    fields = {
        "observation": ReplayField(seen.shape, "uint8", stored="bits" if int(seen.high.max()) == 1 else None),
        "action": ReplayField((), "int32"),
        "reward": ReplayField((), "float32"),
        "terminated": ReplayField((), "bool"),
    }
    played = {"environment": (settings.environment, settings.world_settings), "groups": groups, "network": network}
    return Plan(
        roles=(
            RoleSpec(
                "actor",
                Kind.ACTOR,
                f"{_ROLES}:TurnTaker",
                played,
                writes=tuple(names),
                reads=tuple(names),
                restarts=False,
            ),
            *(_learner(settings, number, name, network) for number, name in enumerate(names)),
            RoleSpec(
                "evaluator",
                Kind.EVALUATOR,
                f"{_ROLES}:GreedyEvaluator",
                {**played, "episodes": settings.evaluate_episodes, "epsilon": settings.epsilon[1]},
                reads=tuple(names),
                evaluate_every=settings.evaluate_interval,
                nice=settings.learner_nice,
            ),
        ),
        replays=tuple(ReplaySpec(name, settings.buffer_capacity, fields, episodes=Episodes()) for name in names),
        channels=tuple(ChannelSpec(name, layout, settings.publish_mode) for name in names),
        pace=Pace(settings.train_interval, 1, settings.learning_starts, settings.max_ahead),
        budget=Budget(settings.steps, settings.seconds),
        patience=Patience(actor=settings.actor_timeout, learner=settings.learner_timeout),
        seed=settings.seed,
        max_lag=settings.max_lag,
        save_every=settings.checkpoint_interval,
        log_every=settings.log_interval,
        best="return",
    )


def _learner(settings: MarlTraining, number: int, group: str, network: Mapping[str, Any]) -> RoleSpec:
    devices = torch.cuda.device_count() if settings.device_per_agent else 0
    return RoleSpec(
        f"learner-{group}",
        Kind.LEARNER,
        f"{_ROLES}:GroupLearner",
        {
            "group": group,
            "network": network,
            "settings": {
                "learning_rate": settings.learning_rate,
                "discount": settings.discount,
                "n_step": settings.n_step,
                "target_interval": settings.target_interval,
            },
            "batch_size": settings.batch_size,
            "first": settings.learning_starts,
            "epsilon": settings.epsilon,
            "device": f"cuda:{number % devices}" if devices else "cpu",
        },
        samples=(group,),
        publishes=group,
        publish_every=settings.publish_interval,
        nice=settings.learner_nice,
    )
