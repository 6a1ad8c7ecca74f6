"""Jurybox's gateway: gRPC of the Open Inference Protocol with the same client as Triton, and its HTTP with binary
tensors with the same plain socket as the HTTP peers.

For gRPC, host and clients run in Triton's environment, so that both have the same tritonclient, grpcio and NumPy; the
server runs in ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.cases import Case
from benchmarks.serving.contender import Ask, Contender
from benchmarks.serving.contenders.http_ask import HttpAsk, free_port, wait_for
from benchmarks.serving.contenders.triton import TYPES, GrpcAsk, SharedMemoryAsk

_START = 120.0
LENGTH = "Inference-Header-Content-Length"
OUR_PYTHON = "BENCH_OUR_PYTHON"  # the interpreter of this project's environment


class GatewayGrpc(Contender):
    title = "Jurybox, gRPC"
    peer = "triton"
    packages = ("tritonclient", "grpcio")
    most_clients = 64
    why_most = "not run: 256 gRPC clients take more memory and start-up time than this benchmark has for one contender"

    def start(self) -> None:
        case = self.case
        self._port, self._http = free_port(), free_port()
        server: dict[str, Any] = {
            "address": f"ipc://{self.folder}/engine",
            "http": f"127.0.0.1:{self._http}", "grpc": f"127.0.0.1:{self._port}",
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
        wait_for(f"http://127.0.0.1:{self._http}/v2/health/ready", _START, lambda: self._process.poll() is None)

    def endpoint(self, index: int) -> int:
        return self._port

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return GrpcAsk(case, index, endpoint, _input(case))

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20.0)


class GatewayShm(GatewayGrpc):
    title = "Jurybox, gRPC and system shared memory"

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return SharedMemoryAsk(case, index, endpoint, _input(case))


class GatewayHttp(GatewayGrpc):
    title = "Jurybox, HTTP with binary tensors"
    peer = ""
    packages = ("jurybox",)
    most_clients = 1024
    why_most = ""

    def endpoint(self, index: int) -> int:
        return self._http

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return BinaryAsk(case, endpoint)


class BinaryAsk(HttpAsk):
    """POST of the protocol's JSON, always the same, and an input's bytes; the answer ends with the outputs' bytes."""

    def __init__(self, case: Case, port: int) -> None:
        tensor = {
            "name": _input(case), "shape": [case.rows, *case.shape], "datatype": TYPES[case.dtype],
            "parameters": {"binary_data_size": case.input_bytes},
        }  # fmt: skip
        wanted = [{"name": name, "parameters": {"binary_data": True}} for name, _ in case.outputs]
        before = json.dumps({"inputs": [tensor], "outputs": wanted}).encode()
        super().__init__(case, port, "/v2/models/served/infer", before, f"{LENGTH}: {len(before)}\r\n")
        self._sizes = [4 * case.rows * int(np.prod(shape)) for _, shape in case.outputs]

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        self._send(inputs)
        body = self._body()
        found, at = [], len(body) - sum(self._sizes)
        for size in self._sizes:
            found.append(np.frombuffer(body, np.float32, size // 4, at))
            at += size
        return found


def _input(case: Case) -> str:
    return "image" if case.model == "image" else "observation"


def _lines(settings: dict[str, Any]) -> list[str]:
    # JSON's strings, numbers, booleans and lists are TOML's too.
    return [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
