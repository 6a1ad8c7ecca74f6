"""What an engine holds of its device's memory, shown on the board."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from numpy.typing import NDArray

_EVERY = 1.0  # seconds: asking takes torch's allocator some tens of microseconds, beside the loop


def show_device_memory(device: torch.device, record: NDArray[Any]) -> None:
    """Keep `device_bytes` of a board's engine record, shape (1,), at what torch's allocator has reserved.

    Nothing is done for a CPU. The thread ends with the process.
    """

    def show() -> None:
        while True:
            record["device_bytes"] = torch.cuda.memory_reserved(device)
            time.sleep(_EVERY)

    if device.type == "cuda":
        threading.Thread(target=show, name="memory", daemon=True).start()
