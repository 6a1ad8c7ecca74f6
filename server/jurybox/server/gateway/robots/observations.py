"""Conversion of a robot's observation to a row of a model. Names, dtypes and layouts follow fixed rules, no guesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.row_codec import utf8
from jurybox.protocol.errors import SpecMismatch, plain
from jurybox.protocol.spec import BYTES, ModelSpec, TensorSpec

_CHANNELS = 3


def row_of(observation: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return a value for every input, without a batch axis; text as UTF-8 bytes.

    Values in nested maps are named by their path: `{"images": {"top": ...}}` is the input "images/top". Entries that
    are not inputs of the model are ignored. Numbers are converted where they keep their meaning: floats to floats of
    any size, integers to floats and to integer types that can represent them. An image (uint8, three channels last) may
    also be given as floats from 0 to 1, and with its channels first.

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
    return {name: _one(name, tensor, named[name]) for name, tensor in spec.inputs.items()}


def _flat(observation: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in observation.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}/")
        else:
            yield f"{path}{key}", value


def _one(name: str, spec: TensorSpec, value: Any) -> Any:
    if spec.dtype == BYTES:
        return _text(name, spec, value)
    array = _numbers(name, spec, value)
    fits = _fits(spec, array.shape)
    if _is_image(spec):
        if not fits and array.ndim == 3 and array.shape[0] == _CHANNELS and _fits(spec, (*array.shape[1:], _CHANNELS)):
            array, fits = array.transpose(1, 2, 0), True
        if fits and array.dtype.kind == "f":
            array = _pixels(name, array)
    if not fits:
        raise SpecMismatch(f"{name!r} of the observation: expected {spec}, came {array.dtype}{list(array.shape)}")
    return np.ascontiguousarray(_cast(name, spec.numpy_dtype, array))


def _fits(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
    return spec.extents_of(shape) is not None


def _is_image(spec: TensorSpec) -> bool:
    return spec.dtype == "uint8" and len(spec.shape) == 3 and spec.shape[2] == _CHANNELS


def _text(name: str, spec: TensorSpec, value: Any) -> bytes:
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind == "U":
        value = value.item()
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
