"""Robots that ask one policy server: rate of 1 and 8 clients, and what a websocket adds to an observation.

``python -m benchmarks.robots [--seconds N] [--rounds N]``. Observations are two images of 224 x 224 x 3 and a state, as
openpi's client sends them. Jurybox and a server built as openpi's own take turns; every figure is the best round's:
on a busy machine the others measure the neighbours. Results land in benchmarks/robots/results.
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
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy as np
from websockets.sync.client import ClientConnection, connect

from benchmarks.robots.policies import DIMENSION, HORIZON, SIDE
from jurybox.client import connect as connect_jurybox
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb

LARGE, SMALL = (64, 100, 20), (16, 1, 1)  # width, layers, steps of denoising
RESULTS = Path(__file__).parent / "results" / "robots.md"


def observation() -> dict[str, object]:
    dice = np.random.default_rng(0)
    images = {name: dice.integers(0, 256, (SIDE, SIDE, 3), np.uint8) for name in ("top", "wrist")}
    return {"images": images, "state": dice.normal(size=DIMENSION)}


@contextlib.contextmanager
def jurybox(large: tuple[int, int, int], small: tuple[int, int, int]) -> Iterator[tuple[str, dict[str, str]]]:
    """A server with both policies: its address, and where robots reach each."""
    with tempfile.TemporaryDirectory() as folder:
        lines = ["[server]", f'address = "ipc://{folder}/engine"', 'http = ""', 'grpc = ""', 'devices = ["cpu"]']
        for name, (width, layers, steps) in {"large": large, "small": small}.items():
            lines += [f"[models.{name}]", 'factory = "benchmarks.robots.policies:policy"', "max_batch = 8"]
            lines += [f"args = {{width = {width}, layers = {layers}, steps = {steps}}}"]
            lines += [f"[robots.{name}]", f'model = "{name}"', 'listen = "127.0.0.1:0"']
        file = Path(folder) / "server.toml"
        file.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "jurybox.server.cli", "serve", str(file)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            address = f"ipc://{folder}/engine"
            with connect_jurybox(address, timeout=100) as client:
                client.model("large", rows=1, timeout=100).close()
                robots = client.status()["server"]["robots"]
                while any(where.endswith(":0") for where in robots.values()):
                    time.sleep(0.05)
                    robots = client.status()["server"]["robots"]
            yield address, robots
        finally:
            server.terminate()
            server.wait(30)


@contextlib.contextmanager
def upstream(size: tuple[int, int, int]) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.robots.upstream", *map(str, size)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.terminate()
        server.wait(30)


def ask(connection: ClientConnection, request: bytes) -> None:
    connection.send(request)
    actions = unpackb(connection.recv(60))["actions"]
    assert actions.shape == (HORIZON, DIMENSION)


@contextlib.contextmanager
def opened(where: str) -> Iterator[ClientConnection]:
    with connect(f"ws://{where}", compression=None, max_size=None, open_timeout=60) as connection:
        connection.recv(60)
        yield connection


def asked(where: str, clients: int, seconds: float) -> tuple[float, float]:
    """Answers a second of so many clients together, and the median latency in ms."""
    request = packb(observation())
    times: list[list[float]] = [[] for _ in range(clients)]
    ready, over = threading.Barrier(clients + 1), threading.Event()

    def robot(mine: list[float]) -> None:
        with opened(where) as connection:
            for _ in range(3):
                ask(connection, request)
            ready.wait(60)
            while not over.is_set():
                began = time.perf_counter()
                ask(connection, request)
                mine.append(time.perf_counter() - began)

    threads = [threading.Thread(target=robot, args=(mine,)) for mine in times]
    for thread in threads:
        thread.start()
    ready.wait(60)
    time.sleep(seconds)
    over.set()
    for thread in threads:
        thread.join(60)
    together = [value for mine in times for value in mine]
    return sum(len(mine) / sum(mine) for mine in times if mine), 1e3 * statistics.median(together)


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
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    small: dict[str, list[float]] = {"shared memory": [], "websocket": [], "upstream": []}
    with jurybox(LARGE, SMALL) as (address, robots), upstream(LARGE) as peer, upstream(SMALL) as small_peer:
        for _ in range(given.rounds):
            for name, where in (("jurybox", robots["large"]), ("upstream", peer)):
                for clients in (1, 8):
                    rates.setdefault((name, clients), []).append(asked(where, clients, given.seconds))
            small["shared memory"].append(inside(address, given.seconds / 2))
            small["websocket"].append(asked(robots["small"], 1, given.seconds / 2)[1])
            small["upstream"].append(asked(small_peer, 1, given.seconds / 2)[1])
    best = {key: (max(rate for rate, _ in rounds), min(ms for _, ms in rounds)) for key, rounds in rates.items()}
    lines = [
        "# Robots that ask one policy server",
        "",
        f"{date.today()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the end; "
        f"`python -m benchmarks.robots --seconds {given.seconds:g} --rounds {given.rounds}`, the best round. An "
        "observation "
        "is two images of 224 x 224 x 3 and a state; the policy is 20 steps "
        "of 100 small layers, on one thread: on a CPU its forward costs its calls, whatever the batch.",
        "",
        "| server | clients | answers/s | median ms | 8 clients to 1 |",
        "|---|---|---|---|---|",
    ]
    for (name, clients), (rate, ms) in best.items():
        ratio = f"{best[name, 8][0] / best[name, 1][0]:.1f}" if clients == 8 else ""
        lines.append(f"| {name} | {clients} | {rate:.1f} | {ms:.1f} | {ratio} |")
    way = {name: min(times) for name, times in small.items()}
    lines += [
        "",
        "Eight clients in closed loop make two groups of four: while one is computed the other comes back. So they get",
        "what batches of four give; one of eight would leave the clients' core idle meanwhile.",
        "",
        "What the way costs, with a policy that computes next to nothing (ms, median of one client):",
        "",
        "| way | ms | added |",
        "|---|---|---|",
        *(f"| {name} | {ms:.2f} | {ms - way['shared memory']:.2f} |" for name, ms in way.items()),
    ]
    text = "\n".join(lines) + "\n"
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
