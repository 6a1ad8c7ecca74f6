"""Do several reading processes slow each other down?

usage: python -m benchmarks.replay.readers [--readers 1 2 4] [--sizes large small] [--seconds 2] [--rounds 3]
Each reader is a process that samples batches of 256 from one replay, with one thread. Wanted: four readers at three
times one reader's rate or more with four cores. With fewer cores a rate shows nothing, but the CPU time per row stays
the same if readers do not slow each other down.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from measure import BATCH, SHAPES  # noqa: E402

from benchmarks.replay.machine import description  # noqa: E402
from jurybox.training.replay import Field, Replay  # noqa: E402

CAPACITY = {"large": 4096, "small": 1_000_000}
_START = 3.0  # seconds in which the readers' interpreters start and map the ring


def read(name: str, seconds: float, begin: float) -> dict[str, float]:
    """One reader: rows, and seconds of a processor."""
    replay = Replay.attach(name, populate=True, threads=1)
    batch, rows = replay.batch(BATCH), 0
    replay.sample(BATCH, batch)
    time.sleep(max(0.0, begin - time.time()))
    cpu, until = time.process_time(), time.perf_counter() + seconds
    while time.perf_counter() < until:
        replay.sample(BATCH, batch)
        rows += BATCH
    return {"rows": rows, "cpu": time.process_time() - cpu}


def one_run(size: str, readers: int, seconds: float) -> tuple[float, float]:
    """Rows a second of all together, and microseconds of a processor for a row."""
    fields = {name: Field(shape) for name, shape in SHAPES[size].items()}
    with Replay.create(f"readers-{os.getpid()}", CAPACITY[size], fields, threads=1) as replay:
        fill = {name: np.zeros((BATCH, *shape), np.float32) for name, shape in SHAPES[size].items()}
        for _ in range(CAPACITY[size] // BATCH):
            replay.extend(**fill)
        begin = str(time.time() + _START)
        command = [sys.executable, "-m", "benchmarks.replay.readers", "--reader", replay.name, str(seconds), begin]
        started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(readers)]
        told = [json.loads(each.communicate(timeout=60 + seconds)[0]) for each in started]
    rows, cpu = (sum(each[what] for each in told) for what in ("rows", "cpu"))
    return rows / seconds, 1e6 * cpu / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["large", "small"])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reader", nargs=3, metavar=("NAME", "SECONDS", "BEGIN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        name, seconds, begin = options.reader
        print(json.dumps(read(name, float(seconds), float(begin))))
        return
    cores = len(os.sched_getaffinity(0))
    print(f"{time.strftime('%Y-%m-%d')}, {description()}; {cores} cores, median of {options.rounds} rounds\n")
    print("| rows | readers | rows/s | to one reader | processors' us for a row |\n| --- | --- | --- | --- | --- |")
    for size in options.sizes:
        found: dict[int, list[tuple[float, float]]] = {readers: [] for readers in options.readers}
        for _ in range(options.rounds):  # in turns, because other load varies
            for readers in options.readers:
                found[readers].append(one_run(size, readers, options.seconds))
        first = found[options.readers[0]]
        for readers, runs in found.items():
            gain = statistics.median(mine[0] / one[0] for mine, one in zip(runs, first, strict=True))
            rate, cpu = (statistics.median(values) for values in zip(*runs, strict=True))
            print(f"| {size} | {readers} | {rate:,.0f} | {gain:.2f} | {cpu:.2f} |", flush=True)


if __name__ == "__main__":
    main()
