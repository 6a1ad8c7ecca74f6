"""One ring of a replay, mapped into this process: the pool, or the anchor."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.protocol.segment import Segment
from jurybox.training.replay.layout import Layout, PartLayout
from jurybox.training.replay.options import FULL_MODES

ANCHOR_MARK = 1 << 62


class Part:
    """The native ring and arrays over its memory.

    Attributes:
        ring: what adds and samples.
        mark: added to the indices of its rows, so that they can be told from another part's.
    """

    def __init__(
        self, segment: Segment, layout: Layout, place: PartLayout, *, mark: int, threads: int, seed: int, timeout: float
    ) -> None:
        def block(offset: int, size: int) -> npt.NDArray[np.uint8]:
            return segment.array(np.uint8, (size,), offset)

        capacity = place.capacity
        self.mark = mark
        self.layout = layout
        self.capacity = capacity
        self.slots = block(place.slots, capacity * layout.slot.size).reshape(capacity, layout.slot.size)
        self.links = block(place.links, capacity * 16).reshape(capacity, 16) if layout.episodes else None
        tree = block(place.tree, native.replay_tree_words(capacity) * 8) if layout.prioritized else None
        # The leaves come first in the tree's memory.
        self.leaves: npt.NDArray[np.uint64] | None = None if tree is None else tree[: capacity * 8].view(np.uint64)
        self.ring = native.ReplayRing(
            block(place.control, native.replay_control_bytes()),
            self.slots.reshape(-1),
            None if self.links is None else self.links.reshape(-1),
            tree,
            layout.native_fields(),
            threads,
            seed,
        )
        self.ring.timeout = timeout
        self.ring.alpha = layout.alpha
        names = list(layout.fields)
        if layout.episodes is not None:
            for side in ("terminated", "truncated"):
                name = getattr(layout.episodes, side)
                setattr(self.ring, side, -1 if name is None else names.index(name))

    @property
    def sequences(self) -> npt.NDArray[np.uint64]:
        """The sequence words of all slots: 2 t + 2 where row t is whole, odd while written, 0 where nothing is."""
        words: npt.NDArray[np.uint64] = self.slots[:, :8].view(np.uint64)[:, 0]
        return words

    def field_rows(self, name: str, first: int, rows: int) -> npt.NDArray[Any]:
        """The stored values of `rows` slots from slot `first` on, as an array that IS the slots."""
        spec = self.layout.fields[name]
        offset = self.layout.slot.offsets[name]
        return np.ndarray(
            (rows, *spec.stored_shape),
            spec.stored_dtype,
            self.slots[first : first + rows].data,
            offset,
            strides=(self.layout.slot.size, *_packed_strides(spec.stored_shape, spec.stored_dtype.itemsize)),
        )


def format_parts(segment: Segment, layout: Layout) -> None:
    """Write the description and empty control blocks into a new segment."""
    head = layout.head()
    segment.buffer[: len(head)] = head
    for number, place in enumerate(layout.parts):
        # The anchor keeps what it has: it drops what comes when it is full.
        full = "drop_newest" if number == 1 else layout.full
        limiter = layout.limiter if number == 0 else None
        least, most = limiter.bounds if limiter else (0.0, 0.0)
        native.replay_format(
            segment.array(np.uint8, (native.replay_control_bytes(),), place.control),
            place.capacity,
            layout.slot.size,
            FULL_MODES.index(full),
            limiter.samples_per_insert if limiter else 0.0,
            least,
            most,
            limiter.least_rows if limiter else 0,
        )


def _packed_strides(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides: list[int] = []
    for size in reversed(shape):
        strides.append(item)
        item *= size
    return tuple(reversed(strides))
