"""What a batch costs, learnt from batches: engines and the gateway decide by it whether waiting for more rows pays."""

from __future__ import annotations

_FORGET = 0.005
_SPREAD = 0.02  # of the rows' variance over their squared mean


class BatchCost:
    """What a batch costs: a line through what batches took, by least squares that forget.

    Attributes:
        fixed: ns of a batch however few rows it has.
    """

    def __init__(self) -> None:
        self.fixed = 0.0
        self._weight = self._rows = self._ns = self._rows2 = self._rows_ns = 0.0

    def observe(self, rows: int, ns: int) -> None:
        """A batch of so many rows took so long."""
        keep = 1.0 - _FORGET
        self._weight = keep * self._weight + 1.0
        self._rows = keep * self._rows + rows
        self._ns = keep * self._ns + ns
        self._rows2 = keep * self._rows2 + rows * rows
        self._rows_ns = keep * self._rows_ns + rows * ns
        spread = self._weight * self._rows2 - self._rows * self._rows
        if spread < _SPREAD * self._rows * self._rows:
            return  # batches of one size say nothing of the slope: what was known before stands
        slope = (self._weight * self._rows_ns - self._rows * self._ns) / spread
        self.fixed = max(0.0, (self._ns - max(slope, 0.0) * self._rows) / self._weight)
