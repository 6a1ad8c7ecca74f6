"""Robots with one policy server: rate of 1 and 8 clients, and the cost of a websocket per observation.

``python -m benchmarks.robots [--openpi CHECKOUT] [--seconds N] [--rounds N] [--doors NAME ...] [--out FILE]``: two to
three minutes. Observations are two images of 224 x 224 x 3 and a state, as openpi's client sends them. Jurybox and
openpi's own server (of a checkout; without one a server built like theirs) take turns, so that a ratio of one round
compares adjacent measurements; beside the wall clock is the CPU time per answer, which other programs do not change.
Results are written to benchmarks/robots/results.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.robots.doors import CLIENTS, DOORS, Ask, observation, openpi
from benchmarks.robots.policies import DIMENSION, SIDE, made
from jurybox.client import connect as connect_jurybox

LARGE, SMALL = (64, 100, 20), (16, 1, 1)  # width, layers, steps of denoising
CROWD = 8
TIMES, ADDED = 5.0, 2.0  # the marks: a crowd's rate to one client's, and ms that the port adds
RESULTS = Path(__file__).parent / "results" / "robots.md"


@contextlib.contextmanager
def jurybox(large: tuple[int, int, int], small: tuple[int, int, int]) -> Iterator[tuple[str, dict[str, str], int]]:
    """Start a server with both policies, the large one with a door for each protocol; return its address, the robots'
    address of each door and of "small", and its process."""
    with tempfile.TemporaryDirectory() as folder:
        lines = ["[server]", f'address = "ipc://{folder}/engine"', 'http = ""', 'grpc = ""', 'devices = ["cpu"]']
        for name, (width, layers, steps) in {**dict.fromkeys(DOORS, large), "small": small}.items():
            speaks = name if name in DOORS else "openpi"
            lines += [f"[models.{name}]", 'factory = "benchmarks.robots.policies:policy"', "max_batch = 8"]
            lines += [f'args = {{width = {width}, layers = {layers}, steps = {steps}, speaks = "{speaks}"}}']
            lines += [f"[robots.{name}]", f'model = "{name}"', f'speaks = "{speaks}"', 'listen = "127.0.0.1:0"']
        file = Path(folder) / "server.toml"
        file.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "jurybox.server.cli", "serve", str(file)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            address = f"ipc://{folder}/engine"
            with connect_jurybox(address, timeout=100) as client:
                client.model("openpi", rows=1, timeout=100).close()
                robots = client.status()["server"]["robots"]
                while any(where.endswith(":0") for where in robots.values()):
                    time.sleep(0.05)
                    robots = client.status()["server"]["robots"]
            yield address, robots, server.pid
        finally:
            server.terminate()
            server.wait(30)


@contextlib.contextmanager
def upstream(size: tuple[int, int, int], openpi: str) -> Iterator[tuple[str, int]]:
    """Start the peer; return its URL for robots, and its process."""
    command = [sys.executable, "-m", "benchmarks.robots.upstream", *map(str, size), *([openpi] if openpi else [])]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"127.0.0.1:{int(server.stdout.readline())}", server.pid
    finally:
        server.terminate()
        server.wait(30)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


def forwards(size: tuple[int, int, int]) -> tuple[float, float]:
    """CPU ms of the policy's forward with one row and with CROWD, the best of many: the limit of batching."""
    torch.set_num_threads(1)
    policy, best = made(*size), []
    for rows in (1, CROWD):
        images = torch.zeros(rows, SIDE, SIDE, 3, dtype=torch.uint8)
        taken = []
        with torch.inference_mode():
            for _ in range(20):
                began = time.process_time()
                policy(images, images, torch.zeros(rows, DIMENSION))
                taken.append(time.process_time() - began)
        best.append(1e3 * min(taken))
    return best[0], best[1]


class Measured(NamedTuple):
    """Answers a second of all clients together, the median latency in ms, and CPU ms for each answer."""

    rate: float
    ms: float
    server_cpu: float
    client_cpu: float


def asked(
    where: str,
    clients: int,
    seconds: float,
    pid: int,
    opened: Callable[[str], contextlib.AbstractContextManager[Ask]] = openpi,
) -> Measured:
    """Ask with so many clients in closed loop."""
    times: list[list[float]] = [[] for _ in range(clients)]
    ready, over = threading.Barrier(clients + 1), threading.Event()

    def robot(mine: list[float]) -> None:
        with opened(where) as ask:
            for _ in range(3):
                ask()
            ready.wait(60)
            while not over.is_set():
                began = time.perf_counter()
                ask()
                mine.append(time.perf_counter() - began)

    threads = [threading.Thread(target=robot, args=(mine,)) for mine in times]
    for thread in threads:
        thread.start()
    ready.wait(60)
    before = cpu_seconds(pid), time.process_time()
    time.sleep(seconds)
    after = cpu_seconds(pid), time.process_time()
    over.set()
    for thread in threads:
        thread.join(60)
    together = [value for mine in times for value in mine]
    server, client = (1e3 * (later - sooner) / len(together) for sooner, later in zip(before, after, strict=True))
    rate = sum(len(mine) / sum(mine) for mine in times if mine)
    return Measured(rate, 1e3 * statistics.median(together), server, client)


def inside(address: str, seconds: float) -> float:
    """Median ms of the same observation over shared memory, without a websocket."""
    seen = observation()
    row = {f"images/{name}": image for name, image in seen["images"].items()}  # type: ignore[attr-defined]
    row["state"] = np.asarray(seen["state"], np.float32)
    times = []
    with connect_jurybox(address) as client, client.model("small") as model:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            model(row)
            times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--openpi", default="", help="a checkout of github.com/Physical-Intelligence/openpi")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=DOORS, help="measured beside openpi's")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write")
    given = parser.parse_args()
    one, crowd = forwards(LARGE)
    rates: dict[tuple[str, int], list[Measured]] = {}
    way: dict[str, list[float]] = {}
    with (
        jurybox(LARGE, SMALL) as (address, robots, pid),
        upstream(LARGE, given.openpi) as (peer, peer_pid),
        upstream(SMALL, given.openpi) as (small_peer, small_pid),
    ):
        for _ in range(given.rounds):
            ways = [("jurybox", robots["openpi"], pid, openpi), ("openpi", peer, peer_pid, openpi)]
            ways += [(f"jurybox, {name}", robots[name], pid, CLIENTS[name]) for name in given.doors if name != "openpi"]
            for name, where, process, opened in ways:
                for clients in (1, CROWD):
                    measured = asked(where, clients, given.seconds, process, opened)
                    rates.setdefault((name, clients), []).append(measured)
            way.setdefault("shared memory", []).append(inside(address, given.seconds / 2))
            way.setdefault("jurybox, websocket", []).append(asked(robots["small"], 1, given.seconds / 2, pid).ms)
            way.setdefault("openpi, websocket", []).append(asked(small_peer, 1, given.seconds / 2, small_pid).ms)
        with connect_jurybox(address) as client:
            batch = next(model for model in client.status()["models"] if model["name"] == "openpi")["histograms"]
    text = report(given, rates, way, (one, crowd), batch["batch_rows"])
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(text)
    print(text)


def report(
    given: argparse.Namespace,
    rates: dict[tuple[str, int], list[Measured]],
    way: dict[str, list[float]],
    forward: tuple[float, float],
    batch_rows: list[int],
) -> str:
    """The tables, every row of every round."""
    theirs = "openpi's own server" if given.openpi else "a server built as openpi's own"
    doors = "" if tuple(given.doors) == DOORS else f" --doors {' '.join(given.doors)}"
    lines = [
        "# Robots that ask one policy server",
        "",
        f"{date.today()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the end; `python -m "
        f"benchmarks.robots{' --openpi CHECKOUT' if given.openpi else ''} --seconds {given.seconds:g} --rounds "
        f"{given.rounds}{doors}`, beside {theirs}. An observation is two images of 224 x 224 x 3 and a state; the "
        f"policy is {LARGE[2]} steps of {LARGE[1]} small layers, on one thread: on a CPU its forward costs its calls, "
        f"nearly whatever the batch. One row takes {forward[0]:.1f} ms of CPU, {CROWD} rows {forward[1]:.1f} ms: "
        f"{CROWD} clients could get {CROWD * forward[0] / forward[1]:.1f} times the answers of one, did all else "
        "cost nothing.",
        "",
        "| round | server | clients | answers/s | median ms | server's CPU ms an answer | clients' |",
        "|---|---|---|---|---|---|---|",
    ]
    for number in range(given.rounds):
        for (name, clients), measured in rates.items():
            rate, ms, server, client = measured[number]
            lines.append(f"| {number + 1} | {name} | {clients} | {rate:.1f} | {ms:.1f} | {server:.2f} | {client:.2f} |")

    def ratios(name: str) -> list[float]:
        return [many.rate / single.rate for single, many in zip(rates[name, 1], rates[name, CROWD], strict=True)]

    between = [
        mine.rate / other.rate for mine, other in zip(rates["jurybox", CROWD], rates["openpi", CROWD], strict=True)
    ]
    cpu = [
        single.server_cpu / many.server_cpu
        for single, many in zip(rates["jurybox", 1], rates["jurybox", CROWD], strict=True)
    ]
    best = [max(measured.rate for measured in rates["jurybox", clients]) for clients in (1, CROWD)]
    times, added = statistics.median(ratios("jurybox")), min(way["jurybox, websocket"]) - min(way["shared memory"])
    lines += [
        "",
        f"Batches by rows (1, 2 to 3, 4 to 7, 8): {', '.join(map(str, batch_rows[1:5]))}.",
        "",
        "What the way costs, with a policy that computes next to nothing (ms, the median of one client, by round):",
        "",
        "| way | ms | best, added |",
        "|---|---|---|",
    ]
    for name, rounds in way.items():
        shown = ", ".join(f"{ms:.2f}" for ms in rounds)
        lines.append(f"| {name} | {shown} | {min(rounds) - min(way['shared memory']):.2f} |")
    lines += [
        "",
        "| mark | wanted | by round | median, or best |",
        "|---|---|---|---|",
        f"| {CROWD} clients to 1, jurybox | at least {TIMES:g} | {_shown(ratios('jurybox'))} | {times:.1f} "
        f"(best rates: {best[1] / best[0]:.1f}){_met(times >= TIMES)} |",
        *(
            f"| {CROWD} clients to 1, {name} | at least {TIMES:g} | {_shown(ratios(name))} | "
            f"{(found := statistics.median(ratios(name))):.1f}{_met(found >= TIMES)} |"
            for name in dict.fromkeys(name for name, _ in rates)
            if name.startswith("jurybox, ")
        ),
        f"| {CROWD} clients to 1, openpi | | {_shown(ratios('openpi'))} | {statistics.median(ratios('openpi')):.1f} |",
        f"| {CROWD} clients, jurybox to openpi | | {_shown(between)} | {statistics.median(between):.1f} |",
        f"| server's CPU an answer, 1 client to {CROWD}, jurybox | | {_shown(cpu)} | {statistics.median(cpu):.1f} |",
        f"| ms that the port adds | at most {ADDED:g} | | {added:.2f}{_met(added <= ADDED)} |",
    ]
    return "\n".join(lines) + "\n"


def _shown(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _met(met: bool) -> str:
    return "" if met else ", NOT met"


if __name__ == "__main__":
    main()
