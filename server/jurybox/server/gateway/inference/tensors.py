"""Conversion between tensors of the Open Inference Protocol (raw bytes, typed contents, JSON) and NumPy arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.row_codec import utf8
from jurybox.protocol.dtypes import is_floating
from jurybox.protocol.errors import Code, Error, SpecMismatch, error_for, plain
from jurybox.protocol.row_frames import MOST_ROWS, extents_of_text, split_strings
from jurybox.protocol.spec import BYTES, OIP_NAMES, TensorSpec
from jurybox.server.frontend.requests import Rows
from jurybox.server.security.limits import hold_text

Parameters = Mapping[str, Any]  # bool, int, float or str

MOST_DIMENSIONS = 32
MOST_TENSORS = 1024  # the maximum number of inputs, of outputs and of parameters in a request
# Parsed JSON takes more memory than its text: numbers eight times as much, lists and objects thirty times.
_MOST_PARTS = {b"{": 8 * MOST_TENSORS, b"[": 1 << 20, b'"': 64 * MOST_TENSORS}


def malformed(message: str) -> Error:
    """Return the error for a malformed request."""
    return error_for(Code.MALFORMED, message)


# What Python's JSON calls so. A number that is too large for a float becomes another object, which is refused.
_NAMED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ProtocolMismatch if it is none, or has more parts than a request can have."""
    for mark, most in _MOST_PARTS.items():
        if (there := body.count(mark)) > most:
            raise malformed(
                f"the JSON has {there} {mark.decode()}, expected at most {most}: send tensors as binary data"
            )
    hold_text(body)
    try:
        given = json.loads(body, parse_constant=_NAMED.__getitem__)
    except (ValueError, RecursionError) as error:
        raise malformed(f"the body is no JSON: {plain(error, 200)}") from error
    if not isinstance(given, dict):
        raise malformed(f"the body is a JSON {type(given).__name__}: expected an object")
    return given


def shown(value: object) -> str:
    """Format a value of a request for an error message; for a list or dict, only the type."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__}"
    return repr(value[:40] if isinstance(value, str) else str(value)[:40])


def datatype_of(spec: TensorSpec) -> str:
    """Return the protocol's name of a spec's dtype."""
    return OIP_NAMES[spec.dtype]


def checked_shape(name: str, datatype: str, shape: Sequence[Any], spec: TensorSpec) -> tuple[int, ...]:
    """Check the declared shape (n, *row shape) of an input.

    Raises:
        SpecMismatch: datatype or shape do not match the model's; the message names both.
    """
    _check_datatype(name, datatype, spec)
    given = tuple(shape)
    if spec.variable:
        if not given or any(type(size) is not int or size < 0 for size in given):
            fits = False
        else:
            fits = given[0] > 0 and (len(given) == 1 if spec.dtype == BYTES else spec.extents_of(given[1:]) is not None)
        if fits and given[0] > MOST_ROWS:
            raise SpecMismatch(f"input {name!r}: {given[0]} rows came, expected at most {MOST_ROWS} in a request")
    else:
        # JSON may hold 2.0 or true, which Python compares as equal to sizes.
        fits = given[1:] == spec.shape and all(type(size) is int for size in given) and bool(given) and given[0] > 0
    if not fits:
        expected = f"[{', '.join(map(str, ('n', *spec.shape)))}]"
        if spec.variable and spec.dtype != BYTES:
            expected += f" with at most {spec.capacity} elements in a row"
        hint = ": the rows come first, 1 for a single one" if given == spec.shape else ""
        raise SpecMismatch(f"input {name!r}: expected shape {expected}, came {_sizes(given)}{hint}")
    return given


def _sizes(shape: tuple[Any, ...]) -> list[Any]:
    return list(shape)[:MOST_DIMENSIONS]


def _check_datatype(name: str, datatype: str, spec: TensorSpec) -> None:
    if datatype != OIP_NAMES[spec.dtype]:
        why = "; this input takes numbers, not strings" if datatype == "BYTES" else ""
        raise SpecMismatch(
            f"input {name!r}: expected datatype {OIP_NAMES[spec.dtype]}, came {plain(datatype, 40)!r}{why}"
        )


def rows_of(
    name: str, datatype: str, shape: Sequence[Any], spec: TensorSpec, extents: str | None, source: InputData
) -> Rows:
    """Return the rows of an input, fully checked, so that they cannot fail other requests of the same ticket.

    Args:
        extents: the sizes of the rows as text if they differ; the payload is then flat, and `shape` its length.
        source: the elements.

    Raises:
        SpecMismatch, Error (SPEC_MISMATCH): the input does not match the spec; the message names both.
    """
    if extents is not None:
        if not spec.extents or spec.dtype == BYTES:
            raise SpecMismatch(f"input {name!r}: extents are for rows that differ in size, and not for byte strings")
        _check_datatype(name, datatype, spec)
        sizes, counts = extents_of_text(f"input {name!r}", extents, spec)
        total = sum(counts)
        if tuple(shape) != (total,):
            raise SpecMismatch(f"input {name!r}: its extents say {total} elements, shape {_sizes(tuple(shape))} came")
        flat, at, rows = source.elements((total,), spec), 0, []
        for count, size in zip(counts, sizes, strict=True):
            rows.append(flat[at : at + count].reshape(spec.measured(size)))
            at += count
        return rows
    checked = checked_shape(name, datatype, shape, spec)
    if spec.dtype == BYTES:
        return source.strings(checked[0], spec)
    array = source.elements(checked, spec)
    return list(array) if spec.variable else array


class InputData:
    """The elements of an input; the base of `RawData` and `TypedData`. It has none and raises ProtocolMismatch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def elements(self, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
        """Return the elements as an array of shape `shape`."""
        raise malformed(f"input {self._name!r} came without data")

    def strings(self, n: int, spec: TensorSpec) -> list[bytes]:
        """Return the elements as n byte strings."""
        raise malformed(f"input {self._name!r} came without data")


class RawData(InputData):
    """Bytes in row-major, little-endian order; each byte string is preceded by its length."""

    def __init__(self, name: str, data: Any) -> None:
        self._name, self._data = name, data

    def elements(self, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
        """Return the elements as an array. Raises SpecMismatch if their number is wrong."""
        expected = math.prod(shape) * spec.numpy_dtype.itemsize
        if len(self._data) != expected:
            raise SpecMismatch(
                f"input {self._name!r}: expected {expected} bytes for shape {list(shape)}, came {len(self._data)}"
            )
        return np.frombuffer(self._data, spec.numpy_dtype).reshape(shape)

    def strings(self, n: int, spec: TensorSpec) -> list[bytes]:
        """Return the elements as n byte strings. Raises Error (SPEC_MISMATCH) if a length prefix is wrong."""
        return split_strings(f"input {self._name!r}", self._data, n, spec.capacity)


class TypedData(InputData):
    """Plain values, flat or nested."""

    def __init__(self, name: str, values: Any) -> None:
        self._name, self._values = name, values

    def elements(self, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
        """Return the elements as an array.

        Raises:
            SpecMismatch: their number, nesting, type or range does not match datatype and shape.
        """
        dtype, datatype = spec.numpy_dtype, OIP_NAMES[spec.dtype]
        flat = self._flat(shape)
        kinds: set[type] = {bool} if dtype.kind == "b" else {int} if dtype.kind in "iu" else {int, float}
        self._check_kinds(flat, kinds, datatype)
        in_int64 = dtype.kind in "iu" and dtype != np.uint64
        try:
            with np.errstate(over="ignore"):
                array = np.array(flat, np.int64 if in_int64 else dtype)
        except (OverflowError, ValueError) as error:
            raise SpecMismatch(f"input {self._name!r}: a value does not fit {datatype}: {error}") from error
        wrong: Any = False
        if is_floating(dtype):
            if (infinite := ~np.isfinite(array)).any():
                given = np.array(flat, np.float64)
                wrong = infinite & (np.isnan(array) != np.isnan(given)) | np.isinf(array) & np.isfinite(given)
                infinite &= np.isinf(given)
                if isinstance(self._values, list):  # JSON
                    named = tuple(map(id, _NAMED.values()))
                    wrong |= infinite & [id(value) not in named for value in flat]
        elif in_int64:  # NumPy 1 would reduce them to the dtype's bits
            wrong = (array < np.iinfo(dtype).min) | (array > np.iinfo(dtype).max)
        elif dtype.kind == "u":
            wrong = [value < 0 for value in flat]
        if np.any(wrong):
            value = flat[int(np.flatnonzero(wrong)[0])]
            what = f"the value {value}" if abs(value) != math.inf else "a number that is too large for a float"
            raise SpecMismatch(f"input {self._name!r}: {what} does not fit {datatype}")
        return array.astype(dtype, copy=False).reshape(shape)

    def strings(self, n: int, spec: TensorSpec) -> list[bytes]:
        """Return the elements, which are text (encoded as UTF-8) or bytes, as n byte strings. Raises SpecMismatch."""
        flat = self._flat((n,))
        self._check_kinds(flat, {str, bytes}, "BYTES")
        rows: list[bytes] = []
        for i, value in enumerate(flat):
            row = value if type(value) is bytes else utf8(f"input {self._name!r}, row {i}", value)
            if len(row) > spec.capacity:
                raise SpecMismatch(
                    f"input {self._name!r}, row {i}: {len(row)} bytes came, expected at most {spec.capacity}"
                )
            rows.append(row)
        return rows

    def _flat(self, shape: tuple[int, ...]) -> list[Any]:
        values = self._values
        if isinstance(values, list) and values and isinstance(values[0], list):
            values = self._flattened(values, shape)
        if len(values) != math.prod(shape):
            raise SpecMismatch(
                f"input {self._name!r}: expected {math.prod(shape)} values for shape {list(shape)}, {len(values)} came"
            )
        return values if isinstance(values, list) else list(values)  # only after their number was checked

    def _check_kinds(self, flat: list[Any], kinds: set[type], datatype: str) -> None:
        if not set(map(type, flat)) <= kinds:
            odd = next(value for value in flat if type(value) not in kinds)
            raise SpecMismatch(f"input {self._name!r}: expected values of {datatype}, came {shown(odd)}")

    def _flattened(self, values: list[Any], shape: tuple[int, ...]) -> list[Any]:
        level: list[Any] = [values]
        for size in shape:
            if not all(isinstance(part, list) and len(part) == size for part in level):
                raise SpecMismatch(f"input {self._name!r}: the nesting of data does not match shape {list(shape)}")
            level = [value for part in level for value in part]
        return level
