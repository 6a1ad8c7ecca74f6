"""A client with the oldest protobuf that is allowed, beside a server with the newest: the cheap core of `make matrix`.

It needs the package index; the versions are put before this environment's own, which lends everything else.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.serving import serving

OLDEST = "4.25.0"
CLIENT = """
import sys
import google.protobuf
import numpy as np
from google.protobuf.internal import api_implementation
from jurybox.client import connect
from jurybox.protocol import open_inference_pb2, remote_weights_pb2

assert google.protobuf.__version__ == sys.argv[1], google.protobuf.__version__
assert api_implementation.Type() == sys.argv[2]
rows = np.arange(12, dtype=np.float32).reshape(3, 4)
for address in sys.argv[3:]:
    with connect(address) as server:
        assert server.models() == ["affine"]
        assert np.array_equal(server.model("affine").infer(rows), 2 * rows + 1)
print("answered")
"""


@pytest.fixture(scope="module")
def oldest(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("protobuf")
    wanted = [f"protobuf=={OLDEST}", "--target", str(folder), "--no-deps", "--quiet"]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *wanted], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"protobuf {OLDEST} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    return str(folder)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory) -> list[str]:
    model = {"factory": "tests.models:affine"}
    with serving(tmp_path_factory.mktemp("server"), {"affine": model}, tcp="127.0.0.1:0", grpc="127.0.0.1:0") as server:
        yield [server.address, *(f"{transport}://{server.listening(transport)}" for transport in ("tcp", "grpc"))]


@pytest.mark.runs
@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_a_client_with_the_oldest_protobuf_is_answered(oldest, addresses, implementation) -> None:
    env = {**os.environ, "PYTHONPATH": oldest, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation}
    given = [sys.executable, "-c", CLIENT, OLDEST, implementation, *addresses]
    done = subprocess.run(given, capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "answered\n"
