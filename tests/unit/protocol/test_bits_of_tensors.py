"""Dtypes that NumPy does not have: with the package that has them, without it, and in torch's memory."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jurybox.protocol.dtypes import BITS, DtypeMissing, converted, numpy_dtype, tensor_bits

ml_dtypes = pytest.importorskip("ml_dtypes")
torch = pytest.importorskip("torch")

NAMES = sorted(name for name in BITS if hasattr(torch, name))


@pytest.mark.parametrize("name", sorted(BITS))
def test_a_dtype_that_only_another_package_has_is_missing_without_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert numpy_dtype(name) == getattr(ml_dtypes, name)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(DtypeMissing, match=f"{name} is a dtype .* not installed here: pip install ml_dtypes"):
        numpy_dtype(name)
    assert numpy_dtype("float16") == np.float16


@pytest.mark.parametrize("name", NAMES)
def test_a_tensors_memory_is_read_without_a_copy(name: str) -> None:
    tensor = torch.tensor([[0.5, -2.0, 1.0]]).to(getattr(torch, name))
    array = tensor_bits(tensor)
    assert array is not None and array.dtype == numpy_dtype(name) and array.shape == (1, 3)
    assert array.astype(np.float32).tolist() == [[0.5, -2.0, 1.0]]
    assert array.ctypes.data == tensor.data_ptr()


def test_a_tensor_of_another_dtype_is_not_read_as_bits() -> None:
    assert tensor_bits(torch.ones(2)) is None


@pytest.mark.parametrize(
    "odd",
    [
        {"requires_grad": True},
        {"device": SimpleNamespace(type="cuda")},
        {"is_neg": lambda: True},
        {"layout": "torch.sparse_coo"},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_a_tensor_that_numpy_would_refuse_for_another_reason_is_left_to_it(odd: dict[str, Any]) -> None:
    def view(_: Any) -> Any:
        raise AssertionError("its memory is not to be read")

    plain = {
        "dtype": "torch.bfloat16", "requires_grad": False, "device": SimpleNamespace(type="cpu"),
        "is_neg": lambda: False, "layout": "torch.strided", "view": view,
    }  # fmt: skip
    assert tensor_bits(SimpleNamespace(**plain | odd)) is None
    with pytest.raises(AssertionError, match="not to be read"):
        tensor_bits(SimpleNamespace(**plain))


def test_a_number_that_is_too_large_is_found_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        array, changed = converted(np.array([1.0, 1e300, np.inf, np.nan]), np.dtype(np.float32))
    assert array.dtype == np.float32 and changed.tolist() == [False, True, False, False]
