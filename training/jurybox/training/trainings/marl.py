"""The multi-agent training: environments whose agents take turns, and a separate learner for each agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jurybox.protocol.weights import WeightsLayout
from jurybox.training.algorithms.base import AlgorithmUnusable
from jurybox.training.algorithms.registry import make
from jurybox.training.algorithms.served import raw_network
from jurybox.training.environments.making import EnvironmentPlace, EnvironmentUnusable
from jurybox.training.environments.pettingzoo_env import AgentView, check_names, kept_world, views_of
from jurybox.training.replay import Episodes
from jurybox.training.roles.hosted import Builders, actors, evaluator
from jurybox.training.runtime.plan import (
    Budget,
    ChannelSpec,
    ConfigError,
    Kind,
    Pace,
    Plan,
    ReplaySpec,
    RoleSpec,
    Timeouts,
    check_learns,
    refuse_unused,
)
from jurybox.training.runtime.serving import Models, ServedModels
from jurybox.training.runtime.settings import EnvironmentSettings, merged
from jurybox.training.spaces import AgentSpec
from jurybox.training.trainings.gym import acts_of, fields

_ROLES = "jurybox.training.roles"
_ADAPTER = "jurybox.training.environments.pettingzoo_env:World"
_REFINED_PPO = "jurybox.training.algorithms.ppo:RefinedPPO"
_FACTORY = "jurybox.training.algorithms.served_networks:gym_policy"
ON_POLICY = "ppo"
_PATIENCE = 10.0  # seconds in which a learner of PPO that the actor waits for has to make a step
TREASURE = "jurybox.studies.treasure:TreasureHunt"


class OnPolicy(BaseModel):
    """Further settings of PPO."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n_steps: int = Field(256, ge=2, description="Turns between two updates.")
    n_epochs: int = Field(4, ge=1, description="Passes over a rollout, in parts of batch_size.")
    clip_range: float = Field(0.2, gt=0, description="Largest change of the probability ratio in an update.")
    ent_coef: float = Field(0.01, ge=0, description="Weight of the entropy bonus.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    max_stale: int = Field(1, ge=0, description="Updates by which the policy of a transition may be out of date.")


_EXPLORATION = ("exploration_initial_eps", "exploration_final_eps", "exploration_fraction")
# Settings that can be set for a single agent.
OWN = {
    *("algorithm", "publish_interval", "publish_mode", "buffer_size", "batch_size", "train_freq", "learning_starts"),
    *("learning_rate", "gamma", "n_steps", "target_update_interval", "n_stack", "hidden", *_EXPLORATION, "ppo"),
}


class MarlTraining(EnvironmentSettings):
    """Settings of a multi-agent training; a TOML file and the command line use the same names."""

    title = "multi-agent"
    ways: ClassVar = {
        "multiprocessing": "actor and learners have processes of their own (--serial: one for all), its mode is "
        "publish_mode here, and `share` gives several agents one learner process",
        "num_learner_processes": "each agent has a learner process of its own, and `share` gives several agents one",
    }

    env: str = Field(TREASURE, description="A PettingZoo environment: package.module:callable.")
    env_args: dict[str, Any] = Field({}, description="Keyword arguments of the environment.")
    agents: int = Field(2, ge=1, description="Agents in the treasure hunt.")
    share: tuple[tuple[str, ...], ...] = Field((), description="Groups of agents that one learner serves.")
    # With DQN, not every seed reaches three times the return of random play in the treasure hunt; with PPO, all did.
    algorithm: Literal["dqn", "iqn", "ppo"] = Field("ppo", description="The algorithm of every learner.")
    ppo: OnPolicy = OnPolicy.model_validate({})
    own: dict[str, dict[str, Any]] = Field(
        {}, description="Settings of single agents that differ from the others', by agent."
    )
    steps: int = Field(200_000, ge=1, description="Total turns, over all worlds.")
    envs: int | None = Field(None, ge=1, description="Number of worlds; none: one per worker.")
    workers: int | None = Field(None, ge=1, description="Number of actor processes, each with one world.")
    seconds: float | None = Field(None, gt=0, description="Stop after this many seconds.")

    publish_mode: Literal["double_buffer", "snapshot"] = Field(
        "double_buffer",
        description="Copies of the weights: two, or one for half of the memory, for which readers may wait.",
    )
    publish_interval: int = Field(10, ge=0, description="Learner steps between two publications; 0: only the first.")
    buffer_size: int = Field(10_000, ge=1, description="Capacity of a learner's replay, in transitions.")
    batch_size: int = Field(64, ge=2, description="Transitions in one optimiser step.")
    train_freq: int = Field(4, ge=1, description="Turns per step of every learner.")
    learning_rate: float | None = Field(None, gt=0, description="None: 0.001 with PPO, else 0.00025.")
    learning_starts: int = Field(1000, ge=1, description="Transitions before a learner's first step.")
    gamma: float = Field(0.95, ge=0, le=1, description="Discount factor.")
    n_steps: int = Field(3, ge=1, description="Steps of the n-step return.")
    target_update_interval: int = Field(200, ge=1, description="Learner steps between two target updates.")
    n_stack: int = Field(2, ge=1, description="Newest observations that are observed together.")
    hidden: tuple[int, ...] = Field((128, 128), description="Sizes of the hidden layers of every network.")
    exploration_initial_eps: float = Field(1.0, ge=0, le=1, description="Probability of a random action at first.")
    exploration_final_eps: float = Field(0.05, ge=0, le=1, description="Probability of a random action at last.")
    exploration_fraction: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Fraction of all turns over which it falls to the last value.",
    )

    device_per_agent: bool = Field(
        True, description="Put learner i on cuda:(i modulo devices); without CUDA on the CPU."
    )
    learner_gpus: float = Field(0.0, ge=0, description="With --launcher ray: GPUs reserved for each learner.")
    learner_nice: int = Field(
        10, ge=0, le=19, description="Niceness of the learner processes, so that the actor runs first."
    )
    max_ahead: Annotated[int, Field(ge=0)] | Literal["auto", "none"] = Field(
        "auto",
        description="Turns by which the actor may be ahead of every learner; none: it never waits; auto: with PPO a "
        "rollout, though it waits only while more than half of the learners are behind, else none.",
    )
    max_lag: int | None = Field(None, ge=0, description="Publications by which the actor may lag.")
    actor_timeout: float = Field(
        30.0, gt=0, description="Seconds without a heartbeat after which the actor counts as hung."
    )
    learner_timeout: float = Field(
        60.0, gt=0, description="Seconds without a heartbeat after which a learner counts as hung."
    )
    checkpoint_every: int | None = Field(
        None,
        ge=0,
        description="Turns between two checkpoints; none: 20 checkpoints; 0: one at the end.",
    )
    evaluate_every: int | None = Field(
        None,
        ge=0,
        description="Turns between two evaluations; none: a tenth of all, at least 5,000; 0: one at the end.",
    )
    evaluation_episodes: int = Field(20, ge=1, description="Episodes per evaluation, without exploration.")
    logging: bool = Field(True, description="Show progress.")
    log_every: int = Field(100, ge=1, description="Turns between two rows of metrics.")
    log_dir: Path = Field(Path("marl-out"), description="Folder of the run, where --out is not given.")

    @field_validator("share", mode="before")
    @classmethod
    def _groups(cls, value: Any) -> Any:
        # ["a", "b"] is one group.
        return (tuple(value),) if value and all(isinstance(each, str) for each in value) else value

    @property
    def rate(self) -> float:
        """The learning rate that is used."""
        return self.learning_rate or (0.001 if self.algorithm == ON_POLICY else 0.00025)

    @property
    def pace(self) -> Pace:
        """The pace of a learner with these settings."""
        on_policy = self.algorithm == ON_POLICY
        if self.max_ahead == "auto":
            slack = self.ppo.n_steps if on_policy else None
        else:
            slack = None if self.max_ahead == "none" else self.max_ahead
        if on_policy:
            return Pace(self.ppo.n_steps, 1, 0, slack, _PATIENCE if self.max_ahead == "auto" else None)
        return Pace(self.train_freq, 1, self.learning_starts, slack)

    @property
    def evaluates_every(self) -> int:
        """Turns between two evaluations; 0: one at the end."""
        return max(5000, self.steps // 10) if self.evaluate_every is None else self.evaluate_every

    @property
    def n_envs(self) -> int:
        return self.envs or self.workers or 1

    @model_validator(mode="after")
    def _check_consistency(self) -> MarlTraining:
        if self.workers not in (None, self.n_envs):
            raise ValueError(
                f"workers={self.workers} with envs={self.envs}: each world has an actor process of its own; leave one "
                "of the two out"
            )
        named = [agent for group in self.share for agent in group]
        if len(named) != len(set(named)):
            raise ValueError(f"share names an agent twice: {named}")
        for agent, changes in self.own.items():
            if unknown := changes.keys() - OWN:
                raise ValueError(f"own.{agent}: {min(unknown)} is not an agent's; expected some of {sorted(OWN)}")
            self.of([agent])
        return self

    def of(self, agents: Sequence[str]) -> MarlTraining:
        """Return the settings of the learner of these agents."""
        changes: dict[str, Any] = {}
        for agent in agents:
            changes = merged(changes, self.own.get(agent, {}))
        # Only fields that were set are passed on, because `refuse_unused` tells them from defaults.
        values = {name: getattr(self, name) for name in self.model_fields_set - {"own"}}
        if "ppo" in values:
            values["ppo"] = self.ppo.model_dump(exclude_unset=True)
        return MarlTraining(**merged(values, changes)) if changes else self

    def refuse_unused(self, learners: Iterable[Sequence[str]]) -> None:
        """Refuse settings that have no effect on any learner, and those of an agent that have none on its own.

        Args:
            learners: the agents of each.

        Raises:
            ConfigError: such a setting was set; the message has its name and the reason.
        """
        nowhere: dict[str, str] | None = None
        for agents in learners:
            unused = self.of(agents)._unused()
            refuse_unused({name for agent in agents for name in self.own.get(agent, ())}, unused)
            nowhere = unused if nowhere is None else {name: unused[name] for name in nowhere.keys() & unused.keys()}
        refuse_unused(self.model_fields_set, nowhere or {})

    def _unused(self) -> dict[str, str]:
        if self.algorithm == ON_POLICY:
            unused = dict.fromkeys(
                ("n_steps", "target_update_interval", *_EXPLORATION),
                f"{ON_POLICY} has no replayed values and draws its actions",
            )
            unused |= dict.fromkeys(
                ("train_freq", "learning_starts"), f"the pace of {ON_POLICY} is ppo.n_steps, from the first turn on"
            )
            if self.publish_interval > 1:
                unused["publish_interval"] = f"{ON_POLICY} publishes after every update (or never, with 0)"
        else:
            unused = {"ppo": f"the algorithm is {self.algorithm}"}
        if self.learner_gpus:
            unused["device_per_agent"] = "a learner with GPUs of its own (learner_gpus) takes the first of them"
        if self.env != TREASURE:
            unused["agents"] = "it is the treasure hunt's; another environment's arguments stand in `env_args`"
        unused |= self.unused()
        return unused

    @property
    def world_settings(self) -> dict[str, Any]:
        """Keyword arguments of the environment."""
        return {"agents": self.agents, **self.env_args} if self.env == TREASURE else dict(self.env_args)


def plan(
    settings: MarlTraining,
    serve: Callable[[Models], ServedModels] | None = None,
    *,
    builders: Builders | None = None,
) -> Plan:
    """Create the plan for these settings.

    Args:
        serve: loads models on a server; None: the actors compute their policies themselves.
        builders: how roles get their worlds; None: each builds its own.

    Raises:
        ConfigError: the environment cannot be created, agents that share a learner have different spaces, `share` or
            `own` names unknown agents, or a setting is set that would have no effect.
    """
    builders = builders or Builders()
    try:
        groups, of_group, views = builders.call(_views, settings, builders.place, builders.keeps)
    except EnvironmentUnusable as error:
        raise ConfigError(str(error)) from error
    settings.refuse_unused([name.split("+") for name in of_group])
    for name, own in of_group.items():
        waits = {"ppo.n_steps": own.ppo.n_steps}
        if own.algorithm != ON_POLICY:
            waits = {"learning_starts": own.learning_starts, "train_freq": own.train_freq}
        check_learns(own.steps, own.pace.env_steps(0, 0), waits, name)
    algorithms = {name: _acting(own, views[name].spec) for name, own in of_group.items()}
    made = {}
    for name, arguments in algorithms.items():
        try:
            made[name] = make(**arguments)
        except AlgorithmUnusable as error:
            raise ConfigError(f"{arguments['algorithm']} cannot act for {name}: {error}") from error
    names = tuple(of_group)
    # Agents' names may contain characters that are not allowed in models' names.
    models = {group: f"policy/marl-{number}" for number, group in enumerate(names)}
    served = None
    if serve is not None:
        served = serve(
            {
                models[name]: {
                    "factory": _FACTORY,
                    "args": algorithms[name],
                    "publish": of_group[name].publish_mode,
                    "max_batch": 16,
                }
                for name in names
            }
        )
    stacks = {agent: of_group[group].n_stack for agent, group in groups.items()}
    adapter, arguments = builders.adapter(
        _ADAPTER, {"env": settings.env, "env_args": settings.world_settings, "stacks": stacks}
    )
    played: dict[str, Any] = {"adapter": adapter, "arguments": arguments, "policies": groups, "algorithms": algorithms}
    how = {"episodes": settings.evaluation_episodes, "side_by_side": 1, "explore": True, "against_random": True}
    evaluates = {**played, **how, **({"worker": 1} if builders.shared else {})}
    return Plan(
        roles=(
            *actors(settings.n_envs, {**played, "n": 1, "max_lag": settings.max_lag}, names, names),
            *(
                _learner(own, number, name, algorithms[name]["spec"])
                for number, (name, own) in enumerate(of_group.items())
            ),
            evaluator(evaluates, names, settings.evaluates_every, settings.learner_nice),
        ),
        replays=tuple(
            ReplaySpec(
                name,
                own.buffer_size,
                fields(made[name], views[name].seen),
                episodes=None if made[name].on_policy else Episodes(),
            )
            for name, own in of_group.items()
        ),
        channels=tuple(
            ChannelSpec(name, WeightsLayout.of(raw_network(each).state_dict()), of_group[name].publish_mode)
            for name, each in made.items()
        ),
        pace=settings.pace,
        budget=Budget(settings.steps, settings.seconds),
        # The low `settled` lets a role that is killed every few seconds be restarted any number of times.
        timeouts=Timeouts(actor=settings.actor_timeout, learner=settings.learner_timeout, settled=5.0).with_resets(
            settings.reset_timeout
        ),
        seed=settings.seed,
        max_lag=settings.max_lag,
        save_every=max(1000, settings.steps // 20) if settings.checkpoint_every is None else settings.checkpoint_every,
        log_every=settings.log_every,
        best="return",
        server=None if served is None else served.feed(models),
        policy=description(settings, groups, algorithms, stacks),
    )


def _views(
    settings: MarlTraining, place: EnvironmentPlace, shared: bool
) -> tuple[dict[str, str], dict[str, MarlTraining], dict[str, AgentView]]:
    """Return each agent's group; and of each group its settings, and what its agents observe and do.

    Raises:
        EnvironmentUnusable: the environment cannot be created, or has unsupported spaces. ConfigError: see `plan`.
    """
    world = kept_world(settings.env, settings.world_settings, place=place, shared=shared).env
    try:
        if not getattr(world, "possible_agents", None):
            raise ConfigError(f"{settings.env} does not say its possible_agents, and each needs a policy")
        check_names(settings.env, world.possible_agents)
        groups = _groups(settings, list(world.possible_agents))
        of_group = {name: settings.of(name.split("+")) for name in groups.values()}
        known = views_of(world, {agent: of_group[name].n_stack for agent, name in groups.items()})
    finally:
        if not shared:
            world.close()
    views: dict[str, AgentView] = {}
    for agent, name in groups.items():
        if views.setdefault(name, known[agent]).spec != known[agent].spec:
            raise ConfigError(
                f"the agents of {name} see or do different things ({views[name].spec} and {known[agent].spec}): one "
                "network does not fit both; let each have its own (share)"
            )
    return groups, of_group, views


def description(
    settings: MarlTraining,
    groups: Mapping[str, str],
    algorithms: Mapping[str, Mapping[str, Any]],
    stacks: Mapping[str, int],
) -> dict[str, Any]:
    """Return the description of all learners' policies for ``jurybox policy``, one policy for each group."""
    from jurybox.training.policies import Description

    policies = {}
    for name, arguments in algorithms.items():
        acts = acts_of(_FACTORY, arguments, name)
        draws = acts.choose == "best" and make(**arguments).on_policy  # as in evaluations
        own = {"agent": name.split("+")[0]}
        policies[name] = replace(acts, choose="draw" if draws else acts.choose, own_arguments=own)
    world = {
        "name": settings.env,
        "world": settings.world_settings,
        "groups": dict(groups),
        "stacks": dict(stacks),
    }
    kept = settings.model_dump(mode="json")
    return Description(
        "marl", policies, "jurybox.training.environments.one_agent:AgentEnv", world, kept, settings.seed
    ).as_dict()


def _groups(settings: MarlTraining, agents: Sequence[str]) -> dict[str, str]:
    """Return the name of each agent's replay and channel: the agent's name, or those of its group joined by "+"."""
    groups = {agent: agent for agent in agents}
    for shared in settings.share:
        groups |= {agent: "+".join(shared) for agent in shared}
    if unknown := (groups.keys() | settings.own.keys()) - set(agents):
        raise ConfigError(f"share or own names {min(unknown)!r}; the agents are {', '.join(agents)}")
    return groups


def _acting(settings: MarlTraining, spec: AgentSpec) -> dict[str, Any]:
    """Return the arguments of `algorithms.make` for what acts, and for its network."""
    own: dict[str, Any] = {"hidden": list(settings.hidden)}
    if settings.algorithm != ON_POLICY:
        own |= {name: getattr(settings, name) for name in _EXPLORATION}
    return {"algorithm": settings.algorithm, "settings": own, "spec": spec.as_dict()}


def _learner(settings: MarlTraining, number: int, group: str, spec: Mapping[str, Any]) -> RoleSpec:
    devices = torch.cuda.device_count() if settings.device_per_agent else 0
    device = f"cuda:{number % devices}" if devices else "cpu"
    if settings.learner_gpus:
        device = "cuda:0"  # the first of the GPUs that are visible to it, on any machine
    members = settings.n_envs * len(group.split("+"))
    same: dict[str, Any] = {
        "learning_rate": settings.rate,
        "gamma": settings.gamma,
        "hidden": settings.hidden,
        "batch_size": settings.batch_size,
    }
    if settings.algorithm == ON_POLICY:
        rollout = settings.ppo.n_steps * len(group.split("+"))
        if settings.buffer_size < 2 * rollout:
            raise ConfigError(
                f"buffer_size {settings.buffer_size} is too small for {group}: two rollouts of all its agents "
                f"have {2 * rollout} transitions"
            )
        # The divergence would be measured from the policies that acted, so that an update on a rollout that is one
        # update old would stop at once.
        rules = {**same, "target_kl": None, **settings.ppo.model_dump(exclude={"n_steps", "max_stale"})}
        algorithm, own = _REFINED_PPO, {"n_steps": settings.ppo.n_steps, "rules": rules}
        make, publish_every = f"{_ROLES}.learner:OnPolicyLearner", min(1, settings.publish_interval)
        more: dict[str, Any] = {"rollout": rollout, "max_stale": settings.ppo.max_stale}
    else:
        algorithm = settings.algorithm
        own = {
            **same,
            "n_steps": settings.n_steps,
            "train_freq": settings.train_freq,
            "target_update_interval": settings.target_update_interval * settings.train_freq,
        }
        make, publish_every = f"{_ROLES}.learner:OffPolicyLearner", settings.publish_interval
        # The newest rows of each agent in each world have no successor yet.
        unsampled = members * (settings.n_steps + 1)
        more = {"first": max(settings.learning_starts, unsampled + 1)}
    made = {
        "replay": group,
        "algorithm": {"algorithm": algorithm, "settings": own, "spec": spec},
        "envs": 1,  # a turn is a step of one world
        "suffix": f"_{group}",
        "device": device,
        **more,
    }
    return RoleSpec(
        f"learner-{group}",
        Kind.LEARNER,
        make,
        made,
        samples=(group,),
        publishes=group,
        publish_every=publish_every,
        pace=settings.pace,
        nice=settings.learner_nice,
        gpus=settings.learner_gpus,
    )
