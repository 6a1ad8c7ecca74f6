"""LitServe: FastAPI in front of inference workers. The server is peers/litserve_server.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving.cases import Case
from benchmarks.serving.contender import Contender
from benchmarks.serving.contenders.http_ask import HttpAsk, free_port, wait_for
from benchmarks.serving.peers import __path__ as peers_path

_START = 90.0


class LitServe(Contender):
    title = "LitServe"
    peer = "litserve"
    packages = ("litserve",)

    def start(self) -> None:
        self._port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(next(iter(peers_path)), "litserve_server.py"))],
            env={**os.environ, "BENCH_CASE": self.case.name, "BENCH_PORT": str(self._port)},
        )
        wait_for(f"http://127.0.0.1:{self._port}/health", _START, lambda: self._process.poll() is None)

    def endpoint(self, index: int) -> int:
        return self._port

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> HttpAsk:
        return HttpAsk(case, endpoint, "/predict")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)  # on SIGTERM it leaves its workers behind
        self._process.wait(20.0)
