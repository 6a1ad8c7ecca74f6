"""One replay library under test, in a process of its own: rows/s of adding and sampling, as JSON.

usage: python contestants.py NAME large|small CAPACITY SECONDS
Runs with the interpreter of the environment in which the library is installed; imports nothing else of the project.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH = 256
# (observation elements); a row is observation, action, reward, next observation, done as float32:
# 49,156 and 168 bytes.
SHAPES = {
    "large": {"o": (6143,), "a": (1,), "r": (), "n": (6143,), "d": ()},
    "small": {"o": (17,), "a": (6,), "r": (), "n": (17,), "d": ()},
}


# On a machine that others use as well, rows a second of CPU time still say what a row costs; JURYBOX_BENCH_CLOCK=cpu.
CLOCK = time.process_time if os.environ.get("JURYBOX_BENCH_CLOCK") == "cpu" else time.perf_counter


def rate(call: Callable[[int], Any], rows: int, seconds: float) -> float:
    """Rows/s of the median of five windows."""
    windows = []
    i = 0
    chunk = max(1, 2048 // rows)
    for _ in range(5):
        until, begin, done = time.perf_counter() + seconds / 5, CLOCK(), 0
        while time.perf_counter() < until:
            for _ in range(chunk):
                call(i)
                i += 1
            done += chunk * rows
        windows.append(done / (CLOCK() - begin))
    return sorted(windows)[2]


class Rows:
    """Ready rows: one batch, and its single rows."""

    def __init__(self, shape: dict[str, tuple[int, ...]]) -> None:
        rng = np.random.default_rng(1)
        self.many = {k: rng.random((BATCH, *s), np.float32) for k, s in shape.items()}
        self.single = [{k: v[i] for k, v in self.many.items()} for i in range(BATCH)]


# ruff: noqa: B023  (the calls are made before their loop turns)


def ours(shape: Any, capacity: int, rows: Rows, seconds: float, stored: str | None = None) -> dict[str, float]:
    from jurybox.training.replay import Field, Replay

    out: dict[str, float] = {}
    for prioritized in (False, True):
        fields = {k: Field(s, "float32", stored=stored if len(s) and s[0] > 1000 else None) for k, s in shape.items()}
        with Replay.create(f"bench-{os.getpid()}", capacity, fields, prioritized=prioritized) as replay:
            for _ in range(capacity // BATCH + 1):
                replay.extend(**rows.many)
            batch = replay.batch(BATCH)
            if prioritized:
                errors = np.random.default_rng(2).random(BATCH, np.float32)

                def both(_: int, replay: Any = replay, batch: Any = batch, errors: Any = errors) -> None:
                    replay.sample(BATCH, batch)
                    replay.update_priorities(batch.indices, errors)

                out["prioritized"] = rate(both, BATCH, seconds)
                continue
            single, add, many = rows.single, replay.add, rows.many
            out["add 1"] = rate(lambda i: add(**single[i % BATCH]), 1, seconds)
            out["add 256"] = rate(lambda i: replay.extend(**many), BATCH, seconds)
            out["sample 256"] = rate(lambda i: replay.sample(BATCH, batch), BATCH, seconds)
            out["sample 256, fresh output"] = rate(lambda i: replay.sample(BATCH), BATCH, seconds)
            out["MB"] = replay.nbytes / 1e6
    return out


def numpy_ring(shape: Any, capacity: int, rows: Rows, seconds: float) -> dict[str, float]:
    ring = {k: np.ones((capacity, *s), np.float32) for k, s in shape.items()}
    batch = {k: np.empty((BATCH, *s), np.float32) for k, s in shape.items()}
    state = {"at": 0}
    rng = np.random.default_rng(0)

    def add(**row: Any) -> None:
        at = state["at"]
        for k, v in row.items():
            ring[k][at] = v
        state["at"] = (at + 1) % capacity

    def extend(**values: Any) -> None:
        at = state["at"]
        if at + BATCH > capacity:
            at = 0
        for k, v in values.items():
            ring[k][at : at + BATCH] = v
        state["at"] = at + BATCH

    def sample(_: int) -> None:
        index = rng.integers(0, capacity, BATCH)
        for k, v in ring.items():
            v.take(index, 0, out=batch[k], mode="clip")

    return {
        "add 1": rate(lambda i: add(**rows.single[i % BATCH]), 1, seconds),
        "add 256": rate(lambda i: extend(**rows.many), BATCH, seconds),
        "sample 256": rate(sample, BATCH, seconds),
    }


def torch_select(shape: Any, capacity: int, rows: Rows, seconds: float) -> dict[str, float]:
    import torch

    torch.set_num_threads(2)
    ring = {k: torch.ones((capacity, *s)) for k, s in shape.items()}
    batch = {k: torch.empty((BATCH, *s)) for k, s in shape.items()}

    def sample(_: int) -> None:
        index = torch.randint(0, capacity, (BATCH,))
        for k, v in ring.items():
            torch.index_select(v, 0, index, out=batch[k])

    return {"sample 256": rate(sample, BATCH, seconds)}


def sb3(shape: Any, capacity: int, rows: Rows, seconds: float) -> dict[str, float]:
    import gymnasium as gym
    from stable_baselines3.common.buffers import ReplayBuffer

    box = gym.spaces.Box(-1, 1, shape["o"], np.float32), gym.spaces.Box(-1, 1, shape["a"], np.float32)
    out = {}
    for n in (1, BATCH):
        buffer = ReplayBuffer(capacity, *box, device="cpu", n_envs=n, handle_timeout_termination=False)
        for array in (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards, buffer.dones):
            array[:] = 1
        infos: list[dict[str, Any]] = [{}] * n
        if n == 1:
            single = [{k: v[None] for k, v in row.items()} for row in rows.single]

            def add(i: int, buffer: Any = buffer, infos: Any = infos) -> None:
                row = single[i % BATCH]
                buffer.add(row["o"], row["n"], row["a"], row["r"], row["d"], infos)

            out["add 1"] = rate(add, 1, seconds)
            buffer.full = True
            out["sample 256"] = rate(lambda i, buffer=buffer: buffer.sample(BATCH), BATCH, seconds)
        else:
            m = rows.many
            out["add 256"] = rate(
                lambda i, b=buffer: b.add(m["o"], m["n"], m["a"], m["r"], m["d"], infos), BATCH, seconds
            )
    return out


def cpprb(shape: Any, capacity: int, rows: Rows, seconds: float) -> dict[str, float]:
    from cpprb import PrioritizedReplayBuffer, ReplayBuffer

    spec = {k: {"shape": s or 1, "dtype": np.float32} for k, s in shape.items()}
    plain = ReplayBuffer(capacity, spec)
    for _ in range(capacity // BATCH + 1):
        plain.add(**rows.many)
    out = {
        "add 1": rate(lambda i: plain.add(**rows.single[i % BATCH]), 1, seconds),
        "add 256": rate(lambda i: plain.add(**rows.many), BATCH, seconds),
        "sample 256": rate(lambda i: plain.sample(BATCH), BATCH, seconds),
    }
    ranked = PrioritizedReplayBuffer(capacity, spec)
    for _ in range(capacity // BATCH + 1):
        ranked.add(**rows.many)
    errors = np.random.default_rng(2).random(BATCH, np.float32)

    def both(_: int) -> None:
        batch = ranked.sample(BATCH)
        ranked.update_priorities(batch["indexes"], errors)

    out["prioritized"] = rate(both, BATCH, seconds)
    return out


def torchrl(shape: Any, capacity: int, rows: Rows, seconds: float, memmap: bool = False) -> dict[str, float]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

    storage = LazyMemmapStorage(capacity) if memmap else LazyTensorStorage(capacity)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    many = TensorDict({k: torch.from_numpy(v) for k, v in rows.many.items()}, [BATCH])
    single = [many[i] for i in range(BATCH)]
    for _ in range(capacity // BATCH + 1):
        buffer.extend(many)
    return {
        "add 1": rate(lambda i: buffer.add(single[i % BATCH]), 1, seconds),
        "add 256": rate(lambda i: buffer.extend(many), BATCH, seconds),
        "sample 256": rate(lambda i: buffer.sample(), BATCH, seconds),
    }


CONTESTANTS: dict[str, Callable[..., dict[str, float]]] = {
    "jurybox": ours,
    "jurybox, observations as uint8": lambda *a: ours(*a, stored="uint8"),
    "jurybox, observations as bits": lambda *a: ours(*a, stored="bits"),
    "jurybox, observations as float16": lambda *a: ours(*a, stored="float16"),
    "NumPy ring": numpy_ring,
    "torch index_select, 2 threads": torch_select,
    "SB3": sb3,
    "cpprb": cpprb,
    "TorchRL tensors": torchrl,
    "TorchRL memmap": lambda *a: torchrl(*a, memmap=True),
}

if __name__ == "__main__":
    name, size, capacity, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    print(json.dumps(CONTESTANTS[name](SHAPES[size], capacity, Rows(SHAPES[size]), seconds)))
