"""An engine that leaves for traces when the batch of a ticket began and ended (jurybox.protocol.timings).

It stands around the core, so that an engine without traces runs not one instruction more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from jurybox.protocol.board import Board
from jurybox.protocol.timings import Timings
from jurybox.server.engine.batches import Batches
from jurybox.server.engine.core import Engine
from jurybox.server.engine.door import Door
from jurybox.server.engine.slot import Slot


class TracedBatches(Batches):
    """As Batches; leaves a batch's times before it answers, so that who has the answer finds them.

    Args:
        timings: where to leave them.
        engine: number to leave with them.
        parts: of Batches.
    """

    def __init__(self, timings: Timings, engine: int, *parts: Any) -> None:
        super().__init__(*parts)
        self._timings = timings
        self._engine = engine

    def _computed(self, slot: Slot, tickets: NDArray[Any], rows: int, version: int, began: int) -> None:
        self._timings.write(
            tickets,
            began=began,
            ended=self._clock(),
            engine=self._engine,
            batch_rows=rows,
            batch_tickets=len(tickets),
        )
        super()._computed(slot, tickets, rows, version, began)


class TracedEngine(Engine):
    """As Engine, with what traces need.

    Args:
        timings: where to leave it; the engine does not close it.
    """

    def __init__(
        self,
        board: Board,
        index: int,
        doors: Sequence[Door],
        timings: Timings,
        pause: Callable[[float, int], None],
        report: Callable[..., None],
    ) -> None:
        super().__init__(board, index, doors, pause=pause, report=report)
        self._batches = TracedBatches(timings, index, self._answer, self._crowd, self._clock, report)
