"""Episodes of a policy under a workflow, and their compliance with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.settings import ENCODED, N_TYPES
from jurybox.training.algorithms.base import Rollout
from jurybox.training.spaces import check_finite

# Compliance of a defender with a workflow: which fixes are judged, when they comply, and what the reward is.
#
# A fix is a Remove or a Restore. A host is compromised if red has any session on it, except User0: red's foothold there
# cannot be removed and would keep "user" compromised for ever. There are two metrics:
#
# - compliance, the first definition: of ALL fixes, the share whose target is of the type that comes first in the
#   workflow among the truly compromised types before the action. It can be inflated: a Remove of a clean host is free
#   and complies if its type comes first, and where only one type is compromised all orders agree;
# - obedience, which the gate uses: counts only JUDGED fixes. A fix is judged if hosts of two types or more
#   were compromised before it, so that the workflow sets a priority, and if it changed the true state: its
#   target was compromised, and less so afterwards. Repeated and idle fixes count for nothing.
#
# A fix that red undoes within the same step has not changed the true state.


Bools = npt.NDArray[np.bool_]

_IS_FIX = np.isin(t.KIND, t.FIX_KINDS) & (t.TARGET != t.USER0)
_TYPE_OF_TARGET = t.UNIT_TYPE[t.TARGET]
_HOSTS_OF_TYPE = np.eye(N_TYPES, dtype=np.int64)[t.UNIT_TYPE]  # (13, 5)
_HOSTS_OF_TYPE[t.USER0] = 0
_NOWHERE = N_TYPES  # a place after all others


@dataclass(frozen=True, slots=True)
class Orders:
    """The workflows of n networks; some may have none.

    Attributes:
        given: bool (n,), which networks have one.
        places: int64 (n, 5), the place of each type in the workflow, from 0; zeros without a workflow.
        encoded: float32 (n, 25), the policy's input; zeros without a workflow.
    """

    given: Bools
    places: npt.NDArray[np.int64]
    encoded: npt.NDArray[np.float32]

    @classmethod
    def of(cls, order: Sequence[int] | npt.NDArray[np.int64] | None, n: int) -> Orders:
        """Create from one workflow (or None) for all networks, or from int (n, 5), one each, rows of -1 for none."""
        rows = np.broadcast_to(np.full(N_TYPES, -1) if order is None else np.asarray(order), (n, N_TYPES))
        given: Bools = rows[:, 0] >= 0
        sure = np.where(given[:, None], rows, np.arange(N_TYPES))
        one_hot = np.eye(N_TYPES, dtype=np.float32)[sure].reshape(n, ENCODED)
        places = np.where(given[:, None], np.argsort(sure, axis=1), 0)
        return cls(given, places, one_hot * given[:, None])

    def rows(self, rows: slice) -> Orders:
        """Return the workflows of some networks."""
        return Orders(self.given[rows], self.places[rows], self.encoded[rows])

    def first(self, types: Bools) -> npt.NDArray[np.int64]:
        """Return which of these types, bool (n, 5), comes first, (n,)."""
        first: npt.NDArray[np.int64] = np.where(types, self.places, _NOWHERE).argmin(1)
        return first


def types_of(hosts: Bools) -> Bools:
    """Return the types of these hosts without User0: bool (n, 5) for bool (n, 13)."""
    found: Bools = hosts @ _HOSTS_OF_TYPE > 0
    return found


def judge(actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], orders: Orders) -> tuple[Bools, Bools]:
    """Return which actions are fixes, and which of them comply by the first definition: bool (n,) each.

    Args:
        actions: ids, (n,).
        before: true states before the actions, (n, 13), 0 for a clean host.
        orders: the workflows.
    """
    types = types_of(before > 0)
    fixes: Bools = _IS_FIX[actions]
    return fixes, fixes & types.any(1) & (_TYPE_OF_TARGET[actions] == orders.first(types)) & orders.given


def judge_changes(
    actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], after: npt.NDArray[np.int8], orders: Orders
) -> tuple[Bools, Bools]:
    """Return which actions are judged fixes, and which of them comply: bool (n,) each.

    Args:
        actions, before, orders: see `judge`.
        after: true states after the step.
    """
    rows, targets = np.arange(len(actions)), t.TARGET[actions]
    types = types_of(before > 0)
    changed = _IS_FIX[actions] & (after[rows, targets] < before[rows, targets])
    judged: Bools = changed & (types.sum(1) >= 2) & orders.given
    return judged, judged & (_TYPE_OF_TARGET[actions] == orders.first(types))


class Doubts:
    """The defender's memory of n networks: the hosts with activity since it last checked them.

    One reverse shell in twenty goes unseen: the exploit looks like a scan, and the defender believes the host clean. An
    Analyse finds the file that it leaves. So a host on which there was any activity is in doubt until it was analysed
    or restored, and one that is believed compromised until it was restored: a Remove leaves it in doubt, too.

    Attributes:
        stirred: bool (n, 13), activity since the last Analyse or Restore.
    """

    def __init__(self, n: int) -> None:
        self.stirred: Bools = np.zeros((n, t.N_HOSTS), np.bool_)

    def see(self, actions: npt.NDArray[np.int64], observations: npt.NDArray[Any]) -> None:
        """Record the actions of a step and the observations after it, (n, 52)."""
        cleared = np.flatnonzero(_RESETS_DOUBT[actions])
        self.stirred[cleared, t.TARGET[actions[cleared]]] = False
        self.stirred |= _by_host(observations)[:, :, :2].any(2)

    def hosts(self, observations: npt.NDArray[Any]) -> Bools:
        """Return the hosts that may be compromised, bool (n, 13)."""
        believed = _by_host(observations)[:, :, 2:].any(2)
        in_doubt: Bools = np.logical_or(self.stirred, believed)
        return in_doubt


_RESETS_DOUBT = np.isin(t.KIND, (t.Blue.ANALYSE, t.Blue.RESTORE))


def _by_host(observations: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return observations.reshape(len(observations), t.N_HOSTS, 4)


def order_masks(in_doubt: Bools, orders: Orders) -> Bools:
    """Return masks without fixes that may be out of order, bool (n, 145).

    Where hosts of two types or more may be compromised (see `Doubts`), only those of the type that comes first may be
    fixed.

    Args:
        in_doubt: bool (n, 13).
    """
    types = types_of(in_doubt)
    held = (types.sum(1) >= 2) & orders.given
    out_of_order = _IS_FIX & (orders.first(types)[:, None] != _TYPE_OF_TARGET)
    masks: Bools = ~(out_of_order & held[:, None])
    return masks


@dataclass(slots=True)
class Alignment:
    """Counts the fixes of running episodes, and computes the cost of those out of order.

    A judged fix that does not comply costs `weight`; one that complies gets no reward. A reward would encourage letting
    the attacker in, to have something to fix in order.

    Attributes:
        orders: the workflows. weight: lambda.
        fixes, complied: int64 (n,), of the running episodes, by the first definition; counted in place.
        judged, obeyed: int64 (n,), fixes that are judged and those of them that comply.
    """

    orders: Orders
    weight: float
    fixes: npt.NDArray[np.int64]
    complied: npt.NDArray[np.int64]
    judged: npt.NDArray[np.int64]
    obeyed: npt.NDArray[np.int64]

    def step(
        self, actions: npt.NDArray[np.int64], before: npt.NDArray[np.int8], after: npt.NDArray[np.int8]
    ) -> npt.NDArray[np.float64]:
        """Count one step, and return its rewards, float64 (n,)."""
        fixes, complied = judge(actions, before, self.orders)
        judged, obeyed = judge_changes(actions, before, after, self.orders)
        self.fixes += fixes
        self.complied += complied
        self.judged += judged
        self.obeyed += obeyed
        rewards: npt.NDArray[np.float64] = -self.weight * (judged & ~obeyed).astype(np.float64)
        return rewards


# A policy's input: the observation, the order, and the hosts with activity.
_SEEN, _ORDER_INPUTS, _STIRRED = slice(0, 52), slice(52, 52 + ENCODED), slice(52 + ENCODED, 52 + ENCODED + t.N_HOSTS)
INPUTS = _STIRRED.stop


def network_input(
    seen: npt.NDArray[np.float32], observations: npt.NDArray[Any], orders: Orders, doubts: Doubts
) -> None:
    """Write the policy's input for n networks, (n, INPUTS)."""
    seen[:, _SEEN], seen[:, _ORDER_INPUTS], seen[:, _STIRRED] = observations, orders.encoded, doubts.stirred


Floats = npt.NDArray[np.float32]
Part = VectorEnv[Any, Any, Any]


class MaskedPolicy(Protocol):
    """Acts under masks: a `policy.Defender`."""

    def act(
        self, observations: Floats, masks: npt.NDArray[np.bool_] | None = None, *, greedy: bool = False
    ) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
        """Return actions, log-probabilities and values."""


@dataclass(frozen=True, slots=True)
class PlayedEpisodes:
    """The results of n episodes, each array (n,).

    Attributes:
        returns: float64, of the environment's own rewards, without the cost of disobedience.
        fixes, complied, judged, obeyed: int64, see `Alignment`.
        whole: bool; False if the network was truncated before the last step, such as by the death of its process. What
            the other numbers then count is of two networks, and says nothing about either.
    """

    returns: npt.NDArray[np.float64]
    fixes: npt.NDArray[np.int64]
    complied: npt.NDArray[np.int64]
    judged: npt.NDArray[np.int64]
    obeyed: npt.NDArray[np.int64]
    whole: Bools

    def of(self, rows: Bools) -> PlayedEpisodes:
        """Return some of the episodes."""
        return PlayedEpisodes(*(getattr(self, each.name)[rows] for each in fields(self)))

    @property
    def compliance(self) -> float:
        """Return the share of all fixes that complied by the first definition; 0 without a fix."""
        return share(self.complied, self.fixes)

    @property
    def obedience(self) -> float:
        """Return the share of the judged fixes that complied; 0 without one."""
        return share(self.obeyed, self.judged)


def share(part: npt.ArrayLike, whole: npt.ArrayLike) -> float:
    """Return the sum of `part` over the sum of `whole`; 0 if that is 0."""
    total = int(np.sum(whole))
    return float(np.sum(part)) / total if total else 0.0


def play(
    env: Part | Sequence[Part],
    policy: MaskedPolicy,
    order: Sequence[int] | npt.NDArray[np.int64] | None,
    *,
    steps: int,
    weight: float,
    head_starts: npt.NDArray[np.int64] | None = None,
    use_masks: bool = False,
    mask_orders: bool = False,
    with_orders: bool = True,
    greedy: bool = False,
    stepped: Callable[[int], None] = lambda step: None,
    learn_every: int = 0,
    learn: Callable[[Rollout], object] = lambda part: None,
) -> tuple[Rollout, PlayedEpisodes]:
    """Play one episode of every environment, each of `steps` steps.

    An environment that is truncated before (its process was replaced, say) is bootstrapped there, and begins another
    episode. Its steps without an effect are not valid in the rollout: that of the reset, and the one whose result is
    lost; and its episode is not `PlayedEpisodes.whole`.

    Args:
        env: its infos hold ``true_state``; with masks also ``action_masks``, or it has a method of that name. The
            policy acts for its parts in turn: a part with `step_async` steps while the policy acts for the next.
        order: the workflow of all, or int (n, 5), one each; None or rows of -1 for none: the policy sees zeros
            instead, and no fix is judged.
        weight: lambda, see `Alignment`.
        head_starts: int (n,), the number of first steps in which the defender has to sleep; 0 if left out. Their
            rewards count in the return.
        use_masks: leave out actions that are sure to fail.
        mask_orders: leave out fixes that may be out of order, see `order_masks`.
        with_orders: whether the policy sees the order that it is judged by, and is masked by it.
        greedy: take the most probable action instead of sampling one.
        stepped: called with the number of every step that begins.
        learn_every: number of steps after which `learn` gets the steps since its last call; 0: never. It may change the
            policy, which then goes on. It does not get the last part of the episode.
    """
    parts = [env] if isinstance(env, VectorEnv) else list(env)
    n = sum(part.num_envs for part in parts)
    orders = Orders.of(order, n)
    made_to_sleep = head_starts is not None and bool(head_starts.any())
    rollout = _empty(steps, n, use_masks or mask_orders or made_to_sleep)
    rollout.observation[:, :, _ORDER_INPUTS] = orders.encoded if with_orders else 0.0
    returns, whole = np.zeros(n), np.ones(n, np.bool_)
    last = np.zeros((n, INPUTS), np.float32)
    counts, games, first = np.zeros((4, n), np.int64), [], 0
    for part in parts:
        rows = slice(first, first := first + part.num_envs)
        masking = _Masking(
            use_masks,
            orders.rows(rows) if mask_orders and with_orders else None,
            head_starts[rows] if head_starts is not None and made_to_sleep else None,
        )
        alignment = Alignment(orders.rows(rows), weight, *counts[:, rows])
        games.append(_Game(part, rows, alignment, masking, rollout, returns, whole))

    def finish(step: int) -> Floats:
        """End a step of all parts; return the values of the next states."""
        for game in games:
            game.finish(step)
            last[game.rows] = rollout.observation[step, game.rows]
            game.write(last[game.rows])
        values: Floats = policy.act(last, None, greedy=True)[2]
        rollout.next_value[step] = values
        return values

    for step in range(steps):
        learns = learn_every > 0 and step > 0 and step % learn_every == 0
        if learns:
            learn(rollout.part(step - learn_every, step, finish(step - 1)))
        for game in games:
            if step > 0 and not learns:
                game.finish(step - 1)
            game.act(step, policy, greedy=greedy)
        stepped(step)
    rollout.last_value[:] = finish(steps - 1)
    fixes, complied, judged, obeyed = counts
    return rollout, PlayedEpisodes(returns, fixes, complied, judged, obeyed, whole)


@dataclass(frozen=True, slots=True)
class _Masking:
    """The masks of one part: the actions that are left out."""

    possible: bool
    orders: Orders | None
    head_starts: npt.NDArray[np.int64] | None

    def fill(self, masks: Bools, step: int, env: Part, info: Mapping[str, Any], in_doubt: Bools) -> None:
        if self.possible:
            masks[:] = possible_actions(env, info)
        if self.orders is not None:
            masks &= order_masks(in_doubt, self.orders)
        if self.head_starts is not None:
            asleep = step < self.head_starts
            masks[asleep] = False
            masks[asleep, 0] = True


class _Game:
    """The episodes of one part, written to its rows of the rollout."""

    def __init__(
        self,
        env: Part,
        rows: slice,
        alignment: Alignment,
        masking: _Masking,
        rollout: Rollout,
        returns: npt.NDArray[np.float64],
        whole: Bools,
    ) -> None:
        self.rows, self._env, self._alignment, self._rollout, self._returns = rows, env, alignment, rollout, returns
        self._masking, self._whole = masking, whole
        self._resets = np.zeros(env.num_envs, np.bool_)  # environments whose next step is a reset
        self._doubts = Doubts(env.num_envs)
        self.observation, self._info = env.reset()
        self._truth: npt.NDArray[np.int8] = self._info["true_state"]
        self._result: Callable[[], Any] = lambda: None
        self._actions: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def act(self, step: int, policy: MaskedPolicy, *, greedy: bool) -> None:
        """Choose actions, and begin the step."""
        rollout, rows = self._rollout, self.rows
        seen = rollout.observation[step, rows]
        self.write(seen)
        masks = None
        if rollout.mask is not None:
            masks = rollout.mask[step, rows]
            self._masking.fill(masks, step, self._env, self._info, self._doubts.hosts(self.observation))
        actions, rollout.log_prob[step, rows], rollout.value[step, rows] = policy.act(seen, masks, greedy=greedy)
        if step:  # the value of what followed, where the step before was cut off
            rollout.next_value[step - 1, rows] = rollout.value[step, rows]
        rollout.action[step, rows] = self._actions = actions
        self._result = _begin(self._env, actions)

    def write(self, seen: Floats) -> None:
        """Write the policy's input except the order, (n, INPUTS)."""
        seen[:, _SEEN], seen[:, _STIRRED] = self.observation, self._doubts.stirred

    def finish(self, step: int) -> None:
        """Wait for the step, and record the results."""
        rollout, rows = self._rollout, self.rows
        self.observation, rewards, terminated, truncated, self._info = self._result()
        check_finite(rewards, "a reward")
        check_finite(self.observation, "an observation")
        # The result of this step was lost with its process: nothing is known of what followed the observation before.
        lost = np.zeros_like(self._resets) | self._info.get("restarted", False)
        resets, self._resets = self._resets, terminated | truncated
        self._doubts.stirred[resets] = False  # what is remembered is of the network before
        self._doubts.see(self._actions, self.observation)
        last = step == len(rollout.ended) - 1
        rollout.terminated[step, rows], rollout.ended[step, rows] = terminated, self._resets | resets | last
        assert rollout.valid is not None
        rollout.valid[step, rows] = ~(lost | resets)
        if step:
            rollout.ended[step - 1, rows] |= lost
        self._whole[rows] &= ~(lost | (self._resets & (not last)))
        self._returns[rows] += rewards
        before, (after, self._truth) = self._truth, _true_states(self._info, self._truth)
        rollout.reward[step, rows] = rewards + self._alignment.step(self._actions, before, after)


def _true_states(
    info: Mapping[str, Any], before: npt.NDArray[np.int8]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Return the true states after a step, to compare with those before it, and with those after the next step.

    A network whose process was replaced has no state until its reset. Then no fix may seem to have changed anything:
    the state stays what it was, and clean for the comparison with that of the new network.
    """
    if "true_state" not in info:
        return before, np.zeros_like(before)
    states: npt.NDArray[np.int8] = info["true_state"]
    known = info.get("_true_state")
    if known is None or known.all():
        return states, states
    return np.where(known[:, None], states, before), np.where(known[:, None], states, np.int8(0))


def _begin(env: Part, actions: npt.NDArray[np.int64]) -> Callable[[], Any]:
    """Begin a step; return a function that waits for the result."""
    begin: Callable[..., None] | None = getattr(env, "step_async", None)
    if begin is not None:
        begin(actions)
        wait: Callable[[], Any] = getattr(env, "step_wait")  # noqa: B009 (Gymnasium's base class has none)
        return wait
    done = env.step(actions)
    return lambda: done


def _empty(steps: int, n: int, masks: bool) -> Rollout:
    def table(dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.zeros((steps, n), dtype)

    return Rollout(
        observation=np.zeros((steps, n, INPUTS), np.float32),
        action=table(np.int64),
        log_prob=table(np.float32),
        value=table(np.float32),
        reward=table(np.float32),
        terminated=table(np.bool_),
        ended=table(np.bool_),
        next_value=table(np.float32),
        last_value=np.zeros(n, np.float32),
        mask=np.ones((steps, n, t.N_ACTIONS), np.bool_) if masks else None,
        valid=np.ones((steps, n), np.bool_),
    )


def possible_actions(env: Part, info: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    """Return masks without actions that are sure to fail, bool (n, 145)."""
    if "action_masks" in info:
        masks: npt.NDArray[np.bool_] = info["action_masks"]
        return masks
    known = getattr(env, "action_masks", None)
    return known() if known is not None else np.broadcast_to(t.POSSIBLE, (env.num_envs, t.N_ACTIONS))
