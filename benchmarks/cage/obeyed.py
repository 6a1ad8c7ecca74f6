"""How far orders are obeyed, and what that costs, in several seeds of `jurybox train workflow`: one table.

    jurybox train workflow ... --seeds 0,1,2 --out runs
    python -m benchmarks.cage.obeyed runs/seed-* [--out FILE.md]

A row holds the orders that begin with a type: the mean over the seeds, and the least and the most of them. Both
definitions are those of docs/workflow.md; the price is the return of the same policy without an order less that with
one, in episodes from their start.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.replay.machine import description


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean of numbers, with the least and the most of them."""
    mean, least, most = sum(values) / len(values), min(values), max(values)
    return f"{mean:{form}} ({least:{form}} to {most:{form}})"


def rows(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table's lines of the summaries of runs."""
    found = [
        "| first | judged fixes that comply | the same without order | all fixes that comply | return | price |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for number, (first, *_) in enumerate(zip(*(run["prices"] for run in runs), strict=True)):
        each = [run["prices"][number] for run in runs]
        returns = spread([one["return"] for one in each], ".1f")
        if first["first"] is None:
            found.append(f"| no order | | | | {returns} | |")
            continue
        lost = [run["prices"][0]["return"] - one["return"] for run, one in zip(runs, each, strict=True)]
        shares = (
            spread([one[name] for one in each], ".1%")
            for name in ("obedience", "obedience_without_order", "compliance")
        )
        found.append(f"| {first['first']} | {' | '.join(shares)} | {returns} | {spread(lost, '.1f')} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="a Markdown file")
    options = parser.parse_args()
    runs = [json.loads((run / "summary.json").read_text(encoding="utf-8")) for run in options.runs]
    lines = [f"{time.strftime('%Y-%m-%d')}, {description()}; {len(runs)} seeds.", "", *rows(runs)]
    lines += ["", "| seed | gate on | episodes | orders tried | passed | best | its return | gate |"]
    lines.append("| --- | --- | ---: | ---: | ---: | --- | ---: | --- |")
    for run in runs:
        lines.append(
            f"| {run['seed']} | {run['gate_on']} | {run['episodes']:,} | {run['workflows_tried']} | "
            f"{run['workflows_passed']} | {run['workflow']} | {run['return_mean']:.1f} | {run['verdict']} |"
        )
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join([f"# {options.out.stem}", "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
