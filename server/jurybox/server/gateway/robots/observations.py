"""Conversion of a robot's observation to rows of a model. Names, dtypes and layouts follow fixed rules, no guesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jurybox.client.row_codec import utf8
from jurybox.protocol.errors import SpecMismatch, plain
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec

_CHANNELS = 3
MOST_ROWS = 1024  # of one observation


class ObservedRows(NamedTuple):
    """The rows of an observation.

    Attributes:
        values: for every input a list of n values without a batch axis; text as UTF-8 bytes.
        n: number of rows.
        batched: whether the observation's arrays had a batch axis, which the answer's then have, too.
    """

    values: dict[str, list[Any]]
    n: int
    batched: bool


def rows_of(observation: Mapping[str, Any], spec: ModelSpec) -> ObservedRows:
    """Return the rows of an observation: one, or as many as the batch axis of its arrays has entries.

    Values in nested maps are named by their path: `{"images": {"top": ...}}` is the input "images/top". Entries that
    are not inputs of the model are ignored. Numbers are converted where they keep their meaning: floats to floats of
    any size, integers to floats and to integer types that can represent them. An image (uint8, three channels last) may
    also be given as floats from 0 to 1, and with its channels first; for an input of frames (an axis more) it is the
    only frame. Text may be the only item of a list, or of a list in one; with a batch axis, a list has a text for each
    row. All arrays may have a batch axis, and behind it one of time with a single entry. An input that is a parameter
    of the model may have the parameter's name instead; if it is missing, it has the parameter's default.

    Raises:
        SpecMismatch: an input is missing or does not fit; the message names it.
    """
    named = dict(_flat(observation, ""))
    for name, parameter in spec.parameters.items():
        if parameter.input not in named:
            named[parameter.input] = named.get(name, parameter.default)
        elif name in named and name != parameter.input:
            raise SpecMismatch(f"parameter {name!r} is the input {parameter.input!r}, which came, too")
    if missing := [name for name in spec.inputs if name not in named]:
        came = ", ".join(plain(name, 80) for name in sorted(named)[:20]) or "nothing"
        raise SpecMismatch(
            f"an observation for {spec.name!r} needs {', '.join(spec.inputs)}; {', '.join(missing)} is missing: came "
            f"{came}"
        )
    values: dict[str, list[Any]] = {}
    sizes: dict[int | None, str] = {}  # of the batch axis, each with an input that has it; None: it has no such axis
    for name, tensor in spec.inputs.items():
        if tensor.dtype == BYTES:
            continue
        array = _numbers(name, tensor, named[name])
        values[name], size = _rows(name, tensor, array)
        if array.ndim:
            sizes[size] = name
    if None in sizes and len(sizes) > 1:
        other = next(name for size, name in sizes.items() if size is not None)
        raise SpecMismatch(
            f"the observation has a batch axis in {other!r} and none in {sizes[None]!r}: expected it in all arrays or "
            "in none"
        )
    if len(sizes) > 1:
        (first, one), (second, other) = list(sizes.items())[:2]
        raise SpecMismatch(f"the observation has {first} rows in {one!r} and {second} in {other!r}: expected as many")
    size = next(iter(sizes), None)
    n = 1 if size is None else size
    for name, tensor in spec.inputs.items():
        if tensor.dtype == BYTES:
            values[name] = _texts(name, tensor, named[name], n)
        elif len(values[name]) != n:
            values[name] = values[name] * n  # a single number is that of every row
    return ObservedRows({name: values[name] for name in spec.inputs}, n, size is not None)


def _flat(observation: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in observation.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}/")
        else:
            yield f"{path}{key}", value


def _rows(name: str, spec: TensorSpec, array: NDArray[Any]) -> tuple[list[NDArray[Any]], int | None]:
    """Return an array as the values of rows, and the size of its batch axis; None: it has none."""
    if (fitting := _in_layout(spec, array)) is not None:
        return [_value(name, spec, fitting)], None
    behind = array.ndim - len(spec.shape)
    if behind == 2 and array.shape[1] == 1:
        array, behind = array[:, 0], 1
    if behind == 1 and 1 <= len(array) <= MOST_ROWS:
        rows = [row for row in (_in_layout(spec, row) for row in array) if row is not None]
        if len(rows) == len(array):
            return [_value(name, spec, row) for row in rows], len(rows)
    raise SpecMismatch(f"{name!r} of the observation: expected {spec}, came {array.dtype}{list(array.shape)}")


def _value(name: str, spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
    if _is_image(spec) and array.dtype.kind == "f":
        array = _pixels(name, array)
    cast = _cast(name, spec.numpy_dtype, array)
    return np.ascontiguousarray(cast) if cast.ndim else cast  # it would give a single value an axis


def _in_layout(spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any] | None:
    """Return an array of the input's shape: images with their channels last, a single frame as one of several."""
    if _fits(spec, array.shape):
        return array
    if not _is_image(spec):
        return None
    if array.ndim == len(spec.shape) - 1:
        return _in_layout(spec, array[None]) if array.ndim == 3 else None
    if array.ndim == len(spec.shape) and array.shape[-3] == _CHANNELS:
        turned = np.moveaxis(array, -3, -1)
        return turned if _fits(spec, turned.shape) else None
    return None


def _fits(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
    return spec.extents_of(shape) is not None


def _is_image(spec: TensorSpec) -> bool:
    """Return whether an input is an image or, with an axis more, frames."""
    return spec.dtype == "uint8" and len(spec.shape) in (3, 4) and spec.shape[-1] == _CHANNELS


def _texts(name: str, spec: TensorSpec, value: Any, n: int) -> list[bytes]:
    """Return the texts of n rows: one for all, or a list with one for each."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        value = value.item() if value.size == 1 else value.tolist()
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]  # of the only time, or the only row
    if isinstance(value, list):
        if len(value) != n:
            wanted = "one text" if n == 1 else f"{n} texts"
            raise SpecMismatch(
                f"{name!r} of the observation: expected {wanted}, came a list of {len(value)}: a batch axis gives the "
                "number of rows"
            )
        return [_text(name, spec, one[0] if isinstance(one, list) and len(one) == 1 else one) for one in value]
    return [_text(name, spec, value)] * n


def _text(name: str, spec: TensorSpec, value: Any) -> bytes:
    if isinstance(value, str):
        value = utf8(f"{name!r} of the observation", value)
    if not isinstance(value, bytes):
        raise SpecMismatch(f"{name!r} of the observation: expected text, came {type(value).__name__}")
    if len(value) > spec.capacity:
        raise SpecMismatch(f"{name!r} of the observation: expected at most {spec.capacity} bytes, came {len(value)}")
    return value


def _numbers(name: str, spec: TensorSpec, value: Any) -> NDArray[Any]:
    if isinstance(value, list) and all(type(item) in (int, float, bool) for item in value):
        value = np.array(value, np.float64 if float in map(type, value) else None) if value else np.empty(0)
    elif type(value) in (int, float, bool):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise SpecMismatch(f"{name!r} of the observation: expected {spec}, came {type(value).__name__}")
    return value


def _pixels(name: str, image: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert floats from 0 to 1 to uint8, truncated like in openpi's own server."""
    if image.size and not (image.min() >= 0 and image.max() <= 1):  # also true with a NaN
        raise SpecMismatch(
            f"{name!r} of the observation: expected floats from 0 to 1, came {image.min()} to {image.max()}: send uint8"
        )
    return (image * 255).astype(np.uint8)


def _cast(name: str, dtype: np.dtype[Any], array: NDArray[Any]) -> NDArray[Any]:
    kind = array.dtype.kind
    if array.dtype == dtype:
        return array
    if dtype.kind == "f" and kind in "iuf":
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        if array.size and not bool(np.all(np.isfinite(cast) | ~np.isfinite(array))):
            raise SpecMismatch(f"{name!r} of the observation holds numbers that {dtype} cannot: came {array.dtype}")
        return cast
    if dtype.kind in "iu" and kind in "iu":
        limits = np.iinfo(dtype)
        if not array.size or (int(array.min()) >= limits.min and int(array.max()) <= limits.max):
            return array.astype(dtype)
    raise SpecMismatch(
        f"{name!r} of the observation: expected {dtype}, came {array.dtype} with numbers that it cannot hold"
    )
