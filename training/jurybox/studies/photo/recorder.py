"""Recording of a Stable-Baselines3 training: counters, metrics, checkpoints, progress and interrupts.

A checkpoint contains ``model.zip`` (SB3's own format, so that SB3 can load it) and the further state that `restore`
needs. Nothing is unpickled: the model is created from the settings, and only tensors are read from the file.
The current episodes are not saved: a resumed run begins new ones.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from jurybox.training import interrupts
from jurybox.training.checkpoints import Checkpoint, CheckpointError, Checkpoints
from jurybox.training.run_folder import RunLog, audited
from jurybox.training.runtime.role_context import check_losses
from jurybox.training.spaces import check_finite
from jurybox.training.trainings.progress import Watcher

# Names under which SB3's PPO logs values of an update, and their columns in metrics.csv.
_LEARNER = {
    "train/learning_rate": "learning_rate",
    "train/policy_gradient_loss": "policy_loss",
    "train/value_loss": "value_loss",
    "train/explained_variance": "explained_variance",
    "train/approx_kl": "approximate_kl",
    "train/clip_fraction": "clip_fraction",
    "train/std": "action_deviation",
}
COLUMNS = (
    "learner_steps",
    "episodes",
    "seconds",
    "steps_per_second",
    "return_mean",
    "return_std",
    "rollout_episodes",
    "rollout_return_mean",
    "rollout_return_error",
    *_LEARNER.values(),
)
_LAST = 100  # episodes in the window of return_mean and return_std


class Recorder(BaseCallback):
    """Callback that writes a row of metrics after every rollout and its update, and checkpoints in between.

    Args:
        log: receives the rows.
        watcher: receives the progress after every step of the workers.
        checkpoint_folder: folder for checkpoints; None: no checkpoints.
        checkpoint_every: minimum number of env steps between two checkpoints.
        counted: counters from the checkpoint that the run is resumed from.
        episode_numbers: returns further numbers of a finished episode from its last info; their means are added to
            the row.
        seconds: stop after this many seconds of training; None: no limit.
        policy: writes the policy and its description to a checkpoint's folder.

    Attributes:
        cut: number of episodes that ended because their worker was replaced (``info["restarted"]``). No other
            counter includes them.
    """

    def __init__(
        self,
        log: RunLog,
        watcher: Watcher,
        *,
        checkpoint_folder: Path | None = None,
        checkpoint_every: int = 1,
        counted: Mapping[str, Any] | None = None,
        episode_numbers: Callable[[Mapping[str, Any]], Mapping[str, float]] = lambda info: {},
        seconds: float | None = None,
        policy: Callable[[Path, BaseAlgorithm], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        counted = counted or {}
        self.episodes = int(counted.get("episodes", 0))
        self.cut = 0
        self.returns: deque[float] = deque(counted.get("returns", ()), maxlen=_LAST)
        self._seconds_before = float(counted.get("seconds", 0.0))
        self._log = log
        self._watcher = watcher
        self._checkpoints = None if checkpoint_folder is None else Checkpoints(checkpoint_folder)
        self._every = checkpoint_every
        self._episode_numbers = episode_numbers
        self._limit = seconds
        self._policy = policy
        self._clock = clock
        self._began = self._row_began = clock()
        self._saved_at = self._row_at = 0
        self._sums = np.zeros(0)
        self._finished: list[dict[str, float]] = []

    @property
    def seconds(self) -> float:
        """Seconds of training, including those before a resume."""
        return self._seconds_before + self._clock() - self._began

    def counted(self) -> dict[str, Any]:
        """Return the counters for a checkpoint."""
        return {"episodes": self.episodes, "returns": list(self.returns), "seconds": self.seconds}

    def _on_training_start(self) -> None:
        self._sums = np.zeros(self.training_env.num_envs)
        self._saved_at = self._row_at = self.num_timesteps
        self._began = self._row_began = self._clock()

    def _on_step(self) -> bool:
        interrupts.check()
        check_finite(self.locals["rewards"], "a reward")
        self._sums += self.locals["rewards"]
        for index in np.flatnonzero(self.locals["dones"]):
            total, self._sums[index] = float(self._sums[index]), 0.0
            if self.locals["infos"][index].get("restarted"):
                self.cut += 1
                continue
            self.episodes += 1
            self.returns.append(total)
            info = self.locals["infos"][index]
            self._finished.append({"return": total, **self._episode_numbers(info), **audited(info)})
        shown = {"return": float(np.mean(self.returns))} if self.returns else {}
        self._watcher.advance(self.num_timesteps, shown)
        return self._limit is None or self._clock() - self._began < self._limit

    def _on_rollout_start(self) -> None:
        self._row_and_checkpoint()  # for the previous rollout, whose update is now complete

    def _on_training_end(self) -> None:
        self._row_and_checkpoint(last=True)

    def _row_and_checkpoint(self, *, last: bool = False) -> None:
        if self.num_timesteps > self._row_at:
            self._log.scalars(self.num_timesteps, self._row())
        if self._checkpoints is not None and (
            self.num_timesteps - self._saved_at >= self._every or (last and self.num_timesteps > self._saved_at)
        ):
            try:
                with interrupts.held():
                    save(self._checkpoints, self.model, self.counted(), self._policy)
            except OSError as error:  # a full disk must not end the training
                self._watcher.log(f"no checkpoint at {self.num_timesteps} steps, the one before stands: {error}")
            self._saved_at = self.num_timesteps

    def _row(self) -> dict[str, float]:
        now = self._clock()
        row: dict[str, float] = {
            "learner_steps": learner_steps(self.model),
            "episodes": self.episodes,
            "seconds": self.seconds,
            "steps_per_second": (self.num_timesteps - self._row_at) / max(now - self._row_began, 1e-9),
        }
        if self.returns:
            row |= {"return_mean": float(np.mean(self.returns)), "return_std": float(np.std(self.returns))}
        row |= self._of_rollout()
        for name, column in _LEARNER.items():
            if (value := self.model.logger.name_to_value.get(name)) is not None:
                row[column] = float(value)
        check_losses(row)
        self.model.logger.dump(self.num_timesteps)  # clears the values; the logger has no outputs
        self._row_at, self._row_began, self._finished = self.num_timesteps, now, []
        return row

    def _of_rollout(self) -> dict[str, float]:
        n = len(self._finished)
        row: dict[str, float] = {"rollout_episodes": n}
        if n:
            returns = [episode["return"] for episode in self._finished]
            row["rollout_return_mean"] = float(np.mean(returns))
            row["rollout_return_error"] = float(np.std(returns, ddof=1) / n**0.5) if n > 1 else 0.0
            for name in sorted({name for episode in self._finished for name in episode} - {"return"}):
                row[name] = float(np.mean([episode[name] for episode in self._finished if name in episode]))
        return row


def learner_steps(model: BaseAlgorithm) -> int:
    """Return the number of optimiser steps so far, from Adam's state, which checkpoints include."""
    states = list(model.policy.optimizer.state.values())
    return int(states[0]["step"]) if states else 0


def save(
    checkpoints: Checkpoints,
    model: BaseAlgorithm,
    counted: Mapping[str, Any],
    policy: Callable[[Path, BaseAlgorithm], None] | None = None,
) -> None:
    """Write a checkpoint of a model whose last update is complete.

    Args:
        counted: further numbers; must be JSON-serializable.
        policy: see `Recorder`.
    """
    assert model.env is not None
    document = {
        "counted": dict(counted),
        "updates": getattr(model, "_n_updates", 0),
        "random": _random_states(model.env),
    }
    with checkpoints.writing(model.num_timesteps, document) as folder:
        model.save(folder / "model.zip")
        if policy is not None:
            policy(folder, model)


def restore(model: BaseAlgorithm, checkpoint: Checkpoint, fresh_seed: int) -> None:
    """Restore a new model with the same settings, its environments and the global random generators.

    Args:
        fresh_seed: if there are more environments than in the checkpoint, the additional ones are seeded with it and
            their index.

    Raises:
        CheckpointError: the file cannot be read, or belongs to a different network.
    """
    try:
        model.set_parameters(checkpoint.folder / "model.zip", device=model.device)  # type: ignore[arg-type]
    except Exception as error:
        if "state_dict" in str(error):  # torch's message if the weights do not fit the network
            raise CheckpointError(
                f"{checkpoint.folder} is of another network than this build trains: resume the run with the build that "
                f"began it, or start anew in another folder ({error})"
            ) from error
        raise CheckpointError(
            f"{checkpoint.folder} cannot be read ({error}): remove it to go on from the one before"
        ) from error
    model.num_timesteps = checkpoint.env_steps
    model._n_updates = checkpoint.document["updates"]  # SB3 logs it, and offers no public way to set it
    assert model.env is not None
    _restore_random_states(checkpoint.document["random"], model.env, fresh_seed)


def _random_states(environments: VecEnv) -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
        "environments": [generator.bit_generator.state for generator in environments.get_attr("np_random")],
    }


def _restore_random_states(states: Mapping[str, Any], environments: VecEnv, fresh_seed: int) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
    for index in range(environments.num_envs):
        generator = np.random.default_rng((fresh_seed, index))
        if index < len(states["environments"]):
            generator.bit_generator.state = states["environments"][index]
        environments.set_attr("np_random", generator, indices=[index])
