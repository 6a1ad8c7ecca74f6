"""How fast our simulator of CAGE Challenge 2 is, and whether its returns are those of the original.

    python -m benchmarks.cage.simulator [--seconds 2] [--episodes 4000]

Published: leader board of CAGE Challenge 2 (1000 episodes), https://github.com/cage-challenge/cage-challenge-2.
The original makes 480 to 720 steps a second in one process on two cores of the kind that the results name.
"""

from __future__ import annotations

import argparse
import os
import time
from multiprocessing import get_context
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jurybox.studies.workflow.cage import CageEnv, CageVectorEnv, RedName
from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.cage.environment import Observations

Actions = npt.NDArray[np.int64]


class Defender(Protocol):
    """A policy: observations int8 (n, 52) to actions int64 (n,)."""

    def __call__(self, observations: Observations) -> Actions: ...


class Sleeping:
    """Does nothing."""

    def __call__(self, observations: Observations) -> Actions:
        return np.zeros(len(observations), np.int64)


class UniformlyRandom:
    """Draws from all 145 actions."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, observations: Observations) -> Actions:
        return self._random.integers(0, t.N_ACTIONS, len(observations))


def episode_returns(
    defender: Defender, red: RedName, *, episodes: int, episode_length: int, seed: int, quirk: bool = False
) -> npt.NDArray[np.float64]:
    """Sums of rewards over whole episodes, float64 (episodes,)."""
    env = CageVectorEnv(episodes, red, episode_length=episode_length, quirk=quirk, autoreset_mode="Disabled")
    observations, _ = env.reset(seed=seed)
    total = np.zeros(episodes)
    for _ in range(episode_length):
        observations, rewards, *_rest = env.step(defender(observations))
        total += rewards
    return total


PUBLISHED = {
    ("Sleeping", "B_line"): (-219, -480, -1134),
    ("Sleeping", "Meander"): (-39, -268, -972),
    ("UniformlyRandom", "B_line"): (-154, -347, -727),
    ("UniformlyRandom", "Meander"): (-33, -171, -566),
}
ORIGINAL = 600  # steps a second


def calibration(episodes: int) -> None:
    print(
        f"\n| defender | red | steps | published | ours, with the quirk | off | ours, documented rule |\n|{'---|' * 7}"
    )
    for (name, red), published in PUBLISHED.items():
        for length, expected in zip((30, 50, 100), published, strict=True):
            means = []
            for quirk in (True, False):
                defender: Defender = Sleeping() if name == "Sleeping" else UniformlyRandom(1)
                found = episode_returns(defender, red, episodes=episodes, episode_length=length, seed=2, quirk=quirk)
                means.append(found)
            off = means[0].mean() / expected - 1
            print(
                f"| {name} | {red} | {length} | {expected} | {means[0].mean():.1f} (sd {means[0].std():.0f}) "
                f"| {off:+.1%} | {means[1].mean():.1f} |"
            )


def rate(num_envs: int, red: str, seconds: float) -> float:
    """Steps of all networks a second, uniformly random actions, observations and infos handed out."""
    env = CageVectorEnv(num_envs, red)
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 145, (64, num_envs))
    env.step(actions[0])
    began, steps = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        env.step(actions[steps % 64])
        steps += 1
    return num_envs * steps / spent


def single_rate(red: str, seconds: float) -> float:
    env = CageEnv(red)
    env.reset(seed=0)
    began, steps = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        if env.step(steps % 145)[3]:
            env.reset()
        steps += 1
    return steps / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--episodes", type=int, default=4000)
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start")
    print("\n| networks | red | steps/s, one process | times the original |\n|---|---|---|---|")
    for red in ("B_line", "Meander"):
        speed = single_rate(red, options.seconds)
        print(f"| 1 (CageEnv) | {red} | {speed:,.0f} | {speed / ORIGINAL:,.0f} |")
        for num_envs in (100, 1000, 4000):
            speed = rate(num_envs, red, options.seconds)
            print(f"| {num_envs} | {red} | {speed:,.0f} | {speed / ORIGINAL:,.0f} |")
    with get_context("spawn").Pool(2) as pool:
        for red in ("B_line", "Meander"):
            speed = sum(pool.starmap(rate, [(1000, red, options.seconds)] * 2))
            print(f"| 1000 in each of 2 processes | {red} | {speed:,.0f} | {speed / ORIGINAL:,.0f} |")
    calibration(options.episodes)


if __name__ == "__main__":
    main()
