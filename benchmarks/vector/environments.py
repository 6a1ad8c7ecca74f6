"""The environments of the comparison: they use CPU, return infos, copy Python objects, or do nothing."""

from __future__ import annotations

import copy
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete


class Busy(gymnasium.Env[Any, Any]):
    """Burns CPU for `milliseconds` a step (CPU time, so that a busy machine does not make steps cheaper)."""

    def __init__(self, milliseconds: float = 1.5) -> None:
        self.observation_space = Box(0, 1, (52,), np.float32)
        self.action_space = Discrete(145)
        self._seconds = milliseconds / 1000
        self._seen = np.zeros(52, np.float32)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._seconds:
            until = time.thread_time() + self._seconds
            while time.thread_time() < until:
                pass
        self._steps += 1
        return self._seen, 1.0, False, self._steps >= 100, {}


class Copying(Busy):
    """Copies a network's records, as CybORG does in every step: 1.5 ms or so of small objects all over the memory.

    The work is always the same, and it depends on the caches, unlike that of `Busy`.
    """

    def __init__(self) -> None:
        super().__init__(0.0)
        self._records: dict[str, Any] = {
            f"host{host}": {
                "processes": [{"pid": pid, "user": f"user{pid % 3}", "ports": [pid, host]} for pid in range(32)],
                "interfaces": [{"address": f"10.0.0.{host}"}],
            }
            for host in range(13)
        }

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._records = copy.deepcopy(self._records)
        return super().step(action)


class Telling(Busy):
    """Uses 1.5 ms of CPU, and returns the infos that a search over workflows needs."""

    info_fields: ClassVar[dict[str, tuple[Any, tuple[int, ...]]]] = {
        "true_state": (np.int8, (13,)),
        "action_mask": (np.bool_, (145,)),
        "fixes": (np.int64, ()),
        "complied": (np.int64, ()),
    }

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *rest, _ = super().step(action)
        told = {name: np.zeros(shape, dtype)[()] for name, (dtype, shape) in self.info_fields.items()}
        return (*rest, told)  # type: ignore[return-value]


def telling() -> Telling:
    return Telling()


def copying() -> Copying:
    return Copying()


def busy() -> Busy:
    return Busy(1.5)


def trivial() -> Busy:
    return Busy(0.0)
