"""Device memory as torch sees it, and host memory that a device may read; torch's part is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jurybox.protocol.device_memory import DeviceArray, as_tensor, page_lock
from jurybox.protocol.errors import Refused


def torch_of(pointer: int = 64, elements: int = 6, fails: Exception | None = None) -> Any:
    """Torch, which makes a tensor that begins at a pointer, or fails; `asked` has what it was given."""
    asked: list[Any] = []

    def tensor(array: Any, *, device: Any) -> Any:
        asked.append((array, device))
        if fails is not None:
            raise fails
        return SimpleNamespace(numel=lambda: elements, data_ptr=lambda: pointer)

    return SimpleNamespace(as_tensor=tensor, asked=asked)


def test_an_array_tells_others_where_its_memory_is_and_that_they_may_write_to_it() -> None:
    array = DeviceArray(4096, (2, 3), np.dtype(np.float16))
    assert array.__cuda_array_interface__ == {
        "shape": (2, 3), "typestr": "<f2", "data": (4096, False), "strides": None, "version": 3, "stream": None,
    }  # fmt: skip
    assert (array.pointer, array.shape, array.dtype) == (4096, (2, 3), np.float16)


def test_a_tensor_is_of_the_arrays_own_memory_on_its_device() -> None:
    torch = torch_of(64)
    assert as_tensor(torch, "array", 64, "cuda:1").data_ptr() == 64
    assert torch.asked == [("array", "cuda:1")]
    assert as_tensor(torch_of(0, elements=0), "array", 64, "cuda:1").numel() == 0, "nothing is anywhere"


def test_memory_that_torch_has_copied_is_refused() -> None:
    with pytest.raises(Refused, match="the memory at 0x40 is not on cuda:1"):
        as_tensor(torch_of(128), "array", 64, "cuda:1")


@pytest.mark.parametrize("error", [RuntimeError("wrong device"), TypeError("no array"), ValueError("wrong device")])
def test_memory_that_torch_cannot_use_is_refused_with_its_reason(error: Exception) -> None:
    with pytest.raises(Refused, match=f"torch cannot use memory at 0x40 on cuda:1: {error}"):
        as_tensor(torch_of(fails=error), "array", 64, "cuda:1")


@pytest.mark.parametrize("status", [0, 712])
@pytest.mark.parametrize("tells", [True, False])
def test_the_error_of_memory_that_cannot_be_locked_is_not_left_to_the_next_kernel(status: int, tells: bool) -> None:
    """An older torch cannot be asked for it: a kernel of its own takes it, and raises."""
    told: list[Any] = []

    def register(address: int, size: int, flags: int) -> int:
        told.append((address, size, flags))
        return status

    def ones(*shape: int, device: Any) -> None:
        told.append(("ones", device))
        raise RuntimeError("part or all of the memory is registered already")

    runtime = SimpleNamespace(cudaHostRegister=register)
    if tells:
        runtime.cudaGetLastError = lambda: told.append("last error")
    torch = SimpleNamespace(cuda=SimpleNamespace(cudart=lambda: runtime), ones=ones)
    assert page_lock(torch, 4096, 100, "cuda:1") == status
    expected = [] if not status else ["last error"] if tells else [("ones", "cuda:1")]
    assert told == [(4096, 100, 0), *expected]
