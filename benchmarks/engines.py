"""What further engines add on each way to a server: rows per second of clients in a closed loop.

``python -m benchmarks.engines [--engines 1,2,4] [--seconds 3] [--rounds 3]`` takes four minutes and prints a table.

The model sleeps for 5 ms and 1 ms for each row, as an engine does while its device computes, so engines do not share
cores, and the most is known: `CLIENTS` rows in equal batches on all engines, without a pause. The ways with one row per
request have eight clients: `juror` is eight threads that share a `Juror`, as in a reward server, and `juror, 64 rows`
a single thread whose calls have 64 rows, as in a trainer that scores a whole batch. Servers take turns in every round.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
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

import grpc
import numpy as np
import torch

from jurybox.client import Server, connect
from jurybox.client.rewards import Juror
from jurybox.protocol import TensorSpec
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from jurybox.server.models import ServedModel

CLIENTS, BATCH = 8, 64
FIXED, PER_ROW = 0.005, 0.001  # seconds
WIDTH = 8
ROW = np.ones((1, WIDTH), np.float32)
Ask = Callable[[], object]


class Sleeping(torch.nn.Module):
    """Takes as long as a batch on a device, but no core."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FIXED + PER_ROW * len(x))
        return x.sum(1)


def sleeping() -> ServedModel:
    """Create the served model."""
    return ServedModel(Sleeping(), {"x": TensorSpec("float32", (WIDTH,))}, {"y": TensorSpec("float32", ())})


class Served:
    """A server with some engines, for a ``with`` statement."""

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self._stack = ExitStack()

    def __enter__(self) -> Served:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.address = f"ipc://{folder}/socket"
        lines = [
            "[server]",
            f'address = "{self.address}"',
            'devices = ["cpu"]',
            f"replicas = {self.engines}",
            "threads = 1",
        ]
        lines += [f'{way} = "127.0.0.1:0"' for way in ("http", "grpc", "tcp")]
        lines += ["[models.m]", 'factory = "benchmarks.engines:sleeping"', f"max_batch = {BATCH}", "rows = 2048"]
        (folder / "server.toml").write_text("\n".join(lines))
        command = [sys.executable, "-m", "jurybox.server.cli", "serve", str(folder / "server.toml")]
        log = self._stack.enter_context((folder / "log").open("w"))
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(Path.cwd())})
        self._stack.callback(server.wait, 30)
        self._stack.callback(server.terminate)
        self.connection: Server = self._stack.enter_context(connect(self.address, timeout=60))
        until = time.monotonic() + 60
        while not all(one["state"] == "serving" for one in self.connection.status()["engines"]):
            if time.monotonic() > until:
                raise TimeoutError(f"not all of {self.engines} engines serve after 60 s")
            time.sleep(0.1)
        self.ports = {way: self.connection.status()["server"][way] for way in ("http", "grpc", "tcp")}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def local(served: Served, transport: str) -> Iterator[Ask]:
    with connect(served.address, transport=transport, timeout=60) as server:
        model = server.model("m", rows=1)
        yield lambda: model(ROW[0])


@contextlib.contextmanager
def tcp(served: Served) -> Iterator[Ask]:
    with connect("tcp://" + served.ports["tcp"], timeout=60) as server:
        model = server.model("m", rows=1)
        yield lambda: model(ROW[0])


@contextlib.contextmanager
def http_json(served: Served) -> Iterator[Ask]:
    connection = http.client.HTTPConnection(served.ports["http"], timeout=60)
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
def unary(served: Served) -> Iterator[Ask]:
    with grpc.insecure_channel(served.ports["grpc"], [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        request = pb.ModelInferRequest(model_name="m", raw_input_contents=[ROW.tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=ROW.shape)
        yield lambda: stub.ModelInfer(request, timeout=60)


def rate(
    ask_of: Callable[[], contextlib.AbstractContextManager[Ask]], clients: int, rows: int, seconds: float
) -> float:
    """Return rows per second; each client is a thread that asks again as soon as it is answered."""
    counts, stop, errors = [0] * clients, threading.Event(), list[BaseException]()
    ready = threading.Barrier(clients + 1)

    def work(number: int) -> None:
        try:
            with ask_of() as ask:
                ask()
                ready.wait(60)
                while not stop.is_set():
                    ask()
                    counts[number] += rows
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        ready.wait(60)
        time.sleep(0.5)
        before, began = sum(counts), time.monotonic()
        time.sleep(seconds)
        found = (sum(counts) - before) / (time.monotonic() - began)
    stop.set()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return found


def juror(served: Served, rows: int) -> Callable[[], contextlib.AbstractContextManager[Ask]]:
    """Return a source of clients that share a juror; each call scores so many rows."""
    shared = Juror("m", address=served.address)
    columns = {"x": [ROW[0]] * rows}
    return lambda: contextlib.nullcontext(lambda: shared.scores(columns, rows))


WAYS: dict[str, tuple[int, int, Callable[[Served], Callable[[], contextlib.AbstractContextManager[Ask]]]]] = {
    "shm": (CLIENTS, 1, lambda served: lambda: local(served, "shm")),
    "zmq": (CLIENTS, 1, lambda served: lambda: local(served, "zmq")),
    "tcp": (CLIENTS, 1, lambda served: lambda: tcp(served)),
    "http": (CLIENTS, 1, lambda served: lambda: http_json(served)),
    "grpc": (CLIENTS, 1, lambda served: lambda: unary(served)),
    "juror": (CLIENTS, 1, lambda served: juror(served, 1)),
    f"juror, {BATCH} rows": (1, BATCH, lambda served: juror(served, BATCH)),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="1,2,4", help="numbers of engines")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    engines = [int(number) for number in options.engines.split(",")]
    rates: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(Served(number)) for number in engines]
        for _ in range(options.rounds):
            for way, (clients, rows, ask_of) in WAYS.items():
                for served in servers:
                    found = rate(ask_of(served), clients, rows, options.seconds)
                    rates.setdefault((way, served.engines), []).append(found)
    most = {(n, number): n / (FIXED + PER_ROW * n / number) for n in (CLIENTS, BATCH) for number in engines}
    print(
        f"| rows/s, median of {options.rounds} (of the most) | "
        + " | ".join(f"{n} engine{'s' if n > 1 else ''}" for n in engines)
        + " |"
    )
    print("| --- |" + " ---: |" * len(engines))
    for way, (clients, rows, _) in WAYS.items():
        found_by = {number: statistics.median(rates[way, number]) for number in engines}
        cells = [
            f"{found_by[number]:,.0f} ({found_by[number] / most[clients * rows, number]:.2f})" for number in engines
        ]
        print(f"| {way} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
