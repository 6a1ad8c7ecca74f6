"""How fast is one process: adding, sampling, priorities, beside peers and beside C?

usage: python -m benchmarks.replay.throughput [--rounds 3] [--seconds 1] [--python NAME=INTERPRETER ...]
A peer that is not installed in this environment is measured with --python "cpprb=/path/to/its/python".
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.replay.contestants import CONTESTANTS
from benchmarks.replay.machine import keep, reference

SIZES = {"large": (49_156, 16_384), "small": (168, 1_000_000)}
COLUMNS = ["add 1", "add 256", "sample 256", "sample 256, fresh output", "prioritized"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--python", action="append", default=[])
    options = parser.parse_args()
    interpreters = dict(pair.split("=", 1) for pair in options.python)
    lines: list[str] = []
    for size, (row_bytes, capacity) in SIZES.items():
        c_runs: list[dict[str, float]] = []
        runs: dict[str, list[dict[str, float]]] = {}
        names = [n for n in CONTESTANTS if size == "large" or "observations" not in n]
        for _ in range(options.rounds):
            c_runs.append(reference(row_bytes, capacity, options.seconds / 2))
            for name in names:
                python = interpreters.get(name, interpreters.get(name.split()[0], sys.executable))
                script = str(Path(__file__).with_name("contestants.py"))
                command = [python, script, name, size, str(capacity), str(options.seconds)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    runs.setdefault(name, []).append(json.loads(done.stdout.splitlines()[-1]))
                else:
                    print(f"{name}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        c = {key: statistics.median(run[key] for run in c_runs) for key in c_runs[0]}
        lines += [
            f"## Rows of {row_bytes:,} bytes, {capacity:,} of them: 1000 rows/s (part of C's, one thread / two)",
            "",
        ]
        lines += ["| | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
        add = f"{c['add_1_thread'] / 1e3:,.0f} / {c['add_2_threads'] / 1e3:,.0f}"
        gather = f"{c['gather_1_thread'] / 1e3:,.0f} / {c['gather_2_threads'] / 1e3:,.0f}"
        lines.append(f"| C, 1 thread / 2 threads | {add} | {add} | {gather} | {gather} | |")
        for name, results in runs.items():
            cells = []
            for column in COLUMNS:
                values = [run[column] for run in results if column in run]
                if not values:
                    cells.append("")
                    continue
                value = statistics.median(values)
                kind = "add" if column.startswith("add") else "gather"
                cells.append(
                    f"{value / 1e3:,.0f} ({value / c[kind + '_1_thread']:.0%} / {value / c[kind + '_2_threads']:.0%})"
                )
            memory = f", {results[0]['MB']:,.0f} MB" if "MB" in results[0] else ""
            lines.append(f"| {name}{memory} | " + " | ".join(cells) + " |")
        lines.append("")
    keep("throughput", lines)


if __name__ == "__main__":
    main()
