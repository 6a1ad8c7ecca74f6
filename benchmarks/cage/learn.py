"""Does plain PPO learn to defend? Learning curves and returns of the learned policies, beside published ones.

    python -m benchmarks.cage.learn [--updates 150] [--seeds 3] [--red B_line] [--original 100]

100 networks, 100 steps an episode, an update each; no workflow. Curves go to results/learn-RED.csv. Published (leader
board of CAGE Challenge 2, at 100 steps): plain PPO -30.2 against B_line and -22.2 against Meander; the winner -13.8 and
-16.6.

With --original the learned policies also play so many episodes in CybORG itself, which then has to be importable:
PYTHONPATH names the folder and the packages that `benchmarks.cage.original` is given.
"""

from __future__ import annotations

import argparse
import csv
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv

from jurybox.studies.workflow.cage import CageVectorEnv, CyborgEnv, RedName
from jurybox.studies.workflow.networks import Part
from jurybox.studies.workflow.policy import Defender, learner_of
from jurybox.studies.workflow.rollouts import play
from jurybox.training.algorithms.base import Progress
from jurybox.training.algorithms.ppo import PPOSettings

RESULTS = Path(__file__).parent / "results"
_AT_ONCE = 10  # of CybORG's networks, each of which takes memory


def learn(red: RedName, seed: int, updates: int) -> tuple[list[float], Defender, float]:
    """Mean return of each update's 100 episodes, the learned policy, and seconds of CPU time."""
    learner = learner_of(PPOSettings())
    learner.setup(seed, "cpu")
    policy = Defender(learner, rng=np.random.default_rng(seed))
    env = CageVectorEnv(100, red, autoreset_mode="Disabled")
    env.reset(seed=seed)
    curve, began = [], time.process_time()
    for _ in range(updates):
        rollout, episodes = play(env, policy, None, steps=100, weight=0.0)
        learner.update(rollout, Progress(0, 1))
        curve.append(float(episodes.returns.mean()))
    return curve, policy, time.process_time() - began


def tested(policy: Defender, env: Part, episodes: int, seed: int, *, greedy: bool = False) -> str:
    """Mean and deviation of the returns of new episodes."""
    env.reset(seed=seed)
    rounds = -(-episodes // env.num_envs)
    played = [play(env, policy, None, steps=100, weight=0.0, greedy=greedy)[1].returns for _ in range(rounds)]
    returns = np.concatenate(played)
    return f"{returns.mean():.1f} (sd {returns.std():.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--red", choices=["B_line", "Meander"], default="B_line")
    parser.add_argument("--original", type=int, default=0, help="episodes in CybORG; 0: none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves = []
    ours = CageVectorEnv(1000, options.red, autoreset_mode="Disabled")
    titles = ["seed", "episodes", "last 10 updates", "sampled, 1000 new", "greedy, 1000 new"]
    if options.original:
        theirs = SyncVectorEnv([partial(CyborgEnv, options.red)] * _AT_ONCE)
        titles.append(f"sampled, {options.original} in CybORG")
    titles.append("CPU s")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for seed in range(options.seeds):
        curve, policy, seconds = learn(options.red, seed, options.updates)
        curves.append(curve)
        last = sum(curve[-10:]) / len(curve[-10:])
        shown = [f"{last:.1f}", *(tested(policy, ours, 1000, 1000 + seed, greedy=greedy) for greedy in (False, True))]
        if options.original:
            shown.append(tested(policy, theirs, options.original, 1000 + seed))
        print(f"| {seed} | {100 * options.updates} | {' | '.join(shown)} | {seconds:.0f} |", flush=True)
    with (RESULTS / f"learn-{options.red}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["episodes", *(f"seed{seed}" for seed in range(options.seeds))])
        for update, row in enumerate(zip(*curves, strict=True), 1):
            writer.writerow([100 * update, *(f"{value:.1f}" for value in row)])


if __name__ == "__main__":
    main()
