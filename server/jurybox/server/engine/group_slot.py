"""A group in the engine's loop: where one queue, and one batch, are of several models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.server.engine.group import Grouped
from jurybox.server.engine.inbox import Queue
from jurybox.server.engine.meters import Meters
from jurybox.server.engine.slot import Slot


class GroupSlot(Slot):
    """The slot that all members of a group share."""

    def __init__(self, grouped: Grouped, queue: Queue) -> None:
        self.grouped = grouped
        super().__init__(grouped, queue, GroupMeters(grouped, queue))

    def answers(self, tickets: NDArray[Any], version: int) -> Iterator[tuple[NDArray[Any], int]]:
        """The tickets by the version that computed them, which is each member's own."""
        used = self.grouped.versions(tickets)
        first = int(used[0])
        if (used == first).all():
            yield tickets, first
            return
        for one in np.unique(used):
            yield tickets[used == one], int(one)

    def parts(self, tickets: NDArray[Any]) -> list[NDArray[Any]]:
        """The tickets by member: one that fails shall not fail the others."""
        return [part.tickets for part in self.grouped.split(tickets)]

    def name(self, tickets: NDArray[Any]) -> str:
        """Of the member whose tickets these are."""
        names = [self.grouped.members[part.place].served.spec.name for part in self.grouped.split(tickets)]
        return names[0] if len(names) == 1 else self.grouped.spec.name

    def release(self) -> None:
        """A member leaves; the group goes on."""


class GroupMeters(Meters):
    """Counts for every member by itself."""

    def __init__(self, grouped: Grouped, queue: Queue) -> None:
        self._grouped = grouped
        self._queue = queue
        self._anybody_waits = True

    def batch(self, tickets: NDArray[Any], rows: int, began: int, ended: int) -> None:
        """As Meters.batch."""
        for part in self._grouped.split(tickets):
            self._grouped.members[part.place].meters.batch(part.tickets, part.rows, began, ended)

    def failed(self, tickets: NDArray[Any]) -> None:
        """As Meters.failed."""
        for part in self._grouped.split(tickets):
            self._grouped.members[part.place].meters.failed(part.tickets)

    def not_held(self, tickets: NDArray[Any]) -> None:
        """As Meters.not_held."""
        for part in self._grouped.split(tickets):
            self._grouped.members[part.place].meters.not_held(part.tickets)

    def expired(self, tickets: NDArray[Any]) -> None:
        """As Meters.expired."""
        for part in self._grouped.split(tickets):
            self._grouped.members[part.place].meters.expired(part.tickets)

    def waiting(self, rows: int) -> None:
        """As Meters.waiting: of each member, those of its rows that did not go into the batch."""
        if not rows and not self._anybody_waits:
            return
        self._anybody_waits = rows > 0
        waiting = self._queue.waiting
        for member in self._grouped.members:
            member.meters.waiting(int(waiting["rows"][waiting["model"] == member.model].sum()) if rows else 0)
