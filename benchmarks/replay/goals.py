"""The goals of the replay, beside measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.replay.machine import keep, remembered


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


def of_large(large: Rates) -> list[Goal]:
    own, narrow = large["jurybox"], large["jurybox, observations as uint8"]
    bits = large["jurybox, observations as bits"]
    goals = [
        Goal("49 KB: add 1, part of one thread's memcpy", own["add 1/1"], 0.9, unit="%"),
        Goal("49 KB: add 256, part of one thread's memcpy", own["add 256/1"], 0.9, unit="%"),
        Goal("49 KB: sample 256, part of two threads' gather", own["sample 256, reused/2"], 0.9, unit="%"),
    ]
    for what, form in (("bytes", narrow), ("bits", bits)):
        goals += [
            Goal(
                f"49 KB: {column} with planes as {what}, part of with floats", form[column] / own[column], 1.0, unit="%"
            )
            for column in ("add 1", "add 256", "sample 256, reused")
        ]
        goals.append(Goal(f"49 KB: memory with planes as {what}", form["MB"] / own["MB"], 0.5, at_most=True, unit="%"))
    return goals + beside_torchrl("49 KB", large)


def beside_torchrl(what: str, rates: Rates) -> list[Goal]:
    """Fresh outputs on both sides: TorchRL has no others."""
    pairs = [("TorchRL, tensors", "sample 256, fresh"), ("TorchRL, prioritized", "prioritized, fresh")]
    return [
        Goal(f"{what}: {column}, times TorchRL's", rates["jurybox"][column] / rates[peer][column], 1.0)
        for peer, column in pairs
        if column in rates.get(peer, {}) and column in rates["jurybox"]
    ]


def of_small(small: Rates) -> list[Goal]:
    own, goals = small["jurybox"], []
    if "NumPy ring" in small:
        ring = small["NumPy ring"]["add 1"]
        goals.append(Goal("168 B: add 1, times the plain NumPy ring", own["add 1"] / ring, 1.0))
    goals += [
        Goal("168 B: sample 256, part of the gather (one thread)", own["sample 256, reused/1"], 0.6, unit="%"),
        Goal("168 B: sample 256, part of the gather (two threads)", own["sample 256, reused/2"], 0.6, unit="%"),
    ]
    if "cpprb" in small and "prioritized, fresh" in own:
        times = own["prioritized, fresh"] / small["cpprb"]["prioritized, fresh"]
        goals.append(Goal("168 B: prioritised sample and update, fresh, times cpprb", times, 3.0))
    return goals + beside_torchrl("168 B", small)


def of_writers(what: str, runs: Rates) -> list[Goal]:
    goals = []
    for kind in ("processes", "threads"):
        rates = [runs[f"{n} {kind}"]["written"] for n in (1, 2, 4, 8)]
        slowest = min(rates[1:]) / rates[0]
        goals.append(Goal(f"{what}: slowest of 2, 4, 8 writers ({kind}), part of one", slowest, 0.8, unit="%"))
    return goals


def of_large_writers(runs: Rates) -> list[Goal]:
    together = runs["4 processes, sampler"]["part"]
    goal = Goal("49 KB: four writers and a sampler, part of two cores' memcpy", together, 0.75, unit="%")
    return [goal, *of_writers("49 KB", runs)]


def of_small_writers(runs: Rates) -> list[Goal]:
    rate = runs["4 processes"]["written"] / 1e6
    return [Goal("168 B: four writer processes, million rows/s", rate, 1.2), *of_writers("168 B", runs)]


def of_files(results: Rates, pages: str) -> list[Goal]:
    floats, narrow = results[f"chess, floats{pages}"], results[f"chess, planes as bytes{pages}"]
    random, step = results[f"random floats{pages}"], floats["step"] / floats["save"]
    return [
        Goal(f"save of 50,000 chess samples{pages}", floats["save"], 0.8, at_most=True, unit=" s"),
        Goal(f"load, from floats{pages}", floats["load"], 0.7, at_most=True, unit=" s"),
        Goal(f"load, from floats, into memory in use{pages}", floats["restore"], 0.7, at_most=True, unit=" s"),
        Goal(f"load, planes as bytes{pages}", narrow["load"], 0.5, at_most=True, unit=" s"),
        Goal(f"load, planes as bytes, into memory in use{pages}", narrow["restore"], 0.5, at_most=True, unit=" s"),
        Goal(f"save of random floats, times the disk{pages}", random["save"] / random["C write"], 1.2, at_most=True),
        Goal(f"load of random floats, times the disk{pages}", random["load"] / random["C read"], 1.2, at_most=True),
        Goal(
            f"load of random floats, into memory in use, times the disk{pages}",
            random["restore"] / random["C read"],
            1.2,
            at_most=True,
        ),
        Goal(f"incremental save of 5 %, part of a full one{pages}", step, 0.1, at_most=True, unit="%"),
    ]


def of_all(known: dict[str, dict[str, Any]]) -> list[tuple[str, list[Goal]]]:
    """By part that has been measured: when, and its goals."""
    readers: dict[str, Callable[[Any], list[Goal]]] = {
        "throughput large": lambda figures: of_large(figures["table"]),
        "throughput small": lambda figures: of_small(figures["table"]),
        "writers large": lambda figures: of_large_writers(figures["own"]),
        "writers small": lambda figures: of_small_writers(figures["own"]),
        "files ordinary": lambda figures: of_files(figures["cases"], ""),
        "files huge": lambda figures: of_files(figures["cases"], "; huge pages"),
    }
    return [(known[name]["when"], read(known[name]["figures"])) for name, read in readers.items() if name in known]


def report() -> int:
    """Print and keep the list, from new and earlier measurements; return the number of missed goals."""
    found = of_all(remembered())
    goals = [goal for _, several in found for goal in several]
    missed = sum(not goal.reached for goal in goals)
    lines = [f"{len(goals) - missed} of {len(goals)} reached", ""]
    for when, several in found:
        lines += [when, "", "| what | measured | goal | reached |", "| --- | --- | --- | --- |"]
        lines += [*(goal.line() for goal in several), ""]
    keep("goals", lines)
    return missed
