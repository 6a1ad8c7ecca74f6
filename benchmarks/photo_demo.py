"""`python -m benchmarks.photo_demo [--seeds 20]`: the demo with one seed after the other. results/photo.md has runs.

Each is the command of a user, `jurybox demo photo --seed N`, in a folder of its own; all rows are printed. A seed
passes if the verdict is yes and the marks of docs/photo.md are reached, within 150 s.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

MOST_SECONDS = 150.0
HEAD = (
    "| `--seed` | verdict | PSNR better | CIEDE2000 lower | PSNR, dB | CIEDE2000 | intact, CIEDE2000 | seconds |\n"
    "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def marks(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Pairs of a measure before and after the learned edits, by its name."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    with (folder / "evaluation.csv").open() as file:
        for row in csv.DictReader(file):
            found[row["photo"], row["seed"]][row["kind"]][row["criterion"]] = float(row["mark"])
    names = ("audit_psnr", "audit_ciede2000")
    return {name: [(one["no edits"][name], one["learned"][name]) for one in found.values()] for name in names}


def row(seed: int, folder: Path, seconds: float) -> tuple[str, bool]:
    """A row of the table, and whether the seed passes."""
    summary, found = json.loads((folder / "summary.json").read_text()), marks(folder)
    psnr, colour = found["audit_psnr"], found["audit_ciede2000"]

    def change(pairs: list[tuple[float, float]]) -> str:
        before, after = (sum(values) / len(values) for values in zip(*pairs, strict=True))
        return f"{before:.1f} → {after:.1f}"

    better = sum(after > before for before, after in psnr) / len(psnr)
    lower = sum(after < before for before, after in colour) / len(colour)
    cells = (
        str(seed), summary["verdict"], f"{better:.0%}", f"{lower:.0%}", change(psnr), change(colour),
        f"{summary['intact_ciede2000']:.1f}", f"{seconds:.0f}",
    )  # fmt: skip
    reached = better >= 0.8 and lower >= 0.75 and summary["intact_ciede2000"] <= 3.0 and seconds <= MOST_SECONDS
    return f"| {' | '.join(cells)} |", reached and summary["verdict"] == "yes"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.photo_demo", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n{HEAD}", flush=True)
    passed = 0
    for seed in range(given.first, given.first + given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "jurybox.training.cli", "demo", "photo", "--seed", str(seed)]
            began = time.monotonic()
            subprocess.run(
                [*command, "--out", f"{folder}/out"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            text, passes = row(seed, Path(folder) / "out", time.monotonic() - began)
        passed += passes
        print(text, flush=True)
    print(f"\n{passed} of {given.seeds} seeds pass", flush=True)


if __name__ == "__main__":
    main()
