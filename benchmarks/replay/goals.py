"""What the replay is meant to reach, beside what one run measured."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.replay.machine import keep


@dataclass(frozen=True)
class Goal:
    """A figure and its bound.

    Attributes:
        at_most: whether small is good.
    """

    what: str
    value: float
    bound: float
    at_most: bool = False
    unit: str = ""

    @property
    def reached(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def line(self) -> str:
        value, bound = (f"{x:.0%}" if self.unit == "%" else f"{x:,.2f}{self.unit}" for x in (self.value, self.bound))
        side = "at most" if self.at_most else "at least"
        return f"| {self.what} | {value} | {side} {bound} | {'yes' if self.reached else 'NO'} |"


Rates = dict[str, dict[str, float]]


def of_throughput(table: dict[str, Rates]) -> list[Goal]:
    large, small = table["large"], table["small"]
    own, narrow = large["jurybox"], large["jurybox, observations as uint8"]
    bits = large["jurybox, observations as bits"]
    goals = [
        Goal("49 KB: add 1, part of one thread's memcpy", own["add 1/1"], 0.9, unit="%"),
        Goal("49 KB: add 256, part of one thread's memcpy", own["add 256/1"], 0.9, unit="%"),
        Goal("49 KB: sample 256, part of two threads' gather", own["sample 256/2"], 0.9, unit="%"),
    ]
    for what, form in (("bytes", narrow), ("bits", bits)):
        goals += [
            Goal(
                f"49 KB: {column} with planes as {what}, part of with floats", form[column] / own[column], 1.0, unit="%"
            )
            for column in ("add 1", "add 256", "sample 256")
        ]
        goals.append(Goal(f"49 KB: memory with planes as {what}", form["MB"] / own["MB"], 0.5, at_most=True, unit="%"))
    own = small["jurybox"]
    if "NumPy ring" in small:
        ring = small["NumPy ring"]["add 1"]
        goals.append(Goal("168 B: add 1, times the plain NumPy ring", own["add 1"] / ring, 1.0))
    goals.append(Goal("168 B: sample 256, part of the gather (one thread)", own["sample 256/1"], 0.6, unit="%"))
    if "cpprb" in small:
        times = own["prioritized"] / small["cpprb"]["prioritized"]
        goals.append(Goal("168 B: prioritised sample and update, times cpprb", times, 3.0))
    return goals


def of_writers(table: dict[str, Rates]) -> list[Goal]:
    large, small = table["large"], table["small"]
    together = large["4 processes, sampler"]["part"]
    goals = [Goal("49 KB: four writers and a sampler, part of two cores' memcpy", together, 0.75, unit="%")]
    for name, runs in (("49 KB", large), ("168 B", small)):
        for kind in ("processes", "threads"):
            rates = [runs[f"{n} {kind}"]["written"] for n in (1, 2, 4, 8)]
            goals.append(
                Goal(
                    f"{name}: slowest of 2, 4, 8 writers ({kind}), part of one",
                    min(rates[1:]) / rates[0],
                    0.8,
                    unit="%",
                )
            )
    goals.append(Goal("168 B: four writer processes, million rows/s", small["4 processes"]["written"] / 1e6, 1.2))
    return goals


def of_files(results: Rates) -> list[Goal]:
    goals = []
    for pages in ("", "; huge pages"):
        if f"chess, floats{pages}" not in results:
            continue
        floats, narrow = results[f"chess, floats{pages}"], results[f"chess, planes as bytes{pages}"]
        random = results[f"random floats{pages}"]
        goals += [
            Goal(f"save of 50,000 chess samples{pages}", floats["save"], 0.8, at_most=True, unit=" s"),
            Goal(f"load, from floats{pages}", floats["load"], 0.7, at_most=True, unit=" s"),
            Goal(f"load, planes as bytes{pages}", narrow["load"], 0.5, at_most=True, unit=" s"),
            Goal(
                f"save of random floats, times the disk{pages}", random["save"] / random["C write"], 1.2, at_most=True
            ),
            Goal(f"load of random floats, times the disk{pages}", random["load"] / random["C read"], 1.2, at_most=True),
            Goal(
                f"incremental save of 5 %, part of a full one{pages}",
                floats["step"] / floats["save"],
                0.1,
                at_most=True,
                unit="%",
            ),
        ]
    return goals


def report(goals: list[Goal]) -> int:
    """Print and keep the list; gives how many were missed."""
    missed = sum(not goal.reached for goal in goals)
    lines = [
        f"{len(goals) - missed} of {len(goals)} reached",
        "",
        "| what | measured | goal | reached |",
        "| --- | --- | --- | --- |",
    ]
    keep("goals", [*lines, *(goal.line() for goal in goals)])
    return missed
