"""Failed batches as a list of work: one part of a batch is computed a turn, so that nothing else waits for all of them.

A batch that fails is divided, and its parts are computed again, to find the rows that the model fails on. The engine
takes one part a turn: between two of them it shows that it is alive, answers other models, and lets deadlines pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.wire import TICKET

if TYPE_CHECKING:
    from jurybox.server.engine.batches import Slot


class FailedPart(NamedTuple):
    """Tickets of a failed batch that are computed again together, with the weights version that they asked for."""

    tickets: NDArray[Any]
    version: int


class Recovery:
    """The parts of failed batches, by slot and in the order of their tickets.

    While a slot has parts, its queue waits: no ticket overtakes an earlier one of its lane.

    Attributes:
        parts: those of the slots that have some; read in every turn, and nearly always empty.
    """

    def __init__(self) -> None:
        self.parts: dict[Slot, deque[FailedPart]] = {}
        self._turns: dict[Slot, int] = {}  # when a part of the slot was last taken

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def add(self, slot: Slot, parts: Sequence[NDArray[Any]], version: int) -> None:
        """Add the parts of a batch, copies, before those of later batches."""
        self.parts.setdefault(slot, deque()).extendleft(FailedPart(part, version) for part in reversed(parts))

    def model(self, slot: Slot) -> int:
        """Return the number of the model of a slot's next part."""
        return int(self.parts[slot][0].tickets["model"][0])

    def since(self, slot: Slot) -> int:
        """Return since when a slot waits for a turn: its oldest ticket's arrival, but at least its last turn."""
        return max(int(self.parts[slot][0].tickets["submitted"][0]), self._turns.get(slot, 0))

    def next(self, slot: Slot, now: int) -> tuple[FailedPart | None, NDArray[Any]]:
        """Take a slot's next part, and its tickets whose deadline has passed; None if none is left to compute."""
        self._turns[slot] = now
        late = np.zeros(0, TICKET)
        part = None
        parts = self.parts[slot]
        while parts and part is None:
            tickets, version = parts.popleft()
            passed = (tickets["deadline"] != 0) & (tickets["deadline"] < now)
            if passed.any():
                late, tickets = np.concatenate((late, tickets[passed])), tickets[~passed]
            if len(tickets):
                part = FailedPart(tickets, version)
        self._tidy(slot)
        return part, late

    def remove(self, slot: Slot, field: str, value: int) -> NDArray[Any]:
        """Remove and return the tickets of a lane or a model, the `field` of their records."""
        removed = [np.zeros(0, TICKET)]
        if slot in self.parts:
            kept: deque[FailedPart] = deque()
            for tickets, version in self.parts[slot]:
                those = tickets[field] == value
                removed.append(tickets[those])
                if not those.all():
                    kept.append(FailedPart(tickets[~those], version))
            self.parts[slot] = kept
            self._tidy(slot)
        return np.concatenate(removed)

    def _tidy(self, slot: Slot) -> None:
        if not self.parts[slot]:
            del self.parts[slot]
            self._turns.pop(slot, None)
