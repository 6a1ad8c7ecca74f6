"""Ray Serve over HTTP with its batching. The deployment is peers/ray_server.py."""

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

_START = 150.0


class RayServe(Contender):
    title = "Ray Serve, HTTP"
    peer = "ray"
    packages = ("ray",)
    most_clients = 64
    why_most = "not run: far beyond what it serves on two cores"

    def start(self) -> None:
        self._port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(next(iter(peers_path)), "ray_server.py"))],
            env={
                **os.environ, "BENCH_CASE": self.case.name, "BENCH_PORT": str(self._port),
                "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(self.folder), "BENCH_FOLDER": str(self.folder),
            },
        )  # fmt: skip
        wait_for(f"http://127.0.0.1:{self._port}/-/healthz", _START, lambda: self._process.poll() is None)
        wait_for(f"http://127.0.0.1:{self._port}/", _START, lambda: self._process.poll() is None)

    def endpoint(self, index: int) -> int:
        return self._port

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> HttpAsk:
        return HttpAsk(case, endpoint, "/")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(25.0)
