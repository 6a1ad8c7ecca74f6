"""An estimate of a batch's cost, by which engines and the gateway decide whether waiting for more rows pays."""

from __future__ import annotations

import math

# The least fixed cost of a batch, in ns, for which all clients that return promptly are waited for: a smaller one is of
# the order of a context switch.
LARGE_NS = 1_000_000

_KEEP = 0.995  # what is left of past batches' weight with each batch
_STALE = 100  # batches of equal sizes, after which the last estimate may be out of date
_FORGET = 1.01  # how much the shortest of them grows with each, so that it follows a model that got slower
_SPREAD = 0.02  # the smallest variance of the number of rows over its squared mean for a fit


class BatchCost:
    """A linear model of a batch's duration as a function of its rows, by exponentially weighted least squares.

    Attributes:
        fixed: the cost of a batch in ns that is independent of its number of rows.
        row: the cost of each row in ns; None as long as batches of one size do not show it.
    """

    def __init__(self) -> None:
        self.fixed = 0.0
        self.row: float | None = None
        self._equal = 0  # batches since the last that showed it
        self._shortest = math.inf  # duration of those
        self._weight = self._rows = self._ns = self._rows2 = self._rows_ns = 0.0

    def observe(self, rows: int, ns: int) -> None:
        """Record that a batch of `rows` rows took `ns`."""
        self._weight = weight = _KEEP * self._weight + 1.0
        self._rows = sum_rows = _KEEP * self._rows + rows
        self._ns = sum_ns = _KEEP * self._ns + ns
        self._rows2 = rows2 = _KEEP * self._rows2 + rows * rows
        self._rows_ns = rows_ns = _KEEP * self._rows_ns + rows * ns
        spread = weight * rows2 - sum_rows * sum_rows
        if spread < _SPREAD * sum_rows * sum_rows:
            self._equal += 1
            self._shortest = min(ns, _FORGET * self._shortest)
            return  # batches of equal size do not determine the slope, so keep the last estimate
        self._equal, self._shortest = 0, math.inf
        self.row = row = max(0.0, (weight * rows_ns - sum_rows * sum_ns) / spread)
        self.fixed = max(0.0, (sum_ns - row * sum_rows) / weight)

    @property
    def possible(self) -> float:
        """The fixed cost in ns; while batches of equal sizes do not show which part that is, all of the shortest.

        Whoever waits by it sends a larger batch, which shows it. By a wrong estimate for which nobody waits, two groups
        of clients in turn would send batches of one size for ever.
        """
        if not self._equal or (self.row is not None and self._equal < _STALE):
            return self.fixed
        return self._shortest
