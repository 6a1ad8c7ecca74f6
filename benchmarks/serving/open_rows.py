"""What open rows cost: each kind beside the same forward with rows of a fixed shape, in one interleaved run.

    python -m benchmarks.serving.open_rows --seconds 2 --windows 5

One server, one engine with one thread; clients are processes in closed loop through the shm transport. Windows of each
pair follow one another in turn; the ratio is of the medians. Beside it stands what a row costs the engine's process and
its client's, in microseconds of CPU time.

Beside the sessions stands Triton's sequence batcher with the same LSTM in its Python backend, where
`python -m benchmarks.serving.peers.install triton` has put it: a request there is one row of one sequence, so a client
sends one for each of its sessions over a stream and waits for all answers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.contenders.triton import start_server
from benchmarks.serving.peers.install import DEFAULT_DIR, missing, python_of
from jurybox.client import connect

TEXT = 400
SESSIONS = 8  # of a client


def _asker(model: Any, kind: str, open_: bool) -> Callable[[], Any]:
    rng = np.random.default_rng()
    if kind == "text":
        if not open_:
            row = rng.integers(97, 122, TEXT).astype(np.uint8)
            return lambda: model(row)
        lines = [rng.integers(97, 122, n).astype(np.uint8).tobytes() for n in rng.integers(20, TEXT + 1, 64)]
        turn = iter(range(1 << 62))
        return lambda: model(lines[next(turn) % len(lines)])
    if kind == "memory":
        rows = rng.standard_normal((SESSIONS, 52)).astype(np.float32)
        asked = model.sessions(SESSIONS) if open_ else model
        return lambda: asked.infer(rows)
    row = (
        rng.standard_normal(52).astype(np.float32)
        if kind in ("vector", "deterministic")
        else rng.integers(0, 256, (384, 384, 3)).astype(np.uint8)
    )
    return lambda: model(row)


def _client(address: str, name: str, kind: str, open_: bool, orders: Any, told: Any) -> None:
    with connect(address, timeout=60) as server:
        _follow(_asker(server.model(name, rows=8), kind, open_), orders, told)


def _follow(ask: Callable[[], Any], orders: Any, told: Any) -> None:
    ask()
    told.put((0, 0.0))
    while (order := orders.get()) is not None:
        until, count, before = order, 0, time.process_time()
        while time.monotonic() < until:
            ask()
            count += 1
        told.put((count, time.process_time() - before))


def _triton_client(port: int, first: int, orders: Any, told: Any) -> None:
    from tritonclient import grpc

    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    rows = np.random.default_rng().standard_normal((SESSIONS, 1, 52)).astype(np.float32)
    inputs = []
    for row in rows:
        inputs.append(grpc.InferInput("x", [1, 52], "FP32"))
        inputs[-1].set_data_from_numpy(row)
    begun = False

    def ask(*, end: bool = False) -> None:
        nonlocal begun
        for i in range(SESSIONS):
            of = {"sequence_id": first + i, "sequence_start": not begun, "sequence_end": end}
            client.async_stream_infer("served", [inputs[i]], **of)
        begun = True
        for _ in range(SESSIONS):
            result, error = answers.get(timeout=20)
            if error is not None:
                raise error
            assert result.as_numpy("y").shape == (1, 145)

    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        _follow(ask, orders, told)
        ask(end=True)  # a server that is stopped waits for sequences that are open
        client.stop_stream()


_TRITON = """
backend: "python"
max_batch_size: 64
input [ { name: "x" data_type: TYPE_FP32 dims: [52] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [145] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  oldest { max_candidate_sequences: 1024 max_queue_delay_microseconds: 0 }
}
parameters: { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: { string_value: "yes" } }
"""


def _triton(peers_dir: Path, folder: Path) -> tuple[subprocess.Popen[bytes], int] | str:
    """The server's process and port, or why there is none."""
    if why := missing(peers_dir, "triton"):
        return why
    if importlib.util.find_spec("tritonclient") is None:
        return "tritonclient is not installed here"
    python = python_of(peers_dir, "triton")
    package = next((python.parent.parent / "lib").glob("python3*/site-packages/pytriton"), None)
    if package is None:
        return f"no pytriton under {python.parent.parent}"
    return start_server(folder, package, python, Path(__file__).parent / "peers" / "triton_sequences.py", _TRITON, {})


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


PAIRS = {  # kind: clients, rows a request, goal
    "vector": (16, 0.95),
    "image": (4, 0.95),
    "text": (16, 0.8),
    "memory": (16, 0.9),
    "deterministic": (16, 1 / 1.3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--only", default=",".join(PAIRS))
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    given = parser.parse_args()
    kinds = given.only.split(",")
    models: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        factory = "vector" if kind == "deterministic" else kind
        common = {"factory": f"benchmarks.serving.open_models:{factory}", "max_batch": 16 if kind == "image" else 64}
        models[f"{kind}-fixed"] = common | {"rows": 64 if kind == "image" else 512}
        models[f"{kind}-open"] = models[f"{kind}-fixed"] | (
            {"deterministic": True} if kind == "deterministic" else {"args": {"open_": True}}
        )
    from jurybox.training.runtime.local_server import LocalServer  # and with it torch, which clients need not import

    spawn = multiprocessing.get_context("spawn")
    table = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        server = LocalServer(models, Path(folder) / "log", http=False)
        stack.callback(server.stop)
        server.start()
        server.wait(120)
        for kind in kinds:
            clients, goal = PAIRS[kind]
            rows_each = SESSIONS if kind == "memory" else 1
            sides = {}
            triton = _triton(given.peers_dir, Path(folder) / "triton") if kind == "memory" else ""
            if isinstance(triton, str) and triton:
                print(json.dumps({"kind": kind, "triton": "skipped", "why": triton}), flush=True)
            elif not isinstance(triton, str):
                stack.callback(triton[0].wait, 20)
                stack.callback(triton[0].terminate)
            for side in ("fixed", "open") if isinstance(triton, str) else ("fixed", "open", "triton"):
                told, orders = spawn.Queue(), [spawn.Queue() for _ in range(clients)]
                open_ = side == "open" and kind != "deterministic"
                started = [
                    spawn.Process(target=_triton_client, args=(triton[1], 1 + SESSIONS * i, order, told))
                    if side == "triton" and not isinstance(triton, str)
                    else spawn.Process(
                        target=_client, args=(server.address, f"{kind}-{side}", kind, open_, order, told)
                    )
                    for i, order in enumerate(orders)
                ]
                for process in started:
                    process.start()
                for _ in started:
                    told.get(timeout=120)
                sides[side] = (told, orders, started, [])
            with server.connect() as client:
                engine = client.status()["engines"][0]["pid"]
            spent: dict[str, list[float]] = {}
            for _ in range(given.windows):
                for side, (told, orders, _, rates) in sides.items():
                    until, before = time.monotonic() + given.seconds, _cpu_seconds(engine)
                    for order in orders:
                        order.put(until)
                    came = [told.get(timeout=60) for _ in orders]
                    asked = sum(count for count, _ in came)
                    rates.append(asked / given.seconds)
                    rows = asked * rows_each / 1e6
                    spent.setdefault(f"client_us_{side}", []).append(sum(cpu for _, cpu in came) / rows)
                    if side != "triton":
                        spent.setdefault(f"engine_us_{side}", []).append((_cpu_seconds(engine) - before) / rows)
            for _, orders, started, _ in sides.values():
                for order in orders:
                    order.put(None)
                for process in started:
                    process.join(30)
            medians = {side: statistics.median(rates) for side, (_, _, _, rates) in sides.items()}
            fixed, opened = medians["fixed"], medians["open"]
            row = {"kind": kind, "clients": clients} | {side: round(rate) for side, rate in medians.items()}
            row |= {what: round(statistics.median(values), 2) for what, values in spent.items()}
            row |= {"ratio": round(opened / fixed, 3), "goal": round(goal, 2), "met": opened / fixed >= goal}
            table.append(row)
            print(json.dumps(row), flush=True)
    return 0 if all(row["met"] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
