"""Rows written in place: no copy between whoever makes a row and the replay."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy.typing as npt

from jurybox.protocol import forks
from jurybox.protocol.errors import Busy, Refused, SpecMismatch
from jurybox.training.replay.field import Codec
from jurybox.training.replay.part import Part


class Reservation:
    """`rows[name]` is an array of shape (n, ...) that IS the ring's rows, in their stored dtype.

    Leaving the ``with`` block makes them visible, an exception in it gives them back. Until then no reader sees
    them, and a killed writer costs these slots. In a forked child the rows are still its parent's: it is refused.
    """

    def __init__(self, part: Part, n: int) -> None:
        if not 0 < n <= part.capacity:
            raise SpecMismatch(f"cannot reserve {n} rows: expected 1 to {part.capacity}")
        if part.layout.full != "overwrite" or part.layout.limiter is not None:
            raise Refused("reserve() goes with full='overwrite' and no rate limiter; use add() or extend()")
        self._part = part
        self._rows = n
        first = part.ring.reserve_run(n)
        if first is None:
            raise Busy(f"no {n} free slots side by side: writers hold the others; reserve fewer rows")
        self._first: int | None = first
        slot = first % part.capacity
        self._arrays = {
            name: part.field_rows(name, slot, n)
            for name, spec in part.layout.fields.items()
            if spec.codec is not Codec.SPARSE
        }
        self._forked = False
        forks.register(self)

    def _after_fork_in_child(self) -> None:
        self._forked, self._first = True, None

    def _require_own(self) -> None:
        if self._forked:
            raise Refused("these rows were reserved before a fork, and are the parent's to write: reserve rows here")

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        self._require_own()
        if name not in self._arrays:
            raise SpecMismatch(f"field {name!r} cannot be written in place; expected one of {', '.join(self._arrays)}")
        return self._arrays[name]

    def __len__(self) -> int:
        return self._rows

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abandon()

    def commit(self) -> None:
        """Make the rows visible."""
        self._require_own()
        self._finish(commit=True)

    def abandon(self) -> None:
        """Give the slots back; the rows that were in them are gone."""
        self._finish(commit=False)

    def _finish(self, *, commit: bool) -> None:
        if self._first is not None:
            first, self._first = self._first, None
            self._part.ring.finish_run(first, self._rows, commit)
