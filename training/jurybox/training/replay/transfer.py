"""Transfers rows with their episodes from one replay to another of the same fields."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import SpecMismatch
from jurybox.training.replay.cursor import ENDED, FIRST, NewRows, Piece
from jurybox.training.replay.part import Parts

__all__ = ["Exporter", "Importer"]

# A ticket that no row ever has: its row counts as overwritten.
_NEVER = np.uint64(1 << 61)


@dataclass(frozen=True, slots=True)
class RowBatch:
    """New rows of one replay, for another.

    Attributes:
        piece: the rows.
        ended: positions of earlier rows whose episode has ended since.
    """

    piece: Piece
    ended: npt.NDArray[np.int64]


class Exporter:
    """Reads the new rows of a replay as batches that can be sent.

    Args:
        replay: the source; the caller closes it.
        most_bytes: of slots in one batch.
    """

    def __init__(self, replay: Parts, most_bytes: int = 4 << 20) -> None:
        part = replay.parts[0]
        self.new = NewRows(part)
        size = part.layout.slot.size
        self._most = min(part.capacity, max(1, most_bytes // size))
        self._staging = np.empty((self._most, size), np.uint8)

    def batch(self) -> RowBatch | None:
        """A copy of the next rows; None without new rows and ended episodes."""
        pieces = [replace(piece, slots=piece.slots.copy()) for piece in self.new.take(self._staging, self._most)]
        ended = self.new.ended()
        if not pieces and not len(ended):
            return None
        if not pieces:
            none = np.empty(0, np.int64)
            nothing = Piece(self.new.taken, self._staging[:0].copy(), none, none, np.empty(0, np.uint8))
            return RowBatch(nothing, ended)
        names = ("slots", "before", "after", "flags")
        joined = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in names}
        return RowBatch(Piece(pieces[0].first, **joined), ended)


class Importer:
    """Adds one source's batches to a replay, in order.

    If a batch is lost, so are its rows, and the predecessors of the rows after it are unknown.

    Args:
        replay: the target, which overwrites when full; the caller closes it.
        span: rows of the source's replay, the maximum distance of a row from its predecessor.
    """

    def __init__(self, replay: Parts, span: int) -> None:
        self._ring = replay.parts[0].ring
        self._slot = replay.layout.slot.size
        self._linked = replay.layout.episodes is not None
        self._position_at = np.full(span, -1, np.int64)
        self._ticket_at = np.zeros(span, np.uint64)

    def put(self, batch: RowBatch) -> int:
        """Add the rows; returns their number.

        Raises:
            SpecMismatch: they are of a replay with other fields.
        """
        piece, n = batch.piece, len(batch.piece)
        if piece.slots.shape[1] != self._slot:
            raise SpecMismatch(f"rows of {piece.slots.shape[1]} bytes came, this replay's have {self._slot}")
        if n:
            tickets = np.zeros(n, np.uint64)
            within, before, flags, ended = self._links(piece)
            self._ring.import_rows(piece.slots.reshape(-1), within, before, flags, ended, tickets)
            at = piece.positions % len(self._position_at)
            self._position_at[at], self._ticket_at[at] = piece.positions, tickets
        if len(batch.ended):
            known = self._position_at[batch.ended % len(self._position_at)] == batch.ended
            self._ring.close_episodes(self._ticket_at[batch.ended[known] % len(self._position_at)])
        return n

    def _links(
        self, piece: Piece
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """The arguments of the native ring: index of the previous row, its ticket plus one, flags, ended."""
        n = len(piece)
        if not self._linked:
            return np.full(n, -1), np.zeros(n, np.uint64), np.zeros(n, np.uint8), np.ones(n, np.uint8)
        place = np.where(piece.before >= piece.first, piece.before - piece.first, -1)
        at = piece.before % len(self._position_at)
        known = (piece.before >= 0) & (self._position_at[at] == piece.before)
        tickets = np.where(known, self._ticket_at[at] + np.uint64(1), _NEVER)
        before = np.where(piece.before == FIRST, np.uint64(0), tickets)
        return place, before, piece.flags, (piece.after == ENDED).astype(np.uint8)
