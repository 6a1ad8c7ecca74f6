"""From which model size and how many clients on is a server faster than a copy of the model in every client?

    python -m benchmarks.serving.crossover [--page]

One policy in six widths, 1 to 64 clients, two sides: every client with torch and the model in its own process, and
clients of one server with shared memory. Both sides exist all the time, and their windows alternate; the side that is
not measured waits. Seven minutes on two cores.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from benchmarks.serving import machine, page
from benchmarks.serving.__main__ import about, add_common, commit_measured, finish, settled
from benchmarks.serving.cases import CROSSOVER, WIDTHS
from benchmarks.serving.hosting import ROOT, Failed, Host, Place
from benchmarks.serving.results import Failure, Point, Results
from benchmarks.serving.rounds import Plan, quiet_window

OWN, SERVER = "own-copy", "jurybox-sizes"
COUNTS = (1, 4, 16, 64)
FIRST = "**With a small model and few clients the answer is: don't use a server.**"
_TORCH_MIB = 150  # that a process with torch holds


def run(plan: Plan, place: Place, results: Results, counts: tuple[int, ...]) -> None:
    """Measure every size with every number of clients, both sides in turns."""
    first = next(iter(CROSSOVER.values()))
    try:
        with Host(OWN, first, max(counts), place) as own, Host(SERVER, first, max(counts), place) as server:
            for count in counts:
                for host in (own, server):
                    host.grow(count)
                for width, case in zip(WIDTHS, CROSSOVER.values(), strict=True):
                    needed = count * (_TORCH_MIB + weights_mib(width)) / 1024
                    free = machine.available_bytes() / 2**30 + sum(own.memory_mib()) / 1024
                    if needed > 0.9 * free:
                        why = f"not run: the copies want {needed:.0f} GiB of memory, {free:.0f} are to be had"
                        results.failures.append(Failure(case.name, OWN, count, why))
                        print(f"{case.name:10} {count:3} clients  {why}", flush=True)
                        continue
                    for host in (own, server):
                        host.switch(case)
                    for number in range(plan.rounds):
                        for host, other in ((own, server), (server, own)):
                            quiet_window(plan, host, results, count, (other,))
                            point = results.point(case.name, host.name, count)
                            if number == 0:
                                point.server_mib, point.clients_mib = host.memory_mib()
                    for host in (own, server):
                        point = results.point(case.name, host.name, count)
                        print(
                            f"{case.name:10} {count:3} clients  {host.kind.title:26} "
                            f"{point.median('requests_per_s'):9.0f} req/s  p50 {point.median('p50_us'):8.0f} us  "
                            f"CPU {point.median('cpu_us'):8.1f} us/req  {memory(point):7.0f} MiB"
                            f"{'  disturbed' if point.disturbed else ''}",
                            flush=True,
                        )
    except Failed as error:
        results.failures.append(Failure("", "", 0, str(error)))
        print(f"FAILED: {error}")


def memory(point: Point) -> float:
    """Memory of the clients and, if any, of the server, MiB."""
    return point.clients_mib + (point.server_mib if point.contender == SERVER else 0.0)


def rates(results: Results) -> list[str]:
    """The table of the requests a second of both sides."""

    def cell(own: Point, server: Point) -> str:
        a, b = own.median("requests_per_s"), server.median("requests_per_s")
        text = f"{b:,.0f} / {a:,.0f} = {b / a:.2f}"
        mark = "~" if own.disturbed or server.disturbed else ""
        return f"{mark}**{text}**" if b >= a else mark + text

    return [
        "Requests a second, server / own copies = ratio; bold where the server is ahead, ~ where something else "
        "disturbed a window:",
        "",
        *_table(results, cell),
    ]


def tables(results: Results) -> list[str]:
    """All figures of a run."""

    def cpu(own: Point, server: Point) -> str:
        return f"{server.median('cpu_us'):,.0f} / {own.median('cpu_us'):,.0f}"

    def sizes(own: Point, server: Point) -> str:
        return f"{memory(server):,.0f} / {memory(own):,.0f}"

    return [
        *rates(results),
        "CPU of all processes a request, microseconds, server / own copies:",
        "",
        *_table(results, cpu),
        "Memory of all processes, MiB, one server and its clients / own copies (pages that several share counted once; "
        "the server holds all the sizes at once):",
        "",
        *_table(results, sizes),
    ]


def _table(results: Results, cell: Callable[[Point, Point], str]) -> list[str]:
    counts = sorted({point.clients for point in results.points})
    head = " | ".join(f"{count} client{'s' if count > 1 else ''}" for count in counts)
    rule = " | ".join("---:" for _ in counts)
    lines = [f"| hidden (weights) | {head} |", f"| --- | {rule} |"]
    for width in WIDTHS:
        cells = []
        for count in counts:
            own, server = (results.find(f"hidden{width}", side, count) for side in (OWN, SERVER))
            both = own is not None and server is not None and own.windows and server.windows
            cells.append(cell(own, server) if both and own and server else "-")
        lines.append(f"| {width:,} ({weights_mib(width):.1f} MiB) | {' | '.join(cells)} |")
    return [*lines, ""]


def ahead(results: Results, count: int, figure: str = "requests_per_s") -> list[int]:
    """The widths at which the server is ahead with so many clients.

    Args:
        figure: of Window; of ``cpu_us`` less is better.
    """
    found = []
    for width in WIDTHS:
        own, server = (results.find(f"hidden{width}", side, count) for side in (OWN, SERVER))
        if own is None or server is None or not own.windows or not server.windows:
            continue
        ours, theirs = server.median(figure), own.median(figure)
        if (ours < theirs) if figure == "cpu_us" else (ours > theirs):
            found.append(width)
    return found


def _where(widths: list[int]) -> str:
    if not widths:
        return "at no size"
    if widths == list(WIDTHS):
        return "at every size"
    if len(widths) > 1 and widths == list(WIDTHS[-len(widths) :]):
        return f"from hidden {widths[0]:,} on"
    return f"at hidden {', '.join(f'{width:,}' for width in widths)}"


def answer(results: Results) -> list[str]:
    """When to use a server, in words."""
    counts = sorted({point.clients for point in results.points})

    def said(figure: str) -> str:
        each = (f"with {n} client{'s' if n > 1 else ''} {_where(ahead(results, n, figure))}" for n in counts)
        return "; ".join(each)

    held = []
    for count in counts:
        points = [results.find("hidden256", side, count) for side in (SERVER, OWN)]
        server, own = (memory(point) if point is not None else 0.0 for point in points)
        held.append(f"{server:,.0f} against {own:,.0f} MiB with {count}")
    return [
        f"{FIRST} Give every client its own copy, "
        "which `client.weights(model)` keeps up to date. One policy of two hidden layers, asked a row at a time, one "
        "server on the same cores as its clients, beside a copy in each of them:",
        "",
        f"- The server answers more requests a second {said('requests_per_s')}.",
        f"- It costs less CPU a request {said('cpu_us')}.",
        f"- Memory, one torch and one set of weights against one a client: at hidden 256 "
        f"{', '.join(held)} client{'s' if counts[-1] > 1 else ''}.",
    ]


def weights_mib(width: int) -> float:
    """Of one copy, MiB."""
    return (52 * width + width + width * width + width + width * 146 + 146) * 4 / 2**20


def draw(results: Results, file: Path) -> None:
    """The ratio of the rates and the memory of both sides, over the width."""
    from benchmarks.serving.plot import pyplot, save

    counts = sorted({point.clients for point in results.points})
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.4))
    for number, count in enumerate(counts):
        sides = [(w, *(results.find(f"hidden{w}", side, count) for side in (OWN, SERVER))) for w in WIDTHS]
        pairs = [(w, own, server) for w, own, server in sides if own and server and own.windows and server.windows]
        widths = [width for width, _, _ in pairs]
        colour = f"C{number}"
        left.plot(widths, [s.median("requests_per_s") / o.median("requests_per_s") for _, o, s in pairs], "o-",
                  color=colour, markersize=3, label=f"{count} client{'s' if count > 1 else ''}")  # fmt: skip
        right.plot(widths, [memory(server) / 1024 for _, _, server in pairs], "-", color=colour)
        right.plot(widths, [memory(own) / 1024 for _, own, _ in pairs], "--", color=colour)
    left.axhline(1, color="black", linewidth=0.8)
    left.set_title("requests/s, server over own copies", fontsize=9)
    right.set_title("memory, GiB: one server (solid), own copies (dashed)", fontsize=9)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.minorticks_off()
        axis.set_xticks(WIDTHS, [str(width) for width in WIDTHS], fontsize=8)
        axis.set_xlabel("hidden units")
        axis.grid(True, alpha=0.25)
    left.legend(fontsize=8, frameon=False)
    save(figure, file)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.crossover", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="windows of each side at every point (3)")
    parser.add_argument(
        "--clients", type=lambda text: tuple(map(int, text.split(","))), default=COUNTS, metavar="N,..."
    )
    add_common(parser)
    arguments = settled(
        parser.parse_args(),
        {"rounds": 1, "window": 0.5, "warm_up": 0.2},
        {"rounds": 3, "window": 2.0, "warm_up": 0.25, "retries": 3, "spare": 30.0},
    )
    plan = Plan(
        asked={}, rounds=arguments.rounds, window=arguments.window, warm_up=arguments.warm_up, noise=arguments.noise,
        retries=arguments.retries, patience=arguments.patience, spare=arguments.spare,
    )  # fmt: skip
    commit = commit_measured(arguments)
    machine.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.out.mkdir(parents=True, exist_ok=True)
    now = datetime.now().astimezone()
    file = arguments.out / f"crossover-{now:%Y-%m-%d-%H%M}{'-quick' if arguments.quick else ''}.json"
    results = Results(about(arguments, plan, (OWN, SERVER), now, commit))
    with tempfile.TemporaryDirectory(prefix="jbench-samples-") as folder:
        command = [sys.executable, "-m", "benchmarks.serving.samples", folder, *CROSSOVER]
        subprocess.run(command, cwd=ROOT, check=True)
        try:
            run(plan, Place(Path(folder), arguments.peers_dir), results, arguments.clients)
        finally:
            machine.end_descendants()
            finish(results, now)
            results.write(file)
    print(f"wrote {file}")
    broken = any(not failure.case for failure in results.failures)
    if results.points:
        draw(results, file.with_suffix(".svg"))
        text = [
            f"# A server or own copies: {results.about['date'][:10]}",
            "",
            f"{page.cited(results)} {page.versions(results)}",
            "",
            *tables(results),
        ]
        file.with_suffix(".md").write_text("\n".join(text).rstrip() + "\n")
    if arguments.page and not broken:
        for line in page.cite("crossover", file):
            print(line)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
