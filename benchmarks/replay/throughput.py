"""Rates of one process for adding, sampling and priorities, beside peers and C.

usage: python -m benchmarks.replay.throughput [--sizes large small] [--seconds 0.5] [--rounds 1] [--peers-dir DIR]
                                             [--only NAME ...]
With --only the figures are printed and not kept. Every contestant runs in its own process, right after the C program,
to which its ratios refer. The environments of the peers are made by `python -m benchmarks.replay.install`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # as contestants import each other, which run in environments without this package

from contestants import CONTESTANTS  # noqa: E402
from measure import ROW_BYTES  # noqa: E402

from benchmarks.replay.install import DEFAULT_DIR, missing, python_of  # noqa: E402
from benchmarks.replay.machine import keep, reference, remember, remembered  # noqa: E402

CAPACITY = {"large": 16_384, "small": 1_000_000}
# Like beside like: "reused" writes every sample into the arrays of the last one, "fresh" gives its caller new ones, and
# a contestant with only one of them has only that column. Prioritised is a sample and new priorities for its rows.
COLUMNS = ["add 1", "add 256", "sample 256, reused", "sample 256, fresh", "prioritized, reused", "prioritized, fresh"]
# The reference of each column: one thread's copy or gather, and two threads'.
AGAINST = {"add 1": "add", "add 256": "add"}
_LONGEST = 120.0

Table = dict[str, dict[str, dict[str, float]]]


def against(column: str, threads: int) -> str:
    kind = AGAINST.get(column, "gather")
    return f"{kind}_{threads}_thread{'s' if threads > 1 else ''}"


def one(name: str, size: str, seconds: float, peers_dir: Path) -> dict[str, float] | str:
    """Rates by column and, as "C ...", the C program's; or why there are none."""
    contestant = CONTESTANTS[name]
    python = sys.executable
    if contestant.environment:
        if reason := missing(peers_dir, contestant.environment):
            return reason
        python = str(python_of(peers_dir, contestant.environment))
    c = reference(ROW_BYTES[size], CAPACITY[size], 0.2)
    command = [python, str(HERE / "contestants.py"), name, size, str(CAPACITY[size]), str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        return f"not done within {_LONGEST:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["it failed without a word"])[-1][:200]
    found: dict[str, float] = json.loads(lines[-1])
    return found | {f"C {key}": value for key, value in c.items()}


def measured(size: str, options: argparse.Namespace) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Medians over the rounds, by contestant; and those that could not be measured."""
    failures: set[str] = set()
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for name, contestant in CONTESTANTS.items():
            if size not in contestant.sizes or (options.only and name not in options.only):
                continue
            result = one(name, size, options.seconds, options.peers_dir)
            if isinstance(result, str):
                failures.add(f"{name}, {ROW_BYTES[size]:,} bytes: {result}")
                continue
            for column in COLUMNS:
                if column in result:
                    for threads in (1, 2):
                        result[f"{column}/{threads}"] = result[column] / result[f"C {against(column, threads)}"]
            runs.setdefault(name, []).append(result)
    medians = {
        name: {key: statistics.median(run[key] for run in results) for key in results[0]}
        for name, results in runs.items()
    }
    return medians, sorted(failures)


def main(arguments: list[str] | None = None) -> Table:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=list(CAPACITY), default=list(CAPACITY))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args(arguments)
    table: Table = {}
    for size in options.sizes:
        table[size], failures = measured(size, options)
        how = f"medians of {options.rounds} rounds, in each of which everybody ran in turn"
        if options.only:
            print("\n".join(section(size, table[size], failures, how)))
        else:
            remember(f"throughput {size}", {"table": table[size], "failures": failures, "how": how})
    if not options.only:
        render()
    return table


def render() -> None:
    """Write new and earlier measurements as one document."""
    lines: list[str] = []
    for size in CAPACITY:
        if known := remembered().get(f"throughput {size}"):
            found = known["figures"]
            lines += section(size, found["table"], found["failures"], f"{known['when']}; {found['how']}")
    lines += [
        "Like beside like: reused samples go into the arrays of the last one, fresh ones are their caller's own, as "
        "most libraries give them; prioritized is a sample and the new priorities of its rows.",
        "",
    ]
    lines += ["Pages are touched before timing. Reverb holds 50,000 of the small rows, 8,192 of either at the start."]
    keep("throughput", lines)


def section(size: str, results: dict[str, dict[str, float]], failures: list[str], how: str) -> list[str]:
    lines = [
        f"## Rows of {ROW_BYTES[size]:,} bytes, {CAPACITY[size]:,} of them: 1000 rows/s "
        "(part of C's, one thread / two)",
        "",
        how,
        "",
        "| | " + " | ".join(COLUMNS) + " |",
        "| --- |" + " --- |" * len(COLUMNS),
    ]
    cells = []
    for column in COLUMNS:
        of = [
            statistics.median(r[f"C {against(column, threads)}"] for r in results.values()) / 1e3 for threads in (1, 2)
        ]
        cells.append(f"{of[0]:,.0f} / {of[1]:,.0f}" if not column.startswith("prioritized") else "")
    lines.append("| C, 1 thread / 2 threads | " + " | ".join(cells) + " |")
    for name, found in results.items():
        cells = [
            f"{found[column] / 1e3:,.0f} ({found[f'{column}/1']:.0%} / {found[f'{column}/2']:.0%})"
            if column in found
            else ""
            for column in COLUMNS
        ]
        memory = f", {found['MB']:,.0f} MB" if "MB" in found else ""
        lines.append(f"| {name}{memory} | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"- not measured: {failure}" for failure in failures), ""]


if __name__ == "__main__":
    main()
