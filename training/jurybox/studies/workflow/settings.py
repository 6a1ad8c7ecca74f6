"""The settings of a search over workflows, and the 120 workflows: orders in which five types of units are repaired."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, model_validator

from jurybox.studies.workflow.cage import RedName
from jurybox.studies.workflow.cage.tables import UNIT_TYPES
from jurybox.training.algorithms.ppo import PPOSettings
from jurybox.training.algorithms.schedules import NoiseSchedule
from jurybox.training.runtime.settings import ServedSettings

# Workflows: the 120 orders in which the five types of units may have priority.
#
# An order is a tuple of five type numbers (see `tables.UNIT_TYPES`); the first type is fixed first.


Order = tuple[int, ...]

N_TYPES = len(UNIT_TYPES)
ORDERS: tuple[Order, ...] = tuple(permutations(range(N_TYPES)))
ENCODED = N_TYPES * N_TYPES
GateOn = Literal["obedience", "compliance"]
_PAIRS = tuple(combinations(range(N_TYPES), 2))


def describe(order: Sequence[int]) -> str:
    """Return the order as text: 'enterprise > op_server > ...'."""
    return " > ".join(UNIT_TYPES[kind] for kind in order)


def parse(text: str) -> Order:
    """Parse an order, as the inverse of `describe`; commas also separate types.

    Raises:
        ValueError: it does not name each type once.
    """
    names = [name.strip() for name in text.replace(">", ",").split(",")]
    if sorted(names) != sorted(UNIT_TYPES):
        raise ValueError(f"expected each of {', '.join(UNIT_TYPES)} once, got {text!r}")
    return tuple(UNIT_TYPES.index(name) for name in names)


def vectors(orders: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return which type of each pair comes first in orders (n, 5), as float64 (n, 10).

    Their squared Euclidean distances are the orders' normalised Kendall distances: the share of pairs that are
    reversed.
    """
    places = np.argsort(np.asarray(orders, int), axis=1)
    signs = np.stack([np.sign(places[:, b] - places[:, a]) for a, b in _PAIRS], axis=1)
    found: npt.NDArray[np.float64] = signs / (2.0 * len(_PAIRS) ** 0.5)
    return found


_CYBORGS = {"B_lineAgent": "B_line", "RedMeanderAgent": "Meander"}  # CybORG's names for the same attackers


class WorkflowTraining(ServedSettings):
    """A search over workflows; a TOML file and the command line hold the same names.

    Attributes:
        env: "cage", our simulator, or "cyborg", the real CybORG in worker processes.
        red: the attacker, by our name or CybORG's (B_lineAgent, RedMeanderAgent).
        quirk: reproduce a quirk of the original: drop the cost of Impact after Op_Server0 is restored.
        envs: networks; an update follows one episode of each, or `update_every_steps` of it.
        episode_length: steps of an episode.
        update_every_steps: steps of each network between two updates, perhaps fewer before the last in an episode;
            0: a whole episode.
        total_episodes: the training budget for all phases. Evaluations do not count.
        reference_share: share of the budget for first training without a workflow: this gives the return to compare
            with, and with `inherit` the initial policy.
        mixed_share: share of the budget for training one policy with all orders at once: each network draws an order in
            each episode, some draw none. Half of the networks go on like that during the search, so that the policy
            forgets no order. 0: one order after the other. Without `inherit` there is no such policy.
        final_share: share of the budget for the best workflow at the end.
        max_train_episodes_per_env: the maximum number of updates for one workflow.
        gate: share of the fixes that must comply for a workflow to count as learned.
        gate_on: the fixes that the gate, `align_lambda` and `alignment_reward` are about: "obedience", the judged ones,
            or "compliance", every Remove and Restore, of which the gate counts those of episodes from their start.
        min_judged: least number of such fixes; with fewer there is no verdict, and the gate is not passed.
        align_lambda: what such a fix out of order costs, in points of return.
        alignment_reward: what such a fix that complies gains, in points of return; a number or a schedule, such as
            "lin_2" (from 2 to 0). A schedule runs over the training of all orders mixed, and stays at its last number
            from then on; without that training it runs over the updates of each workflow anew.
        order_masks: mask fixes that would be out of order. Without them the gate has to be reached by learning.
        show_turns: whether the policy's input says which hosts in doubt have the type that comes first among them; it
            follows from what the policy sees and the order. Without `order_masks` an order is learned sooner with it.
        head_start: maximum number of steps before the defender takes over from the attacker, so that there are hosts
            of several types to fix; half of an episode at most. Drawn from 0 to this, for a share `head_start_share`
            of the episodes.
        head_start_share: share of the episodes with a head start.
        inherit: begin a workflow's training with the policy of the last workflow; else with a new policy.
        use_masks: leave out actions that are sure to fail.
        beta: exploration of the search: deviations between the mean of an order's score and its bound.
        length: length scale of the search's kernel, in Kendall distances.
        noise: variance of a score in that kernel, in units of the scores' own variance.
        revisit: whether an order may be proposed again before all were.
        shortfall_cost: points of score that a shortfall of 1 below the gate costs; a workflow that is not obeyed must
            not win by its return.
        evaluation_episodes: number of episodes after a workflow's training without a head start, and as many with one;
            ten times as many at the end.
        workers: number of workers for the networks: processes, with "cyborg"; actors of a cluster, with either.
        halves: act for half of the networks while the other half steps. This changes the random numbers.
        policy: "local", or "served": actions come from a policy server, a running or a private one.
        ppo: the learner's settings.
    """

    title = "workflow"
    # Settings that may change when a run is resumed; a change of any other makes it a different run.
    may_change = ("total_episodes", "workers", "policy", "server", "server_http", "server_group")

    env: Literal["cage", "cyborg"] = "cage"
    red: Annotated[RedName, BeforeValidator(lambda name: _CYBORGS.get(name, name))] = "B_line"
    quirk: bool = False
    envs: int = Field(100, ge=1)
    episode_length: int = Field(100, ge=1)
    update_every_steps: int = Field(0, ge=0)
    total_episodes: int = Field(100_000, ge=1)
    reference_share: float = Field(0.2, ge=0, lt=1)
    mixed_share: float = Field(0.4, ge=0, lt=1)
    final_share: float = Field(0.1, ge=0, lt=1)
    max_train_episodes_per_env: int = Field(100, ge=1)
    gate: float = Field(0.9, gt=0, le=1)
    gate_on: GateOn = "obedience"
    min_judged: int = Field(100, ge=1)
    align_lambda: float = Field(10.0, ge=0)
    alignment_reward: NoiseSchedule = 0.0
    order_masks: bool = True
    show_turns: bool = False
    head_start: int = Field(20, ge=0)
    head_start_share: float = Field(0.5, ge=0, le=1)
    inherit: bool = True
    use_masks: bool = False
    beta: float = Field(2.0, ge=0)
    length: float = 0.5
    noise: float = 0.1
    revisit: bool = False
    shortfall_cost: float = 100.0
    evaluation_episodes: int = Field(200, ge=1)
    workers: int | None = Field(None, ge=1)
    halves: bool = False
    ppo: PPOSettings = PPOSettings()

    @model_validator(mode="after")
    def _check_consistency(self) -> WorkflowTraining:
        shares = self.reference_share, self.mixed_share, self.final_share
        if self.total_episodes < self.envs:
            raise ValueError(
                f"expected an episode for each network, got envs {self.envs}, total_episodes {self.total_episodes}"
            )
        if self.update_every_steps > self.episode_length:
            raise ValueError(
                f"expected update_every_steps of at most an episode's {self.episode_length} steps, got "
                f"{self.update_every_steps}"
            )
        if sum(shares) >= 1:
            raise ValueError(f"expected shares that leave something for the search, got {shares}")
        if self.halves and self.envs < 2:
            raise ValueError(f"expected at least 2 networks to make halves of, got envs {self.envs}")
        return self

    @property
    def last_update_from(self) -> int:
        """Return the first step of an episode's last update."""
        every = self.update_every_steps or self.episode_length
        return (self.episode_length - 1) // every * every

    @property
    def longest_head_start(self) -> int:
        """Return the longest head start, in steps."""
        return min(self.head_start, self.episode_length // 2)

    def unused(self) -> dict[str, str]:
        own = {"quirk": "it is of our simulator; CybORG is as it is"} if self.env == "cyborg" else {}
        if not self.inherit:
            own["mixed_share"] = "with inherit = false each workflow has a policy of its own"
        return {**super().unused(), **own}
