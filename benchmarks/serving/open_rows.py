"""What open rows cost: each kind beside the same forward with rows of a fixed shape, in one interleaved run.

    python -m benchmarks.serving.open_rows --seconds 2 --windows 5

One server, one engine with one thread; clients are processes in closed loop through the shm transport. Windows of each
pair follow one another in turn; the ratio is of the medians. Answers are checked once a window.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from jurybox.client import connect
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.runtime.local_server import LocalServer

VECTOR, LOGITS = (52,), TensorSpec("float32", (145,))
TEXT = 400


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(52, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 145))

    def forward(self, x: torch.Tensor, x_lengths: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 16, 4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor, x_lengths: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(x.permute(0, 3, 1, 2).float() / 255).mean(dim=(1, 2, 3))  # type: ignore[no-any-return]


class Bag(nn.Module):
    """The mean of embeddings of bytes, and a score of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head = nn.EmbeddingBag(256, 32, mode="sum"), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, x_lengths: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.bag(x.long()))[:, 0]  # type: ignore[no-any-return]


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTMCell(52, 256), nn.Linear(256, 145)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> Any:
        hidden, cell = self.cell(x, (hidden, cell))
        return self.head(hidden), hidden, cell


class Stateless(Lstm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        zero = x.new_zeros(len(x), 256)
        return super().forward(x, zero, zero)[0]  # type: ignore[no-any-return]


def vector(*, open_: bool = False) -> ServedModel:
    spec = TensorSpec("float32", (-1,), capacity=52) if open_ else TensorSpec("float32", VECTOR)
    return ServedModel(Mlp(), {"x": spec}, {"y": LOGITS}, collate="pad", example=_vectors)


def _vectors(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(n, 52)}


def image(*, open_: bool = False) -> ServedModel:
    spec = TensorSpec("uint8", (-1, -1, 3), capacity=3 * 384 * 384) if open_ else TensorSpec("uint8", (384, 384, 3))
    return ServedModel(Cnn(), {"x": spec}, {"y": TensorSpec("float32")}, collate="pad")


def text(*, open_: bool = False) -> ServedModel:
    spec = TensorSpec("bytes", capacity=TEXT) if open_ else TensorSpec("uint8", (TEXT,))
    return ServedModel(Bag(), {"x": spec}, {"y": TensorSpec("float32")}, collate="pad")


def memory(*, open_: bool = False) -> ServedModel:
    state = {name: TensorSpec("float32", (256,)) for name in ("hidden", "cell")}
    if not open_:
        return ServedModel(Stateless(), {"x": TensorSpec("float32", VECTOR)}, {"y": LOGITS})
    return ServedModel(Lstm(), {"x": TensorSpec("float32", VECTOR)}, {"y": LOGITS}, state=state)


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
        rows = rng.standard_normal((8, 52)).astype(np.float32)
        asked = model.sessions(8) if open_ else model
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
        common = {"factory": f"benchmarks.serving.open_rows:{factory}", "max_batch": 16 if kind == "image" else 64}
        models[f"{kind}-fixed"] = common | {"rows": 64 if kind == "image" else 512}
        models[f"{kind}-open"] = models[f"{kind}-fixed"] | (
            {"deterministic": True} if kind == "deterministic" else {"args": {"open_": True}}
        )
    spawn = multiprocessing.get_context("spawn")
    table = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        server = LocalServer(models, Path(folder) / "log", http=False)
        stack.callback(server.stop)
        server.start()
        server.wait(120)
        for kind in kinds:
            clients, goal = PAIRS[kind]
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
            for _ in range(given.windows):
                for told, orders, _, rates in sides.values():
                    until = time.monotonic() + given.seconds
                    for order in orders:
                        order.put(until)
                    rates.append(sum(told.get(timeout=60) for _ in orders) / given.seconds)
            for _, orders, started, _ in sides.values():
                for order in orders:
                    order.put(None)
                for process in started:
                    process.join(30)
            fixed, opened = (statistics.median(rates) for _, _, _, rates in sides.values())
            row = {"kind": kind, "clients": clients, "fixed": round(fixed), "open": round(opened)}
            row |= {"ratio": round(opened / fixed, 3), "goal": round(goal, 2), "met": opened / fixed >= goal}
            table.append(row)
            print(json.dumps(row), flush=True)
    return 0 if all(row["met"] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
