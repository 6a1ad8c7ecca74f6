"""Four writer processes and a sampler with other libraries: rows/s, rows lost, rows mixed.

usage: python crowd.py NAME large|small ROWS_A_WRITER
Every row carries one number in all its fields, which no other row has. The ring is as large as all rows together, so a
row that is not there at the end was lost. Runs with the interpreter of the environment where the library is installed.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import queue
import sys
import threading
import time
from typing import Any

import numpy as np
from measure import BATCH, SHAPES

WRITERS = 4
_LONGEST = 20.0


class LockedCounters:
    """Shared arrays with two counters, each under its lock: a position is read, the row written, the position set."""

    def __init__(self, shape: dict[str, tuple[int, ...]], capacity: int, context: Any) -> None:
        self.shape, self.capacity = shape, capacity
        self.memory = {
            k: context.RawArray(ctypes.c_float, int(capacity * np.prod(s, dtype=int))) for k, s in shape.items()
        }
        self.position, self.size = context.Value("q", 0), context.Value("q", 0)
        self.begin()
        for array in self.ring.values():
            array[:] = -1

    def begin(self) -> None:
        self.ring = {
            k: np.frombuffer(self.memory[k], np.float32).reshape(self.capacity, *s) for k, s in self.shape.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "ring"}

    def add(self, row: dict[str, Any]) -> None:
        with self.position.get_lock():
            at = self.position.value
        for k, v in row.items():
            self.ring[k][at] = v
        with self.position.get_lock():
            self.position.value = (at + 1) % self.capacity
        with self.size.get_lock():
            self.size.value = min(self.size.value + 1, self.capacity)

    def sample(self, rng: np.random.Generator) -> dict[str, Any] | None:
        with self.size.get_lock():
            size = self.size.value
        if size < BATCH:
            return None
        index = rng.integers(0, size, BATCH)
        return {k: v[index] for k, v in self.ring.items()}

    def numbers(self) -> Any:
        return self.ring["r"]


class OneLock(LockedCounters):
    """The same with one lock around everything."""

    def add(self, row: dict[str, Any]) -> None:
        with self.position.get_lock():
            at = self.position.value
            for k, v in row.items():
                self.ring[k][at] = v
            self.position.value = (at + 1) % self.capacity
            self.size.value = min(self.size.value + 1, self.capacity)

    def sample(self, rng: np.random.Generator) -> dict[str, Any] | None:
        with self.position.get_lock():
            return super().sample(rng)


class DrainedQueue:
    """A process queue; a thread of the learner drains it, under an RLock, into an array of objects."""

    def __init__(self, shape: dict[str, tuple[int, ...]], capacity: int, context: Any) -> None:
        self.queue = context.Queue(maxsize=1024)
        self.kept: Any = None
        self.stored = 0
        self.capacity = capacity

    def begin(self) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        return {"queue": self.queue, "kept": None, "stored": 0, "capacity": self.capacity}

    def drain(self) -> None:
        self.kept, self.lock = np.empty(self.capacity, object), threading.RLock()
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        while True:
            row = self.queue.get()
            with self.lock:
                self.kept[self.stored % self.capacity] = row
                self.stored += 1

    def add(self, row: dict[str, Any]) -> None:
        try:
            # An actor does not wait for the learner. The queue pickles later, on a thread: it gets rows that stay.
            self.queue.put_nowait({k: v.copy() for k, v in row.items()})
        except queue.Full:
            return

    def sample(self, rng: np.random.Generator) -> dict[str, Any] | None:
        with self.lock:
            if self.stored < BATCH:
                return None
            rows = self.kept[rng.integers(0, min(self.stored, self.capacity), BATCH)]
            return {k: np.stack([row[k] for row in rows]) for k in rows[0]}

    def numbers(self) -> Any:
        time.sleep(0.5)  # rows in transfer may still arrive
        return np.array([row["r"] for row in self.kept[: min(self.stored, self.capacity)]])


class Cpprb:
    """cpprb's process-safe buffer."""

    def __init__(self, shape: dict[str, tuple[int, ...]], capacity: int, context: Any) -> None:
        from cpprb import MPReplayBuffer

        self.capacity = capacity
        self.buffer = MPReplayBuffer(capacity, {k: {"shape": s or 1, "dtype": np.float32} for k, s in shape.items()})

    def begin(self) -> None:
        pass

    def add(self, row: dict[str, Any]) -> None:
        self.buffer.add(**row)

    def sample(self, rng: np.random.Generator) -> dict[str, Any] | None:
        if self.buffer.get_stored_size() < BATCH:
            return None
        batch: dict[str, Any] = self.buffer.sample(BATCH)
        return batch

    def numbers(self) -> Any:
        return self.buffer.get_all_transitions()["r"].reshape(-1)


DESIGNS: dict[str, Any] = {
    "shared arrays, locked counters": LockedCounters,
    "one lock around a shared ring": OneLock,
    "queue drained under an RLock": DrainedQueue,
    "cpprb, process-safe": Cpprb,
}


def write(design: Any, size: str, number: int, rows: int, start: Any, took: Any) -> None:
    design.begin()
    row = {k: np.empty(s, np.float32) for k, s in SHAPES[size].items()}
    start.wait(60)
    begin = time.perf_counter()
    for i in range(rows):
        for array in row.values():
            array[...] = number * rows + i
        design.add(row)
        if i % 64 == 0 and time.perf_counter() - begin > _LONGEST:
            rows = i + 1
            break
    took.put((rows, time.perf_counter() - begin))


def main() -> None:
    name, size, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # cpprb's buffer only crosses a fork.
    context: Any = multiprocessing.get_context("fork" if name.startswith("cpprb") else "spawn")
    design = DESIGNS[name](SHAPES[size], rows * WRITERS, context)
    start, took = context.Barrier(WRITERS + 1), context.Queue()
    writers = [
        context.Process(target=write, args=(design, size, n, rows, start, took), daemon=True) for n in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    if isinstance(design, DrainedQueue):
        design.drain()
    rng, sampled, mixed, begin = np.random.default_rng(0), 0, 0, 0.0
    start.wait(60)
    begin = time.perf_counter()
    ended: list[tuple[int, float]] = []
    while len(ended) < WRITERS:
        batch = design.sample(rng)
        if batch is None:
            time.sleep(0.001)
        else:
            sampled += BATCH
            stamps = batch["r"].reshape(BATCH, 1)
            bad = np.zeros(BATCH, bool)
            for column in batch.values():
                if isinstance(column, np.ndarray) and len(column) == BATCH and column.dtype == np.float32:
                    bad |= (column.reshape(BATCH, -1) != stamps).any(1)
            mixed += int(bad.sum())
        while True:
            try:
                ended.append(took.get_nowait())
            except queue.Empty:
                break
    seconds = time.perf_counter() - begin
    offered = sum(n for n, _ in ended)
    there = len(np.unique(design.numbers()))
    print(
        json.dumps({
            "written": there / seconds, "offered": offered / seconds, "sampled": sampled / seconds,
            "lost": 1 - min(1.0, there / offered), "mixed": mixed / max(1, sampled),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()
