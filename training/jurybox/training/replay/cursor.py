"""Cursors: readers that get each new row of a replay once, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.training.replay.options import ForkGuard
from jurybox.training.replay.part import Part, Parts, packed_strides


class Cursor:
    """A reader of a replay whose fields are stored unpacked.

    A cursor misses rows that were overwritten or given up before it took them. It also misses a row that its writer had
    not finished when a later one was taken (a killed writer never does). So do not use it where no row may be lost.

    A forked child has its own cursor, which begins at its parent's position: both get every row.

    Args:
        replay: the caller closes it.

    Attributes:
        at: the ticket of the next row; begins after all tickets issued so far. Tickets, not counts of added rows,
            determine slots: a writer skips a slot that another writer holds (for example a killed one).
        missed: rows that were overwritten or given up before they were taken.
        tickets: of the rows that were taken last, int64 (n,).
    """

    def __init__(self, replay: Parts) -> None:
        self._part = replay.parts[0]
        self._fields = replay.layout.fields
        self._offsets = replay.layout.slot.offsets
        self.missed = 0
        self.tickets = np.empty(0, np.int64)
        self.at = int(self._part.ring.reserved)

    def resume(self, at: int) -> None:
        """Continue where another cursor stood, `at`, when the replay was saved whose rows were restored here.

        Rows that were added since the restore come next, even those that were added before this cursor was made. A
        replay that was not restored, or not under its old tickets, has issued fewer: its rows so far are skipped. What
        the ring holds no longer counts as seen, not as missed.
        """
        ring = self._part.ring
        newest = int(ring.reserved)
        self.at = min(max(at, int(ring.tail), newest - self._part.capacity), newest)

    def take(self) -> dict[str, npt.NDArray[np.generic]]:
        """The new rows since the last call, by field: (n, *shape)."""
        part, ring = self._part, self._part.ring
        end = int(ring.reserved)
        first = max(self.at, end - part.capacity, int(ring.tail))
        self.missed += first - self.at
        slots = np.zeros((max(0, end - first), part.slots.shape[1]), np.uint8)
        taken, ticket = 0, first
        while ticket < end:  # to the ring's last slot, and on from its first
            slot = ticket % part.capacity
            n = min(end - ticket, part.capacity - slot)
            native.replay_snapshot(ring, slot, slots[taken : taken + n].reshape(-1), end, None)
            taken, ticket = taken + n, ticket + n
        # An even word that names the row: it is whole. What its writer has not finished, or has overwritten, is not.
        words = np.ascontiguousarray(slots[:, :8]).view(np.uint64)[:, 0]
        written = words == 2 * np.arange(first, first + len(slots), dtype=np.uint64) + 2
        self.tickets = first + np.flatnonzero(written)
        self.at = int(self.tickets[-1]) + 1 if len(self.tickets) else first
        rows = slots[written]
        return {name: self._column(rows, name) for name in self._fields}

    def _column(self, rows: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.generic]:
        spec, (n, size) = self._fields[name], rows.shape
        shape, dtype = spec.stored_shape, spec.stored_dtype
        strides = (size, *packed_strides(shape, dtype.itemsize))
        return np.ndarray((n, *shape), dtype, rows.data, self._offsets[name] if n else 0, strides).copy()


# New rows of a replay since the last call: whole rows in the order of their tickets, and their links.
#
# A row that is taken gets a position, counted from 0; links to its neighbours are positions. So a copy of the
# rows (in a device's memory, or a replay on another host) does not depend on the ring they came from.


# Instead of a neighbour's position. Before a row: it is its episode's first, or its predecessor is missing. After it:
# the next row is missing so far, or the episode is over.
FIRST, UNKNOWN = -1, -2
NOT_YET, ENDED = -1, -2
# Maximum time to write a reserved row; after it the writer counts as killed, and the row is given up.
_TIMEOUT = 1.0
_ENDED_WORD = np.uint64(2**64 - 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the new rows.

    Attributes:
        first: position of the first one; the others follow.
        slots: (n, slot bytes) uint8, as they lie in the ring; their first 8 bytes mean nothing here.
        before: (n,) int64, position of the row before, FIRST or UNKNOWN.
        after: (n,) int64, NOT_YET or ENDED.
        flags: (n,) uint8, as the native code has them. All three are empty where rows have no episodes.
    """

    first: int
    slots: npt.NDArray[np.uint8]
    before: npt.NDArray[np.int64]
    after: npt.NDArray[np.int64]
    flags: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        return np.arange(self.first, self.first + len(self.slots))


class NewRows(ForkGuard):
    """Reads the new rows of one ring, and may free their slots. Belongs to one thread.

    Attributes:
        taken: rows taken so far, and the next one's position.
        missed: rows that were overwritten before they were taken, or whose writer was killed.
    """

    refusal = "these new rows were followed before a fork, and are the parent's: follow them anew here"

    def __init__(self, part: Part) -> None:
        self.taken = 0
        self.missed = 0
        self._part = part
        self._capacity = part.capacity
        self._next = int(part.ring.tail)  # tickets below it have been checked
        self._late: dict[int, float] = {}  # tickets of rows that were not whole, and since when
        self._open: dict[int, int] = {}  # tickets of rows whose episode went on, and their positions
        # Ticket and position, by slot, of taken rows that the ring still holds.
        self._ticket_at = np.full(part.capacity, -1, np.int64)
        self._position_at = np.full(part.capacity, -1, np.int64)
        self._links = np.zeros((0, 16), np.uint8)
        super().__init__()

    @property
    def waiting(self) -> int:
        """The number of new rows."""
        return int(self._part.ring.reserved) - self._next

    def take(self, staging: npt.NDArray[np.uint8], most: int | None = None) -> Iterator[Piece]:
        """Iterate over the new rows in pieces, each valid in `staging` (m, slot bytes) until the next request.

        Args:
            most: maximum number of rows; the rest follows in the next call.
        """
        self._check_process()
        ring = self._part.ring
        newest = int(ring.reserved)
        oldest = max(self._next, int(ring.tail), newest - self._capacity)
        self.missed += oldest - self._next
        if most is not None:
            newest = min(newest, oldest + most)
        for first, n in self._runs(oldest, newest, len(staging)):
            piece = self._piece(first, n, newest, staging)
            if piece is not None:
                yield piece
        self._next = newest
        self._give_up(newest)

    def ended(self) -> npt.NDArray[np.int64]:
        """Return positions of rows that turned out to be the last of their episodes after they were taken."""
        self._check_process()
        if self._part.links is None or not self._open:
            return np.empty(0, np.int64)
        tickets = np.fromiter(self._open, np.int64, len(self._open))
        after = self._part.links.view(np.uint64)[tickets % self._capacity, 1]
        written = self._part.sequences[tickets % self._capacity] == (2 * tickets + 2).astype(np.uint64)
        closed = written & (after == _ENDED_WORD)
        positions = np.array([self._open[ticket] for ticket in tickets[closed].tolist()], np.int64)
        for ticket in tickets[closed | ~written].tolist():
            del self._open[ticket]
        return positions

    def discard(self) -> None:
        """Free the slots of the rows that were read, for waiting writers."""
        self._check_process()
        # Keep rows that are still being written, and all after them.
        upto = min(self._late, default=self._next)
        ring = self._part.ring
        ring.discard(max(0, upto - max(int(ring.tail), self._next - self._capacity)))

    def _runs(self, oldest: int, newest: int, longest: int) -> Iterator[tuple[int, int]]:
        """Runs (ticket, length) of slots side by side: what was late, then what is new."""
        for ticket in sorted(self._late):
            yield ticket, 1
        while oldest < newest:
            n = min(newest - oldest, longest, self._capacity - oldest % self._capacity)
            yield oldest, n
            oldest += n

    def _piece(self, first: int, n: int, newest: int, staging: npt.NDArray[np.uint8]) -> Piece | None:
        slot, staged = first % self._capacity, staging[:n]
        linked = self._part.links is not None
        if linked and len(self._links) < n:
            self._links = np.zeros((len(staging), 16), np.uint8)
        links = self._links.reshape(-1) if linked else None
        native.replay_snapshot(self._part.ring, slot, staged.reshape(-1), newest, links)
        tickets = np.arange(first, first + n)
        whole = staged[:, :8].copy().view(np.uint64)[:, 0] == (2 * tickets + 2).astype(np.uint64)
        now = time.monotonic()
        for ticket in tickets[~whole].tolist():
            self._late.setdefault(ticket, now)
        tickets = tickets[whole]
        count = len(tickets)
        for ticket in tickets.tolist() if self._late else ():
            self._late.pop(ticket, None)
        if count == 0:
            return None
        if count < n:
            staged[:count] = staged[whole]
        positions = np.arange(self.taken, self.taken + count)
        self._ticket_at[tickets % self._capacity] = tickets
        self._position_at[tickets % self._capacity] = positions
        self.taken += count
        if not linked:
            none = np.empty(0, np.int64)
            return Piece(int(positions[0]), staged[:count], none, none, np.empty(0, np.uint8))
        before, after, flags = self._linked(tickets, positions, self._links[:n][whole].view(np.uint64))
        return Piece(int(positions[0]), staged[:count], before, after, flags)

    def _linked(
        self, tickets: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], words: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        flags = (words[:, 0] & np.uint64(3)).astype(np.uint8)
        earlier = (words[:, 0] >> np.uint64(2)).astype(np.int64) - 1
        known = (earlier >= 0) & (self._ticket_at[earlier % self._capacity] == earlier)
        before = np.where(earlier < 0, FIRST, np.where(known, self._position_at[earlier % self._capacity], UNKNOWN))
        ended = words[:, 1] == _ENDED_WORD
        for ticket, position in zip(tickets[~ended].tolist(), positions[~ended].tolist(), strict=True):
            self._open[ticket] = position
        for ticket in earlier[known].tolist():
            self._open.pop(ticket, None)
        return before, np.where(ended, ENDED, NOT_YET), flags

    def _give_up(self, newest: int) -> None:
        for ticket, since in list(self._late.items()):
            if ticket < newest - self._capacity or time.monotonic() - since > _TIMEOUT:
                del self._late[ticket]
                self.missed += 1
