"""A search over workflows with its networks in this process, and in Ray actors on this machine alone.

``python -m benchmarks.cluster.workflow [--updates N] [--rounds N]``. As `jurybox train workflow` with its defaults: 100
networks, an update after an episode of each. Episodes per second are counted after the second update, so start-up does
not count. All take turns, and the load of the machine is printed.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.cluster.compare import compare


def one(launcher: str, updates: int, workers: int | None, halves: bool) -> float:
    """Episodes a second."""
    from jurybox.studies.workflow.settings import WorkflowTraining
    from jurybox.studies.workflow.train import networks
    from jurybox.studies.workflow.trainer import WorkflowTrainer
    from jurybox.training.trainings.launchers import spread_named

    torch.set_num_threads(1)
    settings = WorkflowTraining(workers=workers, halves=halves)
    with spread_named(launcher) as spread, networks(settings, spread) as (env, evaluation, _):
        trainer = WorkflowTrainer(settings, env, evaluation)
        for _ in range(2):
            trainer.advance()
        began, first = time.monotonic(), trainer.episodes
        for _ in range(updates):
            trainer.advance()
        return (trainer.episodes - first) / (time.monotonic() - began)


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
