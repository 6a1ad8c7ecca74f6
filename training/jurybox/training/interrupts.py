"""SIGINT and SIGTERM: they interrupt work, but not the cleanup.

A KeyboardInterrupt can be raised between any two instructions: between starting a process and remembering it, inside
a ``finally``, in a destructor that swallows it. So the first signal raises, except inside `held`, where it is
deferred to the end of the block; later ones do nothing, because the shutdown is bounded; and loops call `check`, in
case the exception was swallowed.
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
    """Install the handlers for SIGINT and SIGTERM. Main thread only.

    Args:
        told: called once, when the first signal comes, to say so.
    """
    _state.told = told
    for number in _SIGNALS:
        signal.signal(number, _on_signal)


def ignore_from_now_on() -> None:
    """Ignore all signals from here on: for the last, bounded cleanup and the interpreter's exit."""
    _state.raised = _state.ended = True
    for number in _SIGNALS:
        # Not a handler of ours: the interpreter would put the default back while it ends, and die of the next one.
        signal.signal(number, signal.SIG_IGN)


def exit_status() -> int | None:
    """128 + the received signal, as in shells: 130 after Ctrl-C. None without a signal."""
    return 128 + _state.asked if _state.asked else None


def check() -> None:
    """Raise KeyboardInterrupt if a signal was received."""
    if _state.asked and not _state.holding and not _state.ended:
        _state.raised = True
        raise KeyboardInterrupt


@contextmanager
def held() -> Iterator[None]:
    """Defer signals to the end of the block. No effect outside of the main thread."""
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


class Signals:
    """Counts requests to stop.

    Attributes:
        count: signals so far.
        first: the first one's number; 0 before.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first = 0

    def ask(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Count one request; called by the handler, or by a program."""
        self.count += 1
        self.first = self.first or number


@contextmanager
def heard(signals: Signals) -> Iterator[None]:
    """Count signals inside the block, instead of other handlers. No effect outside of the main thread.

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
