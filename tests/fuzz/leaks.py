"""What a server holds, before and after: memory, descriptors, threads, shared memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
from tests.serving import RunningServer, segments

_POOLS = 24  # threads, and descriptors with them, by which gRPC's pools may differ: no leak of thousands of inputs


@dataclass(frozen=True)
class Holdings:
    """Of every process of a server, by role."""

    pids: dict[str, int]
    rss: dict[str, int]  # bytes
    fds: dict[str, int]
    threads: dict[str, int]
    segments: int


def holdings(server: RunningServer) -> Holdings:
    pids = server.pids()
    processes = {role: psutil.Process(pid) for role, pid in pids.items()}
    return Holdings(
        pids,
        {role: process.memory_info().rss for role, process in processes.items()},
        {role: process.num_fds() for role, process in processes.items()},
        {role: process.num_threads() for role, process in processes.items()},
        len(segments()),
    )


def grown(before: Holdings, after: Holdings) -> str:
    """In words, for whoever wants figures."""
    return "; ".join(
        f"{role}: {(after.rss[role] - before.rss[role]) / 2**20:+.1f} MiB, {after.fds[role] - before.fds[role]:+d} "
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
        assert after.rss[role] - before.rss[role] < most_bytes, f"memory leaked: {told}"
        assert after.threads[role] <= before.threads[role] + _POOLS, f"threads leaked: {told}"
    return told
