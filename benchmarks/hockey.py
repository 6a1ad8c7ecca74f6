"""How fast hockey plays and its learner learns, on one thread: ``python -m benchmarks.hockey``.

CPU time of this process counts, and the best of several rounds, so that another load on the machine disturbs little
(not at all is out of reach: cores share caches, and may share execution units).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from jurybox.studies.hockey import HockeyGame, HockeyGames, make_opponent, play
from jurybox.studies.hockey.algorithm import algorithm_of
from jurybox.studies.hockey.drawing import draw
from jurybox.studies.hockey.opponents import actor_of
from jurybox.studies.hockey.settings import HockeyTraining
from jurybox.training.algorithms.base import Algorithm, Progress
from jurybox.training.algorithms.registry import make


def per_second(work: Callable[[], int], rounds: int = 7) -> float:
    """Units of work a CPU second, best of `rounds` after one to warm up; `work` returns how many it did."""
    work()
    best = 0.0
    for _ in range(rounds):
        began = time.process_time()
        done = work()
        best = max(best, done / (time.process_time() - began))
    return best


def random_steps() -> int:
    game, actions = HockeyGame(), np.random.default_rng(0).uniform(-1, 1, (5000, 2, 4))
    for action in actions:
        if game.over:
            game.reset()
        game.step(action)
    return len(actions)


def bot_steps() -> int:
    game, bots, done = HockeyGame(), (make_opponent("strong", 1), make_opponent("weak", 2)), 0
    for seed in range(20):
        seen = game.reset(seed)
        while not game.over:
            seen = game.step(np.stack([bot.act(row) for bot, row in zip(bots, seen, strict=True)])).observations
            done += 1
    return done


def algorithm(hidden: tuple[int, int]) -> Algorithm:
    return make(**algorithm_of(HockeyTraining(hidden=hidden), (18, 4)))


def policy_steps(hidden: tuple[int, int]) -> Callable[[], int]:
    made = algorithm(hidden)
    actor = actor_of({name: tensor.numpy() for name, tensor in made.network().state_dict().items()})
    games = HockeyGames(8)

    def work() -> int:
        return sum(episode.length for episode in play(games, range(24), actor, "weak"))

    return work


def updates(hidden: tuple[int, int], n: int, *, compiled: bool = True) -> Callable[[], int]:
    learner = algorithm(hidden)
    learner.compiles = compiled
    learner.setup(0, "cpu")
    rows = {
        "observation": torch.randn(n, 18),
        "action": torch.rand(n, 4) * 2 - 1,
        "reward": torch.randn(n),
        "discount": torch.full((n,), 0.95),
        "next_observation": torch.randn(n, 18),
    }

    def work() -> int:
        for _ in range(200):
            learner.update(rows, Progress(0, 1))
        return 200

    return work


def frames() -> int:
    game = HockeyGame()
    game.reset(0)
    for _ in range(50):
        draw(game, score=(0, 0))
    return 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    with threadpool_limits(1):
        figures = {
            "game, random actions (steps/s)": per_second(random_steps),
            "game, two bots (steps/s)": per_second(bot_steps),
            "8 games, policy 128x128 against weak (steps/s)": per_second(policy_steps((128, 128))),
            "learner 128x128, batch 128, compiled (steps/s)": per_second(updates((128, 128), 128), 40),
            "the same, not compiled (steps/s)": per_second(updates((128, 128), 128, compiled=False), 40),
            "learner 256x256, batch 128, compiled (steps/s)": per_second(updates((256, 256), 128)),
            "learner 256x256, batch 256, compiled (steps/s)": per_second(updates((256, 256), 256)),
            "frames 640 px (frames/s)": per_second(frames, 3),
        }
    if as_json:
        print(json.dumps({name: round(value, 1) for name, value in figures.items()}, indent=2))
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    for name, value in figures.items():
        print(f"{name:50s} {value:10.0f}")


if __name__ == "__main__":
    main()
