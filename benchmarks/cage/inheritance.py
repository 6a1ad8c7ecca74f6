"""How much sooner is a workflow learned by a policy that has learned others? Episodes to the gate and a return.

    python -m benchmarks.cage.inheritance [--seeds 3] [--orders 3] [--updates 100] [--wanted -30] [--no-order-masks]

For each seed some workflows drawn at random, each learned in three ways: from scratch; inherited, one after the other,
each with the policy of the one before (the first from scratch); and by the policy of a mixed training of `--updates`
updates over all other orders at once, so that none of these was among them. It is learned when an update's judged fixes
pass the gate of `jurybox train workflow` and its mean return, of episodes from their start, is the wanted one. 100
networks, 100 steps, an update after each episode of all. A workflow that is given up counts with all its episodes.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from jurybox.studies.workflow import environments
from jurybox.studies.workflow.policy import Defender, learner_of
from jurybox.studies.workflow.rollouts import PlayedEpisodes, play
from jurybox.studies.workflow.settings import ORDERS, Order, WorkflowTraining, describe
from jurybox.training.algorithms.base import Progress, Rollout
from jurybox.training.algorithms.schedules import at

_WITHOUT = 1 / 8  # of the networks of a mixed training


class Trains:
    """A learner and its networks."""

    def __init__(self, settings: WorkflowTraining, seed: int, stream: int) -> None:
        self.settings = settings
        self.learner = learner_of(settings.ppo)
        self.learner.setup(seed, "cpu")
        self.policy = Defender(self.learner, rng=np.random.default_rng(seed))
        self.reward = 0.0  # of a fix that complies
        self._env = environments.make(settings, stream)
        self._random = np.random.default_rng((seed, stream))

    def update(self, orders: npt.NDArray[np.int64] | Order) -> tuple[PlayedEpisodes, float]:
        """Play and learn; the episodes, and the mean return of those from their start."""
        settings = self.settings
        late = self._random.random(settings.envs) < settings.head_start_share
        starts = np.where(late, self._random.integers(0, settings.longest_head_start + 1, settings.envs), 0)
        rollout, played = play(
            self._env,
            self.policy,
            orders,
            steps=settings.episode_length,
            weight=settings.align_lambda,
            reward=self.reward,
            on=settings.gate_on,
            head_starts=starts,
            mask_orders=settings.order_masks,
            show_turns=settings.show_turns,
            learn_every=settings.update_every_steps,
            learn=self._learn,
        )
        self._learn(rollout.part(settings.last_update_from, settings.episode_length, rollout.last_value))
        return played, float(played.returns[starts == 0].mean())

    def _learn(self, part: Rollout) -> None:
        self.learner.update(part, Progress(0, 1))

    def to_the_gate(self, order: Order, wanted: float) -> tuple[int, float, float]:
        """Episodes until it was learned, and obedience and return then; all its episodes when it was not."""
        settings, updates = self.settings, 0
        while True:
            played, returns = self.update(order)
            updates += 1
            passed = played.judged.sum() >= settings.min_judged and played.obedience >= settings.gate
            if (passed and returns >= wanted) or updates == settings.max_train_episodes_per_env:
                return updates * settings.envs, played.obedience, returns


def mixed(settings: WorkflowTraining, seed: int, left_out: Sequence[Order], updates: int) -> Trains:
    """A training of all orders but these, mixed."""
    trains = Trains(settings, 1000 + seed, 90)
    random, known = np.random.default_rng(seed), np.array([order for order in ORDERS if order not in left_out])
    for number in range(updates):
        trains.reward = at(settings.alignment_reward, 1.0 - number / updates)
        orders = known[random.integers(len(known), size=settings.envs)]
        orders[random.random(settings.envs) < _WITHOUT] = -1
        trains.update(orders)
    trains.reward = at(settings.alignment_reward, 0.0)
    return trains


def _shown(found: tuple[int, float, float]) -> str:
    episodes, obedience, returns = found
    return f"{episodes:,} ({obedience:.0%}, {returns:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--wanted", type=float, default=-30.0)
    parser.add_argument("--no-order-masks", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| seed | workflow | from scratch | inherited | from the mixed training |\n|---|---|---|---|---|")
    found: dict[str, list[int]] = {"from scratch": [], "inherited": [], "from the mixed training": []}
    for seed in range(options.seeds):
        settings = WorkflowTraining(
            seed=seed, max_train_episodes_per_env=options.updates, order_masks=not options.no_order_masks
        )
        picked = np.random.default_rng(seed).choice(len(ORDERS), options.orders, replace=False)
        orders = [ORDERS[each] for each in picked]
        chain, knows = Trains(settings, seed, 0), mixed(settings, seed, orders, options.updates)
        before = copy.deepcopy(knows.learner.state_dict())
        for index, order in enumerate(orders):
            inherited = chain.to_the_gate(order, options.wanted)
            alone = inherited
            if index > 0:
                alone = Trains(settings, 100 * seed + index, 10 + index).to_the_gate(order, options.wanted)
                found["inherited"].append(inherited[0])
            knows.learner.load_state_dict(before)
            after = knows.to_the_gate(order, options.wanted)
            found["from scratch"].append(alone[0])
            found["from the mixed training"].append(after[0])
            told = _shown(inherited) if index else ""
            print(f"| {seed} | {describe(order)} | {_shown(alone)} | {told} | {_shown(after)} |", flush=True)
    print("\nmeans: " + ", ".join(f"{name} {statistics.mean(each):,.0f}" for name, each in found.items() if each))


if __name__ == "__main__":
    main()
