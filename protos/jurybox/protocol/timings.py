"""Timings of tickets for traces: begin, end and size of their batches.

Tickets and replies do not contain them. They have separate pages, which exist only if a server is configured for
traces: engines write them, and a client that traces reads them after its answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.scoreboard import MAX_LANES
from jurybox.protocol.segment import Maker, Segment

PLACES = 16  # records per lane; if a client has more tickets in flight, older records are overwritten

TIMING = np.dtype(
    [
        ("sequence", "<u8"),  # of the ticket; written last, so that a matching number means a complete record
        ("began", "<i8"),  # ns of CLOCK_MONOTONIC: its batch left the queue
        ("ended", "<i8"),  # its answer was ready
        ("engine", "<u4"),
        ("rows", "<u4"),  # of the batch
        ("tickets", "<u4"),  # of the batch
        ("pad", "V28"),
    ]
)
assert TIMING.itemsize == 64


class Timings:
    """The array `records` (lanes, PLACES); a ticket's index is its sequence number modulo PLACES."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.records: NDArray[Any] = segment.array(TIMING, (MAX_LANES, PLACES))

    @classmethod
    def create(cls, name: str, make: Maker = Segment.create) -> Timings:
        """Create the segment. Raises SharedMemoryError if too little memory is available."""
        return cls(make(name, TIMING.itemsize * MAX_LANES * PLACES))

    @classmethod
    def attach(cls, name: str, *, writable: bool = False) -> Timings:
        """Map the timings of a server. Raises SharedMemoryError if it has none."""
        return cls(Segment.attach(name, writable=writable))

    def write(
        self, tickets: NDArray[Any], *, began: int, ended: int, engine: int, batch_rows: int, batch_tickets: int
    ) -> None:
        """Record the tickets of one batch (wire.TICKET), of checked lanes."""
        where = tickets["lane"], tickets["sequence"] % PLACES
        records = np.zeros(len(tickets), TIMING)
        records["began"], records["ended"], records["engine"] = began, ended, engine
        records["rows"], records["tickets"] = batch_rows, batch_tickets
        self.records[where] = records
        self.records["sequence"][where] = tickets["sequence"]

    def read(self, lane: int, sequence: int) -> Any:
        """Return the record of a ticket; None if there is none, or not any more."""
        record = self.records[lane, sequence % PLACES].copy()
        return record if int(record["sequence"]) == sequence else None

    def close(self) -> None:
        """Close the segment; the owner also removes it."""
        self.segment.release()
