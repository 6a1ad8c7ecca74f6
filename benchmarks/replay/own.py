"""The replay itself, a plain NumPy ring, torch, and the two designs that the replay takes the place of."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import numpy as np
from measure import BATCH, Rows, rate

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

                def both(out: Any, replay: Any = replay, errors: Any = errors) -> None:
                    replay.update_priorities(replay.sample(BATCH, out).indices, errors)

                out["prioritized, reused"] = rate(lambda i: both(batch), BATCH, seconds)
                out["prioritized, fresh"] = rate(lambda i: both(None), BATCH, seconds)
                continue
            single, add, many = rows.single, replay.add, rows.many
            out["add 1"] = rate(lambda i: add(**single[i % BATCH]), 1, seconds)
            out["add 256"] = rate(lambda i: replay.extend(**many), BATCH, seconds)
            out["sample 256, reused"] = rate(lambda i: replay.sample(BATCH, batch), BATCH, seconds)
            out["sample 256, fresh"] = rate(lambda i: replay.sample(BATCH), BATCH, seconds)
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

    def fresh(_: int) -> dict[str, Any]:
        index = rng.integers(0, capacity, BATCH)
        return {k: v[index] for k, v in ring.items()}

    return {
        "add 1": rate(lambda i: add(**rows.single[i % BATCH]), 1, seconds),
        "add 256": rate(lambda i: extend(**rows.many), BATCH, seconds),
        "sample 256, reused": rate(sample, BATCH, seconds),
        "sample 256, fresh": rate(fresh, BATCH, seconds),
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

    def fresh(_: int) -> dict[str, Any]:
        index = torch.randint(0, capacity, (BATCH,))
        return {k: v[index] for k, v in ring.items()}

    return {
        "sample 256, reused": rate(sample, BATCH, seconds),
        "sample 256, fresh": rate(fresh, BATCH, seconds),
    }


def drained_queue(shape: Any, capacity: int, rows: Rows, seconds: float) -> dict[str, float]:
    """Rows go through a queue; a thread moves them, under an RLock, into an array of objects."""
    rows_in: queue.Queue[Any] = queue.Queue(maxsize=1024)
    kept = np.empty(capacity, object)
    lock = threading.RLock()
    state = {"at": 0}

    def drain() -> None:
        while (row := rows_in.get()) is not None:
            with lock:
                kept[state["at"] % capacity] = row
                state["at"] += 1

    rng = np.random.default_rng(0)

    def sample(_: int) -> dict[str, Any]:
        with lock:
            drawn = kept[rng.integers(0, min(state["at"], capacity), BATCH)]
            return {k: np.stack([row[k] for row in drawn]) for k in shape}

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    # A row is stored when it has been drained: the bounded queue makes the puts wait for that.
    out = {"add 1": rate(lambda i: rows_in.put({k: v.copy() for k, v in rows.single[i % BATCH].items()}), 1, seconds)}
    rows_in.put(None)
    thread.join()
    out["sample 256, fresh"] = rate(sample, BATCH, seconds)
    return out


def locked_counters(shape: Any, capacity: int, rows: Rows, seconds: float) -> dict[str, float]:
    """Shared arrays, and two counters each with a lock; for several writers see the writers' table."""
    import ctypes
    import multiprocessing

    ring = {}
    for k, s in shape.items():
        memory = multiprocessing.RawArray(ctypes.c_float, int(capacity * np.prod(s, dtype=int)))
        ring[k] = np.frombuffer(memory, np.float32).reshape(capacity, *s)
        ring[k][:] = 1
    position, size = multiprocessing.Value("q", 0), multiprocessing.Value("q", 0)
    rng = np.random.default_rng(0)

    def add(i: int) -> None:
        with position.get_lock():
            at = position.value
        for k, v in rows.single[i % BATCH].items():
            ring[k][at] = v
        with position.get_lock():
            position.value = (at + 1) % capacity
        with size.get_lock():
            size.value = min(size.value + 1, capacity)

    def sample(_: int) -> dict[str, Any]:
        with size.get_lock():
            index = rng.integers(0, size.value, BATCH)
        return {k: v[index] for k, v in ring.items()}

    out = {"add 1": rate(add, 1, seconds)}
    out["sample 256, fresh"] = rate(sample, BATCH, seconds)
    return out
