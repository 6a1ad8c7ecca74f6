"""Counting: what an engine did, written to its part of the board."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.board import TIME_BUCKETS


class Meters:
    """The counters of one model in one engine; the only writer of its record on the board.

    What is counted is kept here and shown there: other processes can write to the board.

    Args:
        shown: one record of board.COUNTERS, shape (1,); counting goes on where it stands.
    """

    def __init__(self, shown: NDArray[Any]) -> None:
        self._shown = shown
        self._own = shown.copy()
        self._waiting = 0

    def batch(self, tickets: NDArray[Any], rows: int, began: int, ended: int) -> None:
        """Count one answered batch; `began` and `ended` are ns of CLOCK_MONOTONIC."""
        native.count_batch(self._own, self._shown, tickets, rows, began, ended)

    def failed(self, tickets: NDArray[Any]) -> None:
        """Count tickets that the model could not answer."""
        self._add("failed", len(tickets))

    def expired(self, tickets: NDArray[Any]) -> None:
        """Count tickets whose deadline had passed."""
        self._add("expired", len(tickets))

    def not_held(self, tickets: NDArray[Any]) -> None:
        """Count tickets that asked for a weights version that is not held."""
        self._add("not_held", len(tickets))

    def refused(self, n: int) -> None:
        """Count n tickets refused on arrival."""
        self._add("refused", n)

    def waiting(self, rows: int) -> None:
        """Tell how many rows wait for a batch."""
        self._shown["waiting"] = self._waiting = rows

    def adopted(self, version: int, seconds: float) -> None:
        """Count a change of weights: the version in use from now on, `seconds` after its publication."""
        self._own["version"] = version
        self._own["newest"] = np.maximum(self._own["newest"], version)
        self._own["updates"] += 1
        self._own["adopted"] = time.monotonic_ns()
        nanoseconds = max(0, int(seconds * 1e9))
        self._own["adopt_total_ns"] += nanoseconds
        self._own["adopt_ns"][0, min(nanoseconds.bit_length(), TIME_BUCKETS - 1)] += 1
        self.show()

    def show(self) -> None:
        """Write the whole record anew: somebody may have overwritten it."""
        self._own["waiting"] = self._waiting
        self._shown[:] = self._own

    def _add(self, name: str, n: int) -> None:
        self._own[name] += n
        self._shown[name] = self._own[name]
