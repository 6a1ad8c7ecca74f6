"""Engines on three Ray nodes of this machine, measured: ``python -m benchmarks.cluster.engine_moves``.

Each node has its own shared memory. First one engine, and the time of a call from its node and from another. Then
hockey with `local` policies, collectors on two nodes and the learner on the third. Then hockey with a served policy:
the head with the learner and a collector, a node with another collector, a node with the engine, which is killed, and
one like it joins. The gap is the longest time without an env step after that.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from tests.integration.cluster.clusters import Nodes, nodes, placed, ray
from tests.unit.studies.hockey.hockey_runs import Nothing, settings

from jurybox.cluster import engines
from jurybox.cluster.launcher import RayLauncher
from jurybox.cluster.traffic import Traffic
from jurybox.studies.hockey.served import ENGINE, engine_of
from jurybox.studies.hockey.train import plan, sizes_of
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.replay import Replay
from jurybox.training.runtime.plan import Timeouts
from jurybox.training.runtime.run import run

PATIENT = Timeouts(start=120, actor=100, stall=120)
RESULTS = Path(__file__).parent / "results"


def asked(name: str, calls: int = 200) -> tuple[str, float]:
    """The kind of the endpoint to an engine from here, and the median seconds of a call with one row."""
    row, times = np.full(4, 3.0, np.float32), []
    with engines.connect(name, timeout=60) as server, server.model("double") as model:
        for _ in range(calls):
            began = time.perf_counter()
            model(row)
            times.append(time.perf_counter() - began)
        return server.address.partition(":")[0], statistics.median(times)


def one_engine() -> list[str]:
    """By name, from its node and from another."""
    began = time.monotonic()
    models = {"double": {"factory": "tests.models:affine"}}
    engines.start("judge", models, resources={"right": 1}, timeout=100)
    started = time.monotonic() - began
    there = ray.remote(asked).options(resources={"right": 1}, num_cpus=0)
    endpoints = {"its own node": ray.get(there.remote("judge"), timeout=100), "another node": asked("judge")}
    engines.stop("judge")
    lines = [f"| an engine, from the command until it serves | {started:.1f} s |"]
    return lines + [
        f"| a call with one row from {name}: {endpoint} | {1e6 * took:.0f} µs |"
        for name, (endpoint, took) in endpoints.items()
    ]


def rows_in(folder: Path) -> int:
    """Rows that the learner's replay has received, from the last checkpoint."""
    found = Checkpoints(folder / "checkpoints").latest()
    assert found is not None
    replay = Replay.load(found.folder / "replay-rows.jbr", f"look-{time.time_ns()}")
    try:
        return int(replay.added)
    finally:
        replay.unlink()
        replay.close()


def local_hockey(launcher: RayLauncher) -> list[str]:
    """Collectors away from the learner, which act by themselves."""
    s = settings(steps=6000, workers=2, snapshot_every=3, max_ahead=600, league={"pool": 3, "anchor_share": 0.1})
    with tempfile.TemporaryDirectory() as folder:
        asks = replace(plan(s, Path(folder)), timeouts=PATIENT)
        asks = placed(asks, **{"actor-0": "left", "actor-1": "right", "learner": "head", "evaluator": "head"})
        outcome = run(asks, Path(folder), Nothing(), launcher=launcher)
        rows, past = rows_in(Path(folder)), len(list((Path(folder) / "pool").glob("*.weights")))
    least, most = 2 * outcome.env_steps, 2 * (outcome.env_steps + outcome.episodes) + 64
    return [
        f"| local hockey: end, restarts, past selves | {outcome.end.value}, {outcome.restarts}, {past} |",
        f"| its env steps, learner steps, those due | {outcome.env_steps}, {outcome.learner_steps}, "
        f"{(s.steps - s.learning_starts) // 10} |",
        f"| its rows in the learner's replay, expected | {rows}, {least} to {most} |",
    ]


def counted(came: Counter[tuple[str, int]]) -> None:
    """Count how often each publication comes to each node."""
    adopt = Traffic._adopt

    async def counting(self: Traffic, member: Any, channel: str, publication: Any) -> None:
        await adopt(self, member, channel, publication)
        came[member.node, member.known[channel]] += 1

    Traffic._adopt = counting  # type: ignore[method-assign]


def served_hockey(launcher: RayLauncher, cluster: Nodes, doomed: Any) -> list[str]:
    """The engine's node dies."""
    came: Counter[tuple[str, int]] = Counter()
    counted(came)
    s = settings(steps=10**9, workers=2, policy="served", snapshot_every=10, seconds=48.0, max_ahead=600)
    moments: list[tuple[float, int]] = []
    killed: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        asks = replace(plan(s, Path(folder), engine=ENGINE), timeouts=PATIENT)
        asks = placed(asks, **{"actor-0": "left", "actor-1": "head", "learner": "head", "evaluator": "head"})
        launcher.serve(replace(engine_of(s, sizes_of(s)), resources={"right": 1}), Path(folder) / "server.log")

        def watch(shared: Any) -> None:
            now, steps = time.monotonic(), shared.scoreboard.env_steps
            if not moments or steps != moments[-1][1]:
                moments.append((now, steps))
            if not killed and steps > 3000:
                cluster.kill(doomed)
                killed.append(time.monotonic())
                cluster.add("right")

        outcome = run(asks, Path(folder), Nothing(), launcher=launcher, watch=watch)
        told = (Path(folder) / "logs" / "run.log").read_text()
        print(told)
    if not killed:
        raise RuntimeError(f"there were only {outcome.env_steps} steps: nothing was killed. Try a less busy machine")
    after = [moment for moment in moments if moment[0] >= killed[0]]
    gap = max(late[0] - early[0] for early, late in itertools.pairwise(after))
    return [
        f"| served hockey: longest time without a step after the engine's node died | {gap:.1f} s |",
        f"| its steps before, after | {after[0][1]}, {outcome.env_steps - after[0][1]} |",
        f"| restarts of roles | {outcome.restarts} |",
        f"| publications that came to nodes; most comings of one to one node | {sum(came.values())}; "
        f"{max(came.values())} |",
    ]


def main() -> None:
    lines = [
        f"`python -m benchmarks.cluster.engine_moves`, {date.today()}, {len(os.sched_getaffinity(0))} cores, "
        f"{platform.machine()}, Python {platform.python_version()}; load average {os.getloadavg()[0]:.0f}",
        "",
        "| | |",
        "| --- | --- |",
    ]
    with nodes("left") as cluster, RayLauncher(cluster.address) as launcher:
        doomed = cluster.add("right")
        for part in (one_engine, lambda: local_hockey(launcher), lambda: served_hockey(launcher, cluster, doomed)):
            lines += part()
            print("\n".join(lines), flush=True)
        left = {name: len(cluster.segments(name)) for name in ("head", "left")}
    lines.append(f"| segments left on the nodes that lived | {left} |")
    print(lines[-1])
    (RESULTS / "engine_moves.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
