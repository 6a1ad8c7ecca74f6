"""100 environments in worker processes: steps per second of each implementation, and their share of the cores' limit.

    python -m benchmarks.vector [--seconds 8] [--envs 100] [--rounds 2] [--cases busy] [--only ours]

Peers fork, as Gymnasium does by default (a hundred fresh interpreters with torch for SB3 would not fit); ours spawn.
Contenders take turns, so that a change of the machine's load affects all of them. Those that are not installed are
named. On a shared machine, a hundred processes get a larger share of the cores than two; steps per second of CPU time
then are more reliable than steps per second.
EnvPool steps its own environments in C++ and cannot run one written in Python: it is not comparable here.
PufferLib 2.0.2, the last with a wheel, wants NumPy 1 and Gymnasium 0.29: run it from an environment of its own, with
`--only "PufferLib Multiprocessing"`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil

from benchmarks.vector.environments import busy, copying, telling, trivial

StepAll = Callable[[Any], Any]


def alone(make: Callable[[], Any], seconds: float) -> float:
    """Steps a second of one environment in this process."""
    environment = make()
    environment.reset()
    began, steps = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        if environment.step(0)[3]:
            environment.reset()
        steps += 1
    return steps / spent


@contextmanager
def jurybox(make: Callable[[], Any], n: int) -> Iterator[StepAll]:
    from jurybox.training.vector import ProcessVectorEnv

    with ProcessVectorEnv([make] * n, info_fields=getattr(make(), "info_fields", None)) as env:
        env.reset(seed=0)
        yield env.step


@contextmanager
def jurybox_first_ready(make: Callable[[], Any], n: int) -> Iterator[StepAll]:
    """Half of the environments at a time, whoever is ready."""
    from jurybox.training.vector import ProcessVectorEnv

    with ProcessVectorEnv([make] * n, batch_size=n // 2) as env:
        env.reset(seed=0)
        env.send(np.zeros(n, np.int64))

        def step(actions: Any) -> None:
            for _ in range(2):
                env.send(actions[: n // 2], env.recv()[4]["env_id"])

        yield step


@contextmanager
def gymnasium_async(make: Callable[[], Any], n: int) -> Iterator[StepAll]:
    from gymnasium.vector import AsyncVectorEnv

    env = AsyncVectorEnv([make] * n, shared_memory=True)
    env.reset(seed=0)
    yield env.step
    env.close()


@contextmanager
def sb3_subproc(make: Callable[[], Any], n: int) -> Iterator[StepAll]:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([make] * n, start_method="fork")
    env.reset()
    yield env.step
    env.close()


@contextmanager
def pufferlib_workers(make: Callable[[], Any], n: int) -> Iterator[StepAll]:
    import pufferlib.emulation
    import pufferlib.vector

    workers = len(os.sched_getaffinity(0))
    env = pufferlib.vector.make(
        lambda **kwargs: pufferlib.emulation.GymnasiumPufferEnv(env_creator=make, **kwargs),
        num_envs=n,
        num_workers=workers,
        backend=pufferlib.vector.Multiprocessing,
    )
    env.reset(seed=0)
    yield env.step
    env.close()


CONTENDERS = {
    "ours": jurybox,
    "ours, first half ready": jurybox_first_ready,
    "Gymnasium AsyncVectorEnv (shared memory)": gymnasium_async,
    "SB3 SubprocVecEnv": sb3_subproc,
    "PufferLib Multiprocessing": pufferlib_workers,
}
_BESIDE = "Gymnasium AsyncVectorEnv (shared memory)"
_NEEDS = {"PufferLib Multiprocessing": "pufferlib"}


def rate(step: StepAll, n: int, seconds: float) -> tuple[float, float]:
    """Steps a second, and steps a second of CPU time of this process and its children together."""
    actions = np.zeros(n, np.int64)
    for _ in range(3):
        step(actions)
    began, used, steps = time.perf_counter(), cpu_seconds(), 0
    while (spent := time.perf_counter() - began) < seconds:
        step(actions)
        steps += n
    return steps / spent, steps / (cpu_seconds() - used)


def cpu_seconds() -> float:
    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--envs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    cases = {
        "busy": ("1.5 ms of CPU a step", busy),
        "telling": ("1.5 ms of CPU a step and four infos of fixed shape", telling),
        "copying": ("copies of Python objects, as CybORG makes them", copying),
        "trivial": ("nothing to do in a step", trivial),
    }
    parser.add_argument("--cases", nargs="+", choices=list(cases), default=list(cases))
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    missing = [name for name in options.only if importlib.util.find_spec(_NEEDS.get(name, "numpy")) is None]
    print(f"not installed: {', '.join(missing) or 'none'}; EnvPool runs no Python environments\n")
    for title, make in (cases[name] for name in options.cases):
        singles: list[float] = []
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in options.only if name not in missing}
        for _ in range(options.rounds):
            for name, rates in found.items():
                singles.append(alone(make, min(2.0, options.seconds)))
                with CONTENDERS[name](make, options.envs) as step:
                    rates.append(rate(step, options.envs, options.seconds))
        single = statistics.median(singles)
        theirs = [wall for wall, _ in found.get(_BESIDE, [])]
        print(f"\n{title}; one environment alone: {single:,.0f} steps/s\n")
        print("| way | steps/s | of cores x alone | times AsyncVectorEnv | a core-second of CPU | each round |")
        print("|---|---|---|---|---|---|")
        for name, rates in found.items():
            middle = statistics.median(wall for wall, _ in rates)
            cpu = statistics.median(used for _, used in rates)
            each = ", ".join(f"{wall:,.0f}" for wall, _ in rates)
            share = middle / single / cores
            times = f"{middle / statistics.median(theirs):.2f}" if theirs else ""
            print(f"| {name} | {middle:,.0f} | {share:.0%} | {times} | {cpu:,.0f} | {each} |")


if __name__ == "__main__":
    main()
