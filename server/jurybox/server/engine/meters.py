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

    Args:
        record: one record of board.COUNTERS, shape (1,).
    """

    def __init__(self, record: NDArray[Any]) -> None:
        self._record = record

    def batch(self, tickets: NDArray[Any], rows: int, began: int, ended: int) -> None:
        """Count one answered batch; `began` and `ended` are ns of CLOCK_MONOTONIC."""
        native.count_batch(self._record, tickets, rows, began, ended)

    def failed(self, tickets: NDArray[Any]) -> None:
        """Count tickets that the model could not answer."""
        self._record["failed"] += len(tickets)

    def expired(self, tickets: NDArray[Any]) -> None:
        """Count tickets whose deadline had passed."""
        self._record["expired"] += len(tickets)

    def not_held(self, tickets: NDArray[Any]) -> None:
        """Count tickets that asked for a weights version that is not held."""
        self._record["not_held"] += len(tickets)

    def refused(self, n: int) -> None:
        """Count n tickets refused on arrival."""
        self._record["refused"] += n

    def waiting(self, rows: int) -> None:
        """Tell how many rows wait for a batch."""
        self._record["waiting"] = rows

    def adopted(self, version: int, seconds: float) -> None:
        """Count a change of weights: the version in use from now on, `seconds` after its publication."""
        self._record["version"] = version
        self._record["newest"] = np.maximum(self._record["newest"], version)
        self._record["updates"] += 1
        self._record["adopted"] = time.monotonic_ns()
        nanoseconds = max(0, int(seconds * 1e9))
        self._record["adopt_total_ns"] += nanoseconds
        self._record["adopt_ns"][0, min(nanoseconds.bit_length(), TIME_BUCKETS - 1)] += 1
