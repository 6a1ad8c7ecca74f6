"""A client's lane: which of its rows are free. The number of free rows is the client's credit."""

from __future__ import annotations


class FreeRows:
    """The free rows of a lane, as runs; takes the first run that fits.

    Args:
        first: the lane's first row in the arena.
        rows: how many it has.
    """

    def __init__(self, first: int, rows: int) -> None:
        self.total = rows
        self._runs: list[tuple[int, int]] = [(first, rows)]  # (first, length), in order, never touching

    @property
    def free(self) -> int:
        """Free rows, neighbours or not."""
        return sum(length for _, length in self._runs)

    @property
    def largest(self) -> int:
        """Length of the longest free run."""
        return max((length for _, length in self._runs), default=0)

    def take(self, rows: int) -> int | None:
        """The first of `rows` neighbouring rows, taken; None when there is no such run."""
        for i, (first, length) in enumerate(self._runs):
            if length >= rows:
                if length == rows:
                    del self._runs[i]
                else:
                    self._runs[i] = (first + rows, length - rows)
                return first
        return None

    def give(self, first: int, rows: int) -> None:
        """Give rows back that were taken."""
        at = next((i for i, run in enumerate(self._runs) if run[0] > first), len(self._runs))
        before = self._runs[at - 1] if at else None
        after = self._runs[at] if at < len(self._runs) else None
        if (before and before[0] + before[1] > first) or (after and first + rows > after[0]):
            raise AssertionError(f"rows {first}..{first + rows - 1} were free already")
        start, length = first, rows
        low, high = at, at
        if before and before[0] + before[1] == first:
            start, length, low = before[0], before[1] + length, at - 1
        if after and first + rows == after[0]:
            length, high = length + after[1], at + 1
        self._runs[low:high] = [(start, length)]
