"""How much sooner does a policy comply with a workflow when it begins with that of another? Episodes to the gate.

    python -m benchmarks.cage.inheritance [--seeds 3] [--orders 3] [--updates 100]

For each seed some workflows drawn at random, one after the other: the first from scratch, the others each with the
policy of the one before; with --scratch-all each of those from scratch as well. 100 networks, 100 steps, an update
after each episode of all; the gate of `jurybox train workflow`. A workflow that is given up counts with all its
episodes, so a ratio is not flattered by failures.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import numpy as np
import torch

from jurybox.training.algorithms.ppo import PPO
from jurybox.training.environments.cage.tables import N_ACTIONS
from jurybox.training.search import environments
from jurybox.training.search.rollouts import INPUTS, play
from jurybox.training.search.settings import ORDERS, Order, WorkflowTraining, describe


def to_the_gate(learner: PPO, order: Order, settings: WorkflowTraining, stream: int) -> tuple[int, float, float]:
    """Episodes until it passed, and compliance and return then; all its episodes when it did not."""
    env = environments.make(settings, stream)
    updates = 0
    while True:
        rollout, played = play(
            env, learner, order, steps=settings.episode_length, weight=settings.align_lambda, use_masks=False
        )
        updates += 1
        passed = played.rate >= settings.gate and played.fixes >= settings.min_fixes * settings.envs
        if passed or updates == settings.max_train_episodes_per_env:
            return updates * settings.envs, played.rate, float(played.returns.mean())
        learner.update(rollout)


def compare(
    seed: int, orders: Sequence[Order], settings: WorkflowTraining, scratch_all: bool
) -> tuple[list[int], list[int]]:
    """Episodes from scratch and inherited."""
    learner = PPO(INPUTS, N_ACTIONS, settings.ppo, seed)
    scratch, inherited = [], []
    for index, order in enumerate(orders):
        found = to_the_gate(learner, order, settings, 10 * index)
        if index == 0:
            print(f"| {seed} | {describe(order)} | {_shown(found)} | |", flush=True)
            scratch.append(found[0])
            continue
        inherited.append(found[0])
        told = ""
        if scratch_all:
            fresh = PPO(INPUTS, N_ACTIONS, settings.ppo, 100 * seed + index)
            alone = to_the_gate(fresh, order, settings, 10 * index + 1)
            scratch.append(alone[0])
            told = _shown(alone)
        print(f"| {seed} | {describe(order)} | {told} | {_shown(found)} |", flush=True)
    return scratch, inherited


def _shown(found: tuple[int, float, float]) -> str:
    episodes, rate, returns = found
    return f"{episodes:,} (compliance {rate:.1%}, return {returns:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--scratch-all", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| seed | workflow | episodes from scratch | episodes inherited |\n|---|---|---|---|")
    scratch: list[int] = []
    inherited: list[int] = []
    for seed in range(options.seeds):
        known = list(ORDERS)
        chosen = np.random.default_rng(seed).choice(len(known), options.orders, replace=False)
        settings = WorkflowTraining(seed=seed, max_train_episodes_per_env=options.updates)
        alone, after = compare(seed, [known[each] for each in chosen], settings, options.scratch_all)
        scratch += alone
        inherited += after
    means = statistics.mean(scratch), statistics.mean(inherited)
    print(f"\nmean from scratch {means[0]:,.0f}, inherited {means[1]:,.0f}: {means[1] / means[0]:.0%}")


if __name__ == "__main__":
    main()
