"""Which rows of a lane are free. Calls may be nested: a signal handler or a destructor may take rows at any point."""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from typing import TYPE_CHECKING

MOST_ROWS = (1 << 31) - 1  # of a lane

if TYPE_CHECKING:
    from jurybox.client.in_flight import InFlight


class RowRun:
    """Consecutive rows that belong to whoever holds this object: a call, a ticket, `Rows`.

    Attributes:
        first, rows: the first row and the number of rows.
    """

    __slots__ = ("__weakref__", "first", "rows")

    def __init__(self, first: int, rows: int) -> None:
        self.first = first
        self.rows = rows


class RowAllocator:
    """The rows of a lane: runs that were taken, and tickets to which rows are lent.

    A row is free if it is in no run that is held, and in no ticket that is not settled. So rows of a call that Ctrl-C
    ended return by themselves, and rows that an engine may still write to stay in use until it has answered or is gone.
    Each change of the two tables is one step of the interpreter. What depends on several is checked afterwards.

    Args:
        first, rows: the lane's first row and its number of rows.

    Attributes:
        lent: the tickets that are not settled, by sequence number.
    """

    def __init__(self, first: int, rows: int) -> None:
        self.first = first
        self.rows = rows
        self._end = first + rows
        self.lent: dict[int, InFlight] = {}
        self._taken: set[weakref.ref[RowRun]] = set()
        self._dropped = self._taken.discard  # when a run is dropped its entry goes, without code of the interpreter
        self._attempts = itertools.count()
        self._last = -1

    def take(self, n: int) -> RowRun | None:
        """Take n consecutive rows; return None if there are no such free rows. They are free again when it is dropped.

        Raises:
            ValueError: n is not a whole number of at least 1.
        """
        rows = n if type(n) is int and n > 0 else whole(n, "rows", 1)
        while True:
            attempt = self._last = next(self._attempts)
            if (first := self._fit(rows)) is None:
                return None
            run = RowRun(first, rows)
            self._taken.add(weakref.ref(run, self._dropped))  # from here on the rows are taken
            if self._last == attempt:
                return run
            self.give(run)  # a nested call has taken rows since, perhaps these

    def give(self, run: RowRun) -> None:
        """Free rows now, or once their tickets are settled. Has no effect if they are free already."""
        self._taken.discard(weakref.ref(run))

    @property
    def free(self) -> int:
        """The number of free rows."""
        return sum(length for _, length in self._gaps())

    @property
    def largest(self) -> int:
        """The length of the longest run of free rows."""
        return max((length for _, length in self._gaps()), default=0)

    def is_lent(self, first: int, rows: int) -> bool:
        """Return whether a ticket that is not settled has one of these rows."""
        return any(
            ticket.first < first + rows and first < ticket.first + ticket.rows for ticket in list(self.lent.values())
        )

    def forget(self) -> None:
        """Forget all runs and tickets, in a forked child: they are the parent's."""
        self.lent.clear()
        self._taken.clear()

    def _used(self) -> list[tuple[int, int]]:
        """Return the runs of rows in use, (first, rows), in order; they may overlap."""
        # In this order: rows whose run is given while they are lent move from the first table to the second. `list` of
        # them runs no other code.
        used = []
        for each in list(self._taken):
            if (run := each()) is not None:
                used.append((run.first, run.rows))
        if self.lent:
            used += [(ticket.first, ticket.rows) for ticket in list(self.lent.values())]
        if len(used) > 1:
            used.sort()
        return used

    def _fit(self, n: int) -> int | None:
        """Return the first of n free rows."""
        at = self.first
        for first, rows in self._used():
            if first - at >= n:
                break
            if (end := first + rows) > at:
                at = end
        return at if self._end - at >= n else None

    def _gaps(self) -> list[tuple[int, int]]:
        """Return the free runs, (first, length), in order."""
        gaps, at = [], self.first
        for first, rows in self._used():
            if first > at:
                gaps.append((at, first - at))
            at = max(at, first + rows)
        if at < self.first + self.rows:
            gaps.append((at, self.first + self.rows - at))
        return gaps


def whole(value: int, what: str, least: int, most: int | None = None) -> int:
    """Check a count or an index that comes from a caller. Raises ValueError, naming what it is and what is expected."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{what}={value!r}: expected a whole number {bound}")
    return number


def version_of(value: int | None) -> int:
    """Check a version that comes from a caller; return it as tickets name it, the newest as 0. Raises ValueError.

    A ticket with another one could never be sent, and its lane would try again and again.
    """
    if value is None:
        return 0
    version = value if type(value) is int and 0 < value < 1 << 64 else whole(value, "version", 0, (1 << 64) - 1)
    if version == 0:
        warnings.warn(
            "version=0 means the newest weights for now, and in two minor releases those that the model was loaded "
            "with, as in a Reply: leave it out, or give None, for the newest",
            DeprecationWarning,
            stacklevel=_callers(),
        )
    return version


def _callers() -> int:
    """Return the `stacklevel` at which a warning names the caller of the package."""
    import inspect  # needed here alone, and importing it takes as long as ZeroMQ

    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("jurybox.client."):
        level, frame = level + 1, frame.f_back
    return level
