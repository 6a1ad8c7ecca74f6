"""How many CUDA devices there are, found out without importing torch and without opening a device in this process."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

_TIMEOUT = 30.0  # seconds; a driver that has to load its modules first takes a few


@functools.cache
def visible_cuda_devices() -> int:
    """CUDA devices that the installed torch could use; CUDA_VISIBLE_DEVICES counts. Asked once a process.

    The driver is asked in a process of its own: it keeps files of the device open for as long as its asker lives.
    """
    if not torch_has_cuda():
        return 0
    try:
        asked = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return 0
    return int(asked.stdout) if asked.returncode == 0 and asked.stdout.strip().isdigit() else 0


def torch_has_cuda() -> bool:
    """Whether torch is installed and built for CUDA, as its version file says."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and bool(re.search(r"^cuda\b.*=\s*['\"]\d", version.read_text(), re.MULTILINE))


def ask_driver() -> int:
    """The number of devices the CUDA driver shows; 0 without one (cuInit and cuDeviceGetCount of its driver API)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


if __name__ == "__main__":
    sys.stdout.write(str(ask_driver()))
