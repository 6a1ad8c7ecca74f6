"""The training of any Gymnasium environment, `jurybox train gym`: settings, plan, run and report.

Packages that only the run needs (torch, plots) are imported where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import numpy as np
from pydantic import Field, PrivateAttr, ValidationError, create_model, model_validator

from jurybox.training.algorithms.base import (
    Algorithm,
    AlgorithmSettings,
    AlgorithmUnusable,
    OffPolicySettings,
    OnPolicySettings,
    RecurrentReplaySettings,
)
from jurybox.training.algorithms.registry import ALGORITHMS, algorithm_named, make, tried
from jurybox.training.environments.gymnasium_env import (
    Actions,
    EnvironmentUnusable,
    Observations,
    Seen,
    kept_environment,
)
from jurybox.training.environments.making import EnvironmentPlace
from jurybox.training.environments.vector_env import make_vector
from jurybox.training.replay import Episodes
from jurybox.training.replay import Field as Column
from jurybox.training.roles.hosted import Builders, actors, builders, evaluator
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
    Timeouts,
    check_learns,
)
from jurybox.training.runtime.progress import COLUMNS as OF_EVERY_RUN
from jurybox.training.runtime.settings import NOT_COMPILED, Compile, EnvironmentSettings
from jurybox.training.spaces import DISCOUNTED, MASK, MEMORY, ActionSpec, AgentSpec
from jurybox.training.trainings.training import Run, Training, carry_out

if TYPE_CHECKING:
    from jurybox.training.policies import Acts
    from jurybox.training.report.page import Section
    from jurybox.training.runtime.serving import ServedModels
    from jurybox.training.trainings.recorded_run import RecordingOptions

NAME = "policy"  # of the policy: of its replay and its channel
MODEL = "policy/gym"
FILMS = "films"  # folder in the run's

_ADAPTER = "jurybox.training.environments.gymnasium_env:GymEnvs"
_VECTOR = "jurybox.training.environments.vector_env:VectorEnvs"
_PLAYED = "jurybox.training.environments.gymnasium_env:played_environment"
_PLAYED_VECTOR = "jurybox.training.environments.vector_env:OneOfVector"
_ROLES = "jurybox.training.roles"
_FACTORY = "jurybox.training.algorithms.served_networks:gym_policy"  # of built-in algorithms; servers allow it
_OWN_FACTORY = "jurybox.training.algorithms.served:policy"
# Seconds without a heartbeat: a step of any environment is shorter.
_ACTOR_TIMEOUT, _EVALUATOR_TIMEOUT = 300.0, 600.0
_ROWS, _MOST_BYTES = 1_000_000, 2**31  # a replay if `buffer_size` is not set: rows, and its maximum size
_LAG = 10  # publications by which a served policy may be behind its learner, with off-policy algorithms


class GymTraining(EnvironmentSettings):
    """Settings of a gym training; a TOML file and the command line use the same names.

    Those of the algorithm are settings, too: the class of an object is a variant of this one, with their names, types
    and defaults. Names and defaults of the built-in ones are those of Stable-Baselines3 2.9, except for the differences
    that the documentation lists.

    Class attributes:
        uses: the algorithm's class.
    """

    uses: ClassVar[type[Algorithm]]
    _own: AlgorithmSettings = PrivateAttr()

    title = "gym"
    may_change = (
        *("steps", "seconds", "workers", "policy", "server", "server_http", "server_group", "device", "compile"),
        *("max_ahead", "publish_interval", "max_lag", "evaluate_every", "evaluation_episodes", "checkpoint_every"),
        *("log_every", "reset_timeout", "check_steps", "film"),
    )

    env: str = Field("CartPole-v1", description="Gymnasium id, or module:factory.")
    env_args: dict[str, Any] = Field({}, description="Keyword arguments of the environment.")
    max_episode_steps: int | None = Field(None, ge=1, description="Truncate episodes after this many steps.")
    vector: bool = Field(
        False, description="The environment is a gymnasium.vector.VectorEnv, of all environments of a worker."
    )
    grayscale: bool = Field(False, description="Observe pictures without their colours.")
    resize: tuple[int, int] | None = Field(None, description="Height and width of pictures; none: as they are.")
    n_stack: int = Field(1, ge=1, description="Newest observations that are observed together.")
    algorithm: str = Field(
        "ppo", description=f"{', '.join(ALGORITHMS)}, or module:Class of your own; its settings are settings, too."
    )
    seconds: float | None = Field(None, gt=0, description="Stop after this many seconds.")
    steps: int = Field(100_000, ge=1, description="Total env steps.")
    workers: int = Field(1, ge=1, description="Number of processes that step environments.")
    envs: int = Field(1, ge=1, description="Number of environments, over all workers.")
    device: str = Field("cpu", description="Device of the learner.")
    compile: Compile = "auto"
    normalize_observations: bool = Field(
        False, description="Normalize observations to mean 0 and standard deviation 1."
    )
    normalize_rewards: bool = Field(
        False, description="Divide rewards by the running deviation of discounted returns, and cut them off at 10."
    )
    action_masks: bool = Field(
        False, description='Choose only actions that info["action_mask"] or the environment\'s action_masks() allows.'
    )
    max_lag: int = Field(_LAG, ge=0, description="Publications by which a served policy's answers may lag.")
    evaluate_every: int | None = Field(
        None,
        ge=0,
        description="Env steps between two evaluations; none: a twentieth of all, at least 1,000; 0: one at the end.",
    )
    evaluation_episodes: int = Field(10, ge=1, description="Episodes per evaluation, without exploration.")
    film: bool = Field(
        False, description="Film the first episode of each evaluation: films/ENV_STEPS.webm in the run's folder."
    )
    audit: tuple[str, ...] = Field(
        (),
        description='Names in info["audit"] at the end of an episode: logged, not rewarded.',
    )
    checkpoint_every: int | None = Field(
        None,
        ge=0,
        description="Env steps between two checkpoints; none: a tenth of all, at least 10,000; 0: one at the end.",
    )
    log_every: int = Field(1000, ge=1, description="Env steps between two rows of metrics.")

    def __new__(cls, **values: Any) -> Self:
        return super().__new__(cls.variant(values) if cls is GymTraining else cls)

    @classmethod
    def variant(cls, values: Mapping[str, Any]) -> type[Self]:
        """Return the class with the settings of the algorithm that these values name."""
        return _variant(str(values.get("algorithm", "ppo")))  # type: ignore[return-value]

    @classmethod
    def variants(cls, values: Mapping[str, Any]) -> Mapping[str, type[Self]]:
        """Return the variants of the built-in algorithms, or the one of an algorithm of the user's own."""
        chosen = values.get("algorithm", "ppo")
        return {name: cls.variant({"algorithm": name}) for name in (ALGORITHMS if chosen in ALGORITHMS else [chosen])}

    @classmethod
    def unknown(cls, name: str, table: Sequence[str] = ()) -> str:
        if not table and any(name in algorithm_named(other).Settings.model_fields for other in ALGORITHMS):
            chosen = cls.model_fields["algorithm"].default
            return f"{chosen} does not use it"
        return super().unknown(name, table)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.envs % self.workers:
            raise ValueError(f"envs={self.envs} with workers={self.workers}: expected the same number for each worker")
        try:
            own = {name: getattr(self, name) for name in self.uses.Settings.model_fields}
            self._own = self.uses.Settings(**own)
        except ValidationError as error:
            told = (each["msg"].removeprefix("Value error, ") for each in error.errors())
            raise ValueError("; ".join(told)) from error
        due, envs = self.pace.env_steps(0, 0), self.envs
        if isinstance(self._own, OnPolicySettings):
            check_learns(self.steps, due, {"n_steps": self._own.n_steps, "envs": envs})
            return self
        replay, asks = self.replayed, {"n_steps": self.replayed.n_steps}
        if isinstance(replay, RecurrentReplaySettings) and replay.recurrent is not None:
            asks = {"burn_in": replay.burn_in, "sequence_length": replay.sequence_length}
        least = replay.unsampled(envs) + 1
        if replay.buffer_size is not None and replay.buffer_size < least:
            those = ", ".join(f"{name}={value}" for name, value in asks.items())
            raise ValueError(
                f"buffer_size={replay.buffer_size} with {those} and envs={envs}: expected {least} rows or "
                f"more, since the newest {' + '.join(asks)} + 1 of each environment cannot be sampled; raise "
                f"buffer_size, or lower {', '.join(asks)} or envs"
            )
        waits = {"learning_starts": replay.learning_starts, "train_freq": replay.train_freq} if due >= least else asks
        check_learns(self.steps, max(due, least), {**waits, "envs": envs})
        return self

    @property
    def own(self) -> AlgorithmSettings:
        """The settings of the algorithm."""
        return self._own

    @property
    def replayed(self) -> OffPolicySettings:
        """The same, of an algorithm that learns from a replay."""
        assert isinstance(self._own, OffPolicySettings)
        return self._own

    @property
    def rolled_out(self) -> OnPolicySettings:
        """The same, of an algorithm that is `on_policy`."""
        assert isinstance(self._own, OnPolicySettings)
        return self._own

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What is done to observations: the settings that are not as the environment has it."""
        found: dict[str, Any] = {"grayscale": True} if self.grayscale else {}
        if self.resize is not None:
            found["resize"] = list(self.resize)
        return found if self.n_stack == 1 else {**found, "n_stack": self.n_stack}

    @property
    def envs_per_worker(self) -> int:
        return self.envs // self.workers

    @property
    def pace(self) -> Pace:
        """The pace: PPO learns between rollouts, other algorithms make learner steps after each round of env steps."""
        if self.uses.on_policy:
            return Pace(self.rolled_out.n_steps * self.envs, 1, 0, 0)
        own = self.replayed
        return Pace(*own.round(self.envs), own.learning_starts, own.max_ahead)

    def unused(self) -> dict[str, str]:
        """Return the settings that have no effect with the others, and why."""
        unused = {**super().unused(), **self.own.unused()}
        if self.vector:
            wraps = "vector is true: let the factory wrap its environments"
            unused |= dict.fromkeys(("max_episode_steps", "grayscale", "resize", "n_stack"), wraps)
            unused["film"] = "vector is true: `jurybox policy play --video` films one of its environments"
            unused["build_once"] = "vector is true: each process has a vector environment of its own"
        if self.device != "cpu":
            unused["compile"] = NOT_COMPILED
        if self.policy == "local":
            unused["max_lag"] = "policy is local: workers take the newest weights before every step"
        elif self.uses.on_policy:
            unused["max_lag"] = f"{self.algorithm} waits for the newest weights"
        return unused


def _variant(name: str) -> type[GymTraining]:
    """Return the settings of trainings with that algorithm. Raises ConfigError: it cannot be used."""
    try:
        return _variant_of(name, algorithm_named(name))
    except AlgorithmUnusable as error:
        raise ConfigError(str(error)) from error


@cache
def _variant_of(name: str, algorithm: type[Algorithm]) -> type[GymTraining]:
    kind = OnPolicySettings if algorithm.on_policy else OffPolicySettings
    if not issubclass(algorithm.Settings, kind):
        raise ConfigError(
            f"{name}.Settings is no subclass of {kind.__name__}, which an algorithm with on_policy = "
            f"{algorithm.on_policy} needs"
        )
    own = algorithm.Settings.model_fields
    if taken := own.keys() & GymTraining.model_fields.keys():
        raise ConfigError(f"{name}.Settings has {', '.join(sorted(taken))}, which every training has: rename it")
    first = Field(name, description=GymTraining.model_fields["algorithm"].description)
    fields: dict[str, Any] = {each: (field.annotation, field) for each, field in own.items()}
    made = create_model("GymTraining", __base__=GymTraining, __module__=__name__, algorithm=(str, first), **fields)
    made.uses = algorithm
    return made


def look(place: EnvironmentPlace, *of: Any, shared: bool, **preprocessing: Any) -> tuple[Seen, ActionSpec, str]:
    """Return the format of observations' rows, what is chosen, and what the space of actions is called.

    Args:
        of: arguments of `make_environment`. shared: see `gymnasium_env.kept_environment`.

    Raises:
        EnvironmentUnusable: the environment cannot be created, or has unsupported spaces.
    """
    env = kept_environment(*of, place=place, shared=shared, **preprocessing).env
    try:
        return Observations(env.observation_space).seen, Actions(env.action_space).spec, str(env.action_space)
    finally:
        if not shared:
            env.close()


def look_at_vector(name: str, arguments: Mapping[str, Any], n: int) -> tuple[Seen, ActionSpec, str]:
    """Return the same of a vector environment of which each worker has n environments. Raises EnvironmentUnusable."""
    env = make_vector(name, arguments, 1)
    try:
        if env.num_envs not in (1, n):
            raise EnvironmentUnusable(
                f"{name!r} always makes {env.num_envs} environments, and each worker is to have {n}: expected "
                f"envs = {env.num_envs} for each of the workers, or a factory with a parameter num_envs"
            )
        space = env.single_action_space
        return Observations(env.single_observation_space).seen, Actions(space).spec, str(space)
    finally:
        env.close()


def spaces_of(settings: GymTraining, builders: Builders | None = None) -> tuple[Seen, AgentSpec]:
    """Return the format of observations' rows, and what a policy of the settings' environment gets and chooses.

    Args:
        builders: where the environment is looked at; None: here, in one of its own.

    Raises:
        ConfigError: the environment cannot be created, or the algorithm does not support its spaces.
    """
    builders = builders or Builders()
    try:
        if settings.vector:
            seen, action, called = look_at_vector(settings.env, settings.env_args, settings.envs_per_worker)
        else:
            looks = partial(look, shared=builders.keeps, **settings.preprocessing)
            of = settings.env, settings.env_args, settings.max_episode_steps
            seen, action, called = builders.call(looks, builders.place, *of)
    except EnvironmentUnusable as error:
        raise ConfigError(str(error)) from error
    if settings.normalize_observations and not seen.numbers:
        raise ConfigError("normalize_observations: these observations are pictures, and have no numbers to normalise")
    if settings.action_masks and any(leaf.name == MASK for leaf in seen.inputs):
        raise ConfigError(
            f"action_masks: the observation has a part {MASK!r}, which is the name of the input for masks: return it "
            "in info instead, or rename it"
        )
    spec = AgentSpec(seen.inputs, action, settings.normalize_observations, masked=settings.action_masks)
    try:
        made = make(**algorithm_of(settings, spec))
    except AlgorithmUnusable as error:
        raise ConfigError(f"{settings.algorithm} cannot act in {settings.env} ({called}): {error}") from error
    if made.remembers and any(leaf.name == MEMORY for leaf in seen.inputs):
        raise ConfigError(
            f"recurrent: the observation has a part {MEMORY!r}, the name of what the policy remembers: rename it"
        )
    return seen, spec


def algorithm_of(settings: GymTraining, spec: AgentSpec) -> dict[str, Any]:
    """Return the arguments of `algorithms.make`, as values of JSON and TOML."""
    fields = settings.uses.Settings.model_fields
    own = {name: value for name, value in settings.own.model_dump(mode="json").items() if value is not None}
    if lost := [name for name in fields.keys() - own.keys() if fields[name].default is not None]:
        raise ConfigError(f"{lost[0]} is none, which only a setting can be whose default is none")
    if spec.pictures and not spec.numbers and "hidden" not in settings.model_fields_set:
        own["hidden"] = list(settings.uses.hidden_after_pictures)
    return {"algorithm": settings.algorithm, "settings": own, "spec": spec.as_dict()}


def fields(algorithm: Algorithm, seen: Seen) -> dict[str, Column]:
    """Return the fields of the replay."""
    action = algorithm.spec.action
    packed = None if algorithm.on_policy else "bits"  # a cursor takes rows as they are stored
    stored = packed if seen.binary else None
    found = {
        "observation": Column((seen.size,), seen.dtype, stored=stored),
        "action": Column(action.shape, action.dtype),
        "reward": Column(),
        "terminated": Column((), "bool"),
        **({MASK: Column((action.size,), "bool", stored=packed)} if algorithm.spec.masked else {}),
        **{name: Column(shape) for name, shape in algorithm.columns.items()},
        **({MEMORY: Column((algorithm.remembers,))} if algorithm.remembers else {}),
    }
    if algorithm.on_policy:
        from jurybox.training.roles.learner import COLUMNS

        found |= {"next_observation": Column((seen.size,), seen.dtype), **COLUMNS}
    return found


def plan(
    settings: GymTraining,
    served: ServedModels | None = None,
    *,
    builders: Builders | None = None,
    spaces: tuple[Seen, AgentSpec] | None = None,
    folder: Path | None = None,
) -> Plan:
    """Create the plan for these settings.

    Args:
        served: the server that has the policy; None: workers compute it themselves.
        builders: how roles get their environments; None: each builds its own.
        spaces: what `spaces_of` returned; None: it is called.
        folder: of the run, for films; None: none are made.

    Raises:
        ConfigError: the environment cannot be created, or the algorithm does not support it.
    """
    from jurybox.protocol.weights import WeightsLayout

    builders = builders or Builders()
    seen, spec = spaces or spaces_of(settings, builders)
    made_of = algorithm_of(settings, spec)
    algorithm = make(**made_of)
    on_policy, pace = algorithm.on_policy, settings.pace
    if on_policy and pace.train_freq < 2:
        raise ConfigError("n_steps=1 of one environment is no rollout: expected two steps or more")
    values = settings.model_dump(mode="json")
    arguments = {name: values[name] for name in ("env", "env_args")}
    if not settings.vector:
        arguments |= {"max_episode_steps": values["max_episode_steps"], **settings.preprocessing}
    arguments |= {"clips": algorithm.chooses[1] == "clip", "masked": spec.masked}
    adapter, arguments = builders.adapter(_VECTOR if settings.vector else _ADAPTER, arguments)
    policies, algorithms = {"": NAME}, {NAME: made_of}
    played: dict[str, Any] = {
        "adapter": adapter,
        "arguments": arguments,
        "policies": policies,
        "algorithms": algorithms,
    }
    acts = {**played, "n": settings.envs_per_worker, "max_lag": 0 if on_policy else settings.max_lag}
    acts["discounts"] = {NAME: settings.own.gamma} if settings.normalize_rewards else {}
    learner: dict[str, Any] = {"replay": NAME, "algorithm": made_of, "envs": settings.envs, "device": settings.device}
    learner |= {"normalize_rewards": settings.normalize_rewards, "compile": settings.compile}
    try:
        acting = tried(algorithm, np.zeros((2, seen.size), seen.dtype))
    except AlgorithmUnusable as error:
        raise ConfigError(f"{settings.algorithm} is inconsistent: {error}") from error
    columns = fields(algorithm, seen)
    if settings.normalize_rewards:
        columns[DISCOUNTED] = Column()
    capacity = 2 * pace.train_freq + settings.envs
    if on_policy:
        learner["rollout"] = pace.train_freq
    else:
        learner["first"] = settings.replayed.unsampled(settings.envs) + 1
        row = sum(each.stored_bytes for each in columns.values())
        # A million rows with pictures would need more memory than most machines have. A size that is set is not capped.
        capacity = settings.replayed.buffer_size or min(_ROWS, _MOST_BYTES // row)
    evaluates: dict[str, Any] = {
        **played,
        "episodes": settings.evaluation_episodes,
        "bound": settings.max_episode_steps,
    }
    if builders.shared:  # the evaluator plays in the first worker's environments and has no more than those
        evaluates |= {"worker": 1, "side_by_side": min(10, settings.envs_per_worker)}
    films = None if folder is None or not settings.film else str(folder.absolute() / FILMS)
    if films is not None:
        evaluates["film"] = FILMS
        if not builders.shared:  # else it has the training's own environments, as `env_args` says
            rendered = {**arguments["env_args"], "render_mode": "rgb_array"}
            evaluates["arguments"] = {**arguments, "env_args": rendered}
    every = max(1000, settings.steps // 20) if settings.evaluate_every is None else settings.evaluate_every
    return Plan(
        roles=(
            *actors(settings.workers, acts, [NAME], [NAME]),
            RoleSpec(
                "learner",
                Kind.LEARNER,
                f"{_ROLES}.learner:{'OnPolicyLearner' if on_policy else 'OffPolicyLearner'}",
                learner,
                samples=(NAME,),
                publishes=NAME,
                publish_every=1 if on_policy else settings.replayed.publish_interval,
            ),
            evaluator(evaluates, [NAME], every),
        ),
        replays=(ReplaySpec(NAME, capacity, columns, episodes=None if on_policy else Episodes()),),
        channels=(ChannelSpec(NAME, WeightsLayout.of(acting.state_dict())),),
        pace=pace,
        budget=Budget(settings.steps, settings.seconds),
        timeouts=Timeouts(actor=_ACTOR_TIMEOUT, evaluator=_EVALUATOR_TIMEOUT).with_resets(settings.reset_timeout),
        seed=settings.seed,
        save_every=max(10_000, settings.steps // 10)
        if settings.checkpoint_every is None
        else settings.checkpoint_every,
        log_every=settings.log_every,
        best="return",
        folders={} if films is None else {FILMS: films},
        server=None if served is None else served.feed({NAME: MODEL}),
        policy=description(settings, made_of),
    )


def description(settings: GymTraining, made_of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of the policy for ``jurybox policy``."""
    from jurybox.training.policies import Description

    return Description(
        "gym",
        {NAME: acts_of(factory_of(settings), made_of, NAME)},
        _PLAYED_VECTOR if settings.vector else _PLAYED,
        {
            "name": settings.env,
            "arguments": settings.env_args,
            **({} if settings.vector else {"max_episode_steps": settings.max_episode_steps, **settings.preprocessing}),
        },
        settings.model_dump(mode="json"),
        settings.seed,
    ).as_dict()


def acts_of(factory: str, made_of: Mapping[str, Any], channel: str) -> Acts:
    """Return how a policy acts, from the arguments of `algorithms.make` and the channel of its weights."""
    from jurybox.training.policies import Acts

    output, how = make(**made_of).chooses
    action = AgentSpec.of(made_of["spec"]).action
    low, high = ([each if math.isfinite(each) else None for each in bounds] for bounds in (action.low, action.high))
    return Acts(
        factory, made_of, f"weights-{channel}.state", output, how,
        low=low, high=high, first=action.start, counts=action.counts, starts=action.starts,
        parts=[asdict(part) for part in action.parts],
    )  # fmt: skip


def factory_of(settings: GymTraining) -> str:
    """Return the factory of the served policy."""
    return _FACTORY if settings.algorithm in ALGORITHMS else _OWN_FACTORY


def columns(settings: GymTraining) -> tuple[str, ...]:
    """Return the columns of metrics.csv."""
    audits = (f"audit_{name}" for name in settings.audit)
    losses = dict.fromkeys((*settings.uses.metrics, *settings.own.scheduled))
    counts = ("stale", "missed", "skipped") if settings.uses.on_policy else ()
    if settings.normalize_rewards:
        counts = ("return_deviation", *counts)
    return (*OF_EVERY_RUN, *losses, *counts, "eval_return", "eval_return_std", "eval_length", *audits)


def train(
    settings: GymTraining,
    folder: Path,
    *,
    command: str = "",
    **options: Unpack[RecordingOptions],
) -> Outcome:
    """Train, and write metrics, logs, checkpoints, summary.json and report.html to `folder`.

    Raises:
        ConfigError: the environment cannot be created, or the algorithm or the launcher does not support the settings.

    For other errors see `recorded_run`, and with a served policy `served_models`.
    """
    from threadpoolctl import threadpool_limits

    from jurybox.cluster.endpoints import Serves
    from jurybox.training.runtime.serving import served_models
    from jurybox.training.trainings.recorded_run import recorded_run

    folder = folder.absolute()  # an environment may change the current folder
    serial = bool(options.get("serial"))
    with ExitStack() as resources:
        built = resources.enter_context(
            builders(settings.build_once, settings.workers, folder / "logs", options.get("launcher"), serial=serial)
        )
        spaces = spaces_of(settings, built)
        # A second thread slows down such small networks, and changes the order of sums and so their values.
        resources.enter_context(threadpool_limits(1))
        served = None
        if settings.policy == "served":
            serving: object = options.get("launcher")
            if isinstance(serving, Serves) and not serial and settings.server is None:
                raise ConfigError(
                    "a served policy on --launcher ray wants a server that runs (--server), or policy='local'"
                )
            folder.mkdir(parents=True, exist_ok=True)
            model = {
                "factory": factory_of(settings),
                "args": algorithm_of(settings, spaces[1]),
                "publish": "double_buffer",
                "max_batch": settings.envs,
            }
            log, http = folder / "server.log", settings.server_http
            served = resources.enter_context(
                served_models({MODEL: model}, settings.server, log, http=http, group=settings.server_group)
            )
        planned = plan(settings, served, builders=built, spaces=spaces, folder=folder)
        built.check(planned, settings.check_steps)
        return recorded_run(
            planned,
            folder,
            columns(settings),
            settings,
            lambda outcome, rows, _: report(settings, outcome, rows, folder, command),
            **options,
        )


def report(
    settings: GymTraining, outcome: Outcome, rows: Sequence[Mapping[str, float]], folder: Path, command: str
) -> str:
    """Return the report as one HTML document."""
    from jurybox.training.checkpoints import Checkpoints
    from jurybox.training.report import page
    from jurybox.training.report.page import Section, over_steps

    sentences = [page.ended(outcome)]
    best = Checkpoints(folder / "checkpoints").best()
    if best is not None:
        sentences.append(
            f"The best evaluation, after {best['env_steps']:,} env steps: a mean return of "
            f"{best['numbers']['return']:.2f} over {settings.evaluation_episodes} episodes without exploration. "
            "checkpoints/best holds its weights."
        )
    evaluations = over_steps(rows, "eval_return", "return", "return", "mean return of evaluations over env steps")
    facts = {
        "Environment": settings.env,
        "Algorithm": settings.algorithm,
        "Policy": settings.policy,
        "Seed": settings.seed,
    }
    used = {name: value for name, value in settings.as_dict().items() if name not in settings.unused()}
    sections = [
        Section("How it ended", sentences),
        Section("Evaluations", evaluations, f"{settings.evaluation_episodes} episodes each.") if evaluations else None,
        page.return_curve(rows, "While learning", "env steps", "return, last 100 episodes"),
        _audits(settings, rows),
        None if outcome.serial else page.worked_when(folder / "timeline.json"),
        page.the_run(facts, used, command, outcome, packages=("torch", "numpy", "gymnasium")),
    ]
    return page.render("Jurybox gym report", f"Jurybox: {settings.algorithm} in {settings.env}", sections)


def _audits(settings: GymTraining, rows: Sequence[Mapping[str, float]]) -> Section | None:
    """Return the charts of audited numbers, which are never rewarded, over the training."""
    from jurybox.training.report.page import Section, over_steps

    named = ((name, f"audit_{name}", f"{name} over env steps") for name in settings.audit)
    drawn = [chart for name, column, title in named for chart in over_steps(rows, column, name, name, title)]
    caption = "Told at the end of episodes and never rewarded: a return that rises while these fall is overoptimised."
    return Section("The audit", drawn, caption) if drawn else None


_NO_ENVIRONMENT = """\
which environment? Give one, for example:

    jurybox train gym --env CartPole-v1                       one that Gymnasium knows, with ppo
    jurybox train gym --env Pendulum-v1 --algorithm sac       ppo, dqn, iqn, td3 or sac
    jurybox train gym --env ale_py:ALE/Pong-v5                of a module that registers it
    jurybox train gym --env my_module:MyEnv                   a class or function of yours, in this folder

`--steps` is how long it trains (100,000 env steps), `--help` shows the other settings, docs/gym.md describes them"""


def _work(settings: GymTraining, run: Run) -> str:
    if "env" not in settings.model_fields_set:
        raise ConfigError(_NO_ENVIRONMENT)
    outcome = carry_out(partial(train, settings, run.folder, command=run.command), run)
    lines = [f"{outcome.text}: {outcome.episodes:,} episodes, {outcome.env_steps:,} steps in {outcome.seconds:.0f} s"]
    if (found := outcome.evaluation.get("eval_return")) is not None:
        lines.append(f"the last evaluation: a mean return of {found:.2f} over {settings.evaluation_episodes} episodes")
    return "\n".join(lines)


TRAINING = Training("gym", GymTraining, _work)
