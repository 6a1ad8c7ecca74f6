"""The arena: one shared-memory segment per model, a column of rows for every input and every output.

All rows of one tensor are contiguous, so that adjacent rows reach the model without a copy. Every column begins on a
page boundary, which page-locking requires.

A tensor whose rows differ in size has two columns: one of slots of its capacity, and one of extents, the sizes of the
rows in the slots. They are followed by a column for the reasons of failed rows and, for a model with state, by a column
with each row's session and by columns of the state, for clients that read or write it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import ProtocolMismatch, cut
from jurybox.protocol.segment import Maker, Segment
from jurybox.protocol.spec import ModelSpec

_PAGE = 4096
REASON_BYTES = 128  # of the reason why a row failed, UTF-8, padded with zeros; all zeros: it did not fail

# The session of a row. `slot` counts from the first row of the lane; `step` is the number of the session's request
# since its state was reset. Step 0 resets the state; an engine computes every other step only after the previous one.
SESSION = np.dtype([("slot", "<u4"), ("step", "<u4"), ("flags", "<u4"), ("pad", "V4")])
LOAD, STORE, NO_FORWARD = 1, 2, 4  # flags: read the state from the row's columns; write it there; compute nothing


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


@dataclass(slots=True)
class Columns:
    """The columns of one model: arrays whose first dimension is the row.

    Attributes:
        inputs, outputs: (rows, *TensorSpec.stored_shape) by name.
        input_extents, output_extents: (rows, k) int64, for tensors whose rows differ in size.
        reasons: (rows, REASON_BYTES) uint8, written if a row fails.
        sessions: (rows,) of SESSION if the model has state.
        state_in, state_out: (rows, *shape) for each part of its state.
    """

    spec: ModelSpec
    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, NDArray[Any]]
    input_extents: dict[str, NDArray[np.int64]]
    output_extents: dict[str, NDArray[np.int64]]
    reasons: NDArray[np.uint8]
    sessions: NDArray[Any] | None = None
    state_in: dict[str, NDArray[Any]] = field(default_factory=dict)
    state_out: dict[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def here(cls, spec: ModelSpec, rows: int) -> Columns:
        """Create columns in this process's own memory."""
        made = {key: np.zeros((rows, *shape), dtype) for key, dtype, shape in _columns(spec)}
        return _collected(spec, made)

    def nothing(self) -> Columns:
        """Return columns without rows, for a lane that was lost."""
        return Columns(self.spec, {}, {}, {}, {}, np.zeros((0, REASON_BYTES), np.uint8))

    def fail(self, row: int, reason: str) -> None:
        """Set the reason why a row failed."""
        text = np.frombuffer(cut(reason or "it failed", REASON_BYTES), np.uint8)
        self.reasons[row, : len(text)] = text
        self.reasons[row, len(text) :] = 0

    def refuse(self, first: int, rows: int, reasons: Mapping[int, str]) -> None:
        """Set the reasons of a request's failed rows, by row number from `first`; clear those of the others."""
        self.reasons[first : first + rows] = 0
        for row, reason in reasons.items():
            self.fail(first + row, reason)

    def failures(self, first: int, rows: int) -> dict[int, str]:
        """Return the reasons of failed rows, by row number from `first`."""
        there = self.reasons[first : first + rows]
        return {int(i): there[i].tobytes().rstrip(b"\0").decode(errors="replace") for i in np.flatnonzero(there[:, 0])}


def _columns(spec: ModelSpec) -> Iterator[tuple[tuple[str, str], np.dtype[Any], tuple[int, ...]]]:
    """Yield key, dtype and row shape of every column, in the order of memory."""
    for kind, tensors in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        for name, tensor in tensors.items():
            yield (kind, name), tensor.numpy_dtype, tensor.stored_shape
    for kind, tensors in (("input_extents", spec.inputs), ("output_extents", spec.outputs)):
        for name, tensor in tensors.items():
            if tensor.variable:
                yield (kind, name), np.dtype(np.int64), (tensor.extents,)
    yield ("reasons", ""), np.dtype(np.uint8), (REASON_BYTES,)
    if spec.state:
        yield ("sessions", ""), SESSION, ()
        for kind in ("state_in", "state_out"):
            for name, tensor in spec.state.items():
                yield (kind, name), tensor.numpy_dtype, tensor.shape


def _collected(spec: ModelSpec, made: Mapping[tuple[str, str], NDArray[Any]]) -> Columns:
    def group(kind: str) -> dict[str, NDArray[Any]]:
        return {name: array for (of, name), array in made.items() if of == kind}

    return Columns(
        spec,
        group("inputs"),
        group("outputs"),
        group("input_extents"),
        group("output_extents"),
        made["reasons", ""],
        made.get(("sessions", "")),
        group("state_in"),
        group("state_out"),
    )


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The offsets of the columns, and the size of the segment."""

    spec: ModelSpec
    rows: int

    @property
    def size(self) -> int:
        """The size of the segment in bytes."""
        return sum(self._bytes(dtype, shape) for _, dtype, shape in _columns(self.spec))

    def _bytes(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
        return _pages(dtype.itemsize * int(np.prod(shape, dtype=np.int64)) * self.rows)

    def views(self, segment: Segment) -> Columns:
        """Return the columns as arrays over the segment.

        Raises:
            ProtocolMismatch: the segment is not of this layout's size.
        """
        if segment.size != self.size:
            raise ProtocolMismatch(
                f"arena {segment.name} has {segment.size} bytes, {self.size} were expected for {self.rows} rows of "
                f"model {self.spec.name!r}: client and server disagree on the layout"
            )
        offset, made = 0, {}
        for key, dtype, shape in _columns(self.spec):
            made[key] = segment.array(dtype, (self.rows, *shape), offset)
            offset += self._bytes(dtype, shape)
        return _collected(self.spec, made)


class Arena:
    """An arena's segment and its arrays, `columns`; `inputs` and `outputs` are those of `columns`."""

    def __init__(self, segment: Segment, layout: ArenaLayout) -> None:
        self.segment = segment
        self.layout = layout
        self.columns: Columns = layout.views(segment)
        self.inputs, self.outputs = self.columns.inputs, self.columns.outputs

    @classmethod
    def create(cls, name: str, layout: ArenaLayout, make: Maker = Segment.create) -> Arena:
        """Create the segment. Raises SharedMemoryError if too little memory is available."""
        return cls(make(name, layout.size), layout)

    @classmethod
    def attach(cls, name: str, layout: ArenaLayout) -> Arena:
        """Map the arena that the server created."""
        return cls(Segment.attach(name), layout)

    @property
    def rows(self) -> int:
        return self.layout.rows

    def close(self) -> None:
        """Close the segment; the owner also removes it."""
        self.inputs, self.outputs = {}, {}
        self.columns = self.columns.nothing()
        self.segment.release()
