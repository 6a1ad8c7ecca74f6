"""A network between a client and its server that is cut and restored: ``python -m benchmarks.cluster.cut``.

The time until the client gets an error, and from the restoration until it has answers again, with the hosts of
`two_hosts`.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.cluster.namespaces import B, TwoHosts
from benchmarks.cluster.two_hosts import RESULTS, served
from jurybox.protocol.segment import directory
from jurybox.studies.hockey.settings import HockeyTraining

# Requests the newest policy and a pinned version, once for every line, which is the time-out in seconds.
_CLIENT = """\
import json, sys, time
from pathlib import Path
import numpy as np
from jurybox.client import Error
from jurybox.cluster import endpoints
registry, rows = Path(sys.argv[1]), np.zeros((4, 18), np.float32)
with endpoints.reach("hockey", lambda: endpoints.find(registry, "hockey"), 60.0) as server:
    with server.model("policy/hockey", rows=4) as policy, server.model("policy/hockey-pool", rows=4) as past:
        for line in sys.stdin:
            began = time.monotonic()
            try:
                newest = policy.infer(rows, timeout=float(line))
                pinned = past.infer(rows, timeout=float(line), version=1)
                said = {"shapes": [newest.shape, pinned.shape]}
            except Error as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({**said, "seconds": time.monotonic() - began, "to": server.address}), flush=True)
"""


class Client:
    """A client on the second host, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def asks(self, timeout: float) -> dict[str, Any]:
        """Its report after one request with this time-out: "shapes" or "error", "seconds", "to"."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{timeout}\n")
        self._process.stdin.flush()
        said: dict[str, Any] = json.loads(self._process.stdout.readline())
        return said


@contextmanager
def client(hosts: TwoHosts, registry: Path) -> Iterator[Client]:
    """A client that has found the server in the registry."""
    command = hosts.inside(B, [sys.executable, "-c", _CLIENT, str(registry)])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Client(process)


def main() -> None:
    settings = HockeyTraining()
    with TwoHosts(0.005) as hosts, tempfile.TemporaryDirectory(dir=directory(), prefix="two-hosts-") as folder:
        registry = Path(folder)
        with served(hosts, registry, settings), client(hosts, registry) as asking:
            first = asking.asks(30.0)
            hosts.cut.set()
            told = [asking.asks(2.0) for _ in range(5)]
            hosts.cut.clear()
            mended = time.monotonic()
            while "error" in (again := asking.asks(2.0)) and time.monotonic() - mended < 60:
                pass
            back = time.monotonic() - mended
    lines = [
        f"`python -m benchmarks.cluster.cut`, {date.today()}, {platform.machine()}, Python {platform.python_version()}",
        "",
        "5 ms in each direction; calls with a timeout of 2 s; the cut lasted five of them.",
        "",
        "| | |",
        "| --- | --- |",
        f"| before: {first.get('shapes', first)}, one question after the other | {1000 * first['seconds']:.0f} ms |",
        f"| during the cut: {told[0].get('error', told[0])} | {max(each['seconds'] for each in told):.2f} s at most |",
        f"| after it: {again.get('shapes', again)}, from the mending to the first answer | {back:.2f} s |",
    ]
    print("\n".join(lines))
    (RESULTS / "cut.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
