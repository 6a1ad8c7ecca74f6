"""What further engines add on each way to a server: rows per second of clients in a closed loop.

``python -m benchmarks.engines [--engines 1,2,4] [--seconds 3] [--rounds 3]`` takes six minutes and prints a table;
``python -m benchmarks.engines --network [--ways tcp] [--clients 1 4 16]`` the same of a small network.

The model sleeps for 5 ms and 1 ms for each row, as an engine does while its device computes, so engines do not share
cores, and the most is known: `CLIENTS` rows in equal batches on all engines, without a pause. The ways with one row per
request have eight clients, each a process; `juror` is eight threads that share a `Juror`, as in a reward server, and
`juror, 64 rows` a single thread whose calls have 64 rows, as in a trainer that scores a whole batch. Servers take turns
in every round. The small network (two hidden layers of 64 units) needs the cores, so the most is not known, and what is
told is the median of the rounds' ratios to the first number of engines, with the lowest and the highest; and the CPU
time of a row, of all processes, which says the same on a machine that others use, too: on busy cores the rate is one
over it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import numpy as np

from benchmarks.serving.machine import between, read
from jurybox.client import connect
from jurybox.client.rewards import Juror
from jurybox.protocol import TensorSpec
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

if TYPE_CHECKING:
    from jurybox.server.models import ServedModel

CLIENTS, BATCH = 8, 64
FIXED, PER_ROW = 0.005, 0.001  # seconds
WIDTH = 8
ROW = np.ones((1, WIDTH), np.float32)
START = 60.0  # seconds for a server, and for all clients
Ask = Callable[[], object]


def sleeping() -> ServedModel:
    """Create a model that takes as long as a batch on a device, but no core."""
    import torch  # the clients need none

    from jurybox.server.models import ServedModel

    class Sleeping(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(FIXED + PER_ROW * len(x))
            return x.sum(1)

    return ServedModel(Sleeping(), {"x": TensorSpec("float32", (WIDTH,))}, {"y": TensorSpec("float32", ())})


def network() -> ServedModel:
    """Create a small network."""
    from torch import nn

    from jurybox.server.models import ServedModel

    layers = nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1), nn.Flatten(0)
    return ServedModel(nn.Sequential(*layers), {"x": TensorSpec("float32", (WIDTH,))}, {"y": TensorSpec("float32", ())})


class Place(NamedTuple):
    """Where a server listens."""

    address: str
    http: str
    grpc: str
    tcp: str


class Served:
    """A server with some engines, for a ``with`` statement."""

    def __init__(self, engines: int, factory: str = "sleeping") -> None:
        self.engines = engines
        self._factory = f"benchmarks.engines:{factory}"
        self._stack = ExitStack()

    def __enter__(self) -> Served:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"ipc://{folder}/socket"
        lines = [
            "[server]",
            f'address = "{address}"',
            'devices = ["cpu"]',
            f"replicas = {self.engines}",
            "threads = 1",
        ]
        lines += [f'{way} = "127.0.0.1:0"' for way in ("http", "grpc", "tcp")]
        lines += ["[models.m]", f'factory = "{self._factory}"', f"max_batch = {BATCH}", "rows = 2048"]
        (folder / "server.toml").write_text("\n".join(lines))
        command = [sys.executable, "-m", "jurybox.server.cli", "serve", str(folder / "server.toml")]
        log = self._stack.enter_context((folder / "log").open("w"))
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(Path.cwd())})
        self._stack.callback(server.wait, 30)
        self._stack.callback(server.terminate)
        until = time.monotonic() + START
        with connect(address, timeout=START) as server:
            while any(one["state"] != "serving" for one in server.status()["engines"]):
                if time.monotonic() > until:
                    raise TimeoutError(f"not all of {self.engines} engines serve after {START:.0f} s")
                time.sleep(0.1)
            status = server.status()
        self.place = Place(address, *(status["server"][way] for way in ("http", "grpc", "tcp")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def native(address: str, **options: Any) -> Iterator[Ask]:
    with connect(address, timeout=START, **options) as server:
        model = server.model("m", rows=1)
        yield lambda: model(ROW[0])


@contextlib.contextmanager
def http_json(address: str) -> Iterator[Ask]:
    connection = http.client.HTTPConnection(address, timeout=START)
    tensor = {"name": "x", "shape": list(ROW.shape), "datatype": "FP32", "data": ROW.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]})

    def ask() -> None:
        connection.request("POST", "/v2/models/m/infer", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read().decode())
        answer.read()

    yield ask
    connection.close()


@contextlib.contextmanager
def unary(address: str) -> Iterator[Ask]:
    with grpc.insecure_channel(address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        request = pb.ModelInferRequest(model_name="m", raw_input_contents=[ROW.tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=ROW.shape)
        yield lambda: stub.ModelInfer(request, timeout=START)


WAYS: dict[str, Callable[[Place], contextlib.AbstractContextManager[Ask]]] = {
    "shm": lambda place: native(place.address, transport="shm"),
    "zmq": lambda place: native(place.address, transport="zmq"),
    "tcp": lambda place: native("tcp://" + place.tcp),
    "http": lambda place: http_json(place.http),
    "grpc": lambda place: unary(place.grpc),
}


def work(way: str, place: Place, number: int, counts: Any, ready: Any, stop: Any) -> None:
    """Ask in a closed loop, as a process of its own."""
    with WAYS[way](place) as ask:
        loop(ask, 1, number, counts, ready, stop)


def loop(ask: Ask, rows: int, number: int, counts: Any, ready: Any, stop: Any) -> None:
    """Ask until `stop`, and count the rows from `ready` on. After an error there is no `ready`."""
    try:
        ask()
        ready.wait(START)
        while not stop.is_set():
            ask()
            counts[number] += rows
    except BaseException:
        ready.abort()
        raise


def measured(clients: list[Any], counts: Any, ready: Any, stop: Any, seconds: float) -> tuple[float, float]:
    """Start the clients; return their rows per second, and the CPU time of a row in us, also of the servers.

    Raises:
        BrokenBarrierError: a client failed.
    """
    for client in clients:
        client.start()
    try:
        ready.wait(START)
        time.sleep(0.5)
        before, first = sum(counts), read()
        time.sleep(seconds)
        rows, last = sum(counts) - before, read()
        used = between(first, last, set())
        return float(rows / used.seconds), 1e6 * used.server / max(1, rows)
    finally:
        stop.set()
        for client in clients:
            client.join(START)


def rate(way: str, place: Place, seconds: float, n: int = CLIENTS) -> tuple[float, float]:
    """Return the rows per second of n processes, and the CPU time of a row."""
    spawn = multiprocessing.get_context("spawn")
    counts, ready, stop = spawn.Array("Q", n), spawn.Barrier(n + 1), spawn.Event()
    clients = [spawn.Process(target=work, args=(way, place, i, counts, ready, stop)) for i in range(n)]
    return measured(clients, counts, ready, stop, seconds)


def juror_rate(threads: int, rows: int, place: Place, seconds: float) -> float:
    """Return the rows per second of threads that share a juror; each call has `rows` rows."""
    juror, columns = Juror("m", address=place.address), {"x": [ROW[0]] * rows}
    counts, ready, stop = [0] * threads, threading.Barrier(threads + 1), threading.Event()

    def ask() -> None:
        scores = juror.scores(columns, rows)
        if any(isinstance(score, str) for score in scores):
            raise RuntimeError(f"a score is missing: {scores}")

    clients = [threading.Thread(target=loop, args=(ask, rows, i, counts, ready, stop)) for i in range(threads)]
    try:
        return measured(clients, counts, ready, stop, seconds)[0]
    finally:
        juror.close()


def of_a_network(engines: list[int], ways: list[str], clients: list[int], seconds: float, rounds: int) -> None:
    """Print the table of the small network."""
    with ExitStack() as stack:
        servers = [stack.enter_context(Served(number, "network")) for number in engines]
        titles = [f"{number} engine{'s' if number > 1 else ''}" for number in engines]
        print(f"| medians of {rounds} | clients | " + " | ".join(titles) + " |\n" + "| --- " * (len(engines) + 2) + "|")
        for way, n in itertools.product(ways, clients):
            found = [[rate(way, served.place, seconds, n) for served in servers] for _ in range(rounds)]
            for what, at in ((f"{way}, rows/s", 0), (f"{way}, CPU us a row", 1)):
                cells = [f"{statistics.median(each[at] for each in side):,.0f}" for side in zip(*found, strict=True)]
                for number in range(1, len(engines)):
                    ratios = sorted(each[number][at] / each[0][at] for each in found)
                    cells[number] += f" ({statistics.median(ratios):.2f}; {ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"| {what} | {n} | " + " | ".join(cells) + " |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="1,2,4", help="numbers of engines")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--network", action="store_true", help="serve a small network, which needs the cores")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["tcp"], help="to the network")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16], help="of the network")
    options = parser.parse_args(argv)
    engines = [int(number) for number in options.engines.split(",")]
    if options.network:
        of_a_network(engines, options.ways, options.clients, options.seconds, options.rounds)
        return
    # The rows in flight, and what measures them.
    rows: dict[str, tuple[int, Callable[[Place], float]]] = {
        way: (CLIENTS, lambda place, way=way: rate(way, place, options.seconds)[0])
        for way in WAYS  # type: ignore[misc]
    }
    rows["juror"] = CLIENTS, lambda place: juror_rate(CLIENTS, 1, place, options.seconds)
    rows[f"juror, {BATCH} rows"] = BATCH, lambda place: juror_rate(1, BATCH, place, options.seconds)
    rates: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(Served(number)) for number in engines]
        for _ in range(options.rounds):
            for name, (_, measure) in rows.items():
                for served in servers:
                    rates.setdefault((name, served.engines), []).append(measure(served.place))
    titles = [f"{number} engine{'s' if number > 1 else ''}" for number in engines]
    print(f"| rows/s, median of {options.rounds} (of the most) | " + " | ".join(titles) + " |")
    print("| --- |" + " ---: |" * len(engines))
    for name, (n, _) in rows.items():
        cells = []
        for number in engines:
            found, most = statistics.median(rates[name, number]), n / (FIXED + PER_ROW * n / number)
            cells.append(f"{found:,.0f} ({found / most:.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
