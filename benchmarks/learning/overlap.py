"""Where the time of a training goes, and what processes gain over one: SAC and DQN of `train gym`, or PPO.

    python -m benchmarks.learning.overlap [--tasks pendulum-sac cartpole-dqn] [--compile never always] [--seconds 8]
    python -m benchmarks.learning.overlap --tasks cartpole-ppo pong-ppo --compile never --rounds 0

1. A serial run, whose processor time is divided among what it does: environments, the policy, recording, drawing a
   batch, the update (with the values of a rollout), publishing, the rest.
2. The same plan in one process and in two (a worker, a learner), which take turns. Of two, the one with more to do is
   the limit: `possible` is the time of both over that of the one, and the gain in env steps cannot be more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from threadpoolctl import threadpool_limits

from benchmarks.hockey_overlap import stretch
from benchmarks.learning.tasks import TASKS
from jurybox.training.algorithms.registry import algorithm_named
from jurybox.training.environments.gymnasium_env import GymEnvs
from jurybox.training.replay import Replay
from jurybox.training.roles.env_actor import EnvActor, _Recorder
from jurybox.training.roles.learner import AlgorithmLearner, OffPolicyLearner, OnPolicyLearner
from jurybox.training.roles.local_policy import LocalPolicy
from jurybox.training.runtime.plan import Plan
from jurybox.training.runtime.turns import ActorTurn, LearnerTurn
from jurybox.training.trainings.gym import GymTraining, plan

_COLLECTING = ("environments", "policy", "recording", "worker, else")
_LEARNING = ("drawing", "update", "publishing", "learner, else")


class Spent:
    """Processor seconds in functions, without those in others of them that they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def watched(self, of: Any, name: str, what: str) -> Any:
        """Return a patch of a method whose time counts as `what`."""
        method: Callable[..., Any] = getattr(of, name)

        def timed(*given: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            began = time.process_time()
            try:
                return method(*given, **named)
            finally:
                took = time.process_time() - began
                self.seconds[what] += took - self._inner.pop()
                self._inner[-1] += took

        return mock.patch.object(of, name, timed)


def planned(task: str, compile: str) -> Plan:
    """The task's plan, without end, evaluations and checkpoints."""
    chosen = TASKS[task]
    replay = {} if chosen.algorithm == "ppo" else {"buffer_size": 100_000}
    settings = GymTraining.checked(
        {
            "env": chosen.env,
            "algorithm": chosen.algorithm,
            "steps": 10**8,
            "envs": chosen.envs,
            "compile": compile,
            "evaluate_every": 0,
            "checkpoint_every": 0,
            **replay,
            **chosen.settings,
        }
    )
    return plan(settings)


def profile(task: str, compile: str, seconds: float) -> str:
    """A row: shares of a serial run's time, and what two processes could gain."""
    spent, algorithm = Spent(), algorithm_named(TASKS[task].algorithm)
    # What was spent until the clock starts is not in it: compiling, random actions.
    role, learned = (OnPolicyLearner, 1) if algorithm.on_policy else (OffPolicyLearner, 100)
    patches = [
        spent.watched(GymEnvs, "step", "environments"),
        spent.watched(LocalPolicy, "_outputs_of", "policy"),
        spent.watched(_Recorder, "add", "recording"),
        spent.watched(EnvActor, "step", "worker, else"),
        spent.watched(ActorTurn, "take", "worker, else"),
        spent.watched(Replay, "sample", "drawing"),
        spent.watched(algorithm, "update", "update"),
        spent.watched(algorithm, "values", "update"),
        spent.watched(LearnerTurn, "_publish", "publishing"),
        spent.watched(role, "step", "learner, else"),
        spent.watched(LearnerTurn, "take", "learner, else"),
    ]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for patch in patches:
            stack.enter_context(patch)
        made = planned(task, compile)
        began: dict[str, float] = {}
        first: Any = role.step

        def step(learner: AlgorithmLearner) -> None:
            if learner.context.own_steps == learned:
                began.update(spent.seconds)
            first(learner)

        stack.enter_context(mock.patch.object(role, "step", step))
        found = stretch(made, seconds, Path(folder), serial=True, learned=learned)
    used = {what: spent.seconds[what] - began.get(what, 0.0) for what in (*_COLLECTING, *_LEARNING)}
    total = sum(used.values())
    collecting = sum(used[what] for what in _COLLECTING) / total
    cells = [task, compile, f"{found.env_steps:,.0f}", *(f"{value / total:.0%}" for value in used.values())]
    return "| " + " | ".join([*cells, f"{1 / max(collecting, 1 - collecting):.2f}"]) + " |"


def gain(task: str, compile: str, seconds: float, rounds: int) -> str:
    """A row: env steps a second in one process and in two."""
    found: dict[bool, list[float]] = {True: [], False: []}
    busy: list[tuple[float, float]] = []
    for _ in range(rounds):
        for serial in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                one = stretch(planned(task, compile), seconds, Path(folder), serial=serial)
            found[serial].append(one.env_steps)
            if not serial:
                busy.append((one.busy["learner"], one.busy["actor-0"]))
    gains = sorted(two / one for one, two in zip(found[True], found[False], strict=True))
    rates = [f"{statistics.median(found[serial]):,.0f}" for serial in (True, False)]
    shares = [f"{statistics.median(each):.0%}" for each in zip(*busy, strict=True)]
    middle = f"{statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f})"
    return "| " + " | ".join([task, compile, *rates, middle, *shares]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["pendulum-sac", "cartpole-dqn"])
    parser.add_argument("--compile", nargs="+", choices=["never", "always"], default=["never", "always"])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3, help="of one process and two; 0: none")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes
    with threadpool_limits(1):
        shares = (*_COLLECTING, *_LEARNING, "possible")
        print("| task | compile | env steps / s | " + " | ".join(shares) + " |\n" + "|---" * 12 + "|")
        for task in given.tasks:
            for compile in given.compile:
                print(profile(task, compile, given.seconds), flush=True)
        if not given.rounds:
            return
        print("\n| task | compile | serial, env steps / s | in processes | gain | learner busy | worker busy |")
        print("|---" * 7 + "|")
        for task in given.tasks:
            for compile in given.compile:
                print(gain(task, compile, given.seconds, given.rounds), flush=True)


if __name__ == "__main__":
    main()
