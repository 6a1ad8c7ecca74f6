"""Is a crowd's rate the server's, or that of hundreds of interpreters? The same in C++, or as one client's rows.

    python -m benchmarks.serving.crowd [--clients 1,4,16,64,256] [--seconds 2] [--rounds 3]

The small network. "C++": so many processes without Python, on lanes that this process leases (crowd.cpp, built here
with the transport's own header). "one client, rows": this process asks for as many rows with one request. Windows take
turns; the upper quartile of the rounds is printed, since other programs can only slow a window down.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jurybox.client import connect

_START = 60.0
_ROOT = Path(__file__).parents[2]


def build(folder: Path) -> Path:
    """The C++ clients' program."""
    program = folder / "crowd"
    source = Path(__file__).with_suffix(".cpp")
    command = ["c++", "-std=c++20", "-O3", "-pthread", f"-I{_ROOT / 'native'}", "-o", str(program), str(source)]
    subprocess.run(command, check=True)
    return program


class Lanes:
    """Leased lanes of one row, and what the program has to know of them."""

    def __init__(self, address: str, n: int) -> None:
        self._server = connect(address, transport="shm", timeout=_START)
        models: list[Any] = [self._server.model("served", rows=1) for _ in range(n)]
        self._models = models
        models[0](np.zeros(52, np.float32))  # attaches to the rings
        lane = models[0].requests.lane
        (rings,) = lane._transport._rings.values()
        arena = lane._arena.segment
        base = np.frombuffer(arena.buffer, np.uint8).ctypes.data
        inputs, outputs = lane.columns.inputs["observation"], lane.columns.outputs.values()
        self.fds = (rings.memory.segment.fd, rings.memory.pipe, arena.fd)
        self._where = [
            *map(str, self.fds),
            str(rings.incarnation),
            str(inputs.ctypes.data - base),
            str(inputs[0].nbytes),
            ",".join(f"{array.ctypes.data - base},{array[0].nbytes}" for array in outputs),
        ]
        self._lanes = [f"{m._lane.leased[0]}:{m._lane.leased[1]}:{m._lane._first}" for m in models]

    def ask(self, program: Path, clients: int, seconds: float) -> tuple[float, float]:
        """Requests/s, and us of the clients' CPU a request."""
        command = [str(program), str(seconds), *self._where, *self._lanes[:clients]]
        done = subprocess.run(command, pass_fds=self.fds, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        return found["answered"] / seconds, found["cpu"] / found["answered"] * 1e6 * seconds / (seconds + 0.3)

    def close(self) -> None:
        self._server.close()


def in_rows(model: Any, rows: int, seconds: float) -> float:
    """Rows/s of one client that asks for so many at once."""
    x = np.zeros((rows, 52), np.float32)
    done, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < seconds:
        model.infer(x)
        done += rows
    return done / (now - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,4,16,64,256")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    counts = [int(n) for n in given.clients.split(",")]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="jurybox-crowd-") as name:
        folder = Path(name)
        program, address = build(folder), f"ipc://{folder}/engine"
        config = folder / "server.toml"
        config.write_text(
            f'[server]\naddress = "{address}"\nhttp = ""\ngrpc = ""\ndevices = ["cpu"]\nthreads = 1\n'
            '[models.served]\nfactory = "benchmarks.serving.factories:model"\nmax_batch = 256\nrows = 1024\n'
            'args = {case = "vector"}\n'
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "jurybox.server.cli", "serve", str(config)]
        server = subprocess.Popen(command, cwd=_ROOT, env=environment)
        try:
            lanes = Lanes(address, max(counts))
            alone = connect(address, transport="shm", timeout=_START)
            model = alone.model("served", rows=max(counts))
            rates: dict[int, list[tuple[float, float, float]]] = {n: [] for n in counts}
            for _ in range(given.rounds):
                for n in counts:
                    rates[n].append((*lanes.ask(program, n, given.seconds), in_rows(model, n, given.seconds)))
            print("| clients, or rows | C++ clients, requests/s | their CPU, us a request | one client, rows/s |")
            print("| ---: | ---: | ---: | ---: |")
            for n, found in rates.items():
                at = len(found) // 4
                rate, rows = (sorted((each[i] for each in found), reverse=True)[at] for i in (0, 2))
                print(f"| {n} | {rate:,.0f} | {sorted(each[1] for each in found)[at]:.1f} | {rows:,.0f} |")
            alone.close()
            lanes.close()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(20.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
