"""Fork handlers for objects that hold descriptors, locks or rows in shared memory.

A forked child shares its parent's sockets, file locks and rows; if it used them, the two would take each other's
answers. So such objects register here, and release what they hold in the child before any of its code runs.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, Protocol, TypeVar

T = TypeVar("T", bound="Closing")


def cannot_be_sent(self: object) -> str | tuple[Any, ...]:
    """Raise TypeError: the `__reduce__` of an object that is of use in its process alone."""
    raise TypeError(
        f"a {type(self).__name__} holds resources of its process and cannot be pickled or copied: create it where "
        "it is used. A jurybox Server or Model can be sent, and connects again there"
    )


class Closing:
    """An object that holds such resources and is closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Release the resources."""
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    __reduce__ = cannot_be_sent


class Forked(Protocol):
    """An object with a fork handler."""

    def _after_fork_in_child(self) -> None:
        """Close inherited descriptors and create new locks; called in the child before `os.fork` returns there.

        A thread that the child does not have may have held the old locks. Never unlock a file and never send: either
        would act on behalf of the parent.
        """


_living: weakref.WeakSet[Forked] = weakref.WeakSet()


def register(holder: Forked) -> None:
    """Call `holder._after_fork_in_child()` in every child that is forked while `holder` is alive."""
    _living.add(holder)


def _tell() -> None:
    for holder in list(_living):
        try:
            holder._after_fork_in_child()
        except Exception:  # noqa: BLE001  the other handlers must run, too
            sys.excepthook(*sys.exc_info())


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_tell)
