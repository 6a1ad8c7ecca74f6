"""An engine that leaves for traces when the batch of a ticket began and ended (jurybox.protocol.timings).

All of it stands around the core and the doors, so that an engine without traces runs not one instruction more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

from numpy.typing import NDArray

from jurybox.protocol.board import Board
from jurybox.protocol.errors import Code
from jurybox.protocol.timings import Timings
from jurybox.server.engine.core import Engine, Slot
from jurybox.server.engine.door import Door
from jurybox.server.engine.group import Grouped
from jurybox.server.engine.served import Served

_COMPUTED = (Code.OK, Code.MODEL_FAILED)  # answers to tickets that were in a batch


class Stopwatch:
    """The batch that is computed now, or was last."""

    def __init__(self) -> None:
        self.began = 0
        self.rows = 0
        self.tickets = 0


class TimedServed:
    """A served model, or a group of them, that says when a batch begins; in all else the model itself."""

    def __init__(self, served: Served | Grouped, watch: Stopwatch) -> None:
        self._served = served
        self._watch = watch

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> None:
        """As Served.run."""
        watch = self._watch
        watch.began, watch.rows, watch.tickets = time.monotonic_ns(), rows, len(tickets)
        self._served.run(tickets, rows, version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served, name)


class TimedDoor:
    """A door that leaves a ticket's times before it answers it: who has the answer finds them."""

    number = 0

    def __init__(self, door: Door, timings: Timings, engine: int, watch: Stopwatch) -> None:
        self._door = door
        self._timings = timings
        self._engine = engine
        self._watch = watch
        self.collect = door.collect

    def reply(self, tickets: NDArray[Any], code: int, version: int, message: str) -> None:
        """As Door.reply."""
        watch = self._watch
        if code in _COMPUTED:
            self._timings.write(
                tickets,
                began=watch.began,
                ended=time.monotonic_ns(),
                engine=self._engine,
                batch_rows=watch.rows,
                batch_tickets=watch.tickets,
            )
        self._door.reply(tickets, code, version, message)


class TracedEngine(Engine):
    """As Engine, with what traces need.

    Args:
        timings: where to leave it; the engine does not close it.
    """

    def __init__(self, board: Board, index: int, doors: Sequence[Door], timings: Timings, **options: Any) -> None:
        self._watch = Stopwatch()
        super().__init__(board, index, [TimedDoor(door, timings, index, self._watch) for door in doors], **options)

    def put(self, model: int, slot: Slot, max_batch: int) -> None:
        """As Engine.put."""
        if not isinstance(slot.served, TimedServed):
            slot.served = cast(Served, TimedServed(slot.served, self._watch))
        super().put(model, slot, max_batch)
