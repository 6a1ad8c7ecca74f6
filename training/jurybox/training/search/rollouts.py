"""Whole episodes of a policy under a workflow, as the learner wants them and as the log wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from jurybox.training.algorithms.ppo import Rollout
from jurybox.training.environments.cage import tables as t
from jurybox.training.search.compliance import Alignment, pooled_rate
from jurybox.training.search.workflows import ENCODED, encode

INPUTS = 4 * t.N_HOSTS + ENCODED

Floats = npt.NDArray[np.float32]


class Policy(Protocol):
    """Who acts: `PPO`, or one that asks a server."""

    def act(
        self, observations: Floats, masks: npt.NDArray[np.bool_] | None = None, *, greedy: bool = False
    ) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """Actions, log-probabilities and values."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """What came of n episodes.

    Attributes:
        returns: float64 (n,), of the environment's own rewards; alignment is not in it.
        fixes, complied: of all together.
    """

    returns: npt.NDArray[np.float64]
    fixes: int
    complied: int

    @property
    def rate(self) -> float:
        return pooled_rate(self.fixes, self.complied)


def play(
    env: VectorEnv[Any, Any, Any],
    policy: Policy,
    order: Sequence[int] | None,
    *,
    steps: int,
    weight: float,
    no_fix_penalty: float = 0.2,
    strict: bool = False,
    use_masks: bool = False,
    greedy: bool = False,
) -> tuple[Rollout, Episodes]:
    """One episode of every environment, all of `steps` steps.

    Args:
        env: its infos hold ``true_state``.
        order: the workflow; None for none: the policy sees zeros in its place, and nothing is paid for compliance.
        weight: lambda of the alignment reward.
        no_fix_penalty, strict: see `Alignment`.
        use_masks: leave out actions that are sure to fail.
        greedy: the likeliest action instead of a drawn one.
    """
    n = env.num_envs
    rollout = _empty(steps, n, use_masks)
    rollout.observations[:, :, 4 * t.N_HOSTS :] = 0.0 if order is None else encode(order)
    alignment = Alignment.begin(
        n,
        range(5) if order is None else order,
        0.0 if order is None else weight,
        no_fix_penalty=no_fix_penalty,
        strict=strict,
    )
    returns = np.zeros(n)
    observation, info = env.reset()
    for step in range(steps):
        seen = rollout.observations[step]
        seen[:, : 4 * t.N_HOSTS] = observation
        masks = _masks(env) if use_masks else None
        if rollout.masks is not None:
            rollout.masks[step] = masks
        before = info["true_state"]
        actions, rollout.log_probs[step], rollout.values[step] = policy.act(seen, masks, greedy=greedy)
        observation, rewards, terminated, truncated, info = env.step(actions)
        over = terminated | truncated
        over |= step == steps - 1
        rollout.actions[step], rollout.terminated[step], rollout.over[step] = actions, terminated, over
        returns += rewards
        rollout.rewards[step] = rewards + alignment.step(actions, before, over)
    last = rollout.observations[-1].copy()
    last[:, : 4 * t.N_HOSTS] = observation
    _, _, rollout.last_values[:] = policy.act(last, None, greedy=True)
    rollout.final_values[-1] = rollout.last_values
    return rollout, Episodes(returns, int(alignment.fixes.sum()), int(alignment.complied.sum()))


def _empty(steps: int, n: int, use_masks: bool) -> Rollout:
    def table(dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.zeros((steps, n), dtype)

    return Rollout(
        observations=np.zeros((steps, n, INPUTS), np.float32),
        actions=table(np.int64),
        log_probs=table(np.float32),
        values=table(np.float32),
        rewards=table(np.float32),
        terminated=table(np.bool_),
        over=table(np.bool_),
        final_values=table(np.float32),
        last_values=np.zeros(n, np.float32),
        masks=np.ones((steps, n, t.N_ACTIONS), np.bool_) if use_masks else None,
    )


def _masks(env: VectorEnv[Any, Any, Any]) -> npt.NDArray[np.bool_]:
    known = getattr(env, "action_masks", None)
    return known() if known is not None else np.broadcast_to(t.POSSIBLE, (env.num_envs, t.N_ACTIONS))
