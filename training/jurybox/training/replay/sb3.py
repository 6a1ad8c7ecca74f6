"""Stable-Baselines3's replay buffer over a shared replay, which other processes may fill.

Use it as ``SAC("MlpPolicy", env, replay_buffer_class=SharedReplayBuffer, replay_buffer_kwargs={"name": "sac"})``.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from jurybox.protocol.errors import SpecMismatch
from jurybox.training.replay.batch import Batch
from jurybox.training.replay.options import Episodes, Field, RateLimiter, Windows
from jurybox.training.replay.replay import Replay

__all__ = ["Hindsight", "SharedReplayBuffer"]

_OBSERVATIONS = ("observation", "next_observation")
_OVER = "over"  # field of a replay whose rows know which follows: whether the episode ended with this row


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Goals in hindsight (M. Andrychowicz et al., 2017, "Hindsight Experience Replay"), as `HerReplayBuffer` has them.

    Attributes:
        compute_reward: rewards (n,) for achieved goals (n, ...), desired goals (n, ...) and n infos, which are empty;
            that of the environment, ``env.unwrapped.compute_reward``.
        max_episode_length: steps of the longest episode. So many rows are read for each that is drawn; with fewer than
            the episode has, goals come from so many rows after it alone.
        n_sampled_goal: transitions with new goals for each with its own.
        goal_selection_strategy: where new goals come from: "future", a later state of the episode (the next one, too),
            or "final", its last one.

    Raises:
        ValueError: a number is out of its bounds, or the strategy is unknown.
    """

    compute_reward: Callable[[npt.NDArray[Any], npt.NDArray[Any], list[dict[str, Any]]], Any]
    max_episode_length: int
    n_sampled_goal: int = 4
    goal_selection_strategy: Literal["future", "final"] = "future"

    def __post_init__(self) -> None:
        if self.max_episode_length < 1 or self.n_sampled_goal < 0:
            raise ValueError(f"expected max_episode_length >= 1 and n_sampled_goal >= 0, got {self}")
        if self.goal_selection_strategy not in ("future", "final"):
            raise ValueError(
                f"goal_selection_strategy is {self.goal_selection_strategy!r}: expected 'future' or 'final'"
            )


class SharedReplayBuffer(ReplayBuffer):
    """`ReplayBuffer` whose rows lie in a `Replay`; a row is one transition of one env.

    Observations may be a Dict of arrays, also with `n_steps`: samples are then `DictReplayBufferSamples`. Sampled
    tensors on the CPU are copies, as Stable-Baselines3's are. Rows added by others are used like its own.

    Args:
        buffer_size: transitions, all envs together (as in Stable-Baselines3).
        name: of the replay; None: one of its own.
        attach: join the replay of that name that another process has made, instead of making it.
        stored_observations: None, "uint8" or "float16": how float32 observations are kept.
        limiter: couples writers and samplers.
        n_steps, gamma: steps of a return, and the discount of a step, as of Stable-Baselines3's `NStepReplayBuffer`.
            The newest rows of an episode that goes on are not drawn until n steps follow; that one shortens them.
        hindsight: goals in hindsight, for observations with "observation", "achieved_goal" and "desired_goal"; only
            rows of which the episode is over, or that have `max_episode_length` rows after them, are drawn.

    Raises:
        ValueError: for `optimize_memory_usage` (a shared ring does not know which row comes next), for `n_steps`
            together with `hindsight`, and for observations without goals with `hindsight`.

    Example:
        SAC("MultiInputPolicy", env, replay_buffer_class=SharedReplayBuffer, replay_buffer_kwargs={
            "hindsight": Hindsight(env.unwrapped.compute_reward, max_episode_length=50)})
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
        n_steps: int = 1,
        gamma: float = 0.99,
        hindsight: Hindsight | None = None,
    ) -> None:
        # Do not call ReplayBuffer's constructor: it would allocate the arrays that the replay replaces.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if optimize_memory_usage:
            raise ValueError(
                "optimize_memory_usage is not for SharedReplayBuffer: use stored_observations to save memory"
            )
        if n_steps < 1 or not 0 <= gamma <= 1:
            raise ValueError(f"n_steps={n_steps} and gamma={gamma}: expected n_steps >= 1 and gamma from 0 to 1")
        if hindsight is not None and n_steps > 1:
            raise ValueError("n_steps and hindsight together: a new goal changes each reward; take one of the two")
        parts = {"": observation_space}
        if isinstance(observation_space, spaces.Dict):
            parts = {f".{key}": part for key, part in observation_space.spaces.items()}
        if hindsight is not None and not {".observation", ".achieved_goal", ".desired_goal"} <= parts.keys():
            raise ValueError(
                f"hindsight with the observations {observation_space}: expected a Dict with observation, achieved_goal "
                "and desired_goal"
            )
        self.n_steps, self.gamma, self.hindsight = n_steps, gamma, hindsight
        self.buffer_size = max(buffer_size // n_envs, 1)  # with `attach`, that of the replay
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.name = name or f"sb3-{os.getpid()}-{secrets.token_hex(4)}"
        shape: Any = self.obs_shape
        shapes = shape if isinstance(shape, dict) else {"": shape}
        observed = {
            key: Field(
                tuple(shapes[key.removeprefix(".")]),
                np.dtype(part.dtype).name,
                stored=stored_observations if part.dtype == np.float32 else None,
            )
            for key, part in parts.items()
        }
        linked = n_steps > 1 or hindsight is not None
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
                    **{f"{name}{key}": field for name in _OBSERVATIONS for key, field in observed.items()},
                    "action": Field((self.action_dim,), np.dtype(action_dtype).name),
                    "reward": Field(()),
                    "done": Field(()),
                    **({_OVER: Field((), "bool")} if linked else {}),
                },
                episodes=Episodes(terminated=_OVER, reward=None) if linked else None,
                limiter=limiter,
                seed=seed,
            )
        )
        if attach:
            self._adopt(observed, np.dtype(action_dtype).name, linked=linked)
        self._observed = list(observed)
        self._streams = self.replay.streams(n_envs) if _OVER in self.replay.layout.fields else None
        self._windows = Windows(length=n_steps if hindsight is None else hindsight.max_episode_length)
        self._rng = np.random.default_rng(seed)
        self._batch: Batch | None = None
        # The creator removes the name, because algorithms do not close their buffers.
        weakref.finalize(self, _close_replay, self.replay, os.getpid(), unlink=not attach)

    def _adopt(self, observed: Mapping[str, Field], action_dtype: str, *, linked: bool) -> None:
        """Take over the size of the replay that was attached.

        Raises:
            SpecMismatch: its rows are of another environment.
        """
        layout, action = self.replay.layout, Field((self.action_dim,), action_dtype)
        fields = {f"observation{key}": field for key, field in observed.items()} | {"action": action}
        if linked:
            fields[_OVER] = Field((), "bool")
        for name, wanted in fields.items():
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
        row = {
            **self._columns("observation", obs),
            **self._columns("next_observation", next_obs),
            "action": np.asarray(action).reshape(self.n_envs, self.action_dim),
            "reward": np.asarray(reward),
            "done": ended,
        }
        if self._streams is None:
            self.replay.extend(**row)
        else:
            self._streams.add(**row, **{_OVER: np.asarray(done, np.bool_)})

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Sample `batch_size` transitions uniformly: `ReplayBufferSamples`, or `DictReplayBufferSamples`."""
        linked = self.n_steps > 1 or self.hindsight is not None
        if self._batch is None or self._batch.n != batch_size:
            self._batch = (
                self.replay.batch(batch_size, windows=self._windows) if linked else self.replay.batch(batch_size)
            )
        batch = self.replay.sample(batch_size, self._batch)
        if not linked:
            observation, following = self._parts("observation", batch), self._parts("next_observation", batch)
            return self._samples(observation, batch["action"], following, batch["done"], batch["reward"], None, env)
        return self._n_step(batch, env) if self.hindsight is None else self._relabelled(batch, self.hindsight, env)

    def _n_step(self, batch: Batch, env: VecNormalize | None) -> Any:
        """Returns of n steps, of fewer where the episode ended."""
        steps = batch.valid["sequence"].astype(np.bool_).sum(1)
        rows, last = np.arange(len(steps)), steps - 1
        counts = np.arange(self.n_steps) < steps[:, None]
        rewards = self._normalize_reward(batch["reward"], env) * self.gamma ** np.arange(self.n_steps) * counts
        return self._samples(
            {key: each[:, 0] for key, each in self._parts("observation", batch).items()},
            batch["action"][:, 0],
            {key: each[rows, last] for key, each in self._parts("next_observation", batch).items()},
            batch["done"][rows, last],
            rewards.sum(1),
            self.gamma**steps,
            env,
            normalised=True,
        )

    def _relabelled(self, batch: Batch, hindsight: Hindsight, env: VecNormalize | None) -> Any:
        """Transitions, most of them with goals that were achieved after them."""
        remaining = batch.valid["sequence"].astype(np.bool_).sum(1)
        # The first ones keep their goals, as those of Stable-Baselines3 do.
        first = len(remaining) - int((1 - 1 / (hindsight.n_sampled_goal + 1)) * len(remaining))
        chosen, rows = remaining - 1, np.arange(len(remaining))
        if hindsight.goal_selection_strategy == "future":
            chosen = self._rng.integers(0, remaining)
        following = self._parts("next_observation", batch)
        goals = following[".achieved_goal"][rows, chosen][first:]
        observation = {key: each[:, 0].copy() for key, each in self._parts("observation", batch).items()}
        following = {key: each[:, 0].copy() for key, each in following.items()}
        reward = batch["reward"][:, 0].copy()
        for each in (observation, following):
            each[".desired_goal"][first:] = goals
        if first < len(reward):
            achieved = following[".achieved_goal"][first:]
            reward[first:] = hindsight.compute_reward(achieved, goals, [{} for _ in goals])
        return self._samples(observation, batch["action"][:, 0], following, batch["done"][:, 0], reward, None, env)

    def _samples(
        self,
        observation: dict[str, npt.NDArray[Any]],
        action: npt.NDArray[Any],
        following: dict[str, npt.NDArray[Any]],
        done: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        discount: npt.NDArray[Any] | None,
        env: VecNormalize | None,
        *,
        normalised: bool = False,
    ) -> Any:
        told = reward.reshape(-1, 1)
        told = np.asarray(told if normalised else self._normalize_reward(told, env), np.float32)
        more = () if discount is None else (self.to_torch(discount.astype(np.float32).reshape(-1, 1)),)
        rest = (self.to_torch(done.reshape(-1, 1)), self.to_torch(told), *more)
        if self._observed == [""]:
            seen, then = (np.asarray(self._normalize_obs(each[""], env)) for each in (observation, following))
            return ReplayBufferSamples(self.to_torch(seen), self.to_torch(action), self.to_torch(then), *rest)
        found = []
        for parts in (observation, following):
            normal: Any = self._normalize_obs({key.removeprefix("."): each for key, each in parts.items()}, env)
            found.append({key: self.to_torch(np.asarray(each)) for key, each in normal.items()})
        return DictReplayBufferSamples(found[0], self.to_torch(action), found[1], *rest)

    def _columns(self, name: str, given: Any) -> dict[str, npt.NDArray[Any]]:
        """The fields of an observation (n_envs, ...), an array or a dict of them."""
        found = {}
        for key in self._observed:
            value = given[key.removeprefix(".")] if key else given
            shape = self.replay.layout.fields[f"{name}{key}"].shape
            found[f"{name}{key}"] = np.asarray(value).reshape(self.n_envs, *shape)
        return found

    def _parts(self, name: str, batch: Batch) -> dict[str, npt.NDArray[Any]]:
        return {key: batch[f"{name}{key}"] for key in self._observed}

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
