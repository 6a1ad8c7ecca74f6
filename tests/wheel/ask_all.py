"""Ask a server over every transport; run by the Python of an environment that has the wheel.

ask_all.py IPC TCP GRPC HTTP: the server's addresses. Over HTTP, with nothing but the standard library.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import numpy as np

from jurybox import native
from jurybox.client import connect

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
EXPECTED = 2 * ROWS + 1


def over_http(address: str) -> np.ndarray:
    """The answer of the Open Inference Protocol."""
    url = f"{address}/v2/models/affine"
    with urllib.request.urlopen(url, timeout=60) as told:
        (name,) = (tensor["name"] for tensor in json.load(told)["inputs"])
    tensor = {"name": name, "shape": ROWS.shape, "datatype": "FP32", "data": ROWS.ravel().tolist()}
    with urllib.request.urlopen(f"{url}/infer", json.dumps({"inputs": [tensor]}).encode(), timeout=60) as answer:
        (out,) = json.load(answer)["outputs"]
    return np.array(out["data"], np.float32).reshape(out["shape"])


if __name__ == "__main__":
    host, tcp, grpc, http = sys.argv[1:]
    assert Path(native.__file__).suffix == ".so" and "site-packages" in native.__file__, native.__file__
    for address, transport in ((host, "shm"), (host, "zmq"), (tcp, "auto"), (grpc, "auto")):
        with connect(address, transport=transport, timeout=60.0) as server:
            assert np.array_equal(server.model("affine").infer(ROWS), EXPECTED), (address, transport)
    assert np.array_equal(over_http(http), EXPECTED)
    sys.stdout.write("shm, zmq, tcp, grpc and HTTP answer\n")
