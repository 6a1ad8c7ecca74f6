"""The arena: one shared-memory segment per model, a block of rows for every input and every output.

Blocks are columns: all rows of one tensor lie one after another, so that neighbouring rows reach the model
without a copy. Every block begins on a page, which page-locking needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.segment import Maker, Segment
from jurybox.protocol.spec import ModelSpec, TensorSpec

_PAGE = 4096


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where every tensor's rows begin, and how large the segment is."""

    spec: ModelSpec
    rows: int

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return sum(_pages(tensor.row_bytes * self.rows) for tensor in self._tensors())

    def _tensors(self) -> list[TensorSpec]:
        return [*self.spec.inputs.values(), *self.spec.outputs.values()]

    def views(self, segment: Segment) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Arrays of shape (rows, *row shape) over the segment: inputs and outputs by name.

        Raises:
            ProtocolMismatch: the segment is not of this layout's size.
        """
        if segment.size != self.size:
            raise ProtocolMismatch(
                f"arena {segment.name} has {segment.size} bytes, {self.size} were expected for {self.rows} rows of "
                f"model {self.spec.name!r}: client and server disagree on the layout"
            )
        offset = 0
        groups: list[dict[str, NDArray[Any]]] = []
        for tensors in (self.spec.inputs, self.spec.outputs):
            group: dict[str, NDArray[Any]] = {}
            for name, tensor in tensors.items():
                group[name] = segment.array(tensor.numpy_dtype, (self.rows, *tensor.shape), offset)
                offset += _pages(tensor.row_bytes * self.rows)
            groups.append(group)
        return groups[0], groups[1]


class Arena:
    """An arena's segment with its arrays."""

    def __init__(self, segment: Segment, layout: ArenaLayout) -> None:
        self.segment = segment
        self.layout = layout
        self.inputs, self.outputs = layout.views(segment)

    @classmethod
    def create(cls, name: str, layout: ArenaLayout, make: Maker = Segment.create) -> Arena:
        """Make the segment. Raises SharedMemoryError where there is no room."""
        return cls(make(name, layout.size), layout)

    @classmethod
    def attach(cls, name: str, layout: ArenaLayout) -> Arena:
        """Map the arena that the server made."""
        return cls(Segment.attach(name), layout)

    @property
    def rows(self) -> int:
        return self.layout.rows

    def close(self) -> None:
        """Let go of the segment; the owner also removes it."""
        self.inputs, self.outputs = {}, {}
        self.segment.close()
        if self.segment.owned:
            self.segment.unlink()
