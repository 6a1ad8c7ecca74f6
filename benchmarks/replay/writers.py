"""Do many writers and a sampler get in each other's way?

usage: python -m benchmarks.replay.writers [--seconds 2] [--rounds 3]
Every writer is a process (or, where it says so, a thread) that stamps its rows with one number; the sampler checks
what it draws. C's two-thread copy is what the machine could carry.
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
from typing import Any

import numpy as np

from benchmarks.replay.contestants import CLOCK, SHAPES
from benchmarks.replay.machine import keep, reference
from jurybox.training.replay import Field, Replay

BATCH = 256
CAPACITY = {"large": 4096, "small": 1_000_000}
ROW_BYTES = {"large": 49_156, "small": 168}


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
        first, begin = replay.added, time.time() + 4.0
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
        # What two cores would do in a second at this price, or what was done in one.
        scale = 2 / used if CLOCK is time.process_time else 1 / seconds
        return {"written": written * scale, "sampled": sampled * scale}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--writer", nargs=5)
    options = parser.parse_args()
    if options.writer:
        name, size, number, seconds, begin = options.writer
        print(json.dumps(write(name, size, int(number), float(seconds), float(begin))))
        return
    lines: list[str] = [
        "With shared cores: rows per two seconds of CPU time, which is what two free cores do in one.",
        "",
    ]
    for size in ("large", "small"):
        carried = statistics.median(reference(ROW_BYTES[size], CAPACITY[size], 0.5)["add_2_threads"] for _ in range(3))
        carried *= 2 if CLOCK is time.process_time else 1
        lines += [
            f"## {ROW_BYTES[size]:,} bytes a row, one row a call; C, two threads: {carried / 1e3:,.0f}k rows/s",
            "",
        ]
        lines += [
            "| writers | sampler | 1000 rows/s written | sampled | together, part of C's |",
            "| --- | --- | --- | --- | --- |",
        ]
        cases = (
            [(n, False, False) for n in (1, 2, 4, 8)] + [(n, False, True) for n in (1, 2, 4, 8)] + [(4, True, False)]
        )
        for writers, sampling, threads in cases:
            runs = [one_run(size, writers, sampling, threads, options.seconds) for _ in range(options.rounds)]
            written = statistics.median(r["written"] for r in runs)
            sampled = statistics.median(r["sampled"] for r in runs)
            kind = "threads" if threads else "processes"
            lines.append(
                f"| {writers} {kind} | {'yes' if sampling else 'no'} | {written / 1e3:,.0f} | {sampled / 1e3:,.0f} "
                f"| {(written + sampled) / carried:.0%} |"
            )
        lines.append("")
    lines.append(
        "Every row that a writer counted was in the replay; one sampled batch in 16 was checked, and no row was mixed."
    )
    keep("writers", lines)


if __name__ == "__main__":
    main()
