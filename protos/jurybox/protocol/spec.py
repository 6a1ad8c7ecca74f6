"""What a model takes and gives: names, dtypes and the shape of one row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jurybox.protocol.errors import plain

_MOST_ELEMENTS = 1 << 31
_LONGEST_NAME = 200  # characters of a tensor's name

# The Open Inference Protocol's names for NumPy's dtypes; what is absent here cannot cross a transport.
# BF16 has no NumPy dtype: a model may compute in it, its rows are float32.
OIP_NAMES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of a model: its dtype (NumPy's name) and the shape of ONE row, the batch dimension left out.

    Raises:
        ValueError: for a dtype that no transport can carry, or a shape that is no tuple, has a size below one, or more
            than 2^31 elements.
    """

    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in OIP_NAMES:
            raise ValueError(f"dtype {self.dtype!r} cannot be served: expected one of {', '.join(OIP_NAMES)}")
        try:
            shape = tuple(int(size) for size in self.shape)
        except TypeError:
            raise ValueError(
                f"shape {self.shape!r} of one row is no tuple: expected its sizes, such as (4,), or () for one number"
            ) from None
        if any(size < 1 for size in shape):
            raise ValueError(f"shape {shape} of one row has a size below 1: rows have a fixed, positive size")
        if math.prod(shape) > _MOST_ELEMENTS:
            raise ValueError(
                f"shape {shape} of one row has {math.prod(shape)} elements, expected at most {_MOST_ELEMENTS}"
            )
        object.__setattr__(self, "shape", shape)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)

    @property
    def elements(self) -> int:
        """Number of elements of one row."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return self.elements * self.numpy_dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The contract of a served model: its name, inputs and outputs, each by name and in order."""

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def __post_init__(self) -> None:
        if not self.inputs or not self.outputs:
            raise ValueError(f"model {self.name!r} needs at least one input and one output")
        for name in (*self.inputs, *self.outputs):
            if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or plain(name) != name:
                raise ValueError(
                    f"model {self.name!r} names a tensor {plain(name)[:80]!r}: expected text of 1 to {_LONGEST_NAME} "
                    "characters that UTF-8 can carry"
                )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, inputs and outputs together."""
        return sum(spec.row_bytes for spec in (*self.inputs.values(), *self.outputs.values()))


def plain_specs(specs: Mapping[str, TensorSpec]) -> list[list[Any]]:
    """The same in plain lists, [name, dtype, shape] each, for JSON."""
    return [[name, spec.dtype, list(spec.shape)] for name, spec in specs.items()]


def specs_from_plain(plain: list[list[Any]]) -> dict[str, TensorSpec]:
    """What `plain_specs` was given."""
    return {name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape in plain}
