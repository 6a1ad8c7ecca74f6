"""Findings of `jurybox doctor`, and checks of the host: devices, file systems, sockets, clock, kernel."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from jurybox.protocol.address import ipc_path


class Level(str, Enum):
    """The severity of a finding: a server runs, runs with limits, or does not run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: its subject, its level, what was found, and a remedy (empty if none is needed)."""

    subject: str
    level: Level
    found: str
    remedy: str = ""


def ok(subject: str, found: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(subject, Level.OK, found)


def warn(subject: str, found: str, remedy: str) -> Finding:
    """Return a finding with which a server runs, but with limits."""
    return Finding(subject, Level.WARN, found, remedy)


def fail(subject: str, found: str, remedy: str) -> Finding:
    """Return a finding with which a server does not run."""
    return Finding(subject, Level.FAIL, found, remedy)


_TIMEOUT = 30.0  # seconds; a driver that must first load its kernel modules takes a few


@functools.cache
def visible_cuda_devices() -> int:
    """Return the number of CUDA devices that the installed torch can use, as CUDA_VISIBLE_DEVICES allows; cached.

    The driver is queried in a separate process, because it keeps files of the device open until its process ends.
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
    """Return whether torch is installed and built for CUDA, by its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and bool(re.search(r"^cuda\b.*=\s*['\"]\d", version.read_text(), re.MULTILINE))


def ask_driver() -> int:
    """Return the number of devices by cuInit and cuDeviceGetCount of the CUDA driver API; 0 without a driver."""
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


_FILES = 64  # files in shared memory of a server with some engines and models
_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_SLOW_CLOCKS = ("acpi_pm", "hpet", "pit", "jiffies")  # each read is a system call of a microsecond or more
_OLDEST, _FULL = (3, 17), (5, 14)  # sealed memory; MADV_POPULATE_WRITE


def room(folder: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the bytes of a file system and the free ones, and its inodes and the free ones; all zeros on an error.

    Without a limit of inodes they are zeros, too.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return (0, 0), (0, 0)
    return (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize), (found.f_files, found.f_favail)


def check_inodes(total: int, free: int, folder: Path) -> Finding:
    """Check for free inodes, since a tmpfs has a limited number of files."""
    if total and free < _FILES:
        return fail(
            "inodes",
            f"{folder}: {free} more files of {total} fit",
            f"remove stale files there (jurybox doctor --fix), or: mount -o remount,nr_inodes=1m {folder}",
        )
    return ok("inodes", f"{free} more files fit" if total else "as many files as fit")


def dead_sockets(address: str) -> list[Path]:
    """Return the sockets of dead servers at an ipc address."""
    path = ipc_path(address)
    if path is None or not path.parent.is_dir() or _held(Path(f"{path}.lock")):
        return []
    return [other for other in sorted(path.parent.glob(f"{path.name}*")) if other.is_socket() and not _listens(other)]


def check_sockets(dead: list[Path], *, fix: bool) -> Finding:
    """Check for sockets of dead servers, at which clients wait until their time-out; remove them with `fix`."""
    if not dead:
        return ok("stale sockets", "none")
    if fix:
        for path in dead:
            path.unlink(missing_ok=True)
        return ok("stale sockets", f"{len(dead)} removed")
    return warn(
        "stale sockets",
        f"{len(dead)}: {', '.join(map(str, dead[:3]))}",
        "a server there was killed: start it again (jurybox serve), or jurybox doctor --fix removes them",
    )


def clock_source() -> str:
    """Return the kernel's clock source; empty if unknown."""
    try:
        return _CLOCK.read_text().strip()
    except OSError:
        return ""


def check_clock(source: str) -> Finding:
    """Check that the clock source is fast, since the monotonic clock is read several times for each request."""
    if source in _SLOW_CLOCKS:
        return warn(
            "clock",
            f"the kernel reads the time from {source}, which takes microseconds",
            f"choose a faster one, if there is one (cat {_CLOCK.with_name('available_clocksource')}): echo tsc > "
            f"{_CLOCK}",
        )
    return ok("clock", f"{source or 'unknown source'}; time-outs use the monotonic clock")


def check_kernel(release: str) -> Finding:
    """Check the kernel: a server needs Linux 3.17; from 5.14 on it can map shared memory in advance."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    if version < _OLDEST:
        return fail("kernel", release, "Linux 3.17 or newer is needed, 5.14 or newer is recommended")
    if version < _FULL:
        return warn(
            "kernel",
            f"{release}: pages of weights and replay are mapped on first use",
            "Linux 5.14 or newer maps them ahead (MADV_POPULATE_WRITE); nothing else is missing",
        )
    return ok("kernel", release)


def _held(lock: Path) -> bool:
    """Return whether a running server holds the lock file of an address."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # unknown: do not treat it as dead
    return True


# ----
# Sharing a GPU between processes: in turns, at the same time (MPS), or partitioned (MIG).


_CAPABILITIES = Path("/proc/driver/nvidia/capabilities")


def mps_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder where the daemon of NVIDIA's Multi-Process Service has its pipes, if one runs."""
    return Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")


def mig_instances(capabilities: Path = _CAPABILITIES) -> int:
    """Return the number of GPU instances into which this host's devices are partitioned; 0 without MIG."""
    return len(list(capabilities.glob("gpu*/mig/gi*")))


def check_gpu_sharing(environ: Mapping[str, str], mps: Path, instances: int) -> Finding:
    """Report how processes share a GPU, as far as this is visible without opening the device."""
    subject, visible = "GPU sharing", environ.get("CUDA_VISIBLE_DEVICES", "")
    running = (mps / "control").exists()
    if environ.get("CUDA_MPS_PIPE_DIRECTORY") and not running:
        return warn(
            subject,
            f"CUDA_MPS_PIPE_DIRECTORY={mps}, and no MPS daemon runs there: processes take turns on the GPU",
            "start it as the same user (nvidia-cuda-mps-control -d), or unset the variable",
        )
    if instances and "MIG-" not in visible:
        return warn(
            subject,
            f"{instances} MIG instances, CUDA_VISIBLE_DEVICES={visible or 'unset'}: processes get the first one",
            "name one: CUDA_VISIBLE_DEVICES=MIG-..., as nvidia-smi -L lists them",
        )
    parts = []
    if instances:
        parts.append(f"MIG: {visible} of {instances} instances")
    if running:
        share = environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        parts.append(f"MPS in {mps}" + (f", {share} % of the GPU's threads" if share else ""))
    return ok(subject, "; ".join(parts) or "none set up: processes on one GPU take turns")
