"""Several runs of `jurybox train hockey` as one plot: mean and spread of their evaluations.

    python -m benchmarks.hockey_curves RUN RUN ... [--serial RUN RUN ...] [--free RUN RUN ...] --out curves.svg
        [--over minutes]

RUN is a run's folder, or its metrics.csv. Each curve is the mean over the runs, its band reaches from the least to the
most of them. Runs evaluate at different steps, so their values are interpolated linearly, up to the end of the shortest
run. Those that were trained with --serial are drawn dashed, those with
--max-ahead none dotted.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

from jurybox.training.run_folder import read_metrics

mpl.use("svg")
import matplotlib.pyplot as plt

_POINTS = 100
_OVER = {"steps": "env steps", "minutes": "minutes"}
_WON, _LOST = "#0b7a53", "#c2570c"

Floats = npt.NDArray[np.float64]


def evaluations(rows: Sequence[Mapping[str, float]], name: str, over: str) -> tuple[Floats, Floats]:
    """Return (n,) steps of a run's evaluations, and their results.

    Over minutes, an evaluation's time is that of the last row of metrics before it.
    """
    where, found, seconds = [], [], 0.0
    for row in rows:
        seconds = row.get("seconds", seconds)
        if name in row:
            where.append(row["env_steps"] if over == "steps" else seconds / 60)
            found.append(row[name])
    return np.array(where), np.array(found)


def joined(runs: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Common places (m,), and the runs' values there (runs, m)."""
    first, last = max(where[0] for where, _ in runs), min(where[-1] for where, _ in runs)
    places = np.linspace(first, last, _POINTS)
    return places, np.stack([np.interp(places, where, found) for where, found in runs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="metrics.csv, or the folder that holds it")
    parser.add_argument("--serial", nargs="+", type=Path, default=[], help="runs of one process, to be drawn dashed")
    parser.add_argument("--free", nargs="+", type=Path, default=[], help="runs without a pace, to be drawn dotted")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--over", choices=_OVER, default="steps")
    args = parser.parse_args()
    kinds = [
        ("paced" if args.free else "in processes" if args.serial else "", "-", args.runs),
        ("serial", "--", args.serial),
        ("free", ":", args.free),
    ]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for panel, bot in zip(panels, ("weak", "strong"), strict=True):
        for (kind, style, paths), (what, colour) in product(kinds, (("wins", _WON), ("losses", _LOST))):
            if not paths:
                continue
            runs = [read_metrics(path / "metrics.csv" if path.is_dir() else path) for path in paths]
            each = [evaluations(rows, f"eval_{what}_{bot}", args.over) for rows in runs]
            each = [run for run in each if len(run[0]) > 1]
            if not each:
                parser.error(f"no run was evaluated twice against the {bot} bot: expected --evaluate-every in them")
            places, values = joined(each)
            label = " ".join(("won" if what == "wins" else "lost", kind)).strip()
            panel.fill_between(places, 100 * values.min(0), 100 * values.max(0), color=colour, alpha=0.18, lw=0)
            panel.plot(places, 100 * values.mean(0), color=colour, ls=style, label=label)
            last = 100 * values[:, -1]
            print(f"{bot} {what} {kind}: {last.mean():.1f} % at the end, from {last.min():.1f} to {last.max():.1f}")
        panel.set(title=f"against the {bot} bot", xlabel=_OVER[args.over], ylim=(0, 100))
        panel.locator_params(axis="x", nbins=5)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"% of games, {len(args.runs)} seeds")
    panels[0].legend(frameon=False)
    figure.savefig(args.out)
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
