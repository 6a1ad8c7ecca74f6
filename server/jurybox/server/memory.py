"""The memory that this process may use: what is left, what limits it, and whether the kernel has killed for lack of it.

And what it has freed and still keeps, which `FreedMemory` returns.

Read from this process's control groups (docs.kernel.org/admin-guide/cgroup-v2.html, cgroup-v1/memory.html) and /proc. A
container's limit is that of its control group.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_GROUPS, _PROC = Path("/sys/fs/cgroup"), Path("/proc")
_MIB = 1 << 20
_EXPLAINS = 5.0  # seconds in which a kill explains the death of a process
_LITTLE = 1 << 20  # bytes that a process at rest holds for clients at most, or an eighth of the most that it held
_AT_REST = 2  # looks in a row that find so little
_MUCH = 8 << 20  # bytes that are worth returning, or looking for
_CONNECTION = 32 << 10  # bytes that a connection takes at least, with TLS twice as much
MORE = "give it more (docker run --memory, MEMORY of compose.yaml, systemd: MemoryMax)"


class _Names(NamedTuple):
    """The files of a control group, and the prefix of the fields in memory.stat that include its children."""

    limit: str
    usage: str
    events: str
    prefix: str


_V2 = _Names("memory.max", "memory.current", "memory.events", "")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_")


def available_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> tuple[int, str]:
    """Return the available memory in bytes, and what limits it: the machine or a control group."""
    machine = _fields(proc / "meminfo")
    found = []
    if "MemAvailable" in machine:
        found.append((1024 * (machine["MemAvailable"] + machine.get("SwapFree", 0)), "the machine's memory"))
    for group, names in _own_groups(proc, groups):
        if (room := _room_of(group, names)) is not None:
            found.append((room, f"the limit {group / names.limit}"))
    return min(found, default=(1 << 62, "memory"))


def memory_limit(proc: Path = _PROC, groups: Path = _GROUPS) -> tuple[int, Path] | None:
    """Return the smallest limit of this process's control groups in bytes, and its file; None without a limit."""
    total = 1024 * _fields(proc / "meminfo").get("MemTotal", 1 << 52)
    found = []
    for group, names in _own_groups(proc, groups):
        with contextlib.suppress(OSError, ValueError):
            found.append((int((group / names.limit).read_text()), group / names.limit))
    limit = min(found, default=None)
    return None if limit is None or limit[0] >= total else limit  # "no limit" of version 1 is a very large number


def bounded(most: int, limit: tuple[int, Path] | None) -> int:
    """Return `most` bytes, or what a process may hold for its clients' requests under a memory limit, if that is less.

    It is an eighth: the same bytes are held up to three times while a request is read, and the rest is for models.
    """
    return most if limit is None else min(most, limit[0] // 8)


class MemoryKills:
    """Tells whether the kernel has killed a process for lack of memory since the last look.

    Several may be killed at once: each such kill explains one death, if that is looked at within seconds.
    """

    def __init__(self, proc: Path = _PROC, groups: Path = _GROUPS, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._groups, self._clock = proc, groups, clock
        self._seen = self._counts()
        self._here = self._anywhere = 0  # kills that have explained no death yet
        self._until = 0.0

    @property
    def known(self) -> bool:
        """Whether the kernel counts such kills."""
        return any(count is not None for count in self._seen)

    def look(self) -> str:
        """Return what was short of memory if a process was killed that no earlier call reported; else an empty text."""
        before, self._seen, now = self._seen, self._counts(), self._clock()
        here, anywhere = (
            max(0, after - was) if was is not None and after is not None else 0
            for was, after in zip(before, self._seen, strict=True)
        )
        if now > self._until:
            self._here = self._anywhere = 0
        if here or anywhere:
            self._until = now + _EXPLAINS
        group, machine = self._here + here > 0, self._anywhere + anywhere > 0
        self._here, self._anywhere = max(0, self._here + here - 1), max(0, self._anywhere + anywhere - 1)
        if group and (limit := memory_limit(self._proc, self._groups)) is not None:
            return f"out of memory: the limit of {limit[0] / _MIB:.0f} MiB ({limit[1]}) is used up; {MORE}"
        if group or machine:
            return "out of memory: the kernel killed a process for lack of it (see dmesg); stop what else takes memory"
        return ""

    def _counts(self) -> tuple[int | None, int | None]:
        """Return the kills in this process's control group, and on the machine; None: not counted."""
        innermost = next(_own_groups(self._proc, self._groups), None)  # which counts a kill for any limit
        of_group = None if innermost is None else _fields(innermost[0] / innermost[1].events).get("oom_kill")
        return of_group, _fields(self._proc / "vmstat").get("oom_kill")


class FreedMemory:
    """Returns what a process has freed to the system when it is at rest, and frees what only refers to itself.

    The allocator keeps it for the next requests (`keep_freed_memory`), also what a burst of requests or connections
    took and nobody will need again soon. What it cannot return counts as needed, until the process has grown again, or
    its clients have given up what they held then.

    Objects that refer to each other wait for Python's collector, which counts objects and not their bytes: eight of a
    connection that is gone may hold a message of 64 MiB for hours. So the collector runs when the process has grown.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
        self._needed = self._grown = self._private()
        self._most = 0  # bytes for clients and their connections, since memory was returned last
        self._rested = 0  # looks in a row

    def look(self, held: int, connections: int) -> None:
        """Return what is free, if the process is at rest. Call it every second.

        Args:
            held: bytes that the process holds for clients now.
            connections: how many are open.
        """
        private, size = self._private(), held + connections * _CONNECTION
        if private - self._grown >= _MUCH:
            gc.collect()
            self._grown = private = self._private()
        self._grown = min(self._grown, private)
        self._needed, self._most = min(self._needed, private), max(self._most, size)
        self._rested = self._rested + 1 if held <= max(_LITTLE, self._most // 8) else 0
        if self._rested >= _AT_REST and (private - self._needed >= _MUCH or self._most - size >= _LITTLE):
            self._trim(0)
            self._needed, self._most = self._private(), size

    def _private(self) -> int:
        """Return the bytes of this process that it shares with nobody."""
        try:
            resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
        except OSError:
            return 0
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _own_groups(proc: Path, groups: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the control groups of this process that limit memory, from the inside outwards."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            folder, names = groups, _V2
        elif "memory" in kinds.split(","):
            folder, names = groups / "memory", _V1
        else:
            continue
        group = folder / path.lstrip("/")
        # A container may see its own group at the root, although its path outside is another.
        for each in (group, *group.parents) if group.is_dir() else (folder,):
            yield each, names
            if each == folder:
                break


def _room_of(group: Path, names: _Names) -> int | None:
    """Return the bytes left of a control group's limit, including reclaimable page cache; None if it has no limit."""
    with contextlib.suppress(OSError, ValueError):
        most = int((group / names.limit).read_text())
        used = int((group / names.usage).read_text())
        cache = _fields(group / "memory.stat")
        return most - used + sum(cache.get(f"{names.prefix}{kind}", 0) for kind in ("inactive_file", "active_file"))
    return None


def _fields(file: Path) -> dict[str, int]:
    """Parse a file of lines with a name and a number."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, rest = line.replace(":", " ", 1).partition(" ")
            if (first := rest.split()[:1]) and first[0].isdigit():
                fields[name] = int(first[0])
    return fields
