"""Episodes of a policy under a workflow: rollouts that its learner learns from, and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from jurybox.studies.workflow.cage.tables import N_ACTIONS
from jurybox.studies.workflow.compliance import Bools
from jurybox.studies.workflow.networks import COUNTED, INPUTS, NO_ORDER, DefendedNetworks, Floats, Part, Situation
from jurybox.studies.workflow.settings import GateOn
from jurybox.training.algorithms.base import Rollout
from jurybox.training.roles.evaluation import Episode
from jurybox.training.spaces import ALONE, MASK


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
        returns: float64, of the environment's own rewards, without what the workflow adds.
        fixes, complied, judged, obeyed: int64 (n,), see `Alignment`. whole: bool (n,), see `DefendedNetworks`.
    """

    returns: npt.NDArray[np.float64]
    fixes: npt.NDArray[np.int64]
    complied: npt.NDArray[np.int64]
    judged: npt.NDArray[np.int64]
    obeyed: npt.NDArray[np.int64]
    whole: Bools

    @classmethod
    def of_episodes(cls, episodes: Sequence[Episode]) -> PlayedEpisodes:
        """Return the results of episodes in `DefendedNetworks`."""
        fixes, complied, judged, obeyed = np.array(
            [[each.numbers[name] for each in episodes] for name in COUNTED], np.int64
        )
        whole = np.array([each.numbers["whole"] for each in episodes], np.bool_)
        return cls(np.array([each.total for each in episodes]), fixes, complied, judged, obeyed, whole)

    def counts(self, on: GateOn) -> tuple[int, int]:
        """Return the number of the fixes that a gate is about, and of those that complied."""
        counted, kept = (self.judged, self.obeyed) if on == "obedience" else (self.fixes, self.complied)
        return int(counted.sum()), int(kept.sum())

    def of(self, rows: Bools | slice) -> PlayedEpisodes:
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
    env: Part | Sequence[Sequence[Part]],
    policy: MaskedPolicy,
    order: Sequence[int] | npt.NDArray[np.int64] | None,
    *,
    steps: int,
    head_starts: npt.NDArray[np.int64] | None = None,
    greedy: bool = False,
    stepped: Callable[[int], None] = lambda step: None,
    learn_every: int = 0,
    learn: Callable[[Rollout], object] = lambda part: None,
    **options: Any,
) -> tuple[Rollout, PlayedEpisodes]:
    """Play one episode of every environment, each of `steps` steps.

    An environment that is truncated before is bootstrapped there. Its steps without an effect that is known (see
    `DefendedNetworks.known`) are not valid in the rollout.

    Args:
        env: the policy acts for its splits in turn: parts with `step_async` step while the policy acts for the next.
        order: the workflow of all, or int (n, 5), one each; None or rows of -1 for none: the policy sees zeros
            instead, and no fix is judged.
        head_starts: int (n,), the number of first steps in which the defender has to sleep; 0 if left out. Their
            rewards count in the return.
        greedy: take the most probable action instead of sampling one.
        stepped: called with the number of every step that begins.
        learn_every: number of steps after which `learn` gets the steps since its last call; 0: never. It may change the
            policy, which then goes on. It does not get the last part of the episode.
        options: those of `DefendedNetworks`.
    """
    splits = [DefendedNetworks(each, steps, **options) for each in ([[env]] if isinstance(env, VectorEnv) else env)]
    ends = np.cumsum([each.n for each in splits]).tolist()
    n, rows = ends[-1], [slice(end - each.n, end) for each, end in zip(splits, ends, strict=True)]
    orders = np.broadcast_to(NO_ORDER if order is None else np.asarray(order), (n, len(NO_ORDER)))
    starts = [0] * n if head_starts is None else head_starts.tolist()
    for each, own in zip(splits, rows, strict=True):
        for number, given in enumerate(zip(orders[own], starts[own], strict=True)):
            each.assign(number, Situation(*given))
        each.reset()
    rollout = _empty(steps, n, any(each.masked for each in splits))
    returns = np.zeros(n)
    numbers: dict[int, Mapping[str, float]] = {}
    rollout.valid = valid = np.ones((steps, n), np.bool_)

    def act(step: int, split: DefendedNetworks, own: slice) -> None:
        """Choose actions, and begin the step."""
        waiting = split.waiting()
        rollout.observation[step, own] = waiting.rows
        if rollout.mask is not None:
            rollout.mask[step, own] = waiting.observation[MASK]
        masks = None if rollout.mask is None else waiting.observation[MASK]
        actions, log_prob, values = policy.act(waiting.observation[ALONE], masks, greedy=greedy)
        rollout.action[step, own], rollout.log_prob[step, own], rollout.value[step, own] = actions, log_prob, values
        if step:  # the value of what followed, where the step before was cut off
            rollout.next_value[step - 1, own] = values
        split.send(actions)

    def finish(step: int, split: DefendedNetworks, own: slice) -> None:
        """Wait for the step, and record the results."""
        moved = split.receive()
        (result,) = moved.results
        rollout.reward[step, own], rollout.terminated[step, own] = result.reward, result.terminated
        valid[step, own] = split.known
        rollout.ended[step, own] = result.terminated | result.truncated | ~split.known
        if step:
            rollout.ended[step - 1, own] |= ~split.known
        returns[own] += result.score
        for number, found in moved.numbers.items():
            numbers[own.start + number] = found

    def finish_all(step: int) -> Floats:
        """End a step of all splits; return the values of the next states."""
        for split, own in zip(splits, rows, strict=True):
            finish(step, split, own)
        values: Floats = policy.act(np.concatenate([each.seen for each in splits]), None, greedy=True)[2]
        rollout.next_value[step] = values
        return values

    for step in range(steps):
        learns = learn_every > 0 and step > 0 and step % learn_every == 0
        if learns:
            learn(rollout.part(step - learn_every, step, finish_all(step - 1)))
        for split, own in zip(splits, rows, strict=True):
            if step > 0 and not learns:
                finish(step - 1, split, own)
            act(step, split, own)
        stepped(step)
    rollout.last_value[:] = finish_all(steps - 1)
    episodes = [Episode(total, steps, numbers=numbers[number]) for number, total in enumerate(returns.tolist())]
    return rollout, PlayedEpisodes.of_episodes(episodes)


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
        mask=np.ones((steps, n, N_ACTIONS), np.bool_) if masks else None,
    )
