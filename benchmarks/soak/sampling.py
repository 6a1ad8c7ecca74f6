"""What the processes of a server hold at one moment, by what the kernel tells."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.serving import RunningServer

from jurybox.protocol.segment import directory

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment.

    Attributes:
        seconds: since the load began.
        pss: bytes, what it shares counted by its share.
        anonymous: bytes of `pss` that are no file's and no shared memory's: heap and stacks, where leaks are.
    """

    seconds: float
    role: str
    pid: int
    pss: int
    anonymous: int
    descriptors: int
    threads: int
    cpu: float  # seconds it has used so far


@dataclass(frozen=True, slots=True)
class SharedSample:
    """Shared memory at one moment: files (segments, pipes) and the bytes that they take."""

    seconds: float
    segments: int
    bytes: int


def take(server: RunningServer, began: float) -> tuple[list[Sample], SharedSample]:
    """Look at every process of the server, and at its shared memory; `began` is of time.monotonic."""
    seconds = time.monotonic() - began
    processes = []
    for role, pid in server.pids().items():
        try:
            processes.append(_of(role, pid, seconds))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it was killed just now, as the load may do
    files = [path.stat(follow_symlinks=False) for path in _living(directory())]
    return processes, SharedSample(seconds, len(files), sum(file.st_blocks * 512 for file in files))


def _living(folder: Path) -> list[Path]:
    return [path for path in folder.glob(f"jurybox-{os.getuid()}-*") if path.exists()]


def _of(role: str, pid: int, seconds: float) -> Sample:
    folder = Path(f"/proc/{pid}")
    rollup = {}
    for line in (folder / "smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        rollup[name] = int(value.split()[0]) * 1024
    user, system = (folder / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return Sample(
        seconds,
        role,
        pid,
        rollup["Pss"],
        rollup["Pss_Anon"],
        len(list((folder / "fd").iterdir())),
        len(list((folder / "task").iterdir())),
        (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"),
    )
