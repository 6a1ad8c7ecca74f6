"""How well runs of `jurybox train hockey` play, in games that no evaluation of theirs has played.

    python -m benchmarks.hockey_games RUN RUN ... [--games 200] [--env hockey.hockey_env:HockeyEnv]

RUN is a folder that was given as --out. It is the best checkpoint's policy that plays, without noise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jurybox.studies.hockey import HockeyGames, evaluate
from jurybox.studies.hockey.report import learned

_SEED = 2026  # evaluations of a run have the run's seed
_AT_ONCE = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--games", type=int, default=200)
    parser.add_argument("--env", help="module:Class with the original's interface; none: this package's own game")
    options = parser.parse_args()
    print("| run | against | won | tied | lost |\n| --- | --- | ---: | ---: | ---: |")
    for run in options.runs:
        policy = learned(run)
        if policy is None:
            parser.error(f"{run} has no checkpoint: expected a folder that `jurybox train hockey --out` has written")
        for opponent in ("weak", "strong"):
            standing = evaluate(HockeyGames(_AT_ONCE, options.env), policy, opponent, options.games, seed=_SEED)
            print(
                f"| {run.name} | {opponent} | {standing.wins:.1%} | {standing.ties:.1%} | {standing.losses:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
