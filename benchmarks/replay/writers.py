"""Do many writers and a sampler slow each other down?

usage: python -m benchmarks.replay.writers [--sizes large small] [--seconds 1.5] [--rounds 1] [--peers-dir DIR]
Every writer is a process (or a thread, if named so) that fills its rows with one number; the sampler checks its rows.
C's two-thread copy is the limit of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as the scripts of other environments see their neighbours

from crowd import DESIGNS  # noqa: E402
from measure import BATCH, CLOCK, ROW_BYTES, SHAPES  # noqa: E402

from benchmarks.replay.install import DEFAULT_DIR, missing, python_of  # noqa: E402
from benchmarks.replay.machine import keep, reference, remember, remembered  # noqa: E402
from jurybox.training.replay import Field, Replay  # noqa: E402

CAPACITY = {"large": 4096, "small": 1_000_000}
# Rows that each of four writers gives to another design.
CROWD_ROWS = {"large": 3000, "small": 25_000}
_LONGEST = 60.0
# Seconds in which the writers' interpreters start and map the ring.
_START = 2.5


def write(name: str, size: str, number: int, seconds: float, begin: float) -> dict[str, float]:
    replay = Replay.attach(name, populate=True)
    rows = [
        {k: np.full(s, number * 1000 + i, np.float32) for k, s in SHAPES[size].items()}
        for i in range(4 if size == "large" else 256)
    ]
    add, done, n = replay.add, 0, len(rows)
    time.sleep(max(0.0, begin - time.time()))
    cpu, until = time.process_time(), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for row in rows:
            add(**row)
        done += n
    return {"rows": done, "cpu": time.process_time() - cpu}


def one_run(size: str, writers: int, sampling: bool, threads: bool, seconds: float) -> dict[str, float]:
    fields = {k: Field(s) for k, s in SHAPES[size].items()}
    with Replay.create(f"writers-{os.getpid()}", CAPACITY[size], fields, threads=1) as replay:
        fill = {k: np.zeros((BATCH, *s), np.float32) for k, s in SHAPES[size].items()}
        for _ in range(CAPACITY[size] // BATCH):
            replay.extend(**fill)
        first, begin = replay.added, time.time() + (0.5 if threads else _START)
        results: list[dict[str, float]] = []
        started: list[Any] = []
        if threads:
            for number in range(writers):
                thread = threading.Thread(
                    target=lambda n=number: results.append(write(replay.name, size, n, seconds, begin))
                )
                thread.start()
                started.append(thread)
        else:
            for number in range(writers):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.replay.writers",
                    "--writer",
                    replay.name,
                    size,
                    str(number),
                    str(seconds),
                    str(begin),
                ]
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        batch = replay.batch(BATCH)
        replay.sample(BATCH, batch)
        time.sleep(max(0.0, begin - time.time()))
        sampled, mixed, checking, cpu, until = 0, 0, 0.0, time.process_time(), time.perf_counter() + seconds
        while sampling and time.perf_counter() < until:
            replay.sample(BATCH, batch)
            sampled += BATCH
            if sampled % (BATCH * 16) == 0:
                at = time.process_time()
                mixed += int(
                    (
                        np.stack(
                            [batch["o"].min(1), batch["o"].max(1), batch["n"].min(1), batch["n"].max(1), batch["d"]]
                        )
                        != batch["r"]
                    )
                    .any(0)
                    .sum()
                )
                checking += time.process_time() - at
        cpu = time.process_time() - cpu - checking
        for item in started:
            if threads:
                item.join()
            else:
                results.append(json.loads(item.communicate()[0]))
        written = sum(r["rows"] for r in results)
        assert mixed == 0, f"{mixed} mixed rows"
        assert replay.added - first == written, "rows were lost"
        # In threads, every writer's process time is the whole process's.
        used = max((r["cpu"] for r in results), default=0.0) if threads else sum(r["cpu"] for r in results) + cpu
        # The rate of two cores at this cost, or the measured rate.
        scale = 2 / used if CLOCK is time.process_time else 1 / seconds
        return {"written": written * scale, "sampled": sampled * scale}


def crowd(name: str, size: str, peers_dir: Path) -> dict[str, float] | str:
    """The result of another design with four writers and a sampler; or why there is none."""
    environment = "cpprb" if name.startswith("cpprb") else ""
    if environment and (reason := missing(peers_dir, environment)):
        return reason
    python = str(python_of(peers_dir, environment)) if environment else sys.executable
    command = [python, str(HERE / "crowd.py"), name, size, str(CROWD_ROWS[size])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        return f"not done within {_LONGEST:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return (done.stderr.strip().splitlines() or ["it failed without a word"])[-1][:200]
    found: dict[str, float] = json.loads(lines[-1])
    return found


def own(size: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The replay itself: medians over the rounds, by writers and their kind."""
    cases = [(n, False, threads) for threads in (False, True) for n in (1, 2, 4, 8)] + [(4, True, False)]
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for writers, sampling, threads in cases:
            carried = reference(ROW_BYTES[size], CAPACITY[size], 0.2)["add_2_threads"]
            carried *= 2 if CLOCK is time.process_time else 1
            run = one_run(size, writers, sampling, threads, options.seconds)
            case = f"{writers} {'threads' if threads else 'processes'}{', sampler' if sampling else ''}"
            together = (run["written"] + run["sampled"]) / carried
            runs.setdefault(case, []).append(run | {"part": together, "carried": carried})
    return {
        case: {key: statistics.median(run[key] for run in found) for key in found[0]} for case, found in runs.items()
    }


def main(arguments: list[str] | None = None) -> dict[str, dict[str, dict[str, float]]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", choices=list(CAPACITY), default=list(CAPACITY))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--writer", nargs=5)
    options = parser.parse_args(arguments)
    if options.writer:
        name, size, number, seconds, begin = options.writer
        print(json.dumps(write(name, size, int(number), float(seconds), float(begin))))
        return {}
    table: dict[str, dict[str, dict[str, float]]] = {}
    for size in options.sizes:
        table[size] = own(size, options)
        others = {name: crowd(name, size, options.peers_dir) for name in DESIGNS}
        remember(f"writers {size}", {"own": table[size], "others": others, "rounds": options.rounds})
    render()
    return table


def render() -> None:
    """Write new and earlier measurements as one document."""
    lines: list[str] = []
    for size in CAPACITY:
        if known := remembered().get(f"writers {size}"):
            lines += [f"## {ROW_BYTES[size]:,} bytes a row, one row a call", "", known["when"], ""]
            lines += section(known["figures"])
    lines.append(
        "Every row that a writer of ours counted was in the replay; one sampled batch in 16 was checked, and no row "
        "was mixed. Of the others every batch was checked, and every row looked for at the end."
    )
    keep("writers", lines)


def section(figures: dict[str, Any]) -> list[str]:
    lines = [
        f"Medians of {figures['rounds']}. With CPU time: rows per two seconds of it, what two free cores do in one.",
        "",
        "| writers | 1000 rows/s written | sampled | together, part of C's right before, 1000 rows/s |",
        "| --- | --- | --- | --- |",
    ]
    for case, result in figures["own"].items():
        lines.append(
            f"| {case} | {result['written'] / 1e3:,.0f} | {result['sampled'] / 1e3:,.0f} "
            f"| {result['part']:.0%} of {result['carried'] / 1e3:,.0f} |"
        )
    lines += [
        "",
        "Four writer processes and a sampler on other designs (wall time):",
        "",
        "| | 1000 rows/s offered | stored | sampled | lost | mixed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, other in figures["others"].items():
        if isinstance(other, str):
            lines.append(f"| {name} | {other} | | | | |")
        else:
            rates = " | ".join(f"{other[key] / 1e3:,.2f}" for key in ("offered", "written", "sampled"))
            lines.append(f"| {name} | {rates} | {other['lost']:.1%} | {other['mixed']:.3%} |")
    return [*lines, ""]


if __name__ == "__main__":
    main()
