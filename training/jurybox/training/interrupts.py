"""Ctrl-C and SIGTERM: they interrupt work, and never the cleanup.

A KeyboardInterrupt can be raised between any two instructions: between starting a process and remembering it, inside
a ``finally``, in a destructor that swallows it. So the first signal raises, except inside `held`, where it waits for
the end of the block; later ones do nothing, because the end is under way and bounded; and whoever loops calls
`check`, in case the exception was lost on its way.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    def __init__(self) -> None:
        self.asked = 0  # number of the first signal that came
        self.raised = False
        self.holding = 0
        self.ended = False
        self.told: Callable[[], None] | None = None


_state = _State()


def take_over(told: Callable[[], None] | None = None) -> None:
    """Handle SIGINT and SIGTERM as above from here on, to the end of the process. Main thread only.

    Args:
        told: called once, when the first signal comes, to say so.
    """
    _state.told = told
    for number in _SIGNALS:
        signal.signal(number, _on_signal)


def ignore_from_now_on() -> None:
    """No signal does anything from here on: for the last, bounded clearing up and the interpreter's own end."""
    _state.raised = _state.ended = True
    for number in _SIGNALS:
        # Not a handler of ours: the interpreter would put the default back while it ends, and die of the next one.
        signal.signal(number, signal.SIG_IGN)


def exit_status() -> int | None:
    """128 + the signal that came, as shells have it: 130 after Ctrl-C. None when none came."""
    return 128 + _state.asked if _state.asked else None


def check() -> None:
    """Raise KeyboardInterrupt when a signal came."""
    if _state.asked and not _state.holding and not _state.ended:
        _state.raised = True
        raise KeyboardInterrupt


@contextmanager
def held() -> Iterator[None]:
    """Let a signal that comes meanwhile wait for the end of the block. Elsewhere than in the main thread: no effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.holding += 1
    try:
        yield
    finally:
        _state.holding -= 1
    if not _state.raised:
        check()


@contextmanager
def blocked_for_children() -> Iterator[None]:
    """Processes started in the block begin with SIGINT blocked, so that none reaches them before they can ignore it."""
    with held():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not _state.asked:
        _state.asked = number
        if _state.told is not None:
            _state.told()
    if not _state.holding and not _state.raised:
        _state.raised = True
        raise KeyboardInterrupt


# ---- Signals during a run of the runtime: the first asks for an orderly end, the second for an immediate one.


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
