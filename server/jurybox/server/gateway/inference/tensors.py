"""Tensors of the Open Inference Protocol to NumPy's and back: raw bytes, typed contents, JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Code, Error, SpecMismatch, error_for
from jurybox.protocol.spec import OIP_NAMES, TensorSpec

DTYPES: dict[str, np.dtype[Any]] = {oip: np.dtype(name) for name, oip in OIP_NAMES.items()}
MOST_DIMENSIONS = 32
MOST_TENSORS = 1024  # inputs, outputs and parameters that a request may name, of each kind


def malformed(message: str) -> Error:
    """What to raise for a request that cannot be read."""
    return error_for(Code.MALFORMED, message)


def shown(value: object) -> str:
    """A value of a request, as far as it belongs in a message: who sends a list of a million parts is told its kind."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__}"
    return repr(value[:40] if isinstance(value, str) else str(value)[:40])


def datatype_of(spec: TensorSpec) -> str:
    """The protocol's name of a spec's dtype."""
    return OIP_NAMES[spec.dtype]


def checked_shape(name: str, datatype: str, shape: Sequence[Any], spec: TensorSpec) -> tuple[int, ...]:
    """The shape (n, *row shape) of an input as its sender declares it.

    Raises:
        SpecMismatch: datatype or shape are not the model's; says both.
    """
    if datatype != OIP_NAMES[spec.dtype]:
        why = "; models here take numbers, not strings" if datatype == "BYTES" else ""
        raise SpecMismatch(f"input {name!r}: expected datatype {OIP_NAMES[spec.dtype]}, came {datatype!r}{why}")
    given = tuple(shape)
    if given[1:] != spec.shape or not given or type(given[0]) is not int or given[0] < 1:
        expected = ", ".join(map(str, ("n", *spec.shape)))
        hint = ": the rows come first, 1 for a single one" if given == spec.shape else ""
        raise SpecMismatch(f"input {name!r}: expected shape [{expected}], came {list(given)[:MOST_DIMENSIONS]}{hint}")
    return given


def from_raw(name: str, data: Any, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
    """An array over bytes in row-major, little-endian order. Raises SpecMismatch where their number is another."""
    expected = shape[0] * spec.row_bytes
    if len(data) != expected:
        raise SpecMismatch(f"input {name!r}: expected {expected} bytes for shape {list(shape)}, came {len(data)}")
    return np.frombuffer(data, spec.numpy_dtype).reshape(shape)


def from_values(name: str, values: Any, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
    """An array of plain numbers, flat or nested as the shape says.

    Raises:
        SpecMismatch: their number, nesting, kind or range is not what datatype and shape ask for.
    """
    dtype = spec.numpy_dtype
    flat: Any = values
    if isinstance(values, list) and values and isinstance(values[0], list):
        flat = _flattened(name, values, shape)
    if len(flat) != math.prod(shape):
        raise SpecMismatch(
            f"input {name!r}: expected {math.prod(shape)} values for shape {list(shape)}, {len(flat)} came"
        )
    kinds = {bool} if dtype.kind == "b" else {int} if dtype.kind in "iu" else {int, float}
    if not isinstance(flat, list):
        flat = list(flat)  # now that their number is right
    if not set(map(type, flat)) <= kinds:
        odd = next(value for value in flat if type(value) not in kinds)
        raise SpecMismatch(f"input {name!r}: expected values of {OIP_NAMES[spec.dtype]}, came {shown(odd)}")
    try:
        return np.array(flat, dtype).reshape(shape)
    except (OverflowError, ValueError) as error:
        raise SpecMismatch(f"input {name!r}: a value does not fit {OIP_NAMES[spec.dtype]}: {error}") from error


def _flattened(name: str, values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    level: list[Any] = [values]
    for size in shape:
        if not all(isinstance(part, list) and len(part) == size for part in level):
            raise SpecMismatch(f"input {name!r}: data is nested otherwise than shape {list(shape)} says")
        level = [value for part in level for value in part]
    return level
