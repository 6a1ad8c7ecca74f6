"""Do collecting and learning overlap? Hockey in processes against the same plan in one process.

    python -m benchmarks.hockey_overlap [--ratios 1/36 1/8 1/2] [--rounds 3] [--seconds 6] [--out FILE.md]
    python -m benchmarks.hockey_overlap --served    # a policy server computes the actions

Both follow one plan: the same roles, networks and ratio of learner steps to env steps. They take turns, and each counts
a stretch of time from its 100th learner step on, so that starting and the warm-up are not in it. "Busy" is the part of
that stretch in which a role did not wait, from the counters that the timeline is drawn of.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from benchmarks.replay.machine import description
from jurybox.studies.hockey.served import policy_server
from jurybox.studies.hockey.settings import HockeyTraining
from jurybox.studies.hockey.train import plan, sizes_of
from jurybox.training.interrupts import Signals
from jurybox.training.report import charts, page
from jurybox.training.runtime.plan import Plan
from jurybox.training.runtime.progress import Timeline
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.shared_resources import SharedResources

_LEARNED = 100  # steps before the clock starts


@dataclass(frozen=True, slots=True)
class Stretch:
    """The work within the measured time: per second, and each role's busy share."""

    episodes: float
    env_steps: float
    learner_steps: float
    busy: dict[str, float]


class _Nothing:
    def scalars(self, step: int, values: object) -> None: ...


class _Clock:
    """Watches a run: notes the counters when it is under way, and again after so many seconds, and ends it."""

    def __init__(self, seconds: float, learned: int) -> None:
        self.signals = Signals()
        self.stretch: Stretch | None = None
        self._seconds, self._learned = seconds, learned
        self._first: tuple[float, list[list[int]]] | None = None

    def __call__(self, shared: SharedResources) -> None:
        scoreboard, now = shared.scoreboard, time.monotonic()
        if self.stretch is not None or (self._first is None and scoreboard.learner_steps < self._learned):
            return
        counts = [list(words) for words in scoreboard.words]
        if self._first is None:
            self._first = now, counts
            return
        began, before = self._first
        seconds = now - began
        if seconds < self._seconds:
            return
        moved = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, counts, strict=True)]
        self.stretch = Stretch(
            *(
                sum(words[word] for words in moved) / seconds
                for word in (Word.EPISODES, Word.ENV_STEPS, Word.LEARNER_STEPS)
            ),
            # The present wait is not in WAITED yet, so the rest of the time was not spent waiting.
            {
                name: words[Word.BUSY] / max(1, words[Word.BUSY] + words[Word.WAITED])
                for (name, _), words in zip(scoreboard.named.roles, moved, strict=True)
            },
        )
        self.signals.ask()


def stretch(planned: Plan, seconds: float, folder: Path, *, serial: bool, learned: int = _LEARNED) -> Stretch:
    """Carry out a plan for so many seconds from its `learned`th learner step on."""
    clock = _Clock(seconds, learned)
    run(planned, folder, _Nothing(), serial=serial, signals=clock.signals, watch=clock)
    assert clock.stretch is not None, "it ended before the clock did"
    return clock.stretch


def measure(settings: HockeyTraining, seconds: float, folder: Path, *, serial: bool) -> Stretch:
    with ExitStack() as resources:
        served = None
        if settings.policy == "served":
            served = resources.enter_context(policy_server(settings, sizes_of(settings), folder / "server.log"))
        return stretch(plan(settings, folder, served), seconds, folder, serial=serial)


def compare(ratio: Fraction, args: argparse.Namespace) -> tuple[list[str], Timeline | None]:
    """One row of the table, and the timeline of the last run in processes."""
    # No step changes a weight: a policy that gets better plays shorter games, and both should play the same.
    still = 1e-30
    settings = HockeyTraining(
        steps=10**9,
        train_freq=ratio.denominator,
        gradient_steps=ratio.numerator,
        workers=args.workers,
        envs=args.workers * args.envs,
        learning_starts=2000,
        evaluate_every=0,
        checkpoint_every=0,
        buffer_size=200_000,
        learning_rate=still,
        critic_learning_rate=still,
        policy="served" if args.served else "local",
    )
    found: dict[bool, list[Stretch]] = {True: [], False: []}
    drawn = None
    for _ in range(args.rounds):
        for serial in (True, False):
            with tempfile.TemporaryDirectory(prefix="jurybox-overlap-") as folder:
                found[serial].append(measure(settings, args.seconds, Path(folder), serial=serial))
                if not serial:
                    drawn = Timeline.read(Path(folder) / "timeline.json")
    one, two = found[True], found[False]
    gains = sorted(b.env_steps / a.env_steps for a, b in zip(one, two, strict=True))
    actors = [share for each in two for name, share in each.busy.items() if name.startswith("actor")]
    cells = [
        str(ratio),
        _middle([each.episodes for each in one]),
        _middle([each.episodes for each in two]),
        f"{statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f})",
        _middle([each.env_steps for each in two], 0),
        _middle([each.learner_steps for each in two], 0),
        f"{statistics.median(each.busy['learner'] for each in two):.0%}",
        f"{statistics.median(actors):.0%}",
    ]
    return cells, drawn


def _middle(values: Sequence[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f}"


HEADER = (
    "learner steps per env step",
    "serial, episodes/s",
    "in processes, episodes/s",
    "gain in env steps (least to most)",
    "env steps/s",
    "learner steps/s",
    "learner busy",
    "actors busy",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", nargs="+", type=Fraction, default=[Fraction(1, 36), Fraction(1, 8), Fraction(1, 2)])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--served", action="store_true", help="ask a policy server instead of acting locally")
    parser.add_argument("--out", type=Path, help="a Markdown file; the timeline is drawn beside it")
    args = parser.parse_args()
    lines = [f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
    for ratio in args.ratios:
        cells, drawn = compare(ratio, args)
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        if args.out and drawn is not None:
            lanes = charts.timeline(drawn, "when each process worked", seconds=1.0)
            name = f"{args.out.stem}-{ratio.numerator}-{ratio.denominator}.html"
            sections = [page.Section("Who worked when", [lanes])]
            heading = f"Hockey, {ratio} learner steps a step"
            args.out.with_name(name).write_text(page.render("Hockey", heading, sections))
    if args.out:
        title = f"# {args.out.stem}\n\n{time.strftime('%Y-%m-%d')}, {description()}"
        told = f"{args.workers} collector(s) of {args.envs} games, {args.rounds} rounds of {args.seconds:g} s each"
        args.out.write_text("\n".join([f"{title}; {told}; nice {os.nice(0)}.", "", *lines, ""]))


if __name__ == "__main__":
    main()
