"""Parameters of requests that a model reads as inputs: a seed, a scale, an instruction for all rows of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.dtypes import is_floating
from jurybox.protocol.errors import SpecMismatch, plain

if TYPE_CHECKING:
    from jurybox.protocol.spec import TensorSpec

# The parameters of the Open Inference Protocol's requests that have a meaning of their own; no model's has such a name.
KNOWN = (
    "timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "session_state", "row_errors", "extents",
)  # fmt: skip
RESERVED = frozenset((*KNOWN, "session_client", "sessions", "triton_enable_empty_final_response"))
MOST_PARAMETERS = 16  # of a model
Value = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: the input that it is, and the value of requests without it."""

    input: str
    default: Value


def parameter_row(name: str, spec: TensorSpec, value: object) -> NDArray[Any] | bytes:
    """Return a parameter's value as a row of its input, which is a single value or a byte string.

    Raises:
        SpecMismatch: its type is another one, or the input's dtype cannot hold it.
    """
    if spec.dtype == "bytes":
        if type(value) is not str:
            raise _unfit(name, "text", value)
        try:
            text = value.encode()
        except UnicodeEncodeError:
            raise _unfit(name, "text that UTF-8 can carry", value) from None
        if len(text) > spec.capacity:
            raise SpecMismatch(f"parameter {name!r} has {len(text)} bytes, the model takes at most {spec.capacity}")
        return text
    dtype = spec.numpy_dtype
    if dtype.kind == "b":
        if type(value) is not bool:
            raise _unfit(name, "true or false", value)
        return np.array(value, dtype)
    if is_floating(dtype):
        if type(value) not in (int, float):
            raise _unfit(name, "a number", value)
        try:
            with np.errstate(over="ignore"):
                row = np.array(float(value), dtype)  # type: ignore[arg-type]
        except OverflowError:
            row = np.array(math.inf, np.float64)
        if not np.isfinite(np.asarray(row, np.float64)):
            raise _unfit(name, f"a finite number that {spec.dtype} holds", value)
        return row
    limits = np.iinfo(dtype)
    if type(value) is not int or not limits.min <= value <= limits.max:
        raise _unfit(name, f"a whole number from {limits.min} to {limits.max}", value)
    return np.array(value, dtype)


def parameter_rows(name: str, spec: TensorSpec, value: object, n: int) -> Any:
    """Return n equal rows, (n,) of the input's dtype or a list of n byte strings. Raises SpecMismatch."""
    row = parameter_row(name, spec, value)
    return [row] * n if isinstance(row, bytes) else np.full(n, row)


def _unfit(name: str, expected: str, value: object) -> SpecMismatch:
    shown = plain(repr(value), 60) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
    return SpecMismatch(f"parameter {name!r}: expected {expected}, came {shown}")
