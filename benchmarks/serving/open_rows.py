"""What open rows cost: each kind beside the same forward with rows of a fixed shape, in one interleaved run.

    python -m benchmarks.serving.open_rows --seconds 2 --windows 5

One server, one engine with one thread; clients are processes in closed loop through the shm transport. Windows of each
pair follow one another in turn; the ratio is of the medians. Beside it stands what a row costs the engine's process, in
microseconds of CPU time, which tells apart what the engine and what its clients spend.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jurybox.client import connect

TEXT, SESSIONS = 400, 8


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
        ask = _asker(server.model(name, rows=8), kind, open_)
        ask()
        told.put(0)
        while (order := orders.get()) is not None:
            until, count = order, 0
            while time.monotonic() < until:
                ask()
                count += 1
            told.put(count)


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
            for side in ("fixed", "open"):
                told, orders = spawn.Queue(), [spawn.Queue() for _ in range(clients)]
                open_ = side == "open" and kind != "deterministic"
                started = [
                    spawn.Process(target=_client, args=(server.address, f"{kind}-{side}", kind, open_, order, told))
                    for order in orders
                ]
                for process in started:
                    process.start()
                for _ in started:
                    told.get(timeout=120)
                sides[side] = (told, orders, started, [])
            with server.connect() as client:
                engine = client.status()["engines"][0]["pid"]
            spent: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(given.windows):
                for side, (told, orders, _, rates) in sides.items():
                    until, before = time.monotonic() + given.seconds, _cpu_seconds(engine)
                    for order in orders:
                        order.put(until)
                    asked = sum(told.get(timeout=60) for _ in orders)
                    rates.append(asked / given.seconds)
                    spent[side].append((_cpu_seconds(engine) - before) / (asked * rows_each) * 1e6)
            for _, orders, started, _ in sides.values():
                for order in orders:
                    order.put(None)
                for process in started:
                    process.join(30)
            fixed, opened = (statistics.median(rates) for _, _, _, rates in sides.values())
            row = {"kind": kind, "clients": clients, "fixed": round(fixed), "open": round(opened)}
            row |= {f"engine_us_{side}": round(statistics.median(values), 2) for side, values in spent.items()}
            row |= {"ratio": round(opened / fixed, 3), "goal": round(goal, 2), "met": opened / fixed >= goal}
            table.append(row)
            print(json.dumps(row), flush=True)
    return 0 if all(row["met"] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
