"""Dtypes that NumPy does not have itself: bfloat16 and float8, of the package ml_dtypes, loaded when they occur."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Error

# By torch's names, which are also ml_dtypes'; with the dtype of the same size in which their bits are handled.
BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class DtypeMissing(Error):
    """A dtype that only ml_dtypes has is needed, and that package is not installed."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name.

    Raises:
        DtypeMissing: it is one of ml_dtypes', which is not installed.
    """
    if name not in BITS:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise DtypeMissing(
            f"{name} is a dtype that NumPy has from the package ml_dtypes, which is not installed here: "
            "pip install ml_dtypes"
        ) from None
    made: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return made


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether elements are floating-point numbers; NumPy's `kind` does not tell it of dtypes that are not its own."""
    return dtype.kind == "f" or dtype.name in BITS


def largest(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a floating-point dtype."""
    if dtype.name not in BITS:
        return float(np.finfo(dtype).max)
    return float(sys.modules["ml_dtypes"].finfo(dtype).max)


def converted(given: NDArray[Any], dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Convert to another dtype; also return which values changed, but for the rounding of floating-point numbers."""
    with np.errstate(over="ignore"):
        array = given.astype(dtype)
    if not is_floating(dtype):
        return array, np.asarray(array != given)
    # A dtype without infinity has NaN instead.
    return array, np.asarray((np.isfinite(array) != np.isfinite(given)) | (np.isnan(array) != np.isnan(given)))


def tensor_bits(tensor: Any) -> NDArray[Any] | None:
    """Return the memory of a torch tensor as an array of a dtype that NumPy does not have.

    None: the tensor is of another dtype, or `numpy()` would refuse it for another reason, which is to be said.

    Raises:
        DtypeMissing: ml_dtypes is not installed.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if (
        name not in BITS
        or tensor.requires_grad
        or tensor.device.type != "cpu"
        or tensor.is_neg()
        or str(tensor.layout) != "torch.strided"
    ):
        return None
    torch = sys.modules["torch"]
    bits = tensor.view(torch.int16 if BITS[name] == "uint16" else torch.uint8).numpy()
    array: NDArray[Any] = bits.view(numpy_dtype(name))
    return array
