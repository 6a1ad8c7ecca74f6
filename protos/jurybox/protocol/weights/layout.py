"""The layout of a model's weights in a slot: names, dtypes, shapes and offsets."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.dtypes import BITS, numpy_dtype
from jurybox.protocol.errors import ProtocolMismatch, SpecMismatch

# Tensors begin on cache lines, for fast copies and views that are aligned for any dtype.
ALIGNMENT = 64
_NAMED_IN_FULL = 8
_MOST_DIMENSIONS = 64  # NumPy's limit
_MOST_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class _Stored:
    """How a dtype is stored: the NumPy dtype, and how its NaN and infinities are detected.

    A word of `width` bytes is not finite if every bit of `mask` is set (the exponent's bits; float8_e4m3fn has no
    infinity and one NaN per sign); width 0: every value is finite.
    """

    numpy: str
    width: int = 0
    mask: int = 0


# By torch's names, which are also NumPy's and ml_dtypes'. The bits of ml_dtypes' are stored as unsigned integers.
DTYPES: dict[str, _Stored] = {
    **{
        name: _Stored(name)
        for name in ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
    },
    "float16": _Stored("float16", 2, 0x7C00),
    "float32": _Stored("float32", 4, 0x7F80_0000),
    "float64": _Stored("float64", 8, 0x7FF0_0000_0000_0000),
    "complex64": _Stored("complex64", 4, 0x7F80_0000),
    "complex128": _Stored("complex128", 8, 0x7FF0_0000_0000_0000),
    "bfloat16": _Stored(BITS["bfloat16"], 2, 0x7F80),
    "float8_e4m3fn": _Stored(BITS["float8_e4m3fn"], 1, 0x7F),
    "float8_e5m2": _Stored(BITS["float8_e5m2"], 1, 0x7C),
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in a slot: its name, dtype (torch's name), shape and byte offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Its NumPy dtype. Raises DtypeMissing for bfloat16 and float8 if ml_dtypes is not installed."""
        return numpy_dtype(self.dtype)

    @property
    def stored(self) -> np.dtype[Any]:
        """The NumPy dtype of its bits: uint16 for bfloat16, uint8 for float8."""
        return np.dtype(DTYPES[self.dtype].numpy)

    @property
    def nbytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * self.stored.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class WeightsLayout:
    """The ordered tensors of a model, with offsets, size and hash.

    Args:
        tensors: (name, dtype, shape) of each tensor, in order. dtypes have torch's names (see `DTYPES`); a shape may be
            () or contain a zero.

    Attributes:
        places: a `TensorPlace` for each tensor by name, in order.
        nbytes: the size of a slot's weights, a multiple of 64.

    Raises:
        SpecMismatch: there are no tensors, two have one name, or a dtype is not supported.
    """

    def __init__(self, tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
        self.places: dict[str, TensorPlace] = {}
        offset = 0
        for name, dtype, shape in tensors:
            if dtype not in DTYPES:
                raise SpecMismatch(
                    f"tensor {name!r} is {dtype}, which a weights channel cannot carry: "
                    f"expected one of {', '.join(DTYPES)}"
                )
            sizes = tuple(int(size) for size in shape)
            if name in self.places or any(size < 0 for size in sizes):
                raise SpecMismatch(f"tensor {name!r} of shape {sizes}: expected every name once and no negative size")
            if len(sizes) > _MOST_DIMENSIONS or math.prod(max(1, size) for size in sizes) > _MOST_BYTES:
                raise SpecMismatch(
                    f"tensor {name!r} has {len(sizes)} dimensions, of sizes up to {max(sizes)}: expected "
                    f"{_MOST_DIMENSIONS} at most, and sizes that an address can reach"
                )
            self.places[name] = place = TensorPlace(name, dtype, sizes, offset)
            offset += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
        if not self.places:
            raise SpecMismatch("a weights layout needs at least one tensor; this module or state_dict has none")
        self.nbytes = offset

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> WeightsLayout:
        """Return the layout of a dict of NumPy arrays or torch tensors, such as a ``state_dict()``."""
        return cls((name, dtype_name(array), tuple(array.shape)) for name, array in arrays.items())

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of names, dtypes and shapes in order, as 64 hexadecimal digits."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_json(self) -> bytes:
        """Return the layout as canonical JSON, which is sent and hashed."""
        rows = [[place.name, place.dtype, list(place.shape)] for place in self.places.values()]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> WeightsLayout:
        """Parse the text of `to_json`.

        Raises:
            ProtocolMismatch: `text` is not a layout.
        """
        try:
            return cls((str(name), str(dtype), tuple(shape)) for name, dtype, shape in json.loads(text))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ProtocolMismatch(f"expected a weights layout as JSON, got {text[:80]!r}: {error}") from error

    def only(self, names: Iterable[str]) -> WeightsLayout:
        """Return the layout of some of the tensors, in this layout's order. Raises SpecMismatch if there are none."""
        wanted = set(names)
        return WeightsLayout((name, place.dtype, place.shape) for name, place in self.places.items() if name in wanted)

    def difference(self, other: WeightsLayout) -> str:
        """Return the differences to `other` as text; empty if there are none. The order of tensors does not matter."""
        lines = [
            f"{name!r} is missing (expected {place})" for name, place in self.places.items() if name not in other.places
        ]
        lines += [
            f"{name!r} came and is not in the layout ({place})"
            for name, place in other.places.items()
            if name not in self.places
        ]
        lines += [
            f"{name!r}: expected {place}, got {other.places[name]}"
            for name, place in self.places.items()
            if name in other.places and str(place) != str(other.places[name])
        ]
        more = [f"and {len(lines) - _NAMED_IN_FULL} more"] if len(lines) > _NAMED_IN_FULL else []
        return "; ".join(lines[:_NAMED_IN_FULL] + more)

    def views(self, flat: npt.NDArray[np.uint8], *, bits: bool = False) -> dict[str, npt.NDArray[Any]]:
        """Return arrays over the `nbytes` bytes of `flat`, one per tensor, by name.

        Args:
            bits: bfloat16 and float8 as unsigned integers of their bits, for which ml_dtypes is not needed.

        Raises:
            DtypeMissing: ml_dtypes is needed and not installed.
        """
        return {
            name: np.ndarray(place.shape, place.stored if bits else place.numpy_dtype, flat.data, place.offset)
            for name, place in self.places.items()
        }

    def tensors(self, block: Any) -> dict[str, Any]:
        """Return torch tensors over a uint8 tensor of `nbytes` bytes on any device, one per tensor, by name."""
        torch = sys.modules["torch"]
        parts = ((place, block[place.offset : place.offset + place.nbytes]) for place in self.places.values())
        return {place.name: part.view(getattr(torch, place.dtype)).reshape(place.shape) for place, part in parts}

    def parts(self) -> npt.NDArray[np.uint64]:
        """Return the table for the native copy: (address, offset, bytes, width, mask) per tensor; addresses are 0."""
        rows = [
            (0, place.offset, place.nbytes, DTYPES[place.dtype].width, DTYPES[place.dtype].mask)
            for place in self.places.values()
        ]
        return np.array(rows, np.uint64).reshape(-1, 5)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightsLayout) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        return f"WeightsLayout({len(self.places)} tensors, {self.nbytes} bytes, {self.hash[:12]})"


def dtype_name(array: Any) -> str:
    """Return the name in `DTYPES` of the dtype of a NumPy array (``float32``) or torch tensor (``torch.float32``)."""
    dtype = array.dtype
    return str(dtype.name) if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def widen(array: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Convert bfloat16, as uint16 of its bits, to float32; exact, since bfloat16 is the upper half of float32."""
    return (array.astype(np.uint32) << 16).view(np.float32)
