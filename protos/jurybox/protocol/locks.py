"""Waits with a limit: time-outs as callers give them, and the lock of what threads share, which knows nested calls.

A signal handler, or a destructor that the garbage collector runs, can make a call within another one of the same
thread. A plain lock would wait for itself. `TimedLock` lets such a call in where it does no harm (`within`), and
refuses it where there is only one of what is used: a publication, a step of a session, a lease (`once`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextvars import ContextVar
from itertools import repeat, starmap
from typing import Any

from jurybox.protocol.errors import Refused, Timeout

LONGEST = 1e8  # seconds, about three years; the cap of all time-outs, so that none overflows
NESTED = "this is a signal handler or a destructor inside of it"
IN_SERVICE = "a destructor was run by the garbage collector in a thread that carries answers; ask in another one"
# Whether this thread belongs to Jurybox or a library, and carries answers to waiting callers. gRPC runs its threads in
# the context of the one that has made the call: they are marked before they run a line.
_serving = ContextVar("jurybox_serving", default=False)


def seconds(timeout: float) -> float:
    """Return a time-out clipped to [0, LONGEST].

    Raises:
        ValueError: it is nan: no deadline made of it would ever be over.
    """
    if 0.0 <= timeout <= LONGEST:
        return timeout
    if math.isnan(timeout):
        raise ValueError(f"timeout={timeout!r}: expected seconds")
    return 0.0 if timeout < 0.0 else LONGEST


def mark_serving() -> None:
    """Mark this thread, and gRPC's for its calls: a destructor that is run in one must not wait for an answer."""
    _serving.set(True)


def is_serving() -> bool:
    """Return whether this thread carries answers."""
    return _serving.get()


class Taken(Exception):
    """Another thread holds the lock."""


class _Got(dict[bool, None]):
    """A mapping for the result of `acquire`: looking up False raises an error."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__({True: None})
        self._error = error

    def __missing__(self, _: bool) -> None:
        raise self._error()


_MINE = _Got(Taken)


class LockTurn:
    """A context manager that acquires a lock within `seconds`, or without waiting (0), and otherwise raises.

    Entering and leaving are single C calls, as with a lock itself: a KeyboardInterrupt cannot occur between acquiring
    the lock and entering the ``with`` block. It costs no more than ``with lock``.
    """

    __slots__ = ("__enter__", "__exit__")

    def __init__(self, lock: Any, seconds: float = 0.0, got: _Got = _MINE) -> None:
        how = (True, seconds) if seconds > 0 else (False,)
        self.__enter__ = map(got.__getitem__, starmap(lock.acquire, repeat(how))).__next__
        self.__exit__ = lock.__exit__


class TimedLock:
    """A lock whose every wait has a limit.

    Args:
        what: what a thread does that has it, for messages: "a publication to 'policy'".
        remedy: how messages end.

    Example:
        lock = TimedLock("a publication to 'policy'")
        with lock.once(10.0):
            ...
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what = what
        self._remedy = remedy
        self.anew()

    def anew(self) -> None:
        """Create the lock, also again in a forked child: a thread of the parent may have had it during the fork."""
        self._lock: Any = threading.RLock()

    @property
    def mine(self) -> bool:
        """Whether this thread has the lock: this call is nested in the one that took it."""
        return bool(self._lock._is_owned())

    def within(self, seconds: float) -> LockTurn:
        """Return a context manager that takes the lock, also if this thread has it already.

        Raises, when it is entered:
            Timeout: another thread did not release it within `seconds`.
            Refused: another thread has it, which may wait for this one to carry its answer.
        """
        if is_serving():
            return LockTurn(self._lock, 0.0, _Got(self._unserved))
        return LockTurn(self._lock, seconds, _Got(lambda: self._late(seconds)))

    def once(self, seconds: float) -> LockTurn:
        """Like `within`, but for what exists once.

        Raises:
            Refused: this thread has it already.
        """
        if self.mine:
            raise self.nested()
        return self.within(seconds)

    def nested(self) -> Refused:
        """Return the error of a call inside of another one of its thread."""
        return Refused(f"{self.what} is under way in this thread: {NESTED}{self._remedy}")

    def _late(self, seconds: float) -> Timeout:
        return Timeout(f"{self.what} in another thread did not end within {max(0.0, seconds):.1f} s{self._remedy}")

    def _unserved(self) -> Refused:
        why = f"{self.what} is under way in another thread, which may wait for this one"
        return Refused(f"{why}: {IN_SERVICE}{self._remedy}")
