"""The learner of algorithms that learn from the newest policy's steps alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jurybox.training.algorithms.base import Floats, OnPolicySettings, Rollout
from jurybox.training.replay import Field
from jurybox.training.replay.cursor import Cursor
from jurybox.training.roles.learner import AlgorithmLearner
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.spaces import DISCOUNTED, MASK

COLUMNS: Mapping[str, Field] = {
    "ended": Field((), "bool"),  # the episode, however
    "environment": Field((), "int64"),  # whose row it is: an environment's, or an agent's in one
    "t": Field((), "int64"),  # the next row of the same episode has the next number
    "updates": Field((), "int64"),  # made before the policy that acted was published
}
"""Columns of a row beside observation, next_observation, action, reward, terminated and the algorithm's own."""


class OnPolicyLearner(AlgorithmLearner):
    """An algorithm that learns from the workers' transitions since the last step, in order.

    Rows of a policy that is more than `max_stale` updates older than the published one are dropped, and counted as
    stale; those that were overwritten before they were taken count as missed. An older policy's rows are corrected by
    the loss's ratio. A step that finds less than half a rollout, because a worker failed, leaves the rows to the next
    step: the run's counters advance anyway, so no role waits for rows that were dropped.

    Args:
        rollout: expected number of rows in a step.
        max_stale: see above.
        options: those of `AlgorithmLearner`.
    """

    def __init__(self, context: RoleContext, *, rollout: int, max_stale: int = 1, **options: Any) -> None:
        super().__init__(context, **options)
        assert isinstance(self.algorithm.settings, OnPolicySettings)
        self._cursor = Cursor(self.replay)
        if context.life > 1:  # the previous process may have ended before it trained on the newest rows
            self._cursor.resume(0)
        self._least, self._max_stale = max(2, rollout // 2), max_stale
        self._held: dict[str, npt.NDArray[Any]] = {}
        self._published = self._oldest_use = self.stale = 0

    def step(self) -> None:
        self.follow_curriculum()
        self._take_rows()
        usable = self._held["updates"] >= max(self._published - self._max_stale, self._oldest_use)
        self.stale += int((~usable).sum())
        self._held = {name: column[usable] for name, column in self._held.items()}
        skipped = len(self._held["reward"]) < self._least
        self.tell(stale=self.stale, missed=self._cursor.missed, skipped=float(skipped))
        if skipped:
            return
        rows, self._held = self._held, {}
        if DISCOUNTED in rows:
            self.see_returns(rows[DISCOUNTED])
            rows = {**rows, "reward": self.scaled(rows["reward"])}
        update = self.learn(rollout(rows, self.algorithm))
        self.see(rows["observation"])
        self.tell(**update.metrics)

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        self._published = self.updates
        return super().publication()

    def adopted(self, extra: Mapping[str, Any]) -> None:
        if self._normaliser is not None:  # the weights contain the statistics, otherwise one rollout would replace them
            own = self._features[0]
            self._normaliser.adopt(int(extra["seen"]), own.mean.cpu().numpy(), own.scale.cpu().numpy())
        # The previous process may have trained on all rows of weights before its last publication.
        self._published = self._oldest_use = self.updates

    def save(self) -> dict[str, Any]:
        self._take_rows()
        return {**super().save(), "stale": self.stale, "held": dict(self._held), "at": self._cursor.at}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._published, self.stale = self.updates, int(state["stale"])
        self._held = {name: np.array(column) for name, column in state["held"].items()}
        self._cursor.resume(state["at"])  # workers may have added rows since, before this process was ready

    def _take_rows(self) -> None:
        columns = self._cursor.take()
        if self._held:
            columns = {name: np.concatenate((self._held[name], column)) for name, column in columns.items()}
        self._held = columns


class Values(Protocol):
    """What estimates values: an algorithm."""

    def values(self, observation: npt.NDArray[Any]) -> Floats:
        """Return values (n,) of rows (n, ...)."""


def rollout(rows: Mapping[str, npt.NDArray[Any]], learner: Values) -> Rollout:
    """Create a rollout from the rows of several environments.

    It has a column for each environment if all made as many steps, otherwise one long column. An episode that was
    truncated or goes on is bootstrapped with the value of its last "next_observation".

    Args:
        rows: columns (n, ...) by name.
    """
    order = np.lexsort((rows["t"], rows["environment"]))
    rows = {name: column[order] for name, column in rows.items()}
    environment, t = rows["environment"], rows["t"]
    count = len(t)
    ended = rows["ended"].astype(np.bool_)
    # If the next row is not the successor (after a killed worker or a checkpoint), the episode was cut off there, too.
    broken = np.ones(count, np.bool_)
    broken[:-1] = (environment[1:] != environment[:-1]) | (t[1:] != t[:-1] + 1)
    ended = ended | broken
    final = np.zeros(count, np.float32)
    truncated = ended & ~rows["terminated"].astype(np.bool_)
    if truncated.any():
        final[truncated] = learner.values(rows["next_observation"][truncated])
    _, counts = np.unique(environment, return_counts=True)
    columns = len(counts) if (counts == counts[0]).all() else 1

    def shaped(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(column.reshape(columns, -1, *column.shape[1:]).swapaxes(0, 1))

    return Rollout(
        observation=shaped(rows["observation"]),
        action=shaped(rows["action"]),
        log_prob=shaped(rows["log_prob"]),
        value=shaped(learner.values(rows["observation"])),
        reward=shaped(rows["reward"]),
        terminated=shaped(rows["terminated"].astype(np.bool_)),
        ended=shaped(ended),
        next_value=shaped(final),
        last_value=np.zeros(columns, np.float32),
        mask=shaped(rows[MASK].astype(np.bool_)) if MASK in rows else None,
    )
