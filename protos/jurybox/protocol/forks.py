"""What a fork leaves to a child: objects that hold descriptors, locks or places in shared memory are told of it.

A child shares its parent's sockets, file locks and rows; using them would give it the parent's answers, and the parent
the child's. So whoever holds such things registers here, and lets go of them in the child before any of its code runs.
It costs nothing until a fork happens.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Protocol


class Forked(Protocol):
    """Who is told."""

    def _after_fork_in_child(self) -> None:
        """Called in the child, in its only thread, before `os.fork` returns there.

        Close inherited descriptors and make new locks: another thread, which the child lacks, may have held the old
        ones. Never unlock a file, never send: both would be done in the parent's name.
        """


_living: weakref.WeakSet[Forked] = weakref.WeakSet()


def register(holder: Forked) -> None:
    """Have `holder._after_fork_in_child()` called in every child that is forked while `holder` lives."""
    _living.add(holder)


def _tell() -> None:
    for holder in list(_living):
        try:
            holder._after_fork_in_child()
        except Exception:  # noqa: BLE001  the others must be told, too
            sys.excepthook(*sys.exc_info())


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_tell)
