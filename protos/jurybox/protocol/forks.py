"""What belongs to one process is told when that process forks.

A forked child has a copy of every object, and shares with its parent what they stand for: a lane, a place of publisher,
a file lock, a stream. Whoever holds such a thing registers here, and in every child its `_after_fork_in_child` says
what becomes of the copy: it refuses from then on, or begins anew. Nobody pays for this but a fork.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """What can be registered: hashable, and referable to weakly."""

    def _after_fork_in_child(self) -> None:
        """Called in a forked child, in its only thread, in no particular order among those registered."""


_held: WeakSet[Forked] = WeakSet()


def register(held: Forked) -> None:
    """Tell `held` in every child that this process forks from now on, for as long as it lives."""
    _held.add(held)


def _in_child() -> None:
    errors: list[Exception] = []
    for held in list(_held):
        try:
            held._after_fork_in_child()
        except Exception as error:  # noqa: BLE001  (the others must be told all the same)
            errors.append(error)
    if errors:
        raise ExceptionGroup("after a fork", errors)  # which os.fork prints


os.register_at_fork(after_in_child=_in_child)
