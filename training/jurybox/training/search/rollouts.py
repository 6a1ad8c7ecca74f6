"""Episodes of a policy under a workflow, and their compliance with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from jurybox.training.algorithms.ppo import Rollout
from jurybox.training.environments.cage import tables as t
from jurybox.training.search.settings import ENCODED, encode

# Compliance of a defender with a workflow: fixes, when they comply, and their reward.
#
# A fix is a Remove or a Restore. It complies when its target is of the type that comes first in the workflow among
# those that are compromised in the truth BEFORE the action. Compromised is a host with any session of red's, except
# User0: red's foothold there cannot be removed and would make "user" compromised for ever.
#
# Cases that this leaves open, as they are decided here:
#
# - Remove and Restore of User0 are not fixes: a policy that is rewarded for its rate would repeat them;
# - a fix while nothing is compromised counts, and does not comply;
# - a fix of a clean host complies if its type comes first. Such a Remove costs nothing, so a policy can still raise its
#   rate with it; the strict rule, an option, requires that the target itself is compromised;
# - an episode without a fix has the rate 0 and costs `no_fix_penalty` x lambda at its end;
# - a gate requires a minimum number of fixes, so that a policy cannot pass it by hardly ever fixing anything.


Bools = npt.NDArray[np.bool_]

_IS_FIX = np.isin(t.KIND, t.FIX_KINDS) & (t.TARGET != t.USER0)
_TYPE_OF_TARGET = t.UNIT_TYPE[t.TARGET]


def judge(
    actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], order: Sequence[int], *, strict: bool = False
) -> tuple[Bools, Bools]:
    """Which actions are fixes, and which of them comply: bool (n,) each.

    Args:
        actions: ids, (n,).
        before: true states before the actions, (n, 13), 0 for a clean host.
        order: the workflow.
        strict: whether the target itself must be compromised.
    """
    compromised = before > 0
    compromised[:, t.USER0] = False
    by_type = np.stack([compromised[:, kind == t.UNIT_TYPE].any(1) for kind in order], axis=1)
    first = np.asarray(order)[by_type.argmax(1)]
    fixes = _IS_FIX[actions]
    complied = fixes & by_type.any(1) & (_TYPE_OF_TARGET[actions] == first)
    if strict:
        complied &= compromised[np.arange(len(actions)), t.TARGET[actions]]
    return fixes, complied


@dataclass(slots=True)
class Alignment:
    """Counts fixes of running episodes, and rewards changes of compliance.

    The reward of a step is lambda times the change of the episode's rate, so an episode's sum is lambda x its final
    rate, whenever it was earned.

    Attributes:
        order: the workflow.
        weight: lambda.
        no_fix_penalty: share of lambda that an episode without a fix costs.
        strict: see `judge`.
        fixes, complied: int64 (n,), of the running episodes.
    """

    order: tuple[int, ...]
    weight: float
    no_fix_penalty: float
    strict: bool
    fixes: npt.NDArray[np.int64]
    complied: npt.NDArray[np.int64]

    @classmethod
    def begin(
        cls, n: int, order: Sequence[int], weight: float, *, no_fix_penalty: float = 0.2, strict: bool = False
    ) -> Alignment:
        return cls(tuple(order), weight, no_fix_penalty, strict, np.zeros(n, np.int64), np.zeros(n, np.int64))

    def step(
        self, actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], over: Bools
    ) -> npt.NDArray[np.float64]:
        """Count one step and return its alignment rewards, float64 (n,); `over` marks episodes that it ends."""
        rate = self.rates()
        fixes, complied = judge(actions, before, self.order, strict=self.strict)
        self.fixes += fixes
        self.complied += complied
        rewards = self.weight * (self.rates() - rate)
        rewards[over & (self.fixes == 0)] -= self.no_fix_penalty * self.weight
        return rewards

    def rates(self) -> npt.NDArray[np.float64]:
        """Complied by fixes so far, 0 without a fix; float64 (n,)."""
        rates: npt.NDArray[np.float64] = self.complied / np.maximum(self.fixes, 1)
        return rates


def pooled_rate(fixes: int, complied: int) -> float:
    """The share of all fixes that complied; 0 without a fix."""
    return complied / fixes if fixes else 0.0


INPUTS = 4 * t.N_HOSTS + ENCODED

Floats = npt.NDArray[np.float32]
Part = VectorEnv[Any, Any, Any]


class Policy(Protocol):
    """A policy: `PPO`, or one on a server."""

    def act(
        self, observations: Floats, masks: npt.NDArray[np.bool_] | None = None, *, greedy: bool = False
    ) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """Actions, log-probabilities and values."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """The results of n episodes.

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
    env: Part | Sequence[Part],
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
        env: its infos hold ``true_state``; with masks also ``action_masks``, or it has a method of that name. Where it
            comes in parts, they are acted for in turn: a part with `step_async` steps while the next is acted for.
        order: the workflow; None for none: the policy sees zeros in its place, and nothing is paid for compliance.
        weight: lambda of the alignment reward.
        no_fix_penalty, strict: see `Alignment`.
        use_masks: leave out actions that are sure to fail.
        greedy: the likeliest action instead of a drawn one.
    """
    parts = [env] if isinstance(env, VectorEnv) else list(env)
    n = sum(part.num_envs for part in parts)
    rollout = _empty(steps, n, use_masks)
    rollout.observations[:, :, 4 * t.N_HOSTS :] = 0.0 if order is None else encode(order)
    alignment = partial(
        Alignment.begin,
        order=range(5) if order is None else order,
        weight=0.0 if order is None else weight,
        no_fix_penalty=no_fix_penalty,
        strict=strict,
    )
    returns = np.zeros(n)
    last = np.zeros((n, INPUTS), np.float32)
    games, first = [], 0
    for part in parts:
        rows = slice(first, first := first + part.num_envs)
        games.append(_Game(part, rows, alignment(part.num_envs), rollout, returns))
    for step in range(steps):
        for game in games:
            if step > 0:
                game.finish(step - 1)
            game.act(step, policy, greedy=greedy)
    for game in games:
        game.finish(steps - 1)
        last[game.rows] = rollout.observations[-1, game.rows]
        last[game.rows, : 4 * t.N_HOSTS] = game.observation
    _, _, rollout.last_values[:] = policy.act(last, None, greedy=True)
    rollout.final_values[-1] = rollout.last_values
    fixes, complied = (sum(int(found.sum()) for found in each) for each in zip(*(g.counts for g in games), strict=True))
    return rollout, Episodes(returns, fixes, complied)


class _Game:
    """The episodes of one part, written to its rows of the rollout."""

    def __init__(
        self, env: Part, rows: slice, alignment: Alignment, rollout: Rollout, returns: npt.NDArray[np.float64]
    ) -> None:
        self.rows, self._env, self._alignment, self._rollout, self._returns = rows, env, alignment, rollout, returns
        self.observation, self._info = env.reset()
        self._result: Callable[[], Any] = lambda: None
        self._actions: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self._alignment.fixes, self._alignment.complied

    def act(self, step: int, policy: Policy, *, greedy: bool) -> None:
        """Choose actions and begin the step."""
        rollout, rows = self._rollout, self.rows
        seen = rollout.observations[step, rows]
        seen[:, : 4 * t.N_HOSTS] = self.observation
        masks = None
        if rollout.masks is not None:
            masks = rollout.masks[step, rows] = _masks(self._env, self._info)
        actions, rollout.log_probs[step, rows], rollout.values[step, rows] = policy.act(seen, masks, greedy=greedy)
        rollout.actions[step, rows] = self._actions = actions
        self._result = _begin(self._env, actions)

    def finish(self, step: int) -> None:
        """Wait for the step, and record the results."""
        before, rollout, rows = self._info["true_state"], self._rollout, self.rows
        self.observation, rewards, terminated, truncated, self._info = self._result()
        over = terminated | truncated
        over |= step == len(rollout.over) - 1
        rollout.terminated[step, rows], rollout.over[step, rows] = terminated, over
        self._returns[rows] += rewards
        rollout.rewards[step, rows] = rewards + self._alignment.step(self._actions, before, over)


def _begin(env: Part, actions: npt.NDArray[np.int64]) -> Callable[[], Any]:
    """Begin a step; returns a function that waits for the result."""
    begin: Callable[..., None] | None = getattr(env, "step_async", None)
    if begin is not None:
        begin(actions)
        wait: Callable[[], Any] = getattr(env, "step_wait")  # noqa: B009 (Gymnasium's base class has none)
        return wait
    done = env.step(actions)
    return lambda: done


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


def _masks(env: Part, info: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    if "action_masks" in info:
        told: npt.NDArray[np.bool_] = info["action_masks"]
        return told
    known = getattr(env, "action_masks", None)
    return known() if known is not None else np.broadcast_to(t.POSSIBLE, (env.num_envs, t.N_ACTIONS))
