"""mosec: a Rust HTTP server in front of Python workers. The worker is peers/mosec_server.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.cases import Case
from benchmarks.serving.contender import Contender
from benchmarks.serving.contenders.http_ask import HttpAsk, free_port, wait_for
from benchmarks.serving.peers import __path__ as peers_path

_START = 90.0


class Mosec(Contender):
    title = "mosec"
    peer = "mosec"
    packages = ("mosec",)
    # Its shortest wait for a fuller batch is a millisecond: a largest batch of as many as there are clients ends it.
    restarts = True

    def start(self) -> None:
        self._port = free_port()
        batch = min(self.clients, max(1, self.case.max_batch // self.case.rows))
        script = Path(next(iter(peers_path)), "mosec_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--address", "127.0.0.1", "--port", str(self._port), "--path",
             str(self.folder / "mosec"), "--log-level", "warning", "--timeout", "20000"],
            env={**os.environ, "BENCH_CASE": self.case.name, "BENCH_BATCH": str(batch)},
        )  # fmt: skip
        wait_for(f"http://127.0.0.1:{self._port}/metrics", _START, lambda: self._process.poll() is None)

    def endpoint(self, index: int) -> int:
        return self._port

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> HttpAsk:
        return HttpAsk(case, endpoint, "/inference")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20.0)
