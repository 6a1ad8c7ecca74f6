"""The training of any Gymnasium environment, `jurybox train gym`: settings, plan, run and report.

Roles import this module for its settings. So packages that only the run needs (torch, plots) are imported where they
are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from pydantic import Field, model_validator

from jurybox.training.environments.gymnasium_env import (
    Actions,
    Does,
    EnvironmentUnusable,
    Observations,
    Seen,
    make_environment,
)
from jurybox.training.recipes.training import Run, Training, carry_out
from jurybox.training.replay import Episodes
from jurybox.training.replay import Field as Column
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
)
from jurybox.training.runtime.progress import COLUMNS as OF_EVERY_RUN
from jurybox.training.runtime.settings import ServedSettings

if TYPE_CHECKING:
    from jurybox.training.policies import Choose
    from jurybox.training.recipes.recorded_run import RecordingOptions
    from jurybox.training.report.page import Section
    from jurybox.training.runtime.serving import ServedModels

Algorithm = Literal["ppo", "dqn", "td3", "sac"]
ON_POLICY = "ppo"
ROWS, CHANNEL = "rows", "policy"  # names of the plan's replay and channel
MODEL = "policy/gym"

_ACTOR = "jurybox.training.recipes.gym_actor"
_LEARNER = "jurybox.training.recipes.gym_learner"
_FACTORY = "jurybox.training.recipes.served_networks:gym_policy"
_EVALUATOR_NICE = 10
# Seconds without a heartbeat: a step or a reset of any environment is shorter, such as one that starts a simulator.
_ACTOR_TIMEOUT, _EVALUATOR_TIMEOUT = 300.0, 600.0
_MOST_BYTES = 2**31  # maximum size of a replay if `buffer_size` is not set
_LAG = 10  # publications by which a served policy may be behind its learner, with off-policy algorithms

# The settings whose use or default depends on the algorithm, with their defaults. Names and values are those of
# Stable-Baselines3 2.9, except for the differences that the documentation lists.
_REPLAYED: dict[str, Any] = {
    "buffer_size": 1_000_000,
    "learning_starts": 100,
    "gradient_steps": 1,
    "n_steps": 1,
    "publish_interval": 1,
    "max_ahead": 100,
}
_OF_NUMBERS = {**_REPLAYED, "batch_size": 256, "train_freq": 1, "tau": 0.005}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {
        "learning_rate": 3e-4,
        "batch_size": 64,
        "hidden": (64, 64),
        "n_steps": 2048,
        "n_epochs": 10,
        "gae_lambda": 0.95,
        "clip_range": 0.2,
        "ent_coef": 0.0,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "normalize_advantage": True,
        "target_kl": None,
    },
    "dqn": {
        **_REPLAYED,
        "learning_rate": 1e-4,
        "batch_size": 32,
        "hidden": (64, 64),
        "train_freq": 4,
        "tau": 1.0,
        "target_update_interval": 10_000,
        "max_grad_norm": 10.0,
        "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0,
        "exploration_final_eps": 0.05,
    },
    "td3": {
        **_OF_NUMBERS,
        "learning_rate": 1e-3,
        "hidden": (400, 300),
        "policy_delay": 2,
        "action_noise": 0.1,
        "target_policy_noise": 0.2,
        "target_noise_clip": 0.5,
    },
    "sac": {
        **_OF_NUMBERS,
        "learning_rate": 3e-4,
        "hidden": (256, 256),
        "ent_coef": "auto",
        "target_entropy": "auto",
        "target_update_interval": 1,
    },
}
_OF_ALGORITHMS = frozenset(name for defaults in DEFAULTS.values() for name in defaults)
_ONLY_PICTURES_HIDDEN: Mapping[str, tuple[int, ...]] = {"ppo": (), "dqn": (), "td3": (256, 256), "sac": (256, 256)}


class GymTraining(ServedSettings):
    """Settings of a gym training; a TOML file and the command line use the same names.

    For settings whose default is None, the algorithm has its own default (`DEFAULTS`); `of` returns the value in use.
    """

    title = "gym"
    may_change = (
        *("steps", "seconds", "policy", "server", "server_http", "device", "max_ahead", "publish_interval"),
        *("max_lag", "evaluate_every", "evaluation_episodes", "checkpoint_every", "log_every"),
    )

    env: str = Field("CartPole-v1", description="Gymnasium id, or module:factory.")
    env_args: dict[str, Any] = Field({}, description="Keyword arguments of the environment.")
    max_episode_steps: int | None = Field(None, ge=1, description="Truncate episodes after this many steps.")
    algorithm: Algorithm = Field("ppo", description="The algorithm; settings without a default have its own.")
    seconds: float | None = Field(None, gt=0, description="Stop after this many seconds.")
    steps: int = Field(100_000, ge=1, description="Total env steps.")
    workers: int = Field(1, ge=1, description="Number of processes that step environments.")
    envs: int = Field(1, ge=1, description="Number of environments, over all workers.")
    device: str = Field("cpu", description="Device of the learner.")
    normalize_observations: bool = Field(
        False, description="Normalize observations to mean 0 and standard deviation 1."
    )
    gamma: float = Field(0.99, ge=0, le=1, description="Discount factor.")

    learning_rate: float | None = Field(None, gt=0, description="Learning rate of Adam.")
    batch_size: int | None = Field(None, ge=2, description="Transitions in one optimiser step.")
    hidden: tuple[int, ...] | None = Field(None, description="Sizes of the hidden layers of every network.")
    n_steps: int | None = Field(
        None, ge=1, description="PPO: steps per environment between two updates; others: steps of the n-step return."
    )
    max_grad_norm: float | None = Field(None, gt=0, description="Norm at which gradients are clipped.")
    ent_coef: float | str | None = Field(
        None, description='PPO: weight of the entropy bonus; SAC: a number, or "auto".'
    )

    n_epochs: int | None = Field(None, ge=1, description="Passes over a rollout.")
    gae_lambda: float | None = Field(None, ge=0, le=1, description="PPO: lambda of generalised advantage estimation.")
    clip_range: float | None = Field(
        None, gt=0, description="PPO: largest change of the probability ratio in an update."
    )
    vf_coef: float | None = Field(None, ge=0, description="PPO: weight of the value loss.")
    normalize_advantage: bool | None = Field(None, description="PPO: normalize advantages in each minibatch.")
    target_kl: float | None = Field(
        None, gt=0, description="An update stops when the KL divergence exceeds 1.5 times this."
    )

    buffer_size: int | None = Field(
        None, ge=1, description="Capacity of the replay, in transitions; none: a million, or what fits in 2 GiB."
    )
    learning_starts: int | None = Field(None, ge=1, description="Env steps with random actions and without learning.")
    train_freq: int | None = Field(None, ge=1, description="Steps per environment between two rounds of learning.")
    gradient_steps: int | None = Field(None, ge=-1, description="Learner steps per round; -1: as many as env steps.")
    tau: float | None = Field(None, gt=0, le=1, description="Coefficient of the soft update of target networks.")
    target_update_interval: int | None = Field(
        None, ge=1, description="Between two target updates: DQN counts env steps, SAC learner steps."
    )
    exploration_fraction: float | None = Field(
        None, gt=0, le=1, description="Fraction of all steps over which epsilon falls to its final value."
    )
    exploration_initial_eps: float | None = Field(
        None, ge=0, le=1, description="DQN: probability of a random action at first."
    )
    exploration_final_eps: float | None = Field(
        None, ge=0, le=1, description="DQN: probability of a random action at last."
    )
    policy_delay: int | None = Field(None, ge=1, description="Critic steps per actor step.")
    action_noise: float | None = Field(
        None, ge=0, description="Standard deviation of the exploration noise, for actions in [-1, 1]."
    )
    target_policy_noise: float | None = Field(
        None, ge=0, description="TD3: standard deviation of the noise on target actions."
    )
    target_noise_clip: float | None = Field(None, ge=0, description="TD3: bound of that noise.")
    target_entropy: float | Literal["auto"] | None = Field(
        None, description="SAC: the entropy aimed at; auto: minus the number of actions."
    )

    max_ahead: int | None = Field(None, ge=0, description="Env steps by which workers may be ahead of the learner.")
    publish_interval: int | None = Field(None, ge=1, description="Learner steps between two publications.")
    max_lag: int = Field(_LAG, ge=0, description="Publications by which a served policy's answers may lag.")
    evaluate_every: int | None = Field(
        None,
        ge=0,
        description="Env steps between two evaluations; none: a twentieth of all, at least 1,000; 0: one at the end.",
    )
    evaluation_episodes: int = Field(10, ge=1, description="Episodes per evaluation, without exploration.")
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

    @model_validator(mode="after")
    def _check_consistency(self) -> GymTraining:
        if self.envs % self.workers:
            raise ValueError(f"envs={self.envs} with workers={self.workers}: expected the same number for each worker")
        if self.algorithm == ON_POLICY and isinstance(self.ent_coef, str):
            raise ValueError(f"ent_coef={self.ent_coef!r}: ppo takes a number")
        if self.gradient_steps == 0:
            raise ValueError("gradient_steps=0: nothing would be learned; expected 1 or more, or -1")
        if self.algorithm != ON_POLICY and self.buffer_size is not None:
            least = self.unsampled + 1
            if self.buffer_size < least:
                raise ValueError(
                    f"buffer_size={self.buffer_size} with n_steps={self.of('n_steps')} and envs={self.envs}: expected "
                    f"{least} rows or more, since the newest n_steps + 1 of each environment cannot be sampled; raise "
                    "buffer_size, or lower n_steps or envs"
                )
        if self.algorithm == "sac":
            from jurybox.training.algorithms.sac import first_temperature

            first_temperature(self.of("ent_coef"))
        if self.hidden is not None and (min(self.hidden, default=1) < 1 or (not self.hidden and self._needs_hidden)):
            raise ValueError(f"hidden={self.hidden}: expected one layer or more, of one unit or more")
        return self

    @classmethod
    def shown_default(cls, name: str) -> str:
        """Return the algorithms' defaults of a setting that has none of its own."""
        algorithms: dict[str, list[str]] = {}
        for algorithm, defaults in DEFAULTS.items():
            if name in defaults and cls.model_fields[name].default is None:
                value = defaults[name]
                shown = "none" if value is None else str(list(value) if isinstance(value, tuple) else value).lower()
                algorithms.setdefault(shown, []).append(algorithm)
        return ", ".join(f"{value} ({' '.join(names)})" for value, names in algorithms.items())

    @property
    def _needs_hidden(self) -> bool:
        return self.algorithm == "sac"

    def of(self, name: str) -> Any:
        """Return the setting of that name, or the algorithm's default.

        Raises:
            KeyError: the algorithm does not use the setting.
        """
        default = DEFAULTS[self.algorithm][name]
        value = getattr(self, name)
        return default if value is None else value

    def hidden_for(self, seen: Seen) -> tuple[int, ...]:
        """Return the sizes of the hidden layers. The defaults differ if all observations are images."""
        if self.hidden is None and seen.pictures:
            return _ONLY_PICTURES_HIDDEN[self.algorithm] if not seen.numbers else tuple(self.of("hidden"))
        return tuple(self.of("hidden"))

    @property
    def envs_per_worker(self) -> int:
        return self.envs // self.workers

    @property
    def unsampled(self) -> int:
        """The most rows that a replay can hold of which none can be sampled.

        The newest n_steps transitions of each environment have no successors yet, and the row before them may be the
        last observation of an episode, which is no transition.
        """
        return int((self.of("n_steps") + 1) * self.envs)

    @property
    def pace(self) -> Pace:
        """The pace: PPO learns between rollouts, other algorithms make learner steps after each round of env steps."""
        if self.algorithm == ON_POLICY:
            return Pace(self.of("n_steps") * self.envs, 1, 0, 0)
        collect = self.of("train_freq") * self.envs
        steps = collect if self.of("gradient_steps") == -1 else self.of("gradient_steps")
        return Pace(collect, steps, self.of("learning_starts"), self.of("max_ahead"))

    def unused(self) -> dict[str, str]:
        """Return the settings that have no effect with the others, and why."""
        used = DEFAULTS[self.algorithm]
        unused = super().unused()
        unused |= dict.fromkeys(_OF_ALGORITHMS - used.keys(), f"{self.algorithm} does not use it")
        if self.policy == "local":
            unused["max_lag"] = "policy is local: workers take the newest weights before every step"
        elif self.algorithm == ON_POLICY:
            unused["max_lag"] = "ppo waits for the newest weights"
        return unused


def spaces_of(settings: GymTraining) -> tuple[Seen, Does]:
    """Return the observation and action space of the settings' environment.

    Raises:
        ConfigError: the environment cannot be created, or the algorithm does not support its spaces.
    """
    try:
        env = make_environment(settings.env, settings.env_args, settings.max_episode_steps)
        try:
            seen, does = Observations(env.observation_space).seen, Actions(env.action_space).does
        finally:
            env.close()
    except EnvironmentUnusable as error:
        raise ConfigError(str(error)) from error
    if settings.algorithm == "dqn" and not does.discrete:
        raise ConfigError(
            f"dqn chooses one of some actions, and those of {settings.env} are numbers ({env.action_space}): take ppo, "
            "td3 or sac"
        )
    if settings.algorithm in ("td3", "sac") and does.discrete:
        raise ConfigError(
            f"{settings.algorithm} gives numbers as actions, and those of {settings.env} are {env.action_space}: take "
            "ppo or dqn"
        )
    if settings.algorithm in ("td3", "sac") and not does.bounded:
        raise ConfigError(
            f"{settings.algorithm} scales its actions to their bounds, and those of {settings.env} have none "
            f"({env.action_space}): bound them in a wrapper (gymnasium.wrappers.RescaleAction), or take ppo"
        )
    if settings.normalize_observations and not seen.numbers:
        raise ConfigError("normalize_observations: these observations are pictures, and have no numbers to normalise")
    return seen, does


def network_of(settings: GymTraining, seen: Seen, does: Does) -> dict[str, Any]:
    """Return the arguments of `algorithms.networks.acting_network`, JSON-serializable."""
    return {
        "algorithm": settings.algorithm,
        "numbers": seen.numbers,
        "pictures": [list(shape) for shape in seen.pictures],
        "normalise": settings.normalize_observations,
        "discrete": does.discrete,
        "actions": does.size,
        "hidden": list(settings.hidden_for(seen)),
        "inputs": [leaf.as_dict() for leaf in seen.inputs],
    }


def fields(settings: GymTraining, seen: Seen, does: Does) -> dict[str, Column]:
    """Return the fields of the replay."""
    stored = "bits" if seen.binary and settings.algorithm != ON_POLICY else None
    found = {
        "observation": Column((seen.size,), seen.dtype, stored=stored),
        "action": Column((), "int64") if does.discrete else Column((does.size,)),
        "reward": Column(),
        "terminated": Column((), "bool"),
    }
    if settings.algorithm == ON_POLICY:
        found |= {
            "next_observation": Column((seen.size,), seen.dtype),
            "log_prob": Column(),
            "over": Column((), "bool"),
            "environment": Column((), "int64"),
            "moment": Column((), "int64"),
            "updates": Column((), "int64"),
        }
    return found


def plan(settings: GymTraining, served: ServedModels | None = None) -> Plan:
    """Create the plan for these settings.

    Args:
        served: the server that has the policy; None: workers compute it themselves.

    Raises:
        ConfigError: the environment cannot be created, or the algorithm does not support it.
    """
    from jurybox.protocol.weights import WeightsLayout
    from jurybox.training.algorithms.networks import acting_network

    seen, does = spaces_of(settings)
    network = network_of(settings, seen, does)
    on_policy, pace = settings.algorithm == ON_POLICY, settings.pace
    if on_policy and pace.collect < 2:
        raise ConfigError("n_steps=1 of one environment is no rollout: expected two steps or more")
    options = {"settings": settings.model_dump(mode="json"), "network": network}
    columns = fields(settings, seen, does)
    capacity = 2 * pace.collect + settings.envs
    if not on_policy:
        row = sum(each.stored_bytes for each in columns.values())
        # A million rows with pictures would need more memory than most machines have. A size that is set is not capped.
        capacity = settings.buffer_size or min(settings.of("buffer_size"), _MOST_BYTES // row)
    every = max(1000, settings.steps // 20) if settings.evaluate_every is None else settings.evaluate_every
    return Plan(
        roles=(
            *(
                RoleSpec(f"actor-{number}", Kind.ACTOR, f"{_ACTOR}:GymActor", options, writes=(ROWS,), reads=(CHANNEL,))
                for number in range(settings.workers)
            ),
            RoleSpec(
                "learner",
                Kind.LEARNER,
                f"{_LEARNER}:{'RolloutLearner' if on_policy else 'ReplayLearner'}",
                options,
                samples=(ROWS,),
                publishes=CHANNEL,
                publish_every=1 if on_policy else settings.of("publish_interval"),
            ),
            RoleSpec(
                "evaluator",
                Kind.EVALUATOR,
                f"{_ACTOR}:GymEvaluator",
                options,
                reads=(CHANNEL,),
                evaluate_every=every,
                nice=_EVALUATOR_NICE,
            ),
        ),
        replays=(ReplaySpec(ROWS, capacity, columns, episodes=None if on_policy else Episodes()),),
        channels=(ChannelSpec(CHANNEL, WeightsLayout.of(acting_network(**network).state_dict())),),
        pace=pace,
        budget=Budget(settings.steps, settings.seconds),
        timeouts=Timeouts(actor=_ACTOR_TIMEOUT, evaluator=_EVALUATOR_TIMEOUT),
        seed=settings.seed,
        save_every=max(10_000, settings.steps // 10)
        if settings.checkpoint_every is None
        else settings.checkpoint_every,
        log_every=settings.log_every,
        best="return",
        server=None if served is None else served.feed({CHANNEL: MODEL}),
        policy=description(settings, seen, does),
    )


# The output of each algorithm that an action without exploration is computed from, and how; of numbers, and of choices.
_OF_NUMBERS_ACTS: Mapping[str, tuple[str, Choose]] = {
    "ppo": ("mean", "clip"),
    "sac": ("mean", "tanh"),
    "td3": ("action", "box"),
}
_OF_CHOICES_ACTS: Mapping[str, tuple[str, Choose]] = {"ppo": ("logits", "best"), "dqn": ("values", "best")}


def description(settings: GymTraining, seen: Seen, does: Does) -> dict[str, Any]:
    """Return the description of the policy for ``jurybox policy``."""
    from jurybox.training.policies import Acts, Description

    output, choose = (_OF_CHOICES_ACTS if does.discrete else _OF_NUMBERS_ACTS)[settings.algorithm]
    acts = Acts(
        _FACTORY,
        network_of(settings, seen, does),
        f"weights-{CHANNEL}.state",
        output,
        choose,
        low=[bound if math.isfinite(bound) else None for bound in does.low],
        high=[bound if math.isfinite(bound) else None for bound in does.high],
        first=does.first,
    )
    return Description(
        "gym",
        {CHANNEL: acts},
        "jurybox.training.environments.gymnasium_env:played_environment",
        {"name": settings.env, "arguments": settings.env_args, "max_episode_steps": settings.max_episode_steps},
        settings.model_dump(mode="json"),
        settings.seed,
    ).as_dict()


_LOSSES: Mapping[str, tuple[str, ...]] = {
    "ppo": ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance", "stale"),
    "dqn": ("loss", "epsilon"),
    "td3": ("critic_loss", "actor_loss", "value"),
    "sac": ("critic_loss", "actor_loss", "value", "ent_coef", "entropy"),
}


def columns(settings: GymTraining) -> tuple[str, ...]:
    """Return the columns of metrics.csv."""
    audits = (f"audit_{name}" for name in settings.audit)
    return (*OF_EVERY_RUN, *_LOSSES[settings.algorithm], "eval_return", "eval_return_std", "eval_length", *audits)


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

    from jurybox.training.cluster.endpoints import Serves
    from jurybox.training.recipes.recorded_run import recorded_run
    from jurybox.training.runtime.serving import served_models

    folder = folder.absolute()  # an environment may change the current folder
    seen, does = spaces_of(settings)
    with ExitStack() as resources:
        # A second thread slows down such small networks, and changes the order of sums and so their values.
        resources.enter_context(threadpool_limits(1))
        served = None
        if settings.policy == "served":
            serving: object = options.get("launcher")
            if isinstance(serving, Serves) and not options.get("serial") and settings.server is None:
                raise ConfigError(
                    "a served policy on --launcher ray wants a server that runs (--server), or policy='local'"
                )
            folder.mkdir(parents=True, exist_ok=True)
            model = {
                "factory": _FACTORY,
                "args": network_of(settings, seen, does),
                "publish": "double_buffer",
                "max_batch": settings.envs,
            }
            log, http = folder / "server.log", settings.server_http
            served = resources.enter_context(served_models({MODEL: model}, settings.server, log, http=http))
        return recorded_run(
            plan(settings, served),
            folder,
            columns(settings),
            settings,
            lambda outcome, rows: report(settings, outcome, rows, folder, command),
            **options,
        )


def report(
    settings: GymTraining, outcome: Outcome, rows: Sequence[Mapping[str, float]], folder: Path, command: str
) -> str:
    """Return the report as one HTML document."""
    from jurybox.training.checkpoints import Checkpoints
    from jurybox.training.report import charts, page
    from jurybox.training.report.page import Section

    sentences = [
        f"{outcome.text[0].upper()}{outcome.text[1:]}: {outcome.episodes:,} episodes, {outcome.env_steps:,} env steps "
        f"and {outcome.learner_steps:,} learner steps in {outcome.seconds:.0f} s."
    ]
    best = Checkpoints(folder / "checkpoints").best()
    if best is not None:
        sentences.append(
            f"The best evaluation, after {best['env_steps']:,} env steps: a mean return of "
            f"{best['numbers']['return']:.2f} over {settings.evaluation_episodes} episodes without exploration. "
            "checkpoints/best holds its weights."
        )
    sections: list[Section | None] = [Section("How it ended", sentences)]
    points = [row for row in rows if "eval_return" in row]
    if len(points) > 1:
        line = charts.stretches("return", [row["env_steps"] for row in points], [row["eval_return"] for row in points])
        drawn = charts.curves([line], "mean return of evaluations over env steps", "env steps", "return")
        sections.append(Section("Evaluations", [drawn], f"{settings.evaluation_episodes} episodes each."))
    sections.append(page.return_curve(rows, "While learning", "env steps", "return, last 100 episodes"))
    sections.append(_audits(settings, rows))
    if not outcome.serial:
        sections.append(page.worked_when(folder / "timeline.json"))
    facts = {
        "Environment": settings.env,
        "Algorithm": settings.algorithm,
        "Policy": settings.policy,
        "Seed": settings.seed,
    }
    in_force = {**settings.as_dict(), **{name: settings.of(name) for name in DEFAULTS[settings.algorithm]}}
    used = {name: value for name, value in in_force.items() if name not in settings.unused()}
    sections.append(page.the_run(facts, used, command, outcome, packages=("torch", "numpy", "gymnasium")))
    return page.render("Jurybox gym report", f"Jurybox: {settings.algorithm} in {settings.env}", sections)


def _audits(settings: GymTraining, rows: Sequence[Mapping[str, float]]) -> Section | None:
    """Return the charts of audited numbers, which are never rewarded, over the training."""
    from jurybox.training.report import charts, page

    drawn = []
    for name in settings.audit:
        points = [row for row in rows if f"audit_{name}" in row]
        if len(points) > 1:
            steps = [row["env_steps"] for row in points]
            line = charts.stretches(name, steps, [row[f"audit_{name}"] for row in points])
            drawn.append(charts.curves([line], f"{name} over env steps", "env steps", name))
    caption = "Told at the end of episodes and never rewarded: a return that rises while these fall is overoptimised."
    return page.Section("The audit", drawn, caption) if drawn else None


_NO_ENVIRONMENT = """\
which environment? Give one, for example:

    jurybox train gym --env CartPole-v1                       one that Gymnasium knows, with ppo
    jurybox train gym --env Pendulum-v1 --algorithm sac       ppo, dqn, td3 or sac
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
