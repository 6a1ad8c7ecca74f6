"""Conversion of a robot's observation to a row of a model. Names, dtypes and layouts follow fixed rules, no guesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jurybox.client.row_codec import utf8
from jurybox.protocol.errors import SpecMismatch, plain
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec

_CHANNELS = 3
_MOST_LISTS = 2  # around a text: one for the batch, one for the time


class Row(NamedTuple):
    """A row of a model.

    Attributes:
        values: a value for every input, without a batch axis; text as UTF-8 bytes.
        batched: whether the observation's arrays had a batch axis of one, which the answer's then have, too.
    """

    values: dict[str, Any]
    batched: bool


def row_of(observation: Mapping[str, Any], spec: ModelSpec) -> Row:
    """Return the row of an observation.

    Values in nested maps are named by their path: `{"images": {"top": ...}}` is the input "images/top". Entries that
    are not inputs of the model are ignored. Numbers are converted where they keep their meaning: floats to floats of
    any size, integers to floats and to integer types that can represent them. An image (uint8, three channels last) may
    also be given as floats from 0 to 1, and with its channels first; for an input of frames (an axis more) it is the
    only frame. Text may be the only item of a list, or of a list in one. All arrays may have a batch axis of one.

    Raises:
        SpecMismatch: an input is missing or does not fit; the message names it.
    """
    named = dict(_flat(observation, ""))
    if missing := [name for name in spec.inputs if name not in named]:
        came = ", ".join(plain(name, 80) for name in sorted(named)[:20]) or "nothing"
        raise SpecMismatch(
            f"an observation for {spec.name!r} needs {', '.join(spec.inputs)}; {', '.join(missing)} is missing: came "
            f"{came}"
        )
    values: dict[str, Any] = {}
    with_axis: dict[bool, str] = {}  # an input with, and one without a batch axis
    for name, tensor in spec.inputs.items():
        if tensor.dtype == BYTES:
            values[name] = _text(name, tensor, named[name])
            continue
        array = _numbers(name, tensor, named[name])
        values[name], batched = _one(name, tensor, array)
        if array.ndim:
            with_axis[batched] = name
    if len(with_axis) == 2:
        raise SpecMismatch(
            f"the observation has a batch axis of one in {with_axis[True]!r} and none in {with_axis[False]!r}: "
            "expected it in all arrays or in none"
        )
    return Row(values, True in with_axis)


def _flat(observation: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in observation.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}/")
        else:
            yield f"{path}{key}", value


def _one(name: str, spec: TensorSpec, array: NDArray[Any]) -> tuple[NDArray[Any], bool]:
    """Return an array as a row's value, and whether it had a batch axis."""
    batched = False
    if (fitting := _in_layout(spec, array)) is None and array.ndim == len(spec.shape) + 1 and array.shape[0] == 1:
        fitting, batched = _in_layout(spec, array[0]), True
    if fitting is None:
        raise SpecMismatch(f"{name!r} of the observation: expected {spec}, came {array.dtype}{list(array.shape)}")
    if _is_image(spec) and fitting.dtype.kind == "f":
        fitting = _pixels(name, fitting)
    return np.ascontiguousarray(_cast(name, spec.numpy_dtype, fitting)), batched


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


def _text(name: str, spec: TensorSpec, value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind == "U":
        value = value.item()
    for _ in range(_MOST_LISTS):
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
    if isinstance(value, list):
        raise SpecMismatch(
            f"{name!r} of the observation: expected one text, came a list of {len(value)}: open a connection for "
            "each robot"
        )
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
