"""What a change costs on every way from a client to a model: an old environment against this one.

    python -m benchmarks.serving.ways --against /path/to/old/.venv [--only WAY ...] [--clients 1 4 16]

Both servers run at once, and their clients take turns: a window of a fixed number of requests to one, then to the
other, in changing order. What is compared is CPU time for a request, of the server's processes and of the clients, from
the scheduler's counters: on a machine that others use, too, rates say little, and CPU time nearly the same as ever.
The rate is printed beside it. A ratio is this environment's over the old one's, the median over the windows, with the
middle half of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.serving.machine import descendants, processes
from benchmarks.serving.ways_client import WAYS

ROOT = Path(__file__).resolve().parents[2]
CLIENT = Path(__file__).with_name("ways_client.py")
_START = 120.0  # seconds
_WARM = 64  # requests before the first window: what is asked often takes a faster way
_CONFIG = """
[server]
address = "ipc://{folder}/engine"
http = "127.0.0.1:0"
grpc = "127.0.0.1:0"
tcp = "127.0.0.1:0"
devices = "cpu"

[models.vector]
factory = "benchmarks.serving.ways_models:vector"

[models.picture]
factory = "benchmarks.serving.ways_models:picture"
max_batch = 8

[models.length]
factory = "benchmarks.serving.ways_models:length"

[dialects.openrlhf]
model = "length"
inputs = {{text = "query"}}
"""


class Side:
    """A server of one environment, and its clients."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._python = str(python)
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", "JURYBOX_SPIN_US": "0"}
        self._environment.pop("PYTHONPATH", None)
        config = folder / "server.toml"
        config.write_text(_CONFIG.format(folder=folder))
        self._log = (folder / "log").open("w+")
        self._address = f"ipc://{folder}/engine"
        self._server = subprocess.Popen(
            [self._python, "-m", "jurybox.server.cli", "serve", str(config)],
            cwd=ROOT,
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
        )
        self._addresses: dict[str, str] = {}
        self._clients: list[subprocess.Popen[str]] = []

    def ready(self) -> None:
        """Wait until the server serves. Raises RuntimeError with its log."""
        until = time.monotonic() + _START
        command = [self._python, "-m", "jurybox.server.cli", "status", "--json", "--address", self._address]
        while self._server.poll() is None and time.monotonic() < until:
            done = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                at = json.loads(done.stdout)["server"]
                if at["state"] == "serving" and at["http"] and at["grpc"] and at["tcp"]:
                    self._addresses = {
                        "ipc": self._address, "http": at["http"], "tcp": f"tcp://{at['tcp']}",
                        "grpc": f"grpc://{at['grpc']}",
                    }  # fmt: skip
                    return
            time.sleep(0.5)
        self._log.seek(0)
        raise RuntimeError(f"the server of {self._python} did not start:\n{self._log.read()[-4000:]}")

    def begin(self, way: str, clients: int) -> None:
        """Start the clients of a way."""
        arguments = [self._python, "-P", str(CLIENT), way, json.dumps(self._addresses)]
        self._clients = [
            subprocess.Popen(
                arguments, cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(clients)
        ]

    def window(self, requests: int) -> tuple[float, float, float]:
        """Let each client send so many requests; return us for one: the server's CPU time, the clients', and time."""
        before, began = self._cpu(), time.monotonic_ns()
        for client in self._clients:
            _to(client.stdin, f"{requests}\n")
        told = [_line(client) for client in self._clients]
        passed, server = time.monotonic_ns() - began, self._cpu() - before
        sent = 1000 * requests * len(self._clients)
        return server / sent, sum(cpu for cpu, _ in told) / sent, passed / sent

    def finish(self) -> None:
        """End the clients."""
        for client in self._clients:
            assert client.stdin is not None
            client.stdin.close()
        for client in self._clients:
            client.wait(30)
        self._clients = []

    def end(self) -> None:
        """End everything."""
        for client in self._clients:
            client.kill()
            client.wait()
        self._server.terminate()
        try:
            self._server.wait(30)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._log.close()

    def _cpu(self) -> int:
        """Return the CPU time of the server's processes so far, in ns."""
        spent = 0
        for pid in (self._server.pid, *descendants(processes(), self._server.pid)):
            for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                try:
                    spent += int(task.read_text().split()[0])
                except OSError:  # it ended just now
                    continue
        return spent


def _to(stream: IO[str] | None, text: str) -> None:
    assert stream is not None
    stream.write(text)
    stream.flush()


def _line(client: subprocess.Popen[str]) -> tuple[int, int]:
    assert client.stdout is not None
    if not (line := client.stdout.readline()):
        raise RuntimeError("a client has ended; its error is above")
    cpu, passed = map(int, line.split())
    return cpu, passed


@dataclass(frozen=True)
class Price:
    """What a request costs on a way.

    Attributes:
        server, client: CPU time of a request, old and new, us.
        ratios: of the CPU time of both together, new over old, of each pair of windows.
        rates: of the rate, new over old, of each pair.
    """

    server: tuple[float, float]
    client: tuple[float, float]
    ratios: list[float]
    rates: list[float]

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)

    @property
    def middle(self) -> tuple[float, float]:
        """The middle half of the ratios."""
        lower, _, upper = statistics.quantiles(self.ratios, n=4)
        return lower, upper


def measured(old: Side, new: Side, way: str, clients: int, windows: int, requests: int) -> Price:
    """Measure one way, with so many clients of each side."""
    sides = (old, new)
    found: tuple[list[tuple[float, float, float]], ...] = ([], [])
    try:
        for side in sides:
            side.begin(way, clients)
        for side in sides:
            side.window(_WARM)
        for number in range(windows):
            for index in (0, 1) if number % 2 else (1, 0):
                found[index].append(sides[index].window(requests))
    finally:
        for side in sides:
            side.finish()
    pairs = list(zip(*found, strict=True))
    medians = [[statistics.median(one[part] for one in windows) for windows in found] for part in (0, 1)]
    return Price(
        (medians[0][0], medians[0][1]),
        (medians[1][0], medians[1][1]),
        [(after[0] + after[1]) / (before[0] + before[1]) for before, after in pairs],
        [before[2] / after[2] for before, after in pairs],
    )


def row_of(way: str, clients: int, price: Price) -> str:
    """Return the line of a table for a way."""
    spent = " | ".join(f"{old:.0f}, {new:.0f}" for old, new in (price.server, price.client))
    ratio = "{:.3f} ({:.3f} to {:.3f})".format(price.ratio, *price.middle)
    return f"| {way} | {clients} | {spent} | {ratio} | {statistics.median(price.rates):.2f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status is 1 if a way costs more than `--most`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="the .venv of the old environment")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--windows", type=int, default=24, help="of each side")
    parser.add_argument("--requests", type=int, default=200, help="of a window, of all clients together")
    parser.add_argument("--most", type=float, default=1.05, help="ratio of CPU time above which the exit status is 1")
    asked = parser.parse_args(arguments)
    dear: list[str] = []
    with ExitStack() as stack:
        sides: list[Any] = []
        for python in (asked.against / "bin" / "python", Path(sys.executable)):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jways-"))
            sides.append(Side(python, Path(folder)))
            stack.callback(sides[-1].end)
        for side in sides:
            side.ready()
        print("| way | clients | server's CPU, us (old, new) | client's | CPU new over old | rate |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for way in asked.only:
            for clients in asked.clients:
                price = measured(*sides, way, clients, asked.windows, -(-asked.requests // clients))
                print(row_of(way, clients, price), flush=True)
                if price.ratio > asked.most:
                    dear.append(f"{way} with {clients}")
    if dear:
        print(f"dearer than {asked.most:g} times: {', '.join(dear)}")
    return 1 if dear else 0


if __name__ == "__main__":
    sys.exit(main())
