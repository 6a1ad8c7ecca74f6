"""Stable-Baselines3's replay buffer over a shared replay, which other processes may fill.

Use it as ``SAC("MlpPolicy", env, replay_buffer_class=SharedReplayBuffer, replay_buffer_kwargs={"name": "sac"})``.
"""

from __future__ import annotations

import os
import secrets
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from jurybox.protocol.errors import SpecMismatch
from jurybox.training.replay.batch import Batch
from jurybox.training.replay.options import Field, RateLimiter
from jurybox.training.replay.replay import Replay

__all__ = ["SharedReplayBuffer"]


class SharedReplayBuffer(ReplayBuffer):
    """`ReplayBuffer` whose rows lie in a `Replay`; a row is one transition of one env.

    Args:
        buffer_size: transitions, all envs together (as in Stable-Baselines3).
        name: of the replay; None: one of its own.
        attach: join the replay of that name that another process has made, instead of making it.
        stored_observations: None, "uint8" or "float16": how float32 observations are kept.
        limiter: couples writers and samplers.

    Sampled tensors on the CPU are copies, as Stable-Baselines3's are. Rows added by others are used like its own.

    Raises:
        ValueError: for `optimize_memory_usage` (a shared ring does not know which row comes next) and for Dict
            observations, which Stable-Baselines3 keeps in another class.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        name: str | None = None,
        attach: bool = False,
        stored_observations: str | None = None,
        limiter: RateLimiter | None = None,
        seed: int | None = None,
    ) -> None:
        # Do not call ReplayBuffer's constructor: it would allocate the arrays that the replay replaces.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if optimize_memory_usage:
            raise ValueError(
                "optimize_memory_usage is not for SharedReplayBuffer: use stored_observations to save memory"
            )
        if isinstance(observation_space, spaces.Dict):
            raise ValueError("SharedReplayBuffer takes array observations; for Dict observations flatten them first")
        self.buffer_size = max(buffer_size // n_envs, 1)  # with `attach`, that of the replay
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.name = name or f"sb3-{os.getpid()}-{secrets.token_hex(4)}"
        observation = Field(tuple(self.obs_shape), np.dtype(observation_space.dtype).name, stored=stored_observations)
        action_dtype = self._maybe_cast_dtype(action_space.dtype)
        if seed is None:  # Stable-Baselines3 has seeded this generator with its own `seed`, and draws from it
            seed = int(np.random.randint(2**31))
        self.replay = (
            Replay.attach(self.name, seed=seed)
            if attach
            else Replay.create(
                self.name,
                self.buffer_size * n_envs,
                {
                    "observation": observation,
                    "next_observation": observation,
                    "action": Field((self.action_dim,), np.dtype(action_dtype).name),
                    "reward": Field(()),
                    "done": Field(()),
                },
                limiter=limiter,
                seed=seed,
            )
        )
        if attach:
            self._adopt(observation, np.dtype(action_dtype).name)
        self._batch: Batch | None = None
        # The creator removes the name, because algorithms do not close their buffers.
        weakref.finalize(self, _close_replay, self.replay, os.getpid(), unlink=not attach)

    def _adopt(self, observation: Field, action_dtype: str) -> None:
        """Take over the size of the replay that was attached.

        Raises:
            SpecMismatch: its rows are of another environment.
        """
        layout, action = self.replay.layout, Field((self.action_dim,), action_dtype)
        for name, wanted in (("observation", observation), ("action", action)):
            there = layout.fields.get(name)
            if there is None or (there.shape, there.dtype) != (wanted.shape, wanted.dtype):
                self.replay.close()
                raise SpecMismatch(f"the replay {self.name!r} holds {name} as {there}: expected {wanted}")
        self.buffer_size = max(layout.capacity // self.n_envs, 1)

    def size(self) -> int:
        """Transitions of each environment, as the base class counts."""
        return len(self.replay) // self.n_envs

    @property
    def full(self) -> bool:
        """Whether the next row replaces another."""
        return len(self.replay) == self.replay.capacity

    @full.setter
    def full(self, value: bool) -> None:
        """Kept for the base class, which sets it; the replay knows by itself."""

    @property
    def pos(self) -> int:
        """Where the next transition goes, as the base class counts."""
        return int(self.replay.parts[0].ring.reserved) // self.n_envs % self.buffer_size

    @pos.setter
    def pos(self, value: int) -> None:
        """Kept for the base class, which sets it; the replay knows by itself."""

    def reset(self) -> None:
        """Discard all rows."""
        self.replay.discard(self.replay.capacity)

    def add(
        self,
        obs: npt.NDArray[Any],
        next_obs: npt.NDArray[Any],
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Add one transition of each environment; a time-out is not a termination, as in Stable-Baselines3."""
        ended = np.asarray(done, np.float32)
        if self.handle_timeout_termination:
            cut = np.array([info.get("TimeLimit.truncated", False) for info in infos], np.float32)
            ended = ended * (1 - cut)
        shape = (self.n_envs, *self.obs_shape)
        self.replay.extend(
            observation=np.asarray(obs).reshape(shape),
            next_observation=np.asarray(next_obs).reshape(shape),
            action=np.asarray(action).reshape(self.n_envs, self.action_dim),
            reward=np.asarray(reward),
            done=ended,
        )

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        """Sample `batch_size` transitions uniformly."""
        if self._batch is None or self._batch.n != batch_size:
            self._batch = self.replay.batch(batch_size)
        batch = self.replay.sample(batch_size, self._batch)
        return ReplayBufferSamples(
            self.to_torch(np.asarray(self._normalize_obs(batch["observation"], env))),
            self.to_torch(batch["action"]),
            self.to_torch(np.asarray(self._normalize_obs(batch["next_observation"], env))),
            self.to_torch(batch["done"].reshape(-1, 1)),
            self.to_torch(self._normalize_reward(batch["reward"].reshape(-1, 1), env)),
        )

    def _get_samples(self, batch_inds: npt.NDArray[Any], env: VecNormalize | None = None) -> ReplayBufferSamples:
        raise NotImplementedError(
            "rows of a shared replay are drawn by sample(), not by index: another process may overwrite them"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a SharedReplayBuffer is not pickled: use buffer.replay.save(path), and Replay.load")


def _close_replay(replay: Replay, maker: int, *, unlink: bool) -> None:
    if unlink and os.getpid() == maker:  # a forked child has a copy of this, and ends earlier
        replay.unlink()
    replay.close()
