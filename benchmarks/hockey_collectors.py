"""Hockey's throughput against the number of collectors.

    python -m benchmarks.hockey_collectors [--collectors 1 2 4 8] [--rounds 3] [--seconds 6] [--out FILE.md]

One learner and one to eight collector processes follow one plan; rates are counted as in `benchmarks.hockey_overlap`,
and take turns. Collectors beyond the cores share them with the learner, so a rate is only valid for as many cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from fractions import Fraction
from pathlib import Path

from benchmarks.hockey_overlap import Stretch, measure
from benchmarks.replay.machine import description
from jurybox.studies.hockey.settings import HockeyTraining

HEADER = ("collectors", "env steps/s", "to one collector", "learner steps/s", "learner busy", "collectors busy")


def settings(collectors: int, games: int, ratio: Fraction) -> HockeyTraining:
    """An endless run with a constant policy, so that games stay alike."""
    return HockeyTraining(
        steps=10**9,
        train_freq=ratio.denominator,
        gradient_steps=ratio.numerator,
        workers=collectors,
        envs=collectors * games,
        learning_starts=2000,
        evaluate_every=0,
        checkpoint_every=0,
        buffer_size=200_000,
        learning_rate=1e-30,  # no step changes a weight
        critic_learning_rate=1e-30,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectors", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--games", type=int, default=8, help="of each collector")
    parser.add_argument("--ratio", type=Fraction, default=Fraction(1, 36), help="learner steps for an env step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--out", type=Path, help="a Markdown file")
    args = parser.parse_args()
    found: dict[int, list[Stretch]] = {count: [] for count in args.collectors}
    for _ in range(args.rounds):
        for count in args.collectors:
            with tempfile.TemporaryDirectory(prefix="jurybox-collectors-") as folder:
                how = settings(count, args.games, args.ratio)
                found[count].append(measure(how, args.seconds, Path(folder), serial=False))
    first = found[args.collectors[0]]
    cores = len(os.sched_getaffinity(0))
    lines = [f"{time.strftime('%Y-%m-%d')}, {description()}; {cores} cores; {args.games} games a collector, "]
    lines[0] += f"{args.ratio} learner steps an env step, {args.rounds} rounds of {args.seconds:g} s in turns."
    lines += ["", f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
    for count, runs in found.items():
        gain = statistics.median(mine.env_steps / one.env_steps for mine, one in zip(runs, first, strict=True))
        acting = [share for each in runs for name, share in each.busy.items() if name.startswith("actor")]
        cells = [
            str(count),
            f"{statistics.median(each.env_steps for each in runs):,.0f}",
            f"{gain:.2f}",
            f"{statistics.median(each.learner_steps for each in runs):,.0f}",
            f"{statistics.median(each.busy['learner'] for each in runs):.0%}",
            f"{statistics.median(acting):.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join([f"# {args.out.stem}", "", *lines, ""]))


if __name__ == "__main__":
    main()
