"""Triton: the tritonserver binary of the nvidia-pytriton wheel with a Python-backend model written by hand.

Not through pytriton's own proxy, which adds a process per request. Two transports: tensors in gRPC messages, and
tensors in system shared memory whose place is in gRPC messages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.cases import Case
from benchmarks.serving.contender import REQUEST_TIMEOUT, Ask, Contender, batch_of
from benchmarks.serving.contenders.http_ask import free_port, wait_for
from benchmarks.serving.peers import __path__ as peers_path

_START = 120.0
TYPES = {"float32": "FP32", "uint8": "UINT8"}


class GrpcAsk(Ask):
    """`infer` with the input in the message."""

    def __init__(self, case: Case, index: int, port: int, input_name: str = "input") -> None:
        from tritonclient import grpc

        self._case = case
        self._client = grpc.InferenceServerClient(f"127.0.0.1:{port}")
        self._input = grpc.InferInput(input_name, [case.rows, *case.shape], TYPES[case.dtype])
        self._outputs = [grpc.InferRequestedOutput(name) for name, _ in case.outputs]

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        self._input.set_data_from_numpy(batch_of(self._case, inputs))
        answer = self._client.infer("served", [self._input], outputs=self._outputs, client_timeout=REQUEST_TIMEOUT)
        return [answer.as_numpy(name) for name, _ in self._case.outputs]

    def close(self) -> None:
        self._client.close()


class SharedMemoryAsk(GrpcAsk):
    """`infer` with input and outputs in regions that stay registered."""

    def __init__(self, case: Case, index: int, port: int, input_name: str = "input") -> None:
        from tritonclient.utils import shared_memory

        super().__init__(case, index, port, input_name)
        self._library = shared_memory
        self._input_region = self._register(f"in{index}_{port}", case.input_bytes)
        self._input.set_shared_memory(f"in{index}_{port}", case.input_bytes)
        self._output_regions = []
        for (name, shape), output in zip(case.outputs, self._outputs, strict=True):
            size = case.rows * int(np.prod(shape)) * 4
            region = f"{name}{index}_{port}"
            self._output_regions.append((self._register(region, size), [case.rows, *(shape or (1,))]))
            output.set_shared_memory(region, size)

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        self._library.set_shared_memory_region(self._input_region, [batch_of(self._case, inputs)])
        self._client.infer("served", [self._input], outputs=self._outputs, client_timeout=REQUEST_TIMEOUT)
        read = self._library.get_contents_as_numpy
        return [read(region, np.float32, shape) for region, shape in self._output_regions]

    def _register(self, name: str, size: int) -> Any:
        region = self._library.create_shared_memory_region(name, f"/jbench_{name}", size)
        self._client.register_system_shared_memory(name, f"/jbench_{name}", size)
        return region

    def close(self) -> None:
        for region in (self._input_region, *(region for region, _ in self._output_regions)):
            self._library.destroy_shared_memory_region(region)
        super().close()


class TritonGrpc(Contender):
    title = "Triton, gRPC"
    peer = "triton"
    packages = ("nvidia-pytriton", "tritonclient")
    most_clients = 64
    why_most = "not run: 256 gRPC clients take more memory and start-up time than this benchmark has for one contender"

    def start(self) -> None:
        spec = find_spec("pytriton")
        assert spec is not None and spec.origin is not None
        self._process, self._port = start_server(
            self.folder,
            Path(spec.origin).parent,
            Path(sys.executable),
            Path(next(iter(peers_path)), "triton_model.py"),
            _config(self.case),
            {"BENCH_CASE": self.case.name},
        )

    def endpoint(self, index: int) -> int:
        return self._port

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return GrpcAsk(case, index, endpoint)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20.0)


class TritonShm(TritonGrpc):
    title = "Triton, system shared memory"

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return SharedMemoryAsk(case, index, endpoint)


def start_server(
    folder: Path, package: Path, python: Path, model: Path, config: str, environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server with one model, `served`, and wait until it answers; return its process and its port for gRPC.

    Args:
        folder: for the model repository and the backends.
        package: where pytriton is installed, by whose interpreter `python` the backend runs.
        model: the file of the Python backend's model; `config`: its config.pbtxt.
        environment: of the model, beside ours.
    """
    binaries, repository = package / "tritonserver", folder / "models" / "served"
    (repository / "1").mkdir(parents=True)
    shutil.copy(model, repository / "1" / "model.py")
    # The wheel keeps a stub for every Python version; the backend looks for its own beside itself.
    backends = folder / "backends" / "python"
    backends.mkdir(parents=True)
    version = package.parent.parent.name.removeprefix("python")
    stub = binaries / "python_backend_stubs" / version / "triton_python_backend_stub"
    for file in (*(binaries / "backends" / "python").iterdir(), stub):
        if file.is_file():
            (backends / file.name).symlink_to(file)
    (repository / "config.pbtxt").write_text(config)
    grpc, http = free_port(), free_port()
    process = subprocess.Popen(
        [str(binaries / "bin" / "tritonserver"), "--model-repository", str(repository.parent),
         "--backend-directory", str(backends.parent), "--grpc-address", "127.0.0.1", "--grpc-port", str(grpc),
         "--http-address", "127.0.0.1", "--http-port", str(http), "--allow-metrics", "false",
         "--backend-config", f"python,shm-region-prefix-name=jbench{grpc}"],
        env={**os.environ, "LD_LIBRARY_PATH": str(package.parent / "nvidia_pytriton.libs"), **environment,
             "PATH": f"{python.parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{http}/v2/health/ready", _START, lambda: process.poll() is None)
    except BaseException:
        process.kill()
        process.wait(20.0)
        raise
    return process, grpc


def _config(case: Case) -> str:
    def tensor(name: str, kind: str, shape: tuple[int, ...]) -> str:
        # A scalar a row is a vector of one there.
        return f'{{ name: "{name}" data_type: TYPE_{kind} dims: {list(shape or (1,))} }}'

    outputs = ", ".join(tensor(name, "FP32", shape) for name, shape in case.outputs)
    return f"""\
backend: "python"
max_batch_size: {case.max_batch}
input [ {tensor("input", TYPES[case.dtype], case.shape)} ]
output [ {outputs} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
dynamic_batching {{ max_queue_delay_microseconds: 0 }}
parameters: {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value: {{ string_value: "yes" }} }}
"""
