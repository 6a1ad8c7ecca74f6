"""The cost of learners for the actor of a multi-agent training, and that of more agents.

python -m benchmarks.marl share   # the actor alone, with one learner, with four
python -m benchmarks.marl agents  # 2 to 32 agents: turns a second, memory
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from datetime import date
from pathlib import Path

from benchmarks.marl.measure import Measured, alone, settings, training

_RESULTS = Path(__file__).parent / "results"


def share(seconds: float, rounds: int, agents: int, nice: int | None) -> str:
    """The actor's turns a second alone and beside its learners, in turns of each, and the learners' steps."""
    changes = {} if nice is None else {"learner_nice": nice}
    single = {"share": (tuple(f"agent_{number}" for number in range(agents)),)}
    alones, ones, manys = [], [], []
    for _ in range(rounds):
        alones.append(alone(agents, seconds))
        ones.append(training(settings(agents, **changes, **single), seconds))
        manys.append(training(settings(agents, **changes), seconds))
    base = statistics.median(each.turns for each in alones)
    lines = [
        f"| {agents} agents, with | turns/s | of alone | steps/s of each learner | together |",
        "|---|---|---|---|---|",
        f"| no learner | {base:,.0f} | | | |",
    ]
    for name, found in (("one learner for all", ones), (f"{agents} learners", manys)):
        middle = sorted(found, key=lambda each: each.turns)[len(found) // 2]
        lines.append(
            f"| {name} | {middle.turns:,.0f} | {middle.turns / base:.0%} | {_steps(middle)} "
            f"| {sum(middle.learner_steps):,.0f} |"
        )
    told = ", ".join(
        "/".join(f"{each.turns:,.0f}" for each in group) for group in zip(alones, ones, manys, strict=True)
    )
    return "\n".join([*lines, "", f"Every round (alone/one/all): {told}."])


def _steps(measured: Measured) -> str:
    return ", ".join(f"{steps:,.0f}" for steps in measured.learner_steps)


def agents_table(seconds: float, counts: list[int]) -> str:
    """Turns a second and memory by number of agents."""
    lines = [
        "| agents | processes | turns/s alone | turns/s | of alone | agents' moves/s | steps/s of all learners "
        "| memory of all processes | of it shared |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for count in counts:
        base = alone(count, seconds / 2)
        found = training(settings(count), seconds)
        lines.append(
            f"| {count} | {count + 3} | {base.turns:,.0f} | {found.turns:,.0f} | {found.turns / base.turns:.0%} "
            f"| {found.turns * count:,.0f} | {sum(found.learner_steps):,.0f} | {found.processes_mb:,.0f} MiB "
            f"| {found.shared_mb:,.1f} MiB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["share", "agents"])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--agents", type=int, default=4, help="in `share`")
    parser.add_argument("--nice", type=int, default=None, help="of the learners in `share`")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="of agents in `agents`")
    parser.add_argument("--out", type=Path, default=None, help="a file for the table")
    asked = parser.parse_args()
    if asked.what == "share":
        table = share(asked.seconds, asked.rounds, asked.agents, asked.nice)
    else:
        table = agents_table(asked.seconds, asked.counts)
    cores = len(os.sched_getaffinity(0))
    text = f"{date.today()}, {cores} cores, {platform.machine()}, nice {os.nice(0)}.\n\n{table}\n"
    print(text)
    if asked.out is not None:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
