"""The rows of a replay in the order in which they came, each handed out once: for small messages between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.training.replay.replay import Replay


class Tail:
    """One reader's place in a replay whose fields are stored as they are.

    Rows that were overwritten before they were taken are missed, and so is one that its writer had not finished when a
    later one was taken (a killed writer never does): what must not be lost is not to be told this way.

    Args:
        replay: stays the caller's to close.

    Attributes:
        at: the number of the next row; begins after all that are there.
    """

    def __init__(self, replay: Replay) -> None:
        self._part = replay.parts[0]
        self._names: Sequence[str] = list(replay.layout.fields)
        self.at = int(self._part.ring.added)

    def take(self) -> dict[str, npt.NDArray[Any]]:
        """What came since the last time, by field: (n, *shape)."""
        part = self._part
        end = int(part.ring.added)
        first = max(self.at, end - part.capacity)
        slots = np.arange(first, end) % part.capacity
        # An even word that names the row: it is whole. Read before and after, as its writer may be a lap ahead.
        whole = 2 * np.arange(first, end, dtype=np.uint64) + 2
        there = part.sequences[slots] == whole
        rows = {name: part.field_rows(name, 0, part.capacity)[slots] for name in self._names}
        there &= part.sequences[slots] == whole
        if there.any():
            self.at = first + int(np.flatnonzero(there)[-1]) + 1
        return {name: values[there] for name, values in rows.items()}
