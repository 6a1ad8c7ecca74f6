"""Counting: what an engine did, written to its part of the board."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.board import TIME_BUCKETS


class Meters:
    """The counters of one model in one engine; the only writer of its record on the board.

    Args:
        record: one record of board.COUNTERS, shape ().
    """

    def __init__(self, record: NDArray[Any]) -> None:
        self._record = record
        self._requests = 0
        self._rows = 0
        self._batches = 0
        self._batch_rows = record["batch_rows"]
        self._queue = record["queue_ns"]
        self._forward = record["forward_ns"]
        self._request = record["request_ns"]

    def batch(self, tickets: NDArray[Any], rows: int, began: int, ended: int) -> None:
        """Count one answered batch; `began` and `ended` are ns of CLOCK_MONOTONIC."""
        record = self._record
        record["requests"] += len(tickets)
        record["rows"] += rows
        record["batches"] += 1
        self._batch_rows[rows.bit_length()] += 1
        self._forward[min((ended - began).bit_length(), TIME_BUCKETS - 1)] += 1
        submitted = tickets["submitted"]
        if len(tickets) == 1:
            since = int(submitted[0])
            self._queue[_bucket(began - since)] += 1
            self._request[_bucket(ended - since)] += 1
        else:
            _add_times(self._queue, began - submitted)
            _add_times(self._request, ended - submitted)

    def failed(self, n: int) -> None:
        """Count n tickets that the model could not answer."""
        self._record["failed"] += n

    def expired(self, n: int) -> None:
        """Count n tickets whose deadline had passed."""
        self._record["expired"] += n

    def refused(self, n: int) -> None:
        """Count n tickets refused on arrival."""
        self._record["refused"] += n

    def waiting(self, rows: int) -> None:
        """Tell how many rows wait for a batch."""
        self._record["waiting"] = rows

    def adopted(self, version: int, seconds: float) -> None:
        """Count a change of weights: the version in use from now on, `seconds` after its publication."""
        self._record["version"] = version
        self._record["newest"] = max(int(self._record["newest"]), version)
        self._record["updates"] += 1
        self._record["adopted"] = time.monotonic_ns()
        self._record["adopt_ns"][_bucket(int(seconds * 1e9))] += 1


def _bucket(nanoseconds: int) -> int:
    # A client's clock is the host's, but what it wrote is not to be trusted with our indices.
    return min(max(nanoseconds, 0).bit_length(), TIME_BUCKETS - 1)


def _add_times(histogram: NDArray[Any], nanoseconds: NDArray[Any]) -> None:
    exponents = np.frexp(np.maximum(nanoseconds, 0).astype(np.float64))[1]
    histogram += np.bincount(np.minimum(exponents, TIME_BUCKETS - 1), minlength=TIME_BUCKETS).astype(np.uint64)
