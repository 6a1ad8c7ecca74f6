"""Checks of the doctor that faults under load have taught: inodes, sockets of the dead, the clock, the kernel."""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

from jurybox.protocol.address import ipc_path
from jurybox.server.findings import Finding, Level

_FILES = 64  # in shared memory, of a server with some engines and models
_CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_SLOW_CLOCKS = ("acpi_pm", "hpet", "pit", "jiffies")  # each reading is a call of the kernel, a microsecond or more
_OLDEST, _FULL = (3, 17), (5, 14)  # sealed memory; MADV_POPULATE_WRITE


def inodes(folder: Path) -> tuple[int, int]:
    """Of the file system: how many files it can hold and how many more fit; zeros where there is no bound."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0, 0
    return found.f_files, found.f_favail


def check_inodes(total: int, free: int, folder: Path) -> Finding:
    """A tmpfs holds a number of files, however small they are."""
    if total and free < _FILES:
        return Finding(
            "inodes",
            Level.FAIL,
            f"{folder}: {free} more files of {total} fit",
            f"remove what is left there (jurybox doctor --fix), or: mount -o remount,nr_inodes=1m {folder}",
        )
    return Finding("inodes", Level.OK, f"{free} more files fit" if total else "as many files as fit")


def dead_sockets(address: str) -> list[Path]:
    """Sockets beside an ipc address that nobody listens on, where no server holds the address."""
    path = ipc_path(address)
    if path is None or not path.parent.is_dir() or _held(Path(f"{path}.lock")):
        return []
    return [other for other in sorted(path.parent.glob(f"{path.name}*")) if other.is_socket() and not _listens(other)]


def check_sockets(dead: list[Path], *, fix: bool) -> Finding:
    """Sockets of dead servers; removed with `fix`. Clients that try them wait until their time-out."""
    if not dead:
        return Finding("stale sockets", Level.OK, "none")
    if fix:
        for path in dead:
            path.unlink(missing_ok=True)
        return Finding("stale sockets", Level.OK, f"{len(dead)} removed")
    return Finding(
        "stale sockets",
        Level.WARN,
        f"{len(dead)}: {', '.join(map(str, dead[:3]))}",
        "a server there was killed: start it again (jurybox serve), or jurybox doctor --fix removes them",
    )


def clock_source() -> str:
    """What the kernel reads the time from; empty where it does not say."""
    try:
        return _CLOCK.read_text().strip()
    except OSError:
        return ""


def check_clock(source: str) -> Finding:
    """The monotonic clock is read several times a request."""
    if source in _SLOW_CLOCKS:
        return Finding(
            "clock",
            Level.WARN,
            f"the kernel reads the time from {source}, which takes microseconds",
            f"choose a faster one, where there is one (cat {_CLOCK.with_name('available_clocksource')}): echo tsc > "
            f"{_CLOCK}",
        )
    return Finding("clock", Level.OK, f"{source or 'unknown source'}; time-outs go by the monotonic clock")


def check_kernel(release: str) -> Finding:
    """Linux 3.17 has what a server's memory needs; 5.14 maps shared memory ahead of its use."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    version = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    if version < _OLDEST:
        return Finding("kernel", Level.FAIL, release, "Linux 3.17 or newer is needed, 5.14 or newer is well")
    if version < _FULL:
        return Finding(
            "kernel",
            Level.WARN,
            f"{release}: pages of weights and replay are mapped at their first use",
            "Linux 5.14 or newer maps them ahead (MADV_POPULATE_WRITE); nothing else is missing",
        )
    return Finding("kernel", Level.OK, release)


def _held(lock: Path) -> bool:
    """Whether a server lives that holds the lock file of an address."""
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
            return True  # not for us to judge
    return True
