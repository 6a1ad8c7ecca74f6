"""A model's place in an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from jurybox.server.engine.crowd import BatchCost
from jurybox.server.engine.group import Grouped
from jurybox.server.engine.inbox import Queue
from jurybox.server.engine.meters import Meters
from jurybox.server.engine.served import Served


class Slot:
    """A model in this engine: its queue, its module, its counters. Models of a group share one (group_slot.py)."""

    def __init__(self, served: Served | Grouped, queue: Queue, meters: Meters) -> None:
        self.served = served
        self.queue = queue
        self.meters = meters
        self.cost = BatchCost()
        self.shown = 0  # 1 + number of the model, as the board shows who computes; 0: ask the tickets

    def answers(self, tickets: NDArray[Any], version: int) -> Iterable[tuple[NDArray[Any], int]]:
        """A computed batch by the weights version of its answers; `version` is the one that was asked for, or 0."""
        return ((tickets, version or self.served.version),)

    def parts(self, tickets: NDArray[Any]) -> Sequence[NDArray[Any]]:
        """What of a batch may fail without the rest."""
        return (tickets,)

    def name(self, tickets: NDArray[Any]) -> str:
        """Of the model whose tickets these are."""
        return self.served.spec.name

    def release(self) -> None:
        """A model is served by this slot no longer."""
        if isinstance(self.served, Served):
            self.served.close()
