"""Writers of a replay: rows written in place, and streams that know their episodes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.protocol import forks
from jurybox.protocol.errors import Busy, Refused, SpecMismatch
from jurybox.protocol.row_arrays import Held, RowArray
from jurybox.training.replay.options import Codec, ForkGuard
from jurybox.training.replay.part import Part


class Reservation(ForkGuard):
    """`rows[name]` is an array of shape (n, ...) that IS the ring's rows, in their stored dtype: nothing is cast to it.

    Leaving the ``with`` block makes them visible, an exception in it releases them. Until then no reader sees
    them, and a killed writer loses these slots. A forked child cannot use its parent's reservation.
    """

    refusal = "these rows were reserved before a fork, and are the parent's to write: reserve rows here"

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
        self._firsts = [first]  # until it is taken out, which ends the reservation once, also in nested calls
        slot = first % part.capacity
        self._held = Held()
        self._arrays = {
            name: RowArray.over(part.field_rows(name, slot, n), f"field {name!r}, as it is stored", self._held)
            for name, spec in part.layout.fields.items()
            if spec.codec is not Codec.SPARSE
        }
        super().__init__()

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        self._firsts.clear()

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        self._check_process()
        if name not in self._arrays:
            raise SpecMismatch(f"field {name!r} cannot be written in place; expected one of {', '.join(self._arrays)}")
        return self._arrays[name]

    def __setitem__(self, name: str, values: Any) -> None:
        if self[name] is not values:  # otherwise `rows[name] += ...` did it
            self[name][...] = values

    def __len__(self) -> int:
        return self._rows

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abandon()

    def commit(self) -> None:
        """Commit the rows: readers see them."""
        self._check_process()
        self._finish(commit=True)

    def abandon(self) -> None:
        """Release the slots; their former rows are lost."""
        self._finish(commit=False)

    def _finish(self, *, commit: bool) -> None:
        self._held.released = True
        with suppress(IndexError):
            self._part.ring.finish_run(self._firsts.pop(), self._rows, commit)


class Adding(Protocol):
    """The fields of one row or of n, by name: numbers, NumPy arrays or CPU tensors, strided or not.

    Returns:
        The rows written: fewer than given (0 of 1) if the replay is full and drops rows.

    Raises:
        SpecMismatch: a field is missing, unknown, or of another shape or kind of dtype, or holds a number that its
            dtype cannot hold: nothing is cut off, wrapped around or taken for infinity.
        Timeout: full="block" or the rate limiter admitted no row for `timeout` seconds.
    """

    def __call__(self, **fields: Any) -> int: ...


class Streams:
    """`n` independent runs of rows, each linked to its own predecessor; belongs to one thread of one process.

    A replay's own `add` is one such stream. Parallel envs need one each: otherwise their rows would form one
    episode. In a forked child they start again: no row of the child follows a row of its parent.
    """

    def __init__(self, part: Part, n: int, *, group: bool) -> None:
        self._native = native.ReplayStreams(part.ring, n, group)
        self._fields = part.layout.fields
        self.add: Adding = self._native.add
        self.extend: Adding = self._native.extend
        forks.register(self)

    def begin_anew(self) -> None:
        """Begin new episodes: no row follows one that was added before. The last ones stay as they are."""
        self._native.after_fork()

    def _after_fork_in_child(self) -> None:
        self.begin_anew()

    def __len__(self) -> int:
        return len(self._native)

    def end(self, which: int = 0, **final: Any) -> None:
        """End the episode of stream `which`.

        Args:
            final: the observation after its last step, by field (needed to bootstrap from an episode that was
                cut); fields that are left out are kept as zeroes. It may also be given when the last row's own
                `terminated` or `truncated` has already ended the episode.
        """
        if not final:
            self._native.end(which)
            return
        rest = {name: np.zeros(spec.shape, spec.dtype) for name, spec in self._fields.items() if name not in final}
        self._native.final(which, **final, **rest)
