"""Weights in chunks, for gRPC streams of weights (remote_weights.proto)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import Code, Error
from jurybox.protocol.remote_weights_pb2 import WeightsChunk
from jurybox.protocol.weights.layout import WeightsLayout, widen

PUBLISH, READ = "/jurybox.RemoteWeights/Publish", "/jurybox.RemoteWeights/Read"
CHUNK_BYTES = 1 << 20
Flat = npt.NDArray[np.uint8]


def transfer_layout(layout: WeightsLayout, *, bfloat16: bool) -> WeightsLayout:
    """Return the layout of a transfer, with float32 as bfloat16 if requested."""
    if not bfloat16:
        return layout
    return WeightsLayout(
        (name, "bfloat16" if place.dtype == "float32" else place.dtype, place.shape)
        for name, place in layout.places.items()
    )


def narrow(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Convert float32 to the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded).astype(np.uint16).reshape(np.shape(array))


def restored(layout: WeightsLayout, travelled: WeightsLayout, flat: Flat) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of `layout` from a transfer; bfloat16 and float8 as unsigned integers of their bits."""
    arrays = travelled.views(flat, bits=True)
    return {
        name: widen(arrays[name]) if travelled.places[name].dtype != place.dtype else arrays[name]
        for name, place in layout.places.items()
    }


def chunks(flat: Flat, base: Flat | None = None, size: int = CHUNK_BYTES) -> Iterator[WeightsChunk]:
    """Yield the bytes of `flat` in chunks; with a `base`, without unchanged chunks."""
    for offset in range(0, len(flat), size):
        part = flat[offset : offset + size]
        if base is None or not np.array_equal(part, base[offset : offset + size]):
            data = part.tobytes()
            yield WeightsChunk(offset=offset, data=data, crc=zlib.crc32(data))


class Assembly:
    """Assembles chunks.

    Args:
        flat: the target; with `gaps`, bytes that no chunk contains stay as they are.
    """

    def __init__(self, flat: Flat, *, gaps: bool) -> None:
        self.flat = flat
        self.received = 0
        self._gaps = gaps
        self._position = 0

    def put(self, chunk: WeightsChunk) -> None:
        """Add a chunk.

        Raises:
            Error: damaged, out of order, or beyond the end (code MALFORMED or TOO_LARGE).
        """
        end = chunk.offset + len(chunk.data)
        if end > len(self.flat):
            raise Error(
                f"a chunk ends at byte {end}, the layout has {len(self.flat)}: these are other weights", Code.TOO_LARGE
            )
        if chunk.offset < self._position or (chunk.offset > self._position and not self._gaps) or not chunk.data:
            raise Error(
                f"a chunk of {len(chunk.data)} bytes begins at byte {chunk.offset}, expected it at {self._position}",
                Code.MALFORMED,
            )
        if zlib.crc32(chunk.data) != chunk.crc:
            raise Error(
                f"the chunk at byte {chunk.offset} came damaged (CRC-32): send the weights again", Code.MALFORMED
            )
        self.flat[chunk.offset : end] = np.frombuffer(chunk.data, np.uint8)
        self._position = end
        self.received += len(chunk.data)

    def finish(self, sent: int) -> None:
        """Check that all `sent` bytes have arrived. Raises Error."""
        if self.received != sent or (not self._gaps and self.received != len(self.flat)):
            raise Error(
                f"{self.received} of {sent} bytes came, of {len(self.flat)} in all: send the weights again",
                Code.MALFORMED,
            )
