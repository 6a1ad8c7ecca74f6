"""The same training on this machine, and by Ray on this machine alone: what Ray costs where it is not needed.

``python -m benchmarks.cluster [--steps N] [--rounds N]``. The training is `jurybox train marl` with two agents: one
actor, two learners. What is measured are turns a second between the fourth and the last row of metrics, so starting up
does not count. Both take turns, and the load of the machine is told.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


class _Rows:
    """Keeps when how many turns were made."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def scalars(self, step: int, values: Any) -> None:
        if "steps_per_second" in values:
            self.seen.append((time.monotonic(), step))


def one(launcher: str, steps: int) -> float:
    """Turns a second of one training."""
    from jurybox.training.recipes.launchers import launcher_named
    from jurybox.training.recipes.marl import MarlTraining, plan
    from jurybox.training.runtime.run import run

    asked = plan(MarlTraining(steps=steps, max_ahead=400, learner_nice=0, log_interval=200, evaluate_episodes=1))
    roles = tuple(replace(role, cpus=0.1) for role in asked.roles)
    rows = _Rows()
    with tempfile.TemporaryDirectory() as folder, launcher_named(launcher) as chosen:
        run(replace(asked, roles=roles), Path(folder), rows, launcher=chosen)
    (began, first), (ended, last) = rows.seen[3], rows.seen[-1]
    return (last - first) / (ended - began)


def _in_a_process(launcher: str, steps: int) -> float:
    command = [sys.executable, "-m", "benchmarks.cluster", "--one", launcher, "--steps", str(steps)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout
    return float(json.loads(said.strip().splitlines()[-1])["turns_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one")
    given = parser.parse_args()
    if given.one:
        print(json.dumps({"turns_per_second": one(given.one, given.steps)}))
        return
    cases: dict[str, Any] = {"local": lambda: _in_a_process("local", given.steps)}
    cases["ray, one node"] = lambda: _in_a_process("ray", given.steps)
    found: dict[str, list[float]] = {name: [] for name in cases}
    loads = [os.getloadavg()[0]]
    for _ in range(given.rounds):
        for name, case in cases.items():
            found[name].append(case())
            loads.append(os.getloadavg()[0])
            print(name, f"{found[name][-1]:.0f} turns/s, load {loads[-1]:.1f}", flush=True)
    base = statistics.median(found["local"])
    lines = [
        f"`python -m benchmarks.cluster --steps {given.steps} --rounds {given.rounds}`, {date.today()}, "
        f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}; "
        f"load average of the machine {min(loads):.0f} to {max(loads):.0f}, this benchmark included",
        "",
        "| | turns a second (median) | each | of local |",
        "| --- | --- | --- | --- |",
    ]
    for name, values in found.items():
        middle = statistics.median(values)
        each = ", ".join(f"{value:.0f}" for value in values)
        lines.append(f"| {name} | {middle:.0f} | {each} | {middle / base:.0%} |")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "training.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
