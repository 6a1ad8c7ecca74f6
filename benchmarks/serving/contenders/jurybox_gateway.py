"""Jurybox's gateway: gRPC of the Open Inference Protocol, asked by the very client that asks Triton.

Host and clients run in Triton's environment, so that both are asked by the same tritonclient, grpcio and NumPy; the
server runs in ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

from benchmarks.serving.cases import Case
from benchmarks.serving.contender import Ask, Contender
from benchmarks.serving.contenders.http_ask import free_port, wait_for
from benchmarks.serving.contenders.triton import GrpcAsk, SharedMemoryAsk

_START = 120.0
OUR_PYTHON = "BENCH_OUR_PYTHON"  # the interpreter of this project's environment


class GatewayGrpc(Contender):
    title = "Jurybox, gRPC"
    peer = "triton"
    packages = ("tritonclient", "grpcio")
    cases = ("vector", "vector64")
    most_clients = 64
    why_most = "not run: 256 gRPC clients take more memory and start-up time than this benchmark has for one contender"

    def start(self) -> None:
        case = self.case
        self._port, http = free_port(), free_port()
        server: dict[str, Any] = {
            "address": f"ipc://{self.folder}/engine", "http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{self._port}",
            "devices": ["cpu"], "threads": 1,
        }  # fmt: skip
        model: dict[str, Any] = {
            "factory": "benchmarks.serving.factories:model", "max_batch": case.max_batch, "rows": 4 * case.max_batch,
        }  # fmt: skip
        config = self.folder / "server.toml"
        config.write_text(
            "\n".join(["[server]", *_lines(server), "[models.served]", *_lines(model),
                       f'args = {{case = "{case.name}"}}'])
        )  # fmt: skip
        self._process = subprocess.Popen([os.environ[OUR_PYTHON], "-m", "jurybox.server.cli", "serve", str(config)])
        wait_for(f"http://127.0.0.1:{http}/v2/health/ready", _START, lambda: self._process.poll() is None)

    def endpoint(self, index: int) -> int:
        return self._port

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return GrpcAsk(case, index, endpoint, "observation")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20.0)


class GatewayShm(GatewayGrpc):
    title = "Jurybox, gRPC and system shared memory"

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return SharedMemoryAsk(case, index, endpoint, "observation")


def _lines(settings: dict[str, Any]) -> list[str]:
    # JSON's strings, numbers, booleans and lists are TOML's too.
    return [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
