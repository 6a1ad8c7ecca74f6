"""Convert a caller's inputs to rows of a lane, and rows to the outputs that a caller receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import Refused, SpecMismatch, did_you_mean, plain
from jurybox.protocol.row_arrays import array_of, other_dtype
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec

NO_SHAPE = (-1,)  # the shape of no array
SESSIONS = ""  # the key of the arena.SESSION records among checked inputs; no tensor has this name

Checked = dict[str, Any]  # inputs by name, each in its codec's internal form


class PlainRows:
    """Rows of fixed shapes: arrays with a first dimension of n. Methods that are rarely called take any rows.

    Attributes:
        only: the name of the only output, or of the first of several.
        open: see `ModelSpec.open`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.open = spec.open
        self.only = next(iter(spec.outputs))

    def checked(self, inputs: Any) -> tuple[Checked, int]:
        """Check inputs against the spec; return them by name, and the number of rows. Raises SpecMismatch."""
        named = self._named(inputs)
        given = {name: self._array(name, spec, named[name]) for name, spec in self.spec.inputs.items()}
        first = next(iter(given.values()))
        n = len(first) if first.ndim else 0
        for name, spec in self.spec.inputs.items():
            self._check(name, spec, given[name], n)
        return given, n

    def one(self, row: Any) -> tuple[Checked, int]:
        """Like `checked`, for a single row. Raises SpecMismatch; its message describes one row."""
        named = self._named(row)
        given: Checked = {}
        for name, spec in self.spec.inputs.items():
            if spec.variable:
                given[name] = [self._row(name, spec, named[name], 0)]
            else:
                array = self._array(name, spec, named[name])
                self._check_row(name, spec, array)
                given[name] = array[None]
        return given, 1

    def put(self, columns: Columns, given: Checked, at: int, n: int, first: int) -> None:
        """Write rows `at` to `at + n` of checked inputs to the lane's rows from `first`."""
        for name, array in given.items():
            columns.inputs[name][first : first + n] = array[at : at + n]

    def take(self, columns: Columns, first: int, n: int) -> dict[str, Any]:
        """Return copies of the outputs of n rows, by name."""
        return {name: array[first : first + n].copy() for name, array in columns.outputs.items()}

    def room(self, n: int) -> dict[str, Any]:
        """Allocate the arrays, or lists, for the outputs of n rows."""
        return {
            name: [None] * n if spec.variable else np.empty((n, *spec.shape), spec.numpy_dtype)
            for name, spec in self.spec.outputs.items()
        }

    def take_into(self, columns: Columns, first: int, n: int, outputs: dict[str, Any], at: int) -> None:
        """Copy the outputs of n rows to rows `at` and after of `outputs`, which `room` allocated."""
        for name, array in outputs.items():
            array[at : at + n] = columns.outputs[name][first : first + n]

    def place(self, outputs: dict[str, Any], at: int, n: int, given: Any) -> None:
        """Write outputs in the caller's form to rows `at` to `at + n` of `outputs`, which `room` allocated."""
        for name, rows in outputs.items():
            rows[at : at + n] = given[name] if len(outputs) > 1 else given

    def _named(self, inputs: Any) -> Mapping[str, Any]:
        specs = self.spec.inputs
        if isinstance(inputs, np.ndarray) or not isinstance(inputs, (dict, Mapping)):  # the last is slow
            if len(specs) != 1:
                raise SpecMismatch(
                    f"{self.spec.name!r} takes {words(self.spec)}: give a dict with an array for each; a call of one "
                    "row also takes them by name"
                )
            return {next(iter(specs)): inputs}
        if inputs.keys() != specs.keys():
            came = sorted(map(plain, inputs))
            unknown = next((name for name in came if name not in specs), None)
            missing = [name for name in specs if name not in came]
            hint = "" if unknown is None else did_you_mean(unknown, missing or specs)
            raise SpecMismatch(f"{self.spec.name!r} takes inputs {sorted(specs)}, {came} came{hint}")
        return inputs

    def _array(self, name: str, spec: TensorSpec, value: Any) -> NDArray[Any]:
        if type(value) is np.ndarray:
            return value
        return array_of(f"input {name!r} of {self.spec.name!r}", spec.dtype, value)

    def _check(self, name: str, spec: TensorSpec, array: NDArray[Any], n: int) -> None:
        if array.dtype != spec.numpy_dtype or array.shape != (n, *spec.shape):
            expected = "n, " + ", ".join(map(str, spec.shape)) if spec.shape else "n"
            raise SpecMismatch(
                f"input {name!r} of {self.spec.name!r}: expected {spec.dtype} of shape ({expected}), came "
                f"{array.dtype} of shape {array.shape}{_hint(array, spec.numpy_dtype, spec.shape)}"
            )

    def _check_row(self, name: str, spec: TensorSpec, row: NDArray[Any]) -> None:
        if row.shape == spec.shape and row.dtype == spec.numpy_dtype:
            return
        hint = f"; for several rows call infer(): here {len(row)}" if row.shape[1:] == spec.shape != row.shape else ""
        if row.dtype != spec.numpy_dtype:
            hint += f"; convert it on purpose: array.astype({spec.numpy_dtype.name!r})"
        raise SpecMismatch(
            f"input {name!r} of {self.spec.name!r}: a call takes one row, {spec.dtype} of shape {spec.shape}, came "
            f"{row.dtype} of shape {row.shape}{hint}"
        )

    def _row(self, name: str, spec: TensorSpec, value: Any, i: int) -> tuple[NDArray[Any], tuple[int, ...]]:
        if spec.dtype == BYTES:
            if isinstance(value, str):
                value = utf8(f"input {name!r} of {self.spec.name!r}, row {i}", value)
            if not isinstance(value, (bytes, bytearray, memoryview)):
                raise SpecMismatch(
                    f"input {name!r} of {self.spec.name!r}, row {i}: expected bytes or str, came {type(value).__name__}"
                )
            array = np.frombuffer(value, np.uint8)
        else:
            what = f"input {name!r} of {self.spec.name!r}, row {i}"
            array = np.ascontiguousarray(array_of(what, spec.dtype, value))
            if array.dtype != spec.numpy_dtype:
                raise other_dtype(what, spec.dtype, array.dtype)
        extents = spec.extents_of(array.shape)
        if extents is None:
            raise SpecMismatch(
                f"input {name!r} of {self.spec.name!r}, row {i}: expected {spec}, came shape {array.shape} "
                f"({array.size} elements)"
            )
        return array.reshape(-1), extents


class OpenRows(PlainRows):
    """Like PlainRows, for rows of variable size or of sessions.

    For a tensor of variable size, the input is a sequence of n arrays (or one array, if all rows have the same size)
    and the output is a list of n arrays. For dtype "bytes", the input is a sequence of n bytes or str, and the output
    is a list of bytes.
    """

    def checked(self, inputs: Any) -> tuple[Checked, int]:
        """Like PlainRows.checked; a tensor of variable size becomes a list of (flat array, extents)."""
        named = self._named(inputs)
        given: Checked = {}
        counts = {}
        for name, spec in self.spec.inputs.items():
            value = named[name]
            if spec.variable:
                given[name] = self._rows(name, spec, value)
            else:
                array = given[name] = self._array(name, spec, value)
                self._check(name, spec, array, len(array) if array.ndim else 0)
            counts[name] = len(given[name])
        if len(set(counts.values())) != 1:
            lengths = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise SpecMismatch(f"inputs of {self.spec.name!r} differ in their numbers of rows: {lengths}")
        return given, next(iter(counts.values()))

    def put(self, columns: Columns, given: Checked, at: int, n: int, first: int) -> None:
        for name, rows in given.items():
            if name == SESSIONS:
                assert columns.sessions is not None
                columns.sessions[first : first + n] = rows[at : at + n]
            elif type(rows) is list:
                slots, extents = columns.inputs[name], columns.input_extents[name]
                for i in range(n):
                    flat, sizes = rows[at + i]
                    slots[first + i, : flat.size] = flat
                    extents[first + i] = sizes
            else:
                columns.inputs[name][first : first + n] = rows[at : at + n]

    def take(self, columns: Columns, first: int, n: int) -> dict[str, Any]:
        return {
            name: self._taken(columns, name, spec, first, n)
            if spec.variable
            else columns.outputs[name][first : first + n].copy()
            for name, spec in self.spec.outputs.items()
        }

    def take_into(self, columns: Columns, first: int, n: int, outputs: dict[str, Any], at: int) -> None:
        for name, rows in self.take(columns, first, n).items():
            outputs[name][at : at + n] = rows

    def _rows(self, name: str, spec: TensorSpec, values: Any) -> list[tuple[NDArray[Any], tuple[int, ...]]]:
        if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, (list, np.ndarray, Sequence)):
            what = "bytes or str" if spec.dtype == BYTES else "arrays"
            raise SpecMismatch(
                f"input {name!r} of {self.spec.name!r}: expected a list of {what}, one for each row, came "
                f"{type(values).__name__}; for a single row call the model itself"
            )
        return [self._row(name, spec, value, i) for i, value in enumerate(values)]

    def _taken(self, columns: Columns, name: str, spec: TensorSpec, first: int, n: int) -> list[Any]:
        slots = columns.outputs[name]
        rows: list[Any] = []
        for i, sizes in enumerate(columns.output_extents[name][first : first + n].tolist(), first):
            shape = spec.measured(sizes)
            count = int(np.prod(shape, dtype=np.int64))
            if not 0 <= count <= spec.capacity or min(sizes) < 0:
                raise Refused(f"output {name!r} of {self.spec.name!r} came with sizes {sizes}: {spec} was expected")
            flat = slots[i, :count]
            rows.append(flat.tobytes() if spec.dtype == BYTES else flat.reshape(shape).copy())
        return rows


def utf8(what: str, text: str) -> bytes:
    """Encode text as UTF-8.

    Args:
        what: what the text belongs to, for the error message.

    Raises:
        SpecMismatch: it contains a lone surrogate, such as decoding with errors="surrogateescape" produces.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise SpecMismatch(
            f"{what}: expected text, came {text[error.start]!a} at character {error.start}, "
            "half a surrogate pair, which UTF-8 cannot carry: decode it with errors='replace' where it comes "
            "from, or pass bytes"
        ) from None


def codec_of(spec: ModelSpec) -> PlainRows:
    """Return the codec for a model's rows."""
    return OpenRows(spec) if spec.open else PlainRows(spec)


def shaped(outputs: dict[str, Any]) -> Any:
    """Return outputs in the caller's form: a single output itself, several as a dict by name."""
    return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def words(spec: ModelSpec) -> str:
    """Return a one-line description of a spec, for messages."""
    inputs = ", ".join(f"{name} {tensor}" for name, tensor in spec.inputs.items())
    outputs = ", ".join(f"{name} {tensor}" for name, tensor in spec.outputs.items())
    return f"{inputs} -> {outputs}"


def _hint(array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    if array.shape == shape:
        return "; for a single row call the model itself, or add an axis: array[None]"
    if array.shape[1:] == shape and array.dtype != dtype:
        return f"; convert it on purpose: array.astype({dtype.name!r})"
    return ""
