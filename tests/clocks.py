"""Clocks that tests set, in place of a module's `time`."""

from __future__ import annotations

from typing import Any

import pytest


class Clock:
    """Time that passes only when a test says so, and while somebody sleeps.

    Attributes:
        now: the monotonic clock, in seconds.
        slept: the seconds of each sleep.
    """

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def given(clock: Clock, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> Clock:
    """Let modules look at a clock, and return it."""
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return clock
