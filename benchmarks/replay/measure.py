"""Shared by contestants: ready rows, and a rate. Imports only NumPy, which every peer's environment has."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH = 256
# A row is observation, action, reward, next observation, done as float32: 49,156 and 168 bytes.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "large": {"o": (6143,), "a": (1,), "r": (), "n": (6143,), "d": ()},
    "small": {"o": (17,), "a": (6,), "r": (), "n": (17,), "d": ()},
}
ROW_BYTES = {"large": 49_156, "small": 168}

# On a shared machine, rows per second of CPU time are more reliable; JURYBOX_BENCH_CLOCK=cpu.
CLOCK = time.process_time if os.environ.get("JURYBOX_BENCH_CLOCK") == "cpu" else time.perf_counter


def rate(call: Callable[[int], Any], rows: int, seconds: float) -> float:
    """Rows/s of the median of five windows."""
    windows = []
    i = 0
    chunk = max(1, 512 // rows)
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
