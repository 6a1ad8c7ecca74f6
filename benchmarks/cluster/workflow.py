"""A search over workflows with its networks in this process, and in Ray actors on this machine alone.

``python -m benchmarks.cluster.workflow [--updates N] [--rounds N]``. As `jurybox train workflow` with its defaults: 100
networks, an update after an episode of each. Episodes per second are counted after the second update, so start-up does
not count. All take turns, and the load of the machine is printed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from threadpoolctl import threadpool_limits

from benchmarks.cluster.compare import compare


class Moments:
    """When each row of metrics was written, which is when an update has ended."""

    def __init__(self) -> None:
        self.rows: list[float] = []

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append(time.monotonic())


def one(launcher: str, updates: int, workers: int | None, halves: bool) -> float:
    """Episodes a second."""
    from jurybox.studies.workflow.settings import WorkflowTraining
    from jurybox.studies.workflow.train import plan
    from jurybox.training.runtime.plan import Budget
    from jurybox.training.runtime.run import run
    from jurybox.training.trainings.launchers import spread_named

    settings, moments = WorkflowTraining(workers=workers, halves=halves), Moments()
    budget = Budget((2 + updates) * settings.envs * settings.episode_length)
    with TemporaryDirectory() as folder, spread_named(launcher) as spread, threadpool_limits(1):
        planned = replace(plan(settings, Path(folder), spread=spread), budget=budget, save_every=0)
        run(planned, Path(folder), moments, serial=True)
    return updates * settings.envs / (moments.rows[-1] - moments.rows[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--halves", action="store_true")
    given = parser.parse_args()
    if given.one:
        print(json.dumps({"figure": one(given.one, given.updates, given.workers, given.halves)}))
        return
    command = f"python -m benchmarks.cluster.workflow --updates {given.updates} --rounds {given.rounds}"
    updates = ["--updates", str(given.updates)]
    cases = {
        "local": ["--one", "local", *updates],
        "ray, one node": ["--one", "ray", *updates],
        "ray, one node, --halves": ["--one", "ray", "--halves", *updates],
    }
    compare("benchmarks.cluster.workflow", "episodes", cases, given.rounds, command, "workflow.md")


if __name__ == "__main__":
    main()
