"""Memory that a GPU reads and writes by itself, without the CPU copying it first."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class PageLock:
    """Keeps memory that exists already, such as an arena's, in place for the device's DMA (cudaHostRegister).

    Attributes:
        held: whether it worked. Without it copies go through staging memory.
        reason: why not; a limit on locked memory is a usual one.
    """

    def __init__(self, memory: NDArray[Any], device: torch.device) -> None:
        self.held = False
        self.reason = "" if device.type == "cuda" else f"{device.type} has no memory of its own"
        self._address = memory.ctypes.data
        if device.type != "cuda":
            return
        status = int(torch.cuda.cudart().cudaHostRegister(self._address, memory.nbytes, 0))  # type: ignore[no-untyped-call]
        self.held = status == 0
        if status:
            self.reason = f"cudaHostRegister gave {status}" + (", locked by another" if status == _ALREADY else "")

    def release(self) -> None:
        """Let the memory go. Nothing that was queued may still use it."""
        if self.held:
            self.held = False
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]


def staging(rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: torch.device) -> torch.Tensor:
    """Rows of host memory that copies to and from the device go through, page-locked for a GPU."""
    return torch.zeros((rows, *shape), dtype=getattr(torch, dtype.name), pin_memory=device.type == "cuda")
