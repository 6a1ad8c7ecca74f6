"""SIGINT and SIGTERM during a run: the first asks for an end in order, the second for one at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """How often the process was told to stop.

    Attributes:
        count: signals so far.
        first: the first one's number; 0 before.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first = 0

    def ask(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Count one more; what a handler does, and what a program may do as well."""
        self.count += 1
        self.first = self.first or number


@contextmanager
def heard(signals: Signals) -> Iterator[None]:
    """Count signals for the length of the block, whatever handled them before; elsewhere than in the main thread none.

    A handler only counts: an exception between any two instructions would leave processes that nobody knows of.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signals.ask) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
