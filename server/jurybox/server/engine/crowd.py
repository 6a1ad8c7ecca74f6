"""Who is about to come back: clients in closed loop, and whether one more of them is worth waiting for.

On few cores an engine that starts on whatever has arrived takes the core from the very clients whose tickets would
have filled its batch. So it waits a little, but only for clients that lately came back at once, and only by this rule:
one more ticket is worth waiting for while it comes sooner than its share of what all of the batch's tickets bear in
common so far, the waiting and the fixed cost of a batch. A model whose cost is all by the row has nothing to share, and
nobody is waited for. Nor is more than half of the crowd: its halves take turns, and while one is computed the other's
clients run, where a batch of everybody would leave all other cores idle. A lone client is never waited for, since
nobody is missing when it asks; a client that stays away loses its credit and is waited for no more until it shows again
that it is quick. native.Crowd keeps that book.
"""

from __future__ import annotations

QUICK = 4  # batches' time within which a client in closed loop is back
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
