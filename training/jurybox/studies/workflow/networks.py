"""The networks to defend as an adapter: observations with the order and what is in doubt, masks, head starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.compliance import Alignment, Bools, Doubts, Orders, in_turn, order_masks
from jurybox.studies.workflow.settings import ENCODED, N_TYPES, GateOn
from jurybox.training.environments.adapter import Moved, Result, Waiting
from jurybox.training.spaces import ALONE, MASK, check_finite

Floats = npt.NDArray[np.float32]
Part = VectorEnv[Any, Any, Any]

# A policy's input: the observation, the order, the hosts with activity, and those whose turn it is by the order.
_SEEN, _ORDER_INPUTS, _STIRRED = slice(0, 52), slice(52, 52 + ENCODED), slice(52 + ENCODED, 52 + ENCODED + t.N_HOSTS)
_IN_TURN = slice(_STIRRED.stop, _STIRRED.stop + t.N_HOSTS)
INPUTS = _IN_TURN.stop
DEFENDER = ""  # the name of the agent, which is alone
NO_ORDER = (-1,) * N_TYPES
COUNTED = ("fixes", "complied", "judged", "obeyed")  # see `Alignment`


class Situation(NamedTuple):
    """What an episode is: the workflow (`NO_ORDER`: none), and the first steps in which the defender has to sleep."""

    order: Sequence[int] | npt.NDArray[np.int64] = NO_ORDER
    head_start: int = 0


class DefendedNetworks:
    """`n` networks as an adapter with one agent. They begin together, and an episode of each takes `steps` steps.

    A network that is truncated before (its process was replaced, say) begins anew within the episode. Rewards have what
    `Alignment` adds, scores are the environment's own. An episode's numbers are the counts of `Alignment`, and
    "whole": 0 where the network was truncated before the last step. What the others then count is of two networks, and
    says nothing about either.

    Args:
        parts: infos hold ``true_state``; with masks also ``action_masks``, or a part has a method of that name.
        weight, reward, on: lambda and the others, see `Alignment`.
        use_masks: leave out actions that are sure to fail.
        mask_orders: leave out fixes that may be out of order, see `order_masks`.
        with_orders: whether the policy sees the order that it is judged by, and is masked by it.
        show_turns: whether its input says which hosts' turn it is, see `in_turn`; else these inputs are zeros.

    Attributes:
        seen: float32 (n, INPUTS), the policy's input now.
        known: bool (n,), the networks whose last action had an effect that is known. None is in the step of a reset,
            nor where the result is lost.
    """

    agents: Sequence[str] = (DEFENDER,)
    name, bound = "the networks to defend", "an episode has the steps that the settings say"

    def __init__(
        self,
        parts: Sequence[Part],
        steps: int,
        *,
        weight: float = 0.0,
        reward: float = 0.0,
        on: GateOn = "obedience",
        use_masks: bool = False,
        mask_orders: bool = False,
        with_orders: bool = True,
        show_turns: bool = False,
    ) -> None:
        self.n, self.steps = sum(part.num_envs for part in parts), steps
        ends = np.cumsum([part.num_envs for part in parts]).tolist()
        self._parts = [(part, slice(end - part.num_envs, end)) for part, end in zip(parts, ends, strict=True)]
        self._paid, self._use_masks, self._mask_orders = (weight, reward, on), use_masks, mask_orders
        self._with_orders, self._show_turns = with_orders, show_turns
        self._situations = [Situation()] * self.n
        self._begun = np.zeros(self.n, np.bool_)
        self._results: list[Callable[[], Any]] = []

    @property
    def masked(self) -> bool:
        """Whether anything is ever masked in these episodes."""
        return self._use_masks or self._mask_orders or any(each.head_start for each in self._situations)

    def assign(self, environment: int, situation: Situation) -> None:
        """Say what the next episode in an environment is."""
        self._situations[environment] = situation

    def begin(self, environment: int, seed: int | None = None) -> None:
        """Begin an episode. The networks draw from their own random state, which goes on from episode to episode."""
        self._begun[environment] = True

    def reset(self, seed: int | None = None) -> None:
        """Begin an episode in all networks, with the random state of a seed, or with their own."""
        given = {} if seed is None else {"seed": seed}
        answers = [result() for result in [started(part, "reset", **given) for part, _ in self._parts]]
        self._observation = np.concatenate([observation for observation, _ in answers])
        self._infos: list[Mapping[str, Any]] = [info for _, info in answers]
        self._truth: npt.NDArray[np.int8] = np.concatenate([info["true_state"] for info in self._infos])
        self._orders = Orders.of(np.array([each.order for each in self._situations]), self.n)
        self._head_starts = np.array([each.head_start for each in self._situations])
        self._alignment = Alignment(self._orders, *self._paid, *np.zeros((len(COUNTED), self.n), np.int64))
        self._doubts, self._t = Doubts(self.n), 0
        self.seen = self._input()
        self._resets = np.zeros(self.n, np.bool_)  # networks whose next step is a reset
        self.known, self._whole = np.ones(self.n, np.bool_), np.ones(self.n, np.bool_)
        self._begun[:] = False

    def waiting(self) -> Waiting:
        if self._begun.any():
            if not self._begun.all():
                raise RuntimeError("some networks were begun and others not: they begin together")
            self.reset()
        return Waiting(DEFENDER, {ALONE: self.seen, MASK: self._masks()}, self.seen)

    def step(self, actions: npt.NDArray[Any]) -> Moved:
        self.send(actions)
        return self.receive()

    def send(self, actions: npt.NDArray[np.int64]) -> None:
        """Begin a step: parts with `step_async` make it while the caller does something else."""
        self._actions = actions
        self._results = [started(part, "step", actions[rows]) for part, rows in self._parts]

    def receive(self) -> Moved:
        """Wait for the step, and return what happened."""
        answers = [result() for result in self._results]
        observations, rewards, terminated, truncated, infos = zip(*answers, strict=True)
        self._observation, self._infos = np.concatenate(observations), list(infos)
        paid = np.concatenate(rewards).astype(np.float64)
        check_finite(paid, "a reward")
        check_finite(self._observation, "an observation")
        died, cut = np.concatenate(terminated), np.concatenate(truncated)
        # The result of this step was lost with its process: nothing is known of what followed the observation before.
        lost = np.zeros_like(self._resets)
        before, after, follows = self._truth, np.empty_like(self._truth), np.empty_like(self._truth)
        for (_, rows), info in zip(self._parts, self._infos, strict=True):
            lost[rows] = info.get("restarted", False)
            after[rows], follows[rows] = _true_states(info, before[rows])
        resets, self._resets = self._resets, died | cut
        self._doubts.stirred[resets] = False  # what is remembered is of the network before
        self._doubts.see(self._actions, self._observation)
        self.known, self.seen = ~(lost | resets), self._input()
        self._truth = follows
        self._t += 1
        last = self._t == self.steps
        self._whole &= ~lost if last else ~(lost | self._resets)
        aligned = self._alignment.step(self._actions, before, after)
        result = Result(DEFENDER, paid + aligned, died, cut | last, self.seen, [{}] * self.n, score=paid)
        return Moved((result,), self.n, range(self.n) if last else (), self._numbers() if last else {})

    def close(self) -> None:
        for part, _ in self._parts:
            part.close()

    def _input(self) -> Floats:
        seen = np.zeros((self.n, INPUTS), np.float32)
        seen[:, _SEEN], seen[:, _STIRRED] = self._observation, self._doubts.stirred
        if self._with_orders:
            seen[:, _ORDER_INPUTS] = self._orders.encoded
        if self._show_turns:
            orders = self._orders if self._with_orders else Orders.of(None, self.n)
            seen[:, _IN_TURN] = in_turn(self._doubts.hosts(self._observation), orders)
        return seen

    def _masks(self) -> Bools:
        masks = np.ones((self.n, t.N_ACTIONS), np.bool_)
        if self._use_masks:
            for (part, rows), info in zip(self._parts, self._infos, strict=True):
                masks[rows] = _possible_actions(part, info)
        if self._mask_orders and self._with_orders:
            masks &= order_masks(self._doubts.hosts(self._observation), self._orders)
        asleep = self._t < self._head_starts
        masks[asleep] = False
        masks[asleep, 0] = True
        return masks

    def _numbers(self) -> dict[int, dict[str, float]]:
        counts = {name: getattr(self._alignment, name).tolist() for name in COUNTED} | {"whole": self._whole.tolist()}
        return {number: {name: each[number] for name, each in counts.items()} for number in range(self.n)}


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


def started(env: Part, what: Literal["reset", "step"], *arguments: Any, **given: Any) -> Callable[[], Any]:
    """Begin a reset or a step; return a function that waits for the result."""
    begin: Callable[..., None] | None = getattr(env, f"{what}_async", None)
    if begin is not None:
        begin(*arguments, **given)
        wait: Callable[[], Any] = getattr(env, f"{what}_wait")
        return wait
    done = getattr(env, what)(*arguments, **given)
    return lambda: done


def _possible_actions(env: Part, info: Mapping[str, Any]) -> Bools:
    """Return masks without actions that are sure to fail, bool (n, 145)."""
    if "action_masks" in info:
        masks: Bools = info["action_masks"]
        return masks
    known = getattr(env, "action_masks", None)
    return known() if known is not None else np.broadcast_to(t.POSSIBLE, (env.num_envs, t.N_ACTIONS))
