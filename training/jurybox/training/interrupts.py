"""Handlers of SIGINT and SIGTERM that interrupt the work, but not the cleanup.

A KeyboardInterrupt can be raised between any two instructions: between starting a process and recording it, inside a
``finally``, or in a destructor that swallows it. So the first signal raises, except inside `held`, which defers it to
the end of the block. Later signals do nothing, because the shutdown takes a bounded time. Loops call `check`, in case
the exception was swallowed.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_EXIT_SECONDS, _SIGNAL_EXIT_SECONDS = 3.0, 1.0  # for the interpreter's exit; after a signal, somebody waits for it


class _SignalState:
    def __init__(self) -> None:
        self.received = 0  # number of the first signal received; 0: none
        self.raised = False
        self.holding = 0
        self.ended = False
        self.on_signal: Callable[[], None] | None = None


_state = _SignalState()


def take_over(on_signal: Callable[[], None] | None = None) -> None:
    """Install the handlers for SIGINT and SIGTERM. Main thread only.

    Args:
        on_signal: called once, on the first signal, to print a message.
    """
    _state.on_signal = on_signal
    for number in _SIGNALS:
        signal.signal(number, _on_signal)


def ignore_from_now_on(status: int = 0) -> None:
    """Ignore both signals from now on: for the final cleanup, which is bounded, and the interpreter's exit.

    The exit is bounded, too: what an environment leaves (a thread, a process, a vector environment) would be waited for
    without end.

    Args:
        status: the process's exit status, should it have to be ended so.
    """
    _state.raised = _state.ended = True
    for number in _SIGNALS:
        # Not a Python handler: at exit the interpreter would restore the default, and the next signal would kill it.
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_after_main, args=(status,), name="end", daemon=True).start()


def shorten_exit(status: int) -> None:
    """After a signal, let the interpreter's exit end when the functions of `atexit` have run. Call it last.

    On a busy machine the rest, taking torch's modules apart, takes seconds.

    Args:
        status: the process's exit status.
    """
    if _state.received:
        atexit.register(_end_now, status)  # runs first


def _end_now(status: int) -> None:
    atexit.unregister(_end_now)
    atexit._run_exitfuncs()
    _end(status)


def _end_after_main(status: int) -> None:
    threading.main_thread().join()  # which has done all that it does when the interpreter begins its exit
    time.sleep(_SIGNAL_EXIT_SECONDS if _state.received else _EXIT_SECONDS)
    _end(status)


def _end(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


def exit_status() -> int | None:
    """Return 128 + the received signal, as in shells (130 after Ctrl-C); None if there was no signal."""
    return 128 + _state.received if _state.received else None


def check() -> None:
    """Raise KeyboardInterrupt if a signal was received."""
    if _state.received and not _state.holding and not _state.ended:
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
    """Start processes in the block with SIGINT blocked, so that they do not receive it before they can ignore it."""
    with held():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if not _state.received:
        _state.received = number
        if _state.on_signal is not None:
            _state.on_signal()
    if not _state.holding and not _state.raised:
        _state.raised = True
        raise KeyboardInterrupt


class Signals:
    """Counts requests to stop.

    Attributes:
        count: number of requests so far.
        first: the first one's signal number; 0: none yet.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first = 0

    def ask(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Count a request. This is the signal handler; programs may call it, too."""
        self.count += 1
        self.first = self.first or number


@contextmanager
def handle_signals(signals: Signals) -> Iterator[None]:
    """Count signals inside the block; other handlers are restored after it. No effect outside of the main thread.

    The handler only counts: an exception between any two instructions could leave processes that are not recorded.
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
