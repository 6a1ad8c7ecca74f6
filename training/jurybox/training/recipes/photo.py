"""The photo training: Stable-Baselines3 PPO over env workers that are clients of the server.

The settings were found on the photos that ship, with the panel as juror. What matters, in this order:

- discount 0: every edit step is paid at once by the change of the score, so nothing is gained by looking ahead, and
  the advantage of a step is free of the noise of those after it;
- a narrow start (deviation 0.3 of the action range): nine tools are moved at once, and a wide one mostly spoils the
  photo in eight of them;
- a learning rate that falls by ten: with few photos the late steps would learn these photos by heart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.protocol.wire import build_version
from jurybox.training.environments.photo import PhotoConfig
from jurybox.training.recipes import checkpoints
from jurybox.training.recipes.checkpoints import Checkpoint
from jurybox.training.recipes.launchers import Spread
from jurybox.training.recipes.photo_worker import environment_maker
from jurybox.training.recipes.progress import Silence, Watcher
from jurybox.training.recipes.recorder import COLUMNS, Recorder, learner_steps
from jurybox.training.run_folder import RunLog, Summary
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.vector.sb3_env import WorkerVecEnv

METRICS = (*COLUMNS, "score_before", "score_after")

ROLLOUT = 4000  # steps of all environments together between two updates


@dataclass(frozen=True, slots=True)
class PhotoTraining:
    """Settings of one training.

    Attributes:
        environment: of every worker; its seed is the base seed, environment i gets ``seed + i``.
        steps: env steps in all; rounded up to whole rollouts.
        workers: environments side by side, each in a process of its own.
        single_process: all environments in this process instead, one after the other, for debugging.
        per_worker: environments of one worker on a cluster; of two, one renders while the other waits for its score.
        rollout: env steps of all workers together between two updates.
        epochs, batch_size: passes over a rollout, and steps of it in one optimiser step.
        learning_rate, final_learning_rate: at the first and the last step, linear in between.
        discount, smoothing, clip: gamma, lambda and clip range of PPO (Schulman et al., 2017; 2016 for lambda).
        hidden: units of the layers of policy and value network.
        log_deviation: logarithm of the actions' deviation at the start.
        checkpoint_every: env steps between two checkpoints.
        patience: seconds that a worker waits for a server that went away.
        seconds: stop training after so many; None trains all steps.
    """

    environment: PhotoConfig = field(default_factory=PhotoConfig)
    steps: int = 40_000
    workers: int = 8
    single_process: bool = False
    per_worker: int = 2
    rollout: int = ROLLOUT
    epochs: int = 10
    batch_size: int = 64
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4
    discount: float = 0.0
    smoothing: float = 0.9
    clip: float = 0.2
    hidden: tuple[int, ...] = (64, 64)
    log_deviation: float = -1.2
    checkpoint_every: int = ROLLOUT
    patience: float = 60.0
    seconds: float | None = None

    @property
    def seed(self) -> int:
        return self.environment.seed

    def as_dict(self) -> dict[str, Any]:
        """Flat, for reports and trackers: the environment's settings as ``environment.NAME``."""
        own = {name: value for name, value in asdict(self).items() if name != "environment"}
        return own | {f"environment.{name}": value for name, value in asdict(self.environment).items()}


def make_environments(settings: PhotoTraining, spread: Spread | None = None, far: str | None = None) -> VecEnv:
    """The environments of a training: worker processes, objects in this one, or workers of a cluster (see `train`)."""
    if spread is not None:
        return _on_cluster(settings, spread, far)
    make = [environment_maker(settings.environment, i, settings.patience) for i in range(settings.workers)]
    # A step may wait for a server that is restarted, and then for its score.
    timeout = 120.0 + settings.patience + 2 * settings.environment.timeout
    return DummyVecEnv(list(make)) if settings.single_process else WorkerVecEnv(make, timeout)


def _on_cluster(settings: PhotoTraining, spread: Spread, far: str | None) -> VecEnv:
    from jurybox.training.cluster.connection import credentials
    from jurybox.training.cluster.sb3_env import SpreadVecEnv, dealt
    from jurybox.training.recipes.photo_worker import env_group

    config, numbers = settings.environment, dealt(settings.workers, settings.per_worker)
    way = None if config.scorer == "local" else spread.way_to(config.address, far)
    makers = [partial(env_group, config, each, settings.patience, way) for each in numbers]
    # A step may wait for a server that is restarted, and then for its score.
    timeout = settings.patience + 2 * config.timeout + 60.0
    workers = spread.workers(makers, environment=credentials(), timeout=timeout)
    try:
        return SpreadVecEnv(workers, [len(each) for each in numbers], settings.seed)
    except BaseException:
        workers.close()
        raise


def train(
    settings: PhotoTraining,
    log: RunLog,
    *,
    resume: Checkpoint | None = None,
    watcher: Watcher | None = None,
    spread: Spread | None = None,
    far: str | None = None,
) -> PPO:
    """Train; leaves metrics, checkpoints and summary.json in the log's folder.

    Args:
        resume: go on from this checkpoint.
        watcher: is told how it goes.
        spread: the cluster that holds the environments; None: this machine. far: the server's address for its other
            machines; None: asked of the server.

    Returns:
        The trained model; its environments are closed.

    Raises:
        WorkerFailed: an environment failed; among others because no server came back within `patience`.
        KeyboardInterrupt: the run was interrupted; the checkpoints written so far are whole.
    """
    watcher = watcher or Silence()
    torch.set_num_threads(1)  # a network this small is slower on two
    environments = make_environments(settings, spread, far)
    try:
        model = _new_model(settings, environments) if resume is None else _resumed(settings, environments, resume)
        model.set_logger(Logger(None, []))
        recorder = Recorder(
            log,
            watcher,
            checkpoint_folder=log.folder / "checkpoints",
            checkpoint_every=settings.checkpoint_every,
            counted=resume.counted if resume else None,
            episode_numbers=_scores,
            seconds=settings.seconds,
        )
        left = settings.steps - model.num_timesteps
        if left > 0:
            watcher.begin("training", settings.steps, model.num_timesteps)
            model.learn(left, recorder, log_interval=10**9, reset_num_timesteps=resume is None)
    finally:
        watcher.end()
        environments.close()
    log.summarise(_summary(settings, model, recorder))
    if spread is not None:
        log.extend_summary(env_worker_restarts=getattr(environments, "restarts", 0), episodes_cut=recorder.cut)
    return model


def _new_model(settings: PhotoTraining, environments: VecEnv) -> PPO:
    hidden = list(settings.hidden)
    with warnings.catch_warnings():
        # A last, smaller batch is nothing to worry about; SB3 warns of it.
        warnings.filterwarnings("ignore", message=".*mini-batch.*", category=UserWarning)
        return PPO(
            "MlpPolicy",
            environments,
            n_steps=steps_per_environment(settings.workers, min(settings.rollout, settings.steps)),
            batch_size=settings.batch_size,
            n_epochs=settings.epochs,
            learning_rate=LinearSchedule(settings.learning_rate, settings.final_learning_rate, 1.0),
            gamma=settings.discount,
            gae_lambda=settings.smoothing,
            clip_range=settings.clip,
            policy_kwargs={
                "net_arch": {"pi": hidden, "vf": hidden},
                "activation_fn": torch.nn.Tanh,
                "log_std_init": settings.log_deviation,
            },
            seed=settings.seed,
            device="cpu",
        )


def _resumed(settings: PhotoTraining, environments: VecEnv, checkpoint: Checkpoint) -> PPO:
    n_steps = steps_per_environment(settings.workers, min(settings.rollout, settings.steps))
    model: PPO = PPO.load(checkpoint.model, environments, device="cpu", n_steps=n_steps)
    # Loading seeds everything anew, so the environments' seeds are used up before their states are put back.
    environments.reset()
    checkpoints.restore_random_states(checkpoint, environments, settings.seed + checkpoint.env_steps)
    return model


def _scores(info: Mapping[str, Any]) -> dict[str, float]:
    return {"score_before": float(info["score_before"]), "score_after": float(info["score"])}


def _summary(settings: PhotoTraining, model: PPO, recorder: Recorder) -> Summary:
    returns = list(recorder.returns)
    return Summary(
        env_steps=model.num_timesteps,
        learner_steps=learner_steps(model),
        episodes=recorder.episodes,
        seconds=recorder.seconds,
        return_mean=float(np.mean(returns)) if returns else None,
        return_std=float(np.std(returns)) if returns else None,
        seed=settings.seed,
        version=build_version(),
    )


def policy_of(model: PPO) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """The learned policy without its noise: from one observation to an action, both float32 vectors."""

    def act(observation: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        action: np.ndarray[Any, Any] = model.predict(observation, deterministic=True)[0]
        return action

    return act


# ----
# How long a rollout is in each environment, so that the learner sees the same amount whatever their number.


def steps_per_environment(environments: int, rollout: int = ROLLOUT) -> int:
    """Steps of each environment between two updates: `rollout` steps in all, as nearly as whole steps allow.

    A batch that grew with the number of workers would make every other setting mean something else on a larger
    machine; this keeps a run on 2 workers comparable with one on 64.

    Args:
        environments: how many step side by side.
        rollout: steps of all of them together between two updates.

    Raises:
        ConfigError: a number below 1, or more environments than steps.
    """
    if environments < 1 or rollout < 1:
        raise ConfigError(f"expected at least one environment and one step, got {environments} and {rollout}")
    if environments > rollout:
        raise ConfigError(
            f"{environments} environments cannot share a rollout of {rollout} steps: use fewer workers, or a longer "
            "rollout"
        )
    return max(1, round(rollout / environments))
