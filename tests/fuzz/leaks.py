"""What a server holds, before and after: memory, descriptors, threads, shared memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import psutil
from tests.serving import RunningServer, segments

_POOLS = 24  # threads, and descriptors with them, by which gRPC's pools may differ: no leak of thousands of inputs


@dataclass(frozen=True)
class Holdings:
    """Of every process of a server, by role."""

    pids: dict[str, int]
    own: dict[str, int]  # bytes
    fds: dict[str, int]
    threads: dict[str, int]
    segments: int


def holdings(server: RunningServer) -> Holdings:
    pids = server.pids()
    processes = {role: psutil.Process(pid) for role, pid in pids.items()}
    return Holdings(
        pids,
        {role: own_memory(process) for role, process in processes.items()},
        {role: process.num_fds() for role, process in processes.items()},
        {role: process.num_threads() for role, process in processes.items()},
        len(segments()),
    )


def own_memory(process: psutil.Process) -> int:
    """Bytes of this process alone, counted page by page: the cheap count (VmRSS) is off by megabytes either way."""
    return int(process.memory_full_info().uss)


class Watched:
    """Reads a server's memory after every 10,000 inputs, and reports whether it grows.

    Pools, caches and fragments of a heap grow with the first inputs only; a leak grows with every input. So the slope
    of the readings after the warm-up is tested, and not a sum.
    """

    EVERY = 10_000  # inputs between two looks
    WARM_UP = 20_000

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self.sent = 0
        self._looks: list[tuple[int, dict[str, int]]] = []

    def came(self, count: int) -> None:
        """Record that so many inputs were sent and answered."""
        self.sent += count
        if self.sent // self.EVERY > len(self._looks):
            self._looks.append((self.sent, {role: own_memory(it) for role, it in self._processes.items()}))

    def slopes(self) -> dict[str, float]:
        """Bytes by which each process grows in 10,000 inputs: least squares over the looks after the warm-up."""
        looks = [(sent, own) for sent, own in self._looks if sent >= self.WARM_UP]
        if len(looks) < 4:
            return {}
        sent = np.array([sent for sent, _ in looks], float)
        return {
            role: float(np.polyfit(sent, [own[role] for _, own in looks], 1)[0]) * self.EVERY
            for role in self._processes
        }

    def require_flat(self, most: int = 1 << 20) -> None:
        """Assert that none grows by `most` bytes in 10,000 inputs: 100 bytes each, less than any Python object.

        With too few inputs nothing is checked.
        """
        for role, slope in self.slopes().items():
            assert slope < most, f"{role} grows with every input: {self.told()}"

    def told(self) -> str:
        """The figures in words."""
        slopes = self.slopes()
        return f"{self.sent} inputs" + "".join(
            f"; {role}: {slopes[role] / 2**20:+.3f} MiB in 10,000 ("
            + " ".join(f"{own[role] / 2**20:.1f}" for _, own in self._looks)
            + ")"
            for role in slopes
        )


def grown(before: Holdings, after: Holdings) -> str:
    """A readable summary."""
    return "; ".join(
        f"{role}: {(after.own[role] - before.own[role]) / 2**20:+.1f} MiB, {after.fds[role] - before.fds[role]:+d} "
        f"descriptors, {after.threads[role] - before.threads[role]:+d} threads"
        for role in before.pids
    )


def assert_nothing_leaked(server: RunningServer, before: Holdings, most_bytes: int = 24 << 20) -> str:
    """No process was replaced, and none holds more than before but for `most_bytes`; gives the growth in words."""
    until = time.monotonic() + 15
    while True:
        after = holdings(server)
        settled = all(after.fds[role] <= before.fds[role] + _POOLS for role in before.pids if role in after.fds)
        if (settled and after.segments <= before.segments) or time.monotonic() > until:
            break
        time.sleep(0.2)
    assert after.pids == before.pids, "a process died and was replaced"
    told = grown(before, after)
    assert settled, f"descriptors leaked: {told}"
    assert after.segments <= before.segments
    for role in before.pids:
        assert after.own[role] - before.own[role] < most_bytes, f"memory leaked: {told}"
        assert after.threads[role] <= before.threads[role] + _POOLS, f"threads leaked: {told}"
    return told
