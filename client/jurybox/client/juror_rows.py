"""The rows of a call for scores: a trainer's columns of values, converted to the inputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.row_codec import utf8
from jurybox.protocol.dtypes import BITS, converted
from jurybox.protocol.errors import SpecMismatch, said
from jurybox.protocol.parameters import parameter_row
from jurybox.protocol.row_arrays import array_of
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec

Inputs = Mapping[str, "str | Callable[[Mapping[str, Any]], Sequence[Any]]"]
PICTURE_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # of Pillow, with 8 bits a channel
# The columns in which trainers provide the value of a model's input.
_ALSO = {
    "text": ("completions", "queries", "solution_str", "response", "observation"),
    "response": ("completions", "solution_str"),
    "completion": ("completions", "solution_str", "response"),
    "image": ("images", "solution_image", "frame", "observation"),
    "query": ("queries",),
    "prompt": ("prompts",),
    "label": ("labels", "ground_truth"),
}


def column_names(name: str, source: str | None) -> tuple[str, ...]:
    """Return the columns that may have the values of an input; the first that exists has them."""
    return (source,) if source else (name, *_ALSO.get(name, ()))


class CallColumns(dict[str, Any]):
    """The columns of a call, and values that all of its rows have: parameters of the model, if it has such."""

    def __init__(self, columns: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
        super().__init__(columns)
        self.parameters = parameters


class CallRows:
    """The rows of one call. After `fit`, each of `rows` is a dict of inputs, or the reason why the row does not fit."""

    def __init__(self, columns: Mapping[str, Any], n: int, until: float) -> None:
        self.columns = CallColumns(columns, getattr(columns, "parameters", {}))
        self.n = n
        self.until = until
        self.rows: list[dict[str, Any] | str] = []

    def fit(self, spec: ModelSpec, inputs: Inputs, *, partial: bool = False) -> None:
        if (unknown := inputs.keys() - spec.inputs.keys()) and not partial:
            raise SpecMismatch(f"model {spec.name!r} has no input {', '.join(unknown)}: it takes {list(spec.inputs)}")
        free = {parameter.input: name for name, parameter in spec.parameters.items()}
        given = {name: self._column(spec, name, inputs.get(name), free.get(name)) for name in spec.inputs}
        rows: list[dict[str, Any] | str] = []
        for i in range(self.n):
            try:
                rows.append({name: fitted(name, spec.inputs[name], column[i]) for name, column in given.items()})
            except (SpecMismatch, TypeError, ValueError) as error:
                rows.append(said(error, 300))
        wrong = [row for row in rows if type(row) is str]
        if self.n > 1 and len(wrong) == self.n:
            raise SpecMismatch(f"not one of {self.n} rows fits model {spec.name!r}; the first: {wrong[0]}")
        self.rows = rows

    def _column(self, spec: ModelSpec, name: str, source: Any, parameter: str | None) -> Sequence[Any]:
        """Return the values of an input.

        Args:
            source: where they come from, if the caller has said so.
            parameter: the name of the parameter that the input is; None: it is none.
        """
        model = spec.name
        if callable(source):
            column = source(self.columns)
        else:
            names = column_names(name, source)
            found = next((key for key in names if self.columns.get(key) is not None), None)
            if found is None and parameter is not None:
                value = self.columns.parameters.get(parameter, spec.parameters[parameter].default)
                return [parameter_row(parameter, spec.inputs[name], value)] * self.n
            if found is None:
                raise SpecMismatch(
                    f"input {name!r} of model {model!r}: expected a column {' or '.join(map(repr, names))}, there are "
                    f"{sorted(self.columns)}; say which with inputs={{{name!r}: ...}}"
                )
            column = self.columns[found]
        if len(column) != self.n:
            raise SpecMismatch(f"input {name!r} of model {model!r}: expected {self.n} values, came {len(column)}")
        return column  # type: ignore[no-any-return]


def fitted(name: str, spec: TensorSpec, value: Any) -> Any:
    """Convert a value to a row of an input. Raises SpecMismatch."""
    if spec.dtype == BYTES:
        row = value if isinstance(value, bytes) else utf8(repr(name), _text(value))
        if len(row) > spec.capacity:
            raise SpecMismatch(f"{name} has {len(row)} bytes, the model takes at most {spec.capacity}")
        return row
    if (
        type(value) is np.ndarray
        and value.dtype == spec.numpy_dtype
        and value.shape == spec.shape
        and value.flags.c_contiguous
    ):
        return value
    if isinstance(value, (list, tuple)) and len(value) == 1 and hasattr(value[0], "getbands"):
        value = value[0]  # TRL's columns contain a list with the prompt's image
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # a Pillow image
        if value.mode not in PICTURE_MODES:  # others would be clipped to 8 bits
            raise SpecMismatch(f"{name} is a picture of mode {value.mode!r}, expected 8 bits a channel")
        value = value.convert("RGB")
    elif hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().resolve_neg()
        came = str(value.dtype).removeprefix("torch.")
        value = value.float() if came in BITS and came != spec.dtype else value  # NumPy has none of these
    array = array_of(name, spec.dtype, value)
    if spec.shape[-1:] == (3,) and array.ndim == 3 and array.shape[0] == 3 != array.shape[2]:
        array = array.transpose(1, 2, 0)  # from torch's channels-first order
    if array.dtype != spec.numpy_dtype:
        if not np.can_cast(array.dtype, spec.numpy_dtype, "same_kind"):
            raise SpecMismatch(f"{name} is {array.dtype}, the model takes {spec.dtype}")
        array = _narrowed(name, array, spec.numpy_dtype)
    if spec.extents_of(array.shape) is None:
        raise SpecMismatch(f"{name} is of shape {array.shape}, the model takes {spec}")
    return np.ascontiguousarray(array) if array.ndim else array


def _narrowed(name: str, array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert to another dtype. Raises SpecMismatch if an integer would wrap, or a finite number become infinite."""
    narrowed, wrong = converted(array, dtype)
    if wrong.any():
        raise SpecMismatch(
            f"{name} is {array.dtype} and has the value {array[wrong][0]}, which the model's {dtype.name} cannot hold: "
            "scale or clip it before it is scored"
        )
    return narrowed


def _text(value: Any) -> str:
    """Return the text of a str, a chat message or a list of them; a message's parts without text are skipped."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        content = value.get("content", value.get("text"))
        return "" if content is None else _text(content)
    if isinstance(value, Sequence):
        return "\n".join(part for part in map(_text, value) if part)
    raise TypeError(f"expected text or chat messages, came {type(value).__name__}")
