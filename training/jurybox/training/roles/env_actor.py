"""The actor of any algorithm in any environment. It does not import torch if a server computes the actions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from jurybox.training.algorithms.base import Array, Arrays, Progress
from jurybox.training.environments.adapter import Adapter, Result, Waiting
from jurybox.training.roles.policy_client import Player, players
from jurybox.training.run_folder import audited
from jurybox.training.runtime.plan import load
from jurybox.training.runtime.role_context import Actor, RoleContext
from jurybox.training.spaces import DISCOUNTED, MASK

_STEP_BITS = 40  # low bits of a step's number; the bits above are its incarnation


class EnvActor(Actor):
    """The actor role. One step is one step of each of its environments.

    Args:
        adapter: "package.module:callable" that makes an `Adapter`, called with `n` and the `arguments`.
        n: number of environments.
        policies: by agent, the name of its policy: that of its replay and of its channel.
        algorithms: by policy, arguments of `algorithms.make`.
        discounts: by policy, the discount factor of the returns until each step, which are recorded then
            ("discounted_return"), so that its learner can normalise rewards.
        max_lag: publications by which a served policy's answers may lag; None: any number.
    """

    def __init__(
        self,
        context: RoleContext,
        *,
        adapter: str,
        arguments: Mapping[str, Any],
        n: int,
        policies: Mapping[str, str],
        algorithms: Mapping[str, Mapping[str, Any]],
        discounts: Mapping[str, float] | None = None,
        max_lag: int | None = None,
    ) -> None:
        super().__init__(context)
        self._random = np.random.default_rng(context.seed)
        self._random_until = context.plan.pace.warmup  # env steps
        with ExitStack() as undo:
            self._adapter: Adapter = load(adapter)(n=n, **arguments)
            undo.callback(self._adapter.close)
            found = players(context, policies, algorithms, rows=n, max_lag=max_lag)
            for each in found.values():
                undo.callback(each.policy.close)
            self._resources = undo.pop_all()
        # Episodes are numbered over all workers, environments and agents: no row of one follows one of another.
        first, begun = context.number * n * len(found), context.incarnation << _STEP_BITS
        self._recorders = {}
        for place, (agent, player) in enumerate(found.items()):
            streams = context.replay(policies[agent]).streams(n)
            discount = (discounts or {}).get(policies[agent])
            self._recorders[agent] = _Recorder(player, streams, first + place * n + np.arange(n), begun, discount)
        self._lengths = np.zeros(n, np.int64)
        self._infos: list[Mapping[str, Any]] = [{}] * n  # of each environment's last step
        self._playing = False

    def step(self) -> int:
        if not self._playing:
            for number in range(self._adapter.n):
                self._begin(number)
            self._playing = True
        steps = 0
        while not steps:
            steps = self._turn()
        return steps

    def _turn(self) -> int:
        """Let the agent act whose turn it is; returns the environment steps that were completed."""
        waiting = self._adapter.waiting()
        chosen = self._choose(waiting, self._recorders[waiting.agent])
        results, steps, over = self._adapter.step(chosen)
        for result in results:
            self._recorders[result.agent].add(result)
            self._infos[:] = result.infos
        if steps:
            self._lengths += 1
        for number in over:
            self._report(number)
            self._begin(number)
        return steps

    def _choose(self, waiting: Waiting, recorder: _Recorder) -> Array:
        algorithm, policy = recorder.player
        progress = Progress(self.context.env_steps, self.context.plan.budget.steps)
        if explores := algorithm.exploration(progress):
            self.context.metrics(**explores)
        columns: Arrays = {}
        if progress.env_steps < self._random_until:
            mask = waiting.observation.get(MASK) if algorithm.spec.masked else None
            chosen = algorithm.spec.action.sample(self._random, self._adapter.n, mask)
        else:
            outputs = policy.outputs(waiting.observation)
            chosen, columns = algorithm.explore(outputs, self._random, progress)
        recorder.acted(waiting, chosen, columns)
        return chosen

    def save(self) -> dict[str, Any]:
        # In general an environment's state cannot be saved: a resumed run begins new episodes, and this one goes on.
        t = {agent: each.t.tolist() for agent, each in self._recorders.items()}
        return {"random": self._random.bit_generator.state, "t": t}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._random.bit_generator.state = state["random"]
        for agent, each in self._recorders.items():
            each.t[:] = state["t"][agent]

    def close(self) -> None:
        self._resources.close()

    def _begin(self, number: int) -> None:
        self._adapter.begin(number, int(self._random.integers(2**31)))
        self._lengths[number] = 0
        for each in self._recorders.values():
            each.begin(number)

    def _report(self, number: int) -> None:
        totals = {agent: float(each.totals[number]) for agent, each in self._recorders.items()}
        named = {f"return_{agent}": total for agent, total in totals.items() if agent}
        total, length = float(np.mean(list(totals.values()))), int(self._lengths[number])
        self.context.episode(total=total, length=length, **named, **audited(self._infos[number]))


class _Recorder:
    """Records an agent's transitions in its replay, each when the result of its action is known.

    Args:
        numbers: of the agent's episodes in each environment.
        begun: number of the first step.
        discount: of the returns that are recorded; None: none are.

    Attributes:
        t: number of each environment's next row.
        totals: returns of the episodes so far.
    """

    def __init__(self, player: Player, streams: Any, numbers: Array, begun: int, discount: float | None) -> None:
        self.player, self._streams, self._numbers = player, streams, numbers
        self._discount, self._discounted = discount, np.zeros(len(numbers))
        self.t = np.full(len(numbers), begun, np.int64)
        self.totals = np.zeros(len(numbers))
        self._row: dict[str, Array] | None = None  # of an action whose result is not known yet

    def begin(self, number: int) -> None:
        """An episode begins: its rows do not follow those of the previous one."""
        self.t[number] += 1
        self.totals[number] = self._discounted[number] = 0.0

    def acted(self, waiting: Waiting, action: Array, columns: Arrays) -> None:
        """Keep an action until its result is known."""
        self._row = {"observation": waiting.rows, "action": action, **columns}
        if self.player.algorithm.spec.masked:
            self._row[MASK] = waiting.observation[MASK].copy()
        if self.player.algorithm.on_policy:
            self._row["updates"] = np.full(len(action), self.player.policy.updates)

    def add(self, result: Result) -> None:
        """Add the rows of the last actions, if it has acted."""
        self.totals += result.reward
        ended = result.terminated | result.truncated
        row, self._row = self._row, None
        if row is not None:
            row |= {"reward": result.reward.astype(np.float32), "terminated": result.terminated}
            if self._discount is not None:
                self._discounted = self._discount * self._discounted + result.reward
                row[DISCOUNTED] = self._discounted.astype(np.float32)
            if self.player.algorithm.on_policy:
                row |= {"next_observation": result.rows, "ended": ended, "environment": self._numbers, "t": self.t}
            self._streams.add(**row)
            self.t += 1
            if not self.player.algorithm.on_policy:
                for number in np.flatnonzero(result.truncated & ~result.terminated).tolist():
                    mask = {} if result.mask is None else {MASK: result.mask[number]}
                    self._streams.end(number, observation=result.rows[number], **mask)
        self._discounted[ended] = 0.0
        self.t[ended] += 1  # an agent may come back in the same episode of the environment
