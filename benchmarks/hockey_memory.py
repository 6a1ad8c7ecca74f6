"""What a hockey run holds in memory, process by process, while its replay is overwritten again and again.

    python -m benchmarks.hockey_memory [--buffer-size 5000 1000000] [--seconds 40] [--out FILE.md]

Each size of the replay gets a run of two collectors, a learner and an evaluator that never wait for each other. The
memory of each process is the kernel's: PSS, of which shared pages count by their share, and of that what is its own
(heap and stacks), where a leak would grow. It is taken every second; the first rows are those after a third of the
time, when all processes stand and the small replay has been overwritten.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.replay.machine import description
from jurybox.studies.hockey.settings import ROWS, HockeyTraining
from jurybox.studies.hockey.train import plan
from jurybox.training.interrupts import Signals
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word

_MIB = 2**20
_EVERY = 1.0  # seconds between two samples


class _Nothing:
    """A sink."""

    def scalars(self, step, values): ...


def settings(buffer_size: int) -> HockeyTraining:
    """An endless run of the default sizes."""
    return HockeyTraining(
        steps=10**9,
        max_ahead="none",
        workers=2,
        learning_starts=min(10_000, buffer_size // 4),
        buffer_size=buffer_size,
        evaluate_every=100_000,
        evaluation_games=20,
        checkpoint_every=0,
    )


def held(pid: int) -> tuple[float, float]:
    """Return a process's PSS, and its anonymous part, MiB."""
    values = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        values[name] = int(value.split()[0]) * 1024 / _MIB
    return values["Pss"], values["Pss_Anon"]


def measure(buffer_size: int, seconds: float, folder: Path) -> list[list[str]]:
    """Run hockey for so long; return a row of the table for each process, and one of the replay."""
    planned, signals = plan(settings(buffer_size), folder), Signals()
    found: dict[str, list[tuple[float, float]]] = {role.name: [] for role in planned.roles}
    taken = began = 0.0
    end: dict[str, float] = {}

    def watch(shared):
        nonlocal taken, began
        now, words = time.monotonic(), shared.scoreboard.words
        if shared.scoreboard.learner_steps == 0 or now - taken < _EVERY:
            return
        began, taken = began or now, now
        if now - began < seconds / 3:
            return
        for role, each in zip(planned.roles, words, strict=True):
            found[role.name].append(held(each[Word.PID]))
        if now - began > seconds and not signals.count:
            replay = shared.replay(ROWS)
            end.update(
                added=replay.counters.added,
                mib=replay.nbytes / _MIB,
                env=shared.scoreboard.env_steps,
                learned=shared.scoreboard.learner_steps,
            )
            signals.ask()

    run(planned, folder, _Nothing(), watch=watch, signals=signals)
    rows = []
    for name, samples in found.items():
        third = max(1, len(samples) // 3)
        own = [anonymous for _, anonymous in samples]
        rows.append(
            [
                f"{buffer_size:,}",
                name,
                f"{statistics.median(pss for pss, _ in samples):.0f}",
                f"{statistics.median(own[:third]):.1f}",
                f"{statistics.median(own[-third:]):.1f}",
            ]
        )
    laps = end["added"] / buffer_size
    what = f"replay: {end['mib']:.0f} MiB, overwritten {laps:.1f} times, {end['env']:,.0f} env steps"
    rows.append([f"{buffer_size:,}", f"{what}, {end['learned']:,.0f} learner steps", "", "", ""])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer-size", nargs="+", type=int, default=[5_000, 1_000_000])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--out", type=Path, help="a Markdown file")
    args = parser.parse_args()
    rows = []
    for size in args.buffer_size:
        with tempfile.TemporaryDirectory(prefix="jurybox-memory-") as folder:
            rows += measure(size, args.seconds, Path(folder))
    lines = [f"{time.strftime('%Y-%m-%d')}, {description()}; two collectors, {args.seconds:g} s of learning each."]
    lines += ["", "| rows of the replay | process | PSS, MiB | its own at first, MiB | its own at last, MiB |"]
    lines += ["| ---: | --- | ---: | ---: | ---: |", *(f"| {' | '.join(row)} |" for row in rows)]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join([f"# {args.out.stem}", "", *lines, ""]))


if __name__ == "__main__":
    main()
