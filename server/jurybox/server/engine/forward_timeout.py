"""A time-out for forwards: a timer's signal raises in a forward that runs Python.

In a call of C code nothing can be raised before it returns. If it does not return, the engine shows no sign of life:
the supervisor ends it, and charges the model.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_AGAIN = 0.05  # seconds until it is raised again, in a forward that catches everything


class ForwardTimeout(BaseException):
    """A forward takes too long. It is no Exception, so that a forward's own handlers let it pass.

    Attributes:
        seconds: the time that it had.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it did not end within forward_timeout = {seconds:g} s")
        self.seconds = seconds


class _Running:
    """The forward that is running."""

    limit = 0.0  # seconds; 0: none is running, or it has no limit


def _raise(_number: int, _frame: FrameType | None) -> None:
    if _Running.limit:
        raise ForwardTimeout(_Running.limit)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ForwardTimeout in the block after so many seconds; 0: never. Only the main thread can have a limit."""
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _raise)
    try:
        _Running.limit = seconds
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
        yield
    finally:
        _Running.limit = 0.0  # the first step: from here on nothing is raised
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
