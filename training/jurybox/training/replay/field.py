"""What a row of a replay is made of: named fields, each handed out as one dtype and kept as it or a narrower one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np


class Codec(IntEnum):
    """How a field is kept; the numbers are those of the native code and of files."""

    RAW = 0
    BITS = 1
    BITS_OF_BYTES = 2
    BYTES = 3
    HALF = 4
    SPARSE = 5


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a row.

    Args:
        shape: of one row; () for a number.
        dtype: NumPy's name of what is given and handed out.
        stored: None to keep the same bytes; "bits" (float32, uint8 or bool whose elements are 0 or 1: anything but 0
            comes back as 1); "uint8" (float32; element = round(value / scale), clipped to 0..255); "float16"
            (float32, rounded to nearest); "sparse" (float32 with at most `nonzero` elements other than 0).
        scale: what one unit of a stored uint8 stands for; 1 / 255 keeps images from 0 to 1.
        nonzero: bound for "sparse"; a row with more is refused.

    Raises:
        ValueError: for a dtype, shape or stored form that cannot be kept.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    stored: str | None = None
    scale: float = 1.0
    nonzero: int | None = None

    def __post_init__(self) -> None:
        shape = tuple(int(size) for size in self.shape)
        if any(size < 1 for size in shape):
            raise ValueError(f"shape {shape} of one row has a size below 1: rows have a fixed, positive size")
        object.__setattr__(self, "shape", shape)
        kind = np.dtype(self.dtype)
        if kind.kind not in "biuf" or kind.itemsize > 8 or not kind.isnative:
            raise ValueError(
                f"dtype {self.dtype!r} cannot be kept: expected bool, an integer or a float of up to 8 bytes"
            )
        object.__setattr__(self, "dtype", kind.name)
        self._check_stored()

    def _check_stored(self) -> None:
        allowed = {
            None: None,
            "bits": ("float32", "uint8", "bool"),
            "uint8": ("float32", "uint8"),
            "float16": ("float32", "float16"),
            "sparse": ("float32",),
        }
        if self.stored not in allowed and self.stored != self.dtype:
            raise ValueError(
                f"stored={self.stored!r} is unknown: expected None, 'bits', 'uint8', 'float16' or 'sparse'"
            )
        dtypes = allowed.get(self.stored)
        if dtypes is not None and self.dtype not in dtypes:
            raise ValueError(f"{self.dtype} cannot be stored as {self.stored!r}: that is for {' or '.join(dtypes)}")
        if (self.stored == "sparse") != (self.nonzero is not None):
            raise ValueError(
                "nonzero=N (the most non-zero elements a row may have) goes with stored='sparse', and only there"
            )
        if self.nonzero is not None and not 0 < self.nonzero <= self.elements:
            raise ValueError(f"nonzero={self.nonzero} must be between 1 and the row's {self.elements} elements")
        if not self.scale > 0:
            raise ValueError(f"scale={self.scale} must be positive")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def elements(self) -> int:
        """Number of elements of one row."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as handed out."""
        return self.elements * self.numpy_dtype.itemsize

    @property
    def codec(self) -> Codec:
        if self.stored is None or self.stored == self.dtype:
            return Codec.RAW
        if self.stored == "bits":
            return Codec.BITS if self.dtype == "float32" else Codec.BITS_OF_BYTES
        return {"uint8": Codec.BYTES, "float16": Codec.HALF, "sparse": Codec.SPARSE}[self.stored]

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """dtype of the stored bytes; uint8 where they are packed."""
        return {Codec.RAW: self.numpy_dtype, Codec.HALF: np.dtype("float16")}.get(self.codec, np.dtype("uint8"))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored row; packed forms are flat."""
        if self.codec in (Codec.BITS, Codec.BITS_OF_BYTES):
            return ((self.elements + 7) // 8,)
        if self.codec is Codec.SPARSE:
            return (self.stored_bytes,)
        return self.shape

    @property
    def stored_bytes(self) -> int:
        """Bytes of one row as kept."""
        match self.codec:
            case Codec.BITS | Codec.BITS_OF_BYTES:
                return (self.elements + 7) // 8
            case Codec.BYTES:
                return self.elements
            case Codec.HALF:
                return 2 * self.elements
            case Codec.SPARSE:
                return 4 + 8 * (self.nonzero or 0)
        return self.row_bytes

    def as_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "stored": self.stored,
            "scale": self.scale,
            "nonzero": self.nonzero,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Field:
        return cls(tuple(data["shape"]), data["dtype"], data["stored"], data["scale"], data["nonzero"])
