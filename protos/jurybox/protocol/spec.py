"""Specs of models: names, dtypes and the shapes of one row of inputs and outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jurybox.protocol.dtypes import numpy_dtype
from jurybox.protocol.errors import plain
from jurybox.protocol.parameters import Parameter, parameter_row

_MOST_ELEMENTS = 1 << 31
_LONGEST_NAME = 200  # characters of a tensor's name
VARIABLE = -1  # in a shape: any size
BYTES = "bytes"

# The Open Inference Protocol's names for dtypes; only these can be sent. It has none for float8: these are our own.
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
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8_E4M3FN",
    "float8_e5m2": "FP8_E5M2",
    BYTES: "BYTES",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The spec of a model's tensor: its dtype and the shape of ONE row, without the batch dimension.

    A size of -1 may differ from row to row; `capacity` is then the maximum number of elements of a row, for which
    shared memory is reserved. A row of dtype "bytes" is a byte string of at most `capacity` bytes; text is UTF-8.

    Example:
        TensorSpec("float32", (52,))                                # 52 numbers
        TensorSpec("uint8", (-1, -1, 3), capacity=3 * 1024 * 1024)  # an RGB image of up to a megapixel
        TensorSpec("bytes", capacity=4096)                          # a prompt

    Args:
        dtype: the NumPy name, or "bytes". NumPy has bfloat16, float8_e4m3fn and float8_e5m2 from the package ml_dtypes.
        shape: the shape of one row; () for a number, and for "bytes".
        capacity: the maximum number of elements of a row, or bytes of a byte string; only for rows of variable size.
        finite: for a floating-point output: rows with NaN or infinity fail (RowFailed).

    Attributes:
        numpy_dtype: the dtype of the elements in memory; uint8 for bytes.

    Raises:
        ValueError: the dtype is not supported, the shape is not a tuple, has a size of 0 or more than 2^31 elements,
            or the capacity is missing, superfluous or too small.
        DtypeMissing: the dtype is one of ml_dtypes', which is not installed.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    capacity: int = 0
    finite: bool = False
    numpy_dtype: np.dtype[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in OIP_NAMES:
            raise ValueError(f"dtype {self.dtype!r} cannot be served: expected one of {', '.join(OIP_NAMES)}")
        try:
            shape = tuple(int(size) for size in self.shape)
        except TypeError:
            raise ValueError(
                f"shape {self.shape!r} of one row is no tuple: expected its sizes, such as (4,), or () for one number"
            ) from None
        if any(size < 1 and size != VARIABLE for size in shape):
            raise ValueError(f"shape {shape} of one row has a size below 1: sizes are positive, -1 stands for any size")
        if self.dtype == BYTES and shape:
            raise ValueError(f'shape {shape} of dtype "bytes": a row is one byte string, of shape ()')
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "numpy_dtype", numpy_dtype("uint8" if self.dtype == BYTES else self.dtype))
        self._check_capacity()
        if self.finite and not self.floating:
            raise ValueError(f"finite is for floating-point numbers, not for {self.dtype}")

    def _check_capacity(self) -> None:
        least = self.unit
        if not self.variable:
            if self.capacity:
                raise ValueError(f"capacity = {self.capacity} of shape {self.shape}: a fixed shape needs none")
        elif self.capacity < least:
            what = "bytes of the longest row" if self.dtype == BYTES else "elements of the largest row"
            raise ValueError(
                f"capacity = {self.capacity} of {self.dtype} {list(self.shape)}: expected the {what}, at least {least}"
            )
        if self.elements > _MOST_ELEMENTS:
            raise ValueError(
                f"shape {self.shape} of one row has {self.elements} elements, expected at most {_MOST_ELEMENTS}"
            )

    @property
    def floating(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return "float" in self.dtype

    @property
    def variable(self) -> bool:
        """Whether rows differ in size."""
        return self.dtype == BYTES or VARIABLE in self.shape

    @property
    def extents(self) -> int:
        """The number of extents of a row: one for each -1, one for a byte string's length, 0 for a fixed shape."""
        return 1 if self.dtype == BYTES else self.shape.count(VARIABLE)

    @property
    def unit(self) -> int:
        """The elements of a row whose variable sizes are all 1; a row has this many times the product of its sizes."""
        return math.prod(size for size in self.shape if size != VARIABLE)

    @property
    def elements(self) -> int:
        """The (largest) number of elements of one row."""
        return self.capacity if self.variable else math.prod(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one row in an arena: flat, `capacity` long, if rows differ in size."""
        return (self.capacity,) if self.variable else self.shape

    @property
    def row_bytes(self) -> int:
        """Size of one row in an arena, in bytes."""
        return self.elements * self.numpy_dtype.itemsize

    def measured(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a row with these variable sizes; for a byte string, its length."""
        if self.dtype == BYTES:
            return (int(extents[0]),)
        sizes = iter(extents)
        return tuple(int(next(sizes)) if size == VARIABLE else size for size in self.shape)

    def extents_of(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the variable sizes of a row of this shape; None if it does not match or exceeds the capacity."""
        if self.dtype == BYTES:
            return (shape[0],) if len(shape) == 1 and 0 <= shape[0] <= self.capacity else None
        if len(shape) != len(self.shape) or any(
            size < 0 or want not in (VARIABLE, size) for want, size in zip(self.shape, shape, strict=True)
        ):
            return None
        if self.variable and math.prod(max(size, 1) for size in shape) > self.capacity:
            return None
        return tuple(size for want, size in zip(self.shape, shape, strict=True) if want == VARIABLE)

    def zeros(self, rows: int) -> Any:
        """Return rows of zeros, (rows, *shape); for variable sizes a list of small rows, for byte strings b"0000"."""
        if self.dtype == BYTES:
            return [b"0" * min(self.capacity, 4)] * rows
        if not self.variable:
            return np.zeros((rows, *self.shape), self.numpy_dtype)
        side = max(1, min(32, int((self.capacity // self.unit) ** (1 / self.extents))))
        return [np.zeros(self.measured([side] * self.extents), self.numpy_dtype) for _ in range(rows)]

    def __str__(self) -> str:
        if not self.variable:
            return f"{self.dtype}{list(self.shape)}"
        return f"{self.dtype}{list(self.shape) if self.shape else ''} up to {self.capacity}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The spec of a served model: its name, inputs and outputs by name, in order.

    `state` is the state that the model keeps for each session between requests, by name; it stays on the server.
    `parameters` are inputs that a request may leave out, or bring as a parameter of that name for all of its rows.
    """

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    state: Mapping[str, TensorSpec] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        if not self.inputs or not self.outputs:
            raise ValueError(f"model {self.name!r} needs at least one input and one output")
        for name in (*self.inputs, *self.outputs, *self.state):
            if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or plain(name) != name:
                raise ValueError(
                    f"model {self.name!r} names a tensor {plain(name)[:80]!r}: expected text of 1 to {_LONGEST_NAME} "
                    "characters that UTF-8 can carry"
                )
        for name, tensor in self.state.items():
            if tensor.variable:
                raise ValueError(f"state {name!r} of model {self.name!r} is {tensor}: state has a fixed shape")
            if name in self.inputs:
                raise ValueError(f"model {self.name!r} has an input and a state {name!r}: expected different names")
        self._check_parameters()

    def _check_parameters(self) -> None:
        for name, parameter in self.parameters.items():
            tensor = self.inputs.get(parameter.input)
            if tensor is None or tensor.shape:  # bytes have the shape ()
                there = ", ".join(f"{key} {one}" for key, one in self.inputs.items())
                raise ValueError(
                    f"parameter {name!r} is the input {parameter.input!r}: expected one of a single value or of bytes; "
                    f"model {self.name!r} takes {there}"
                )
            parameter_row(f"{name}.default", tensor, parameter.default)
        if len({parameter.input for parameter in self.parameters.values()}) < len(self.parameters):
            raise ValueError(f"two parameters of model {self.name!r} are one input: expected an input for each")

    @property
    def required(self) -> dict[str, TensorSpec]:
        """The inputs that a request must bring: all but those of parameters."""
        free = {parameter.input for parameter in self.parameters.values()}
        return {name: tensor for name, tensor in self.inputs.items() if name not in free}

    @property
    def open(self) -> bool:
        """Whether rows differ in size, or the model has state."""
        return bool(self.state) or any(t.variable for t in (*self.inputs.values(), *self.outputs.values()))

    @property
    def row_bytes(self) -> int:
        """The bytes of one row: inputs, outputs and, if the model has it, state."""
        tensors = (*self.inputs.values(), *self.outputs.values(), *self.state.values(), *self.state.values())
        return sum(spec.row_bytes for spec in tensors)


def plain_specs(specs: Mapping[str, TensorSpec]) -> list[list[Any]]:
    """Return specs as lists [name, dtype, shape, capacity, finite], for JSON."""
    return [[name, spec.dtype, list(spec.shape), spec.capacity, spec.finite] for name, spec in specs.items()]


def specs_from_plain(plain: list[list[Any]]) -> dict[str, TensorSpec]:
    """Return the specs in lists of `plain_specs`."""
    return {name: TensorSpec(dtype, tuple(shape), *rest) for name, dtype, shape, *rest in plain}


def tell_spec(message: Any, spec: ModelSpec) -> None:
    """Write inputs, outputs and state to a model's message (ModelMessage of control.proto)."""
    for target, specs in (
        (message.inputs, spec.inputs),
        (message.outputs, spec.outputs),
        (message.session_state, spec.state),
    ):
        for name, one in specs.items():
            target.add(name=name, dtype=one.dtype, shape=one.shape, capacity=one.capacity, finite=one.finite)
    for name, parameter in spec.parameters.items():
        message.parameters.add(name=name, input=parameter.input, default_json=json.dumps(parameter.default))


def parameters_of(message: Any) -> dict[str, Parameter]:
    """Return the parameters in a model's message."""
    return {one.name: Parameter(one.input, json.loads(one.default_json)) for one in message.parameters}
