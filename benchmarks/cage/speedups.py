"""The four speed-ups of a search over many networks, each measured against what it replaced.

    python -m benchmarks.cage.speedups [--envs 20] [--seconds 3] [--rounds 3] [--start 0] [--out FILE.md]
        [--cyborg DIR --packages DIR]

- shared memory: networks in worker processes whose results are in shared memory (`ProcessVectorEnv`), one each and, as
  by default, one for each core; before, one each, pickled into the worker's pipe (`WorkerVecEnv`, as SB3's
  SubprocVecEnv does).
- a pipe of its own for each worker, of which the learner waits for all; before, one queue for the answers of all.
- the true state of CybORG, read only after a step that can have changed it; before, after every step. It needs CybORG:
  `benchmarks.cage.original` says how to get it.
- inheritance of the policy from one workflow to the next; before, from scratch: `benchmarks.cage.inheritance` measures
  it.

And the start of many workers, in groups; before, all at once. Both sides of a row take turns. Rates are in env steps a
second, and in steps a second of CPU time of all processes, which other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.machine import description
from benchmarks.vector.__main__ import cpu_seconds
from jurybox.studies.workflow.cage import CageEnv, CyborgEnv
from jurybox.studies.workflow.environments import TRUTH
from jurybox.training.vector import ProcessVectorEnv, worker_pool
from jurybox.training.vector.sb3_env import WorkerVecEnv

Rate = tuple[float, float]  # a second, and a second of CPU time
_SLEEP = 0  # the action


def timed(step: Callable[[], int], seconds: float) -> Rate:
    """Return steps a second, and a second of CPU time; `step` returns how many it made."""
    for _ in range(3):
        step()
    began, used, steps = time.perf_counter(), cpu_seconds(), 0
    while (spent := time.perf_counter() - began) < seconds:
        steps += step()
    return steps / spent, steps / max(cpu_seconds() - used, 0.01)


def in_shared_memory(envs: int, workers: int | None, seconds: float) -> Rate:
    actions = np.full(envs, _SLEEP)
    with ProcessVectorEnv([CageEnv] * envs, workers=workers, info_fields=TRUTH) as env:
        env.reset(seed=0)
        return timed(lambda: len(env.step(actions)[1]), seconds)


def in_pickles(envs: int, seconds: float) -> Rate:
    actions = np.full(envs, _SLEEP)
    env = WorkerVecEnv([CageEnv] * envs)
    try:
        env.reset()
        return timed(lambda: len(env.step(actions)[1]), seconds)
    finally:
        env.close()


def _echo(take: Callable[[], Any], give: Callable[[Any], Any]) -> None:
    while (message := take()) is not None:
        give(message)


def own_pipes(workers: int, seconds: float) -> Rate:
    fork, message = multiprocessing.get_context("fork"), bytes(60)
    ends = [fork.Pipe() for _ in range(workers)]
    children = [fork.Process(target=_echo, args=(theirs.recv, theirs.send), daemon=True) for _, theirs in ends]
    for child in children:
        child.start()
    ours = [end for end, _ in ends]

    def step() -> int:
        for pipe in ours:
            pipe.send(message)
        left = set(ours)
        while left:
            for pipe in wait(list(left)):
                pipe.recv()  # type: ignore[union-attr]
                left.discard(pipe)  # type: ignore[arg-type]
        return workers

    try:
        return timed(step, seconds)
    finally:
        for pipe in ours:
            pipe.send(None)
        for child in children:
            child.join()


def one_queue(workers: int, seconds: float) -> Rate:
    fork, message = multiprocessing.get_context("fork"), bytes(60)
    asked, answered = [fork.Queue() for _ in range(workers)], fork.Queue()
    children = [fork.Process(target=_echo, args=(queue.get, answered.put), daemon=True) for queue in asked]
    for child in children:
        child.start()

    def step() -> int:
        for queue in asked:
            queue.put(message)
        for _ in asked:
            answered.get()
        return workers

    try:
        return timed(step, seconds)
    finally:
        for queue in asked:
            queue.put(None)
        for child in children:
            child.join()


class _Reads(CyborgEnv):
    """CybORG whose true state is read after every step."""

    def _red_moved(self) -> bool:
        return True


def one_network(kind: type[CyborgEnv], seconds: float) -> Rate:
    env = kind("B_line")
    env.reset(seed=0)

    def step() -> int:
        if env.step(_SLEEP)[3]:
            env.reset()
        return 1

    return timed(step, seconds)


def start(workers: int, together: int) -> float:
    """Return the seconds until so many workers have made their networks, of which some start at a time."""
    per_core = worker_pool._STARTING_ON_A_CORE
    worker_pool._STARTING_ON_A_CORE = max(1, together // len(os.sched_getaffinity(0)))
    began = time.perf_counter()
    try:
        with ProcessVectorEnv([CageEnv] * workers, workers=workers, info_fields=TRUTH, start_timeout=600.0):
            return time.perf_counter() - began
    finally:
        worker_pool._STARTING_ON_A_CORE = per_core


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=20, help="networks, each in a worker process")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start", type=int, default=0, help="also start so many workers, in groups and all at once")
    parser.add_argument("--cyborg", type=Path, help="the folder CybORG of the challenge's repository")
    parser.add_argument("--packages", type=Path, help="site-packages with what CybORG needs")
    parser.add_argument("--out", type=Path, help="a Markdown file")
    args = parser.parse_args()
    pickles = partial(in_pickles, args.envs)
    cases: list[tuple[str, str, Callable[[float], Rate], Callable[[float], Rate]]] = [
        (f"shared memory, {each}", "pickles, one each", partial(in_shared_memory, args.envs, workers), pickles)
        for each, workers in (("one each", args.envs), ("a worker for each core", None))
    ]
    cases += [
        ("a pipe each", "one queue", partial(own_pipes, args.envs), partial(one_queue, args.envs)),
    ]
    if args.cyborg is not None:
        sys.path += [str(args.cyborg.resolve()), str(args.packages.resolve())]
        now, before = partial(one_network, CyborgEnv), partial(one_network, _Reads)
        cases.append(("true state when it may have changed (CybORG)", "after every step", now, before))
    lines = [f"{time.strftime('%Y-%m-%d')}, {description()}, load {os.getloadavg()[0]:.0f}; {args.envs} networks."]
    lines += ["", "| now | before | steps/s | before | steps/s of CPU time | before | times, of CPU time |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, replaced, now, before in cases:
        pairs = [(now(args.seconds), before(args.seconds)) for _ in range(args.rounds)]
        wall, wall_before, used, used_before = (
            statistics.median(pair[side][which] for pair in pairs) for which in (0, 1) for side in (0, 1)
        )
        times = statistics.median(new[1] / old[1] for new, old in pairs)
        lines.append(
            f"| {name} | {replaced} | {wall:,.0f} | {wall_before:,.0f} | {used:,.0f} | {used_before:,.0f} "
            f"| {times:.2f} |"
        )
    lines += ["", "Inheritance of the policy from one workflow to the next: [inheritance.md](inheritance.md)."]
    if args.start:
        cores = len(os.sched_getaffinity(0))
        groups, at_once = start(args.start, worker_pool._STARTING_ON_A_CORE * cores), start(args.start, args.start)
        lines += ["", f"The start of {args.start} workers: {groups:.0f} s in groups, {at_once:.0f} s all at once."]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join([f"# {args.out.stem}", "", *lines, ""]))


if __name__ == "__main__":
    main()
