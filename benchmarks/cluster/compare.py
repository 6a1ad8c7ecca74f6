"""Run cases in turns, each in its own process, and write a table of the results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def in_a_process(module: str, *arguments: str) -> float:
    """The figure that ``python -m MODULE ...`` prints as JSON in its last line."""
    command = [sys.executable, "-m", module, *arguments]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout
    return float(json.loads(said.strip().splitlines()[-1])["figure"])


def compare(module: str, unit: str, cases: Mapping[str, Sequence[str]], rounds: int, command: str, to: str) -> None:
    """Run the cases in turns and write the table to results/; the others are compared with the first case.

    Args:
        module: run with the arguments of each case.
        command: repeats this measurement.
    """
    found: dict[str, list[float]] = {name: [] for name in cases}
    loads = [os.getloadavg()[0]]
    for _ in range(rounds):
        for name, arguments in cases.items():
            found[name].append(in_a_process(module, *arguments))
            loads.append(os.getloadavg()[0])
            print(name, f"{found[name][-1]:.0f} {unit}/s, load {loads[-1]:.1f}", flush=True)
    base = statistics.median(next(iter(found.values())))
    lines = [
        f"`{command}`, {date.today()}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}, "
        f"Python {platform.python_version()}; load average of the machine {min(loads):.0f} to {max(loads):.0f}, this "
        "benchmark included",
        "",
        f"| | {unit} a second (median) | each | of {next(iter(cases))} |",
        "| --- | --- | --- | --- |",
    ]
    for name, values in found.items():
        middle = statistics.median(values)
        each = ", ".join(f"{value:.0f}" for value in values)
        lines.append(f"| {name} | {middle:.0f} | {each} | {middle / base:.0%} |")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / to).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
