"""Tables and plot of a run; from its JSON alone: ``python -m benchmarks.serving.report results/DATE.json``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.serving.cases import CASES, Case
from benchmarks.serving.contender import CONTENDERS, YARDSTICK
from benchmarks.serving.goals import goals
from benchmarks.serving.results import Point, Results


def write(results: Results, stem: Path) -> list[Path]:
    """Write stem.md and stem.svg; gives what was written."""
    from benchmarks.serving import plot

    written = [stem.with_suffix(".md")]
    drawn = plot.draw(results, stem.with_suffix(".svg"))
    written += [drawn] if drawn else []
    written[0].write_text("\n".join(_page(results, drawn)) + "\n")
    return written


def _page(results: Results, drawn: Path | None) -> list[str]:
    about = results.about
    machine = about["machine"]
    lines = [
        f"# Serving: {about['date'][:10]}",
        "",
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, {machine['kernel']}, "
        f"Python {machine['python']}; commit {about['commit']}. Closed loop, every answer checked, server and clients "
        f"on the same cores, torch with one thread. Medians of {about['rounds']} windows of {about['window_s']:g} s.",
        "",
        f"    {about['command']}",
        "",
    ]
    if drawn:
        lines += [f"![throughput and p99 over clients]({drawn.name})", ""]
    lines += cases(results, "##")
    lines += goal_table(results, "##")
    lines += ["## Versions", "", "| contender | versions |", "| --- | --- |"]
    for name, versions in about["versions"].items():
        lines.append(f"| {name} | {', '.join(f'{package} {version}' for package, version in versions.items())} |")
    lines += ["", *missing(results, "##")]
    if results.notes:
        lines += ["## Notes", ""]
        lines += [f"- {note}" for note in dict.fromkeys(results.notes)]
    return lines


def cases(results: Results, heading: str) -> list[str]:
    """The tables of every case that was asked, each under a heading: whoever was measured has a row in each."""
    lines = []
    for case in CASES.values():
        counts = sorted({point.clients for point in results.points if point.case == case.name})
        if counts:
            lines += _case(results, case, counts, heading)
    return lines


def rates(results: Results, name: str) -> list[str]:
    """The table of requests a second of one case, with the line that explains it; empty where it was not asked."""
    case = CASES[name]
    counts = sorted({point.clients for point in results.points if point.case == name})
    return _tables(results, case, counts)[0] if counts else []


def goal_table(results: Results, heading: str) -> list[str]:
    """What was to be reached and whether it was, of the goals that the run has figures for."""
    lines = [f"{heading} Goals", "", "| goal | asked | found | |", "| --- | --- | --- | --- |"]
    for goal in goals(results):
        if goal.found is not None:
            asked = f"{'at least' if goal.at_least else 'at most'} {goal.bound:g} {goal.unit}"
            lines.append(
                f"| {goal.says} | {asked} | {goal.found:.2f} {goal.unit} | {'met' if goal.met else 'not met'} |"
            )
    return [*lines, ""] if len(lines) > 4 else []


def goals_in_short(results: Results) -> str:
    """How many goals were met, and which were not."""
    found = [goal for goal in goals(results) if goal.found is not None]
    short = [f"{goal.says} ({goal.found:.2f} {goal.unit} of {goal.bound:g})" for goal in found if not goal.met]
    said = f"{len(found) - len(short)} of {len(found)} goals were met."
    return f"{said} Not met: {'; '.join(short)}." if short else said


def missing(results: Results, heading: str) -> list[str]:
    """Who could not be measured, and why."""
    if not results.failures:
        return []
    return [f"{heading} Not measured", "", *(f"- {text}" for text in dict.fromkeys(_failures(results))), ""]


def _case(results: Results, case: Case, counts: list[int], heading: str) -> list[str]:
    return [f"{heading} {case.name}: {case.title}", "", *itertools.chain(*_tables(results, case, counts))]


def _tables(results: Results, case: Case, counts: list[int]) -> list[list[str]]:
    """Rates, latencies and costs."""
    rows = f", {case.rows} rows each" if case.rows > 1 else ""
    head = " | ".join(f"{count} client{'s' if count > 1 else ''}" for count in counts)
    rule = " | ".join("---:" for _ in counts)
    asked = {(f.case, f.contender) for f in results.failures} | {(p.case, p.contender) for p in results.points}
    known = [*CONTENDERS, *sorted(name for _, name in asked if name not in CONTENDERS)]
    names = [name for name in known if (case.name, name) in asked]

    def table(title: str, cell: Callable[[Point], str]) -> list[str]:
        lines = [title, "", f"| contender | {head} |", f"| --- | {rule} |"]
        for name in names:
            cells = []
            for count in counts:
                point = results.find(case.name, name, count)
                cells.append(cell(point) if point is not None and point.windows else "-")
            lines.append(f"| {results.title(name)} | {' | '.join(cells)} |")
        return [*lines, ""]

    def throughput(point: Point) -> str:
        rate = point.median("requests_per_s")
        yard = results.find(case.name, YARDSTICK, point.clients)
        ratio = f" ({rate / yard.median('requests_per_s'):.2f})" if yard is not None and yard.windows else ""
        return f"{'~' if point.disturbed else ''}{rate:,.0f}{ratio}"

    def latency(point: Point) -> str:
        return " / ".join(f"{point.median(name) / 1e3:.3g}" for name in ("p50_us", "p99_us", "p999_us"))

    def cost(point: Point) -> str:
        memory = f"; {point.unique_mib:.0f}" if point.unique_mib else ""
        return f"{point.median('server_cpu_us'):.0f} + {point.median('client_cpu_us'):.0f}{memory}"

    return [
        table(
            f"Requests a second{rows}; in brackets over plain ZeroMQ; ~ where something else disturbed every try.",
            throughput,
        ),
        table("Latency of a request, ms: p50 / p99 / p99.9.", latency),
        table("CPU a request, us: server + clients; unique memory of a client, MiB.", cost),
    ]


def _failures(results: Results) -> list[str]:
    return [
        f"{failure.case}, {results.title(failure.contender)}"
        f"{f', {failure.clients} clients' if failure.clients else ''}: {' '.join(failure.reason.split())}"
        for failure in results.failures
    ]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        file = Path(argument)
        for made in write(Results.read(file), file.with_suffix("")):
            print(f"wrote {made}")
