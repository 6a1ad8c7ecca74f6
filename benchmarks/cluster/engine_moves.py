"""How long a served hockey run stands still when its engine's node dies: ``python -m benchmarks.cluster.engine_moves``.

A Ray cluster of three nodes on this machine, each with shared memory of its own: the head with the learner and a
collector, one with another collector, one with the engine. The last one is killed, and one like it joins. Env steps are
looked at ten times a second; the gap is the longest time without one after the kill.
"""

from __future__ import annotations

import itertools
import os
import platform
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from tests.integration.cluster.clusters import nodes, placed
from tests.unit.hockey.hockey_runs import Nothing, settings

from jurybox.training.cluster.launcher import RayLauncher
from jurybox.training.recipes.hockey import plan, sizes_of
from jurybox.training.recipes.hockey_served import ENGINE, engine_of
from jurybox.training.runtime.plan import Patience
from jurybox.training.runtime.run import run

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    s = settings(steps=10**9, workers=2, policy="served", snapshot_every=10, minutes=1.2, max_ahead=600)
    moments: list[tuple[float, int]] = []
    killed: list[float] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, nodes("left") as cluster, RayLauncher(cluster.address) as launcher:
        doomed = cluster.add("right")
        asked = replace(plan(s, Path(folder), engine=ENGINE), patience=Patience(start=120, actor=100, stall=120))
        asked = placed(asked, **{"actor-0": "left", "actor-1": "head", "learner": "head", "evaluator": "head"})
        launcher.serve(replace(engine_of(s, sizes_of(s)), resources={"right": 1}), Path(folder) / "server.log")

        def watch(commons: Any) -> None:
            now, steps = time.monotonic(), commons.board.env_steps
            if not moments or steps != moments[-1][1]:
                moments.append((now, steps))
            if not killed and steps > 3000:
                cluster.kill(doomed)
                killed.append(time.monotonic())
                cluster.add("right")

        outcome = run(asked, Path(folder), Nothing(), launcher=launcher, watch=watch)
        told = (Path(folder) / "logs" / "run.log").read_text()
        print(told)
    if not killed:
        raise RuntimeError(f"there were only {outcome.env_steps} steps: nothing was killed. Try a less busy machine")
    after = [moment for moment in moments if moment[0] >= killed[0]]
    gap = max(late[0] - early[0] for early, late in itertools.pairwise(after))
    lines = [
        f"`python -m benchmarks.cluster.engine_moves`, {date.today()}, {len(os.sched_getaffinity(0))} cores, "
        f"{platform.machine()}, Python {platform.python_version()}; load average {os.getloadavg()[0]:.0f}",
        "",
        "| | |",
        "| --- | --- |",
        f"| first step after the command | {moments[1][0] - began:.0f} s |",
        f"| longest time without a step after the engine's node died | {gap:.1f} s |",
        f"| steps before, after | {after[0][1]}, {outcome.env_steps - after[0][1]} |",
        f"| restarts of roles | {outcome.restarts} |",
    ]
    print("\n".join(lines))
    (RESULTS / "engine_moves.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
