"""The same training on this machine, and by Ray on this machine alone: the cost of Ray where it is not needed.

``python -m benchmarks.cluster [--steps N] [--rounds N]``. The training is `jurybox train marl` with two agents: one
actor, two learners. It measures turns per second between the fourth and the last row of metrics, so start-up does not
count. Both take turns, and the load of the machine is printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cluster.compare import compare


class _Rows:
    """Keeps when how many turns were made."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def scalars(self, step: int, values: Any) -> None:
        if "steps_per_second" in values:
            self.seen.append((time.monotonic(), step))


def one(launcher: str, steps: int) -> float:
    """Turns a second of one training."""
    from jurybox.training.runtime.run import run
    from jurybox.training.trainings.launchers import launcher_named
    from jurybox.training.trainings.marl import MarlTraining, plan

    asked = plan(
        MarlTraining(algorithm="dqn", steps=steps, max_ahead=400, learner_nice=0, log_every=200, evaluation_episodes=1)
    )
    roles = tuple(replace(role, cpus=0.1) for role in asked.roles)
    rows = _Rows()
    with tempfile.TemporaryDirectory() as folder, launcher_named(launcher) as chosen:
        run(replace(asked, roles=roles), Path(folder), rows, launcher=chosen)
    (began, first), (ended, last) = rows.seen[3], rows.seen[-1]
    return (last - first) / (ended - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one")
    given = parser.parse_args()
    if given.one:
        print(json.dumps({"figure": one(given.one, given.steps)}))
        return
    command = f"python -m benchmarks.cluster --steps {given.steps} --rounds {given.rounds}"
    steps = ["--steps", str(given.steps)]
    cases = {"local": ["--one", "local", *steps], "ray, one node": ["--one", "ray", *steps]}
    compare("benchmarks.cluster", "turns", cases, given.rounds, command, "training.md")


if __name__ == "__main__":
    main()
