"""What the kernel tells: which processes are ours, what CPU they and all others used, what memory is theirs alone."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
_BY_ITSELF = 2.0  # seconds; what ends when its parent has ended may take so long


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none of them gets out of sight."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


@dataclass(frozen=True)
class Process:
    """A line of /proc/PID/stat: CPU in ticks, that of reaped children with it."""

    pid: int
    parent: int
    name: str
    state: str
    own: int
    reaped: int


def processes() -> dict[int, Process]:
    """All processes there are."""
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text()
            except OSError:
                continue  # it ended just now
            name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            user, system, reaped_user, reaped_system = map(int, rest[11:15])
            pid = int(entry.name)
            found[pid] = Process(pid, int(rest[1]), name, rest[0], user + system, reaped_user + reaped_system)
    return found


def descendants(table: dict[int, Process], root: int) -> set[int]:
    """Ids of a process's children, theirs, and so on."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    open_ends = [root]
    while open_ends:
        for child in children.get(open_ends.pop(), ()):
            found.add(child)
            open_ends.append(child)
    return found


@dataclass(frozen=True)
class Reading:
    """CPU counters at one moment."""

    at: float
    busy: int  # ticks of all cores that were not idle, stolen ones among them
    table: dict[int, Process]
    ours: frozenset[int]


def read() -> Reading:
    """Take a reading; ours are this process and its descendants."""
    with Path("/proc/stat").open() as stat:
        fields = [int(field) for field in stat.readline().split()[1:]]
    table = processes()
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    ours = frozenset(descendants(table, os.getpid()) | {os.getpid()})
    return Reading(time.monotonic(), user + nice + system + irq + softirq + steal, table, ours)


@dataclass(frozen=True)
class Usage:
    """CPU between two readings, in seconds.

    Attributes:
        clients, server: of our processes; the server's are all that are not clients, without this one.
        others: cores that anything else kept busy.
        loudest: the foreign process that used most, for telling what disturbed.
    """

    seconds: float
    clients: float
    server: float
    others: float
    loudest: str


def between(first: Reading, last: Reading, clients: set[int], waiting: Set[int] = frozenset()) -> Usage:
    """What was used between two readings; `waiting` are ours, but of neither side."""
    seconds = last.at - first.at
    ours = first.ours | last.ours
    spent = {}
    for pid, now in last.table.items():
        before = first.table.get(pid)
        # A child that was reaped in between appears in its parent's account with all it ever used, and has what it
        # used before in the first reading: the sum over a tree is right only with both.
        spent[pid] = now.own + now.reaped - (before.own + before.reaped if before else 0)
    for pid, before in first.table.items():
        if pid not in last.table and pid in ours:
            spent[pid] = -(before.own + before.reaped)
    by_clients = sum(ticks for pid, ticks in spent.items() if pid in clients)
    by_us = sum(ticks for pid, ticks in spent.items() if pid in ours)
    harness = spent.get(os.getpid(), 0) + sum(spent.get(pid, 0) for pid in waiting)
    foreign = {pid: process for pid, process in last.table.items() if pid not in ours}
    ticks, name = max(
        ((one.own - (first.table[pid].own if pid in first.table else 0), one.name) for pid, one in foreign.items()),
        default=(0, ""),
    )
    return Usage(
        seconds=seconds,
        clients=by_clients / TICK,
        server=(by_us - by_clients - harness) / TICK,
        others=(last.busy - first.busy - by_us) / TICK / seconds,
        loudest=f"{name} {ticks / TICK / seconds:.2f}" if ticks > 0 else "",
    )


def unique_bytes(pid: int) -> int:
    """Memory of a process that no other shares (its unique set size)."""
    return _rolled_up(pid, ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:"))


def proportional_bytes(pid: int) -> int:
    """Memory of a process, its share of what it shares with others (its proportional set size); 0 for mere servants.

    Python's resource tracker, which the harness brings along, is one.
    """
    try:
        if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return 0
        return _rolled_up(pid, ("Pss:",))
    except OSError:
        return 0  # it ended just now


def _rolled_up(pid: int, names: tuple[str, ...]) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


def shared_memory_of(pids: set[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped or open."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue  # it ended just now
        for name in links + [line[line.index("/") :] for line in lines if "/" in line]:
            if name.startswith("/dev/shm/") and not name.endswith(" (deleted)"):
                found.add(Path(name))
    return found


def end_descendants(grace: float = 5.0) -> list[str]:
    """End every descendant that does not end by itself, each by its own id; gives their names."""
    names: list[str] = []
    began = time.monotonic()
    number = signal.SIGTERM
    while True:
        _reap()
        table = processes()
        left = [table[pid] for pid in descendants(table, os.getpid()) if table[pid].state != "Z"]
        if not left:
            return names
        if time.monotonic() < began + _BY_ITSELF:
            time.sleep(0.1)
            continue
        if not names:
            names = sorted({process.name for process in left})
        if time.monotonic() > began + _BY_ITSELF + grace:
            number = signal.SIGKILL
        for process in left:
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def _reap() -> None:
    """Collect ended orphans."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def available_bytes() -> int:
    """Memory that programs can still have without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024


def describe() -> dict[str, str | int]:
    """The hardware and the system."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_gib": round(memory / 2**20),
        "kernel": f"{platform.system()} {platform.release()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
    }
