"""The photo training: Stable-Baselines3 PPO over env workers that are clients of the server.

The default settings were tuned on the photos that ship, with the panel as juror. The most important, in this order:

- discount 0: each edit step is rewarded immediately by the change of the score, so later rewards only add noise to
  the advantage of a step;
- a small initial standard deviation (0.3 of the action range): every step moves nine tools at once, and a large
  deviation mostly spoils the photo with eight of them;
- a learning rate that falls by a factor of ten: with few photos the late steps would overfit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.protocol.weights import WeightsLayout
from jurybox.studies.photo.environment import PhotoConfig, observation
from jurybox.studies.photo.environment.edits import TOOLS
from jurybox.studies.photo.imitation import imitate
from jurybox.studies.photo.network import PhotoMoves, photo_moves
from jurybox.studies.photo.start import begin_with
from jurybox.studies.photo.worker import environment_maker
from jurybox.training.algorithms.compiling import PlainAdam
from jurybox.training.policies import Acts, Description
from jurybox.training.roles.sb3 import LEARNER_COLUMNS, POLICY, SB3Trainer
from jurybox.training.run_folder import audited
from jurybox.training.runtime.plan import Budget, ChannelSpec, ConfigError, Kind, Plan, RoleSpec
from jurybox.training.runtime.progress import COLUMNS
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.settings import Settings
from jurybox.training.trainings.launchers import Spread
from jurybox.training.vector.sb3_env import WorkerVecEnv

METRICS = (
    *COLUMNS,
    *("rollout_episodes", "rollout_return_mean", "rollout_return_error"),
    *LEARNER_COLUMNS,
    *("action_deviation", "score_before", "score_after"),
)


def columns(config: PhotoConfig) -> tuple[str, ...]:
    """Return the columns of metrics.csv, with a pair (before and after the edits) for every audited measure."""
    return (*METRICS, *(f"audit_{name}{suffix}" for name in ("psnr", *config.audit) for suffix in ("_before", "")))


ROLLOUT = 4000  # steps of all environments together between two updates


class PhotoTraining(Settings):
    """Settings of a photo training; a TOML file and the command line use the same names.

    Attributes:
        environment: settings of every worker's environment; environment i gets the seed ``seed + i``.
    """

    title = "photo"
    # Settings that may differ when a run is resumed. A change of any other would make it a different run.
    may_change = (
        *("steps", "envs", "workers", "checkpoint_every", "server_timeout", "seconds", "damages"),
        *("environment.address", "environment.timeout", "environment.audit_models", "perceptual"),
    )

    environment: PhotoConfig = PhotoConfig()
    steps: int = Field(40_000, ge=1, description="Edit steps in all; rounded up to whole rollouts.")
    imitation: int = Field(0, ge=0, description="Pictures before these steps, of which the cures are shown.")
    start: str | None = Field(
        None, description="A policy to start from: shipped, or a file of photo.start; none: a new one."
    )
    envs: int | None = Field(None, ge=1, description="Environments side by side; none: one for each worker, or 8.")
    workers: int | None = Field(
        None, ge=1, description="Processes; none: one for each environment, on a cluster one for two."
    )
    rollout: int = Field(ROLLOUT, ge=1, description="Env steps of all environments together between two updates.")
    n_epochs: int = Field(10, ge=1, description="Passes over a rollout.")
    batch_size: int = Field(64, ge=1, description="Steps of a rollout in one optimiser step.")
    learning_rate: float = Field(1e-3, gt=0, description="Learning rate of Adam at the first step.")
    final_learning_rate: float = Field(1e-4, ge=0, description="At the last step; linear in between.")
    # Schulman et al., 2017; 2016 for lambda.
    gamma: float = Field(0.0, ge=0, le=1, description="Discount factor.")
    gae_lambda: float = Field(0.9, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    clip_range: float = Field(0.2, gt=0, description="Largest change of the probability ratio in an update.")
    ent_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    vf_coef: float = Field(0.5, ge=0, description="Weight of the value network's loss.")
    max_grad_norm: float = Field(0.5, gt=0, description="Gradients are scaled down to it.")
    normalize_advantage: bool = Field(True, description="Normalize advantages in each minibatch.")
    target_kl: float | None = Field(None, gt=0, description="An update ends early beyond this divergence.")
    hidden: tuple[int, ...] = Field((64, 64), description="Units of the layers of policy and value network.")
    log_std_init: float = Field(-1.2, description="Logarithm of the actions' deviation at the start.")
    checkpoint_every: int | None = Field(None, ge=1, description="Env steps between two checkpoints; none: a rollout.")
    server_timeout: float = Field(60.0, ge=0, description="Seconds that a worker waits for a server that went away.")
    seconds: float | None = Field(None, gt=0, description="Stop training after so many.")
    damages: int = Field(24, ge=2, description="Seeds of degradation in the evaluation.")
    perceptual: str | None = Field(
        None, description="package.module:function that makes a learned distance of two pictures, for the audit."
    )

    @model_validator(mode="after")
    def _one_seed(self) -> PhotoTraining:
        if self.environment.seed:
            raise ValueError("environment.seed has no effect: set seed instead")
        taken = {"psnr", self.environment.model} & self.environment.audit.keys()
        if taken:
            raise ValueError(f"audit jurors need names of their own, got {', '.join(sorted(taken))}")
        return self

    @property
    def config(self) -> PhotoConfig:
        """The environment's settings, with the seed."""
        return replace(self.environment, seed=self.seed)

    @property
    def n_envs(self) -> int:
        return self.envs or self.workers or 8


def check_workers(settings: PhotoTraining) -> None:
    """Raise ConfigError unless each environment has its own worker, which a training on one machine requires."""
    if settings.workers not in (None, settings.n_envs):
        raise ConfigError(
            f"workers={settings.workers} with envs={settings.envs}: on one machine each environment has a process of "
            "its own; leave one of the two out (--launcher ray takes both)"
        )


def make_environments(
    settings: PhotoTraining,
    *,
    serial: bool = False,
    ray: Mapping[str, Any] | None = None,
    network_address: str | None = None,
) -> VecEnv:
    """Create a training's environments: in worker processes, in this process, or in a cluster's workers (see `plan`).

    Raises:
        ConfigError: on one machine, the number of workers differs from the number of environments.
    """
    if ray is not None:
        return _on_cluster(settings, ray, network_address)
    make = [environment_maker(settings.config, i, settings.server_timeout) for i in range(settings.n_envs)]
    if serial:
        return DummyVecEnv(list(make))
    check_workers(settings)
    # A step may wait first for a server that restarts, and then for its score.
    timeout = 120.0 + settings.server_timeout + 2 * settings.environment.timeout
    return WorkerVecEnv(make, timeout)


def _on_cluster(settings: PhotoTraining, needs: Mapping[str, Any], network_address: str | None) -> VecEnv:
    from jurybox.cluster.connection import addresses_of, credentials
    from jurybox.cluster.env_workers import EnvWorkers, Needs
    from jurybox.cluster.sb3_env import SpreadVecEnv, dealt
    from jurybox.studies.photo.worker import env_group

    config, n = settings.config, settings.n_envs
    # With two environments in a worker, one can render while the other waits for its score.
    numbers = dealt(n, 2 if settings.workers is None else -(-n // settings.workers))
    addresses = None if config.scorer == "local" else addresses_of(config.address, network_address)
    makers = [partial(env_group, config, each, settings.server_timeout, addresses) for each in numbers]
    # A step may wait first for a server that restarts, and then for its score.
    timeout = settings.server_timeout + 2 * config.timeout + 60.0
    workers = EnvWorkers(makers, Needs(**needs), environment=credentials(), timeout=timeout)
    try:
        return SpreadVecEnv(workers, [len(each) for each in numbers], settings.seed)
    except BaseException:
        workers.close()
        raise


def plan(
    settings: PhotoTraining, *, serial: bool = False, spread: Spread | None = None, network_address: str | None = None
) -> Plan:
    """The plan of a training: one role, Stable-Baselines3's own loop, beside workers for its environments.

    Args:
        serial: run all environments in this process, one after the other, for debugging.
        spread: the cluster that the environments run on, to which this process is connected; None: this machine.
        network_address: the server's address for the cluster's other machines; None: ask the server.
    """
    rollout = settings.n_envs * steps_per_environment(settings.n_envs, min(settings.rollout, settings.steps))
    ray = None if spread is None else {} if spread.needs is None else asdict(spread.needs)
    where = {"serial": serial, "ray": ray, "network_address": network_address}
    found = description(settings)
    network = photo_moves(**found.policies[POLICY].arguments).module
    return Plan(
        roles=(
            RoleSpec(
                "trainer",
                Kind.TRAINER,
                f"{__name__}:trainer",
                {"photo": settings.model_dump(mode="json"), **where},
                publishes=POLICY,
            ),
        ),
        channels=(ChannelSpec(POLICY, WeightsLayout.of(network.state_dict())),),
        budget=Budget(settings.steps, settings.seconds),
        seed=settings.seed,
        save_every=settings.checkpoint_every or rollout,
        log_every=rollout,
        policy=found.as_dict(),
    )


def trainer(
    context: RoleContext,
    *,
    photo: Mapping[str, Any],
    serial: bool,
    ray: Mapping[str, Any] | None,
    network_address: str | None,
) -> PhotoTrainer:
    """Make the role of `plan`."""
    settings = PhotoTraining.checked(photo)
    torch.set_num_threads(1)  # a second thread slows down so small a network
    environments = make_environments(settings, ray=ray, network_address=network_address, serial=serial)
    try:
        return PhotoTrainer(context, settings, _new_model(settings, environments))
    except BaseException:
        environments.close()
        raise


class PhotoTrainer(SB3Trainer):
    """Trains a photo policy, from a start or cures that it is shown, and counts what happens to scores.

    Raises:
        WorkerFailed: an environment failed, for example because no server came back within `server_timeout`.
    """

    model: PPO

    def __init__(self, context: RoleContext, settings: PhotoTraining, model: PPO) -> None:
        super().__init__(context, model)
        self._settings = settings
        self._finished: list[dict[str, float]] = []

    def begin(self) -> None:
        if self._settings.start is not None:
            begin_with(self.model, self._settings.start)
        if self._settings.imitation:
            episode = self._settings.environment.steps
            shown = imitate(
                self.model,
                self.environments,
                self._settings.imitation,
                seed=self._settings.seed,
                episode=episode,
                check=self.context.goes_on,
            )
            self.context.say(f"shown cures of {len(shown.seen):,} pictures")

    def network(self) -> torch.nn.Module:
        policy: Any = self.model.policy
        network: torch.nn.Module = policy.mlp_extractor.policy_net
        return network

    def ended(self, info: Mapping[str, Any], total: float) -> None:
        scores = {"score_before": float(info["score_before"]), "score_after": float(info["score"])}
        self._finished.append({"return": total, **scores, **audited(info)})

    def numbers(self) -> dict[str, float]:
        found, self._finished = self._finished, []
        row: dict[str, float] = {"rollout_episodes": len(found), "episodes_cut": self.cut}
        row["env_worker_restarts"] = getattr(self.environments, "restarts", 0)
        if found:
            returns = [episode["return"] for episode in found]
            row["rollout_return_mean"] = float(np.mean(returns))
            row["rollout_return_error"] = float(np.std(returns, ddof=1) / len(found) ** 0.5) if len(found) > 1 else 0.0
            for name in sorted({name for episode in found for name in episode} - {"return"}):
                row[name] = float(np.mean([episode[name] for episode in found if name in episode]))
        return row


# Settings with the names of PPO's arguments.
_OF_PPO = (
    *("batch_size", "n_epochs", "gamma", "gae_lambda", "clip_range", "ent_coef", "vf_coef", "max_grad_norm"),
    *("normalize_advantage", "target_kl", "seed"),
)


def _new_model(settings: PhotoTraining, environments: VecEnv) -> PPO:
    hidden = list(settings.hidden)
    with warnings.catch_warnings():
        # SB3 warns that the last mini-batch is smaller, which is harmless here.
        warnings.filterwarnings("ignore", message=".*mini-batch.*", category=UserWarning)
        return PPO(
            PhotoActorCritic,
            environments,
            n_steps=steps_per_environment(settings.n_envs, min(settings.rollout, settings.steps)),
            learning_rate=LinearSchedule(settings.learning_rate, settings.final_learning_rate, 1.0),
            **{name: getattr(settings, name) for name in _OF_PPO},
            policy_kwargs={
                "net_arch": {"pi": hidden, "vf": hidden},
                "activation_fn": torch.nn.Tanh,
                "log_std_init": settings.log_std_init,
                "optimizer_class": PlainAdam,
                "optimizer_kwargs": {"eps": 1e-5},  # what its default gives torch's own Adam alone
            },
            device="cpu",
        )


class PhotoActorCritic(ActorCriticPolicy):
    """SB3's actor-critic policy with `PhotoMoves` as the actor; the critic sees the whole observation."""

    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        made: Any = self.mlp_extractor
        widths = [layer.out_features for layer in made.policy_net if isinstance(layer, torch.nn.Linear)]
        made.policy_net = PhotoMoves(self.features_dim, len(TOOLS), widths, **parts())
        made.latent_dim_pi = len(TOOLS)

    def _build(self, lr_schedule: Callable[[float], float]) -> None:
        super()._build(lr_schedule)
        self.action_net: torch.nn.Module = torch.nn.Identity()  # the actor's output is the mean already
        actor: Any = self.mlp_extractor.policy_net
        for layers in (actor.others, actor.light, actor.turning):
            self.init_weights(layers[-1], gain=0.01)  # moves start near 0, as in every policy of SB3
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]


def parts() -> dict[str, Any]:
    """Return the arguments of `PhotoMoves` that say which part of the observation each of its perceptrons sees."""
    return {
        "leaning": observation.leaning(),
        "straighten": TOOLS.index("straighten"),
        "lit": observation.VIEW.start,
        "lighting": [TOOLS.index(name) for name in ("exposure", "temperature", "tint")],
    }


def description(settings: PhotoTraining) -> Description:
    """Return the description of the saved policy. By default it plays held-out photos with an in-process juror."""
    size, actions = observation.SIZE, len(TOOLS)
    acts = Acts(
        "jurybox.studies.photo.network:photo_moves",
        {"observation": size, "action": actions, "hidden": list(settings.hidden), **parts()},
        "weights-policy.state",
        output="action",
        choose="box",
        low=[-1.0] * actions,
        high=[1.0] * actions,
    )
    played = replace(settings.config.held_out(), scorer="local", address=None, audit={}, audit_models={})
    factory = "jurybox.studies.photo.environment.photo_edit:played"
    return Description("photo", {POLICY: acts}, factory, asdict(played), settings.as_dict(), settings.seed)


def steps_per_environment(environments: int, rollout: int = ROLLOUT) -> int:
    """Return the steps of each environment between two updates, so that all together take about `rollout` steps.

    If the rollout grew with the number of workers, every other setting would have a different effect on a larger
    machine. A fixed total keeps a run with 2 workers comparable with one with 64.

    Args:
        environments: number of parallel environments.
        rollout: steps of all environments together between two updates.

    Raises:
        ConfigError: an argument is below 1, or there are more environments than steps.
    """
    if environments < 1 or rollout < 1:
        raise ConfigError(f"expected at least one environment and one step, got {environments} and {rollout}")
    if environments > rollout:
        raise ConfigError(
            f"{environments} environments cannot share a rollout of {rollout} steps: use fewer workers, or a longer "
            "rollout"
        )
    return max(1, round(rollout / environments))
