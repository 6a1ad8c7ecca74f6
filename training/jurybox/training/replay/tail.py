"""The rows of a replay in the order in which they came, each handed out once: for small messages between processes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.training.replay.part import packed_strides
from jurybox.training.replay.replay import Replay


class Tail:
    """One reader's place in a replay whose fields are stored as they are: a cursor.

    Rows that were overwritten or given up before they were taken are missed, and so is one that its writer had not
    finished when a later one was taken (a killed writer never does): what must not be lost is not to be told this way.

    A forked child has a cursor of its own, which begins where its parent's stood: both are handed every row.

    Args:
        replay: stays the caller's to close.

    Attributes:
        at: the ticket of the next row; begins after all that were handed out by then. Tickets, and not rows added, say
            where a row lies: a writer that meets a slot that is taken (by one who was killed there, say) takes another.
    """

    def __init__(self, replay: Replay) -> None:
        self._part = replay.parts[0]
        self._fields = replay.layout.fields
        self._offsets = replay.layout.slot.offsets
        self.at = int(self._part.ring.reserved)

    def take(self) -> dict[str, npt.NDArray[np.generic]]:
        """What came since the last time, by field: (n, *shape)."""
        part, ring = self._part, self._part.ring
        end = int(ring.reserved)
        first = max(self.at, end - part.capacity, int(ring.tail))
        slots = np.zeros((max(0, end - first), part.slots.shape[1]), np.uint8)
        taken, ticket = 0, first
        while ticket < end:  # to the ring's last slot, and on from its first
            slot = ticket % part.capacity
            n = min(end - ticket, part.capacity - slot)
            native.replay_snapshot(ring, slot, slots[taken : taken + n].reshape(-1), end, None)
            taken, ticket = taken + n, ticket + n
        # An even word that names the row: it is whole. What its writer has not finished, or has overwritten, is not.
        words = np.ascontiguousarray(slots[:, :8]).view(np.uint64)[:, 0]
        there = words == 2 * np.arange(first, first + len(slots), dtype=np.uint64) + 2
        if there.any():
            self.at = first + int(np.flatnonzero(there)[-1]) + 1
        rows = slots[there]
        return {name: self._column(rows, name) for name in self._fields}

    def _column(self, rows: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.generic]:
        spec, (n, size) = self._fields[name], rows.shape
        shape, dtype = spec.stored_shape, spec.stored_dtype
        strides = (size, *packed_strides(shape, dtype.itemsize))
        return np.ndarray((n, *shape), dtype, rows.data, self._offsets[name] if n else 0, strides).copy()
