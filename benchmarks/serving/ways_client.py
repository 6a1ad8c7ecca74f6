"""A client of `ways`, on one way into a server, in the environment of either of the two that are compared.

Run as a program: its arguments are the way and the server's addresses as JSON. For each line with a number on standard
input it sends so many requests, one after another, checks each answer, and prints its own CPU time and the time that
passed, in ns.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable

import numpy as np

ROW = np.arange(4, dtype=np.float32)
PICTURE = np.full((1, 224, 224, 3), 7, np.uint8)
Ask = Callable[[], None]


def _equal(came: object, expected: object) -> None:
    if not np.array_equal(came, expected):
        raise AssertionError(f"expected {expected}, came {came}")


def ours(address: str, transport: str = "auto") -> Ask:
    """A row at a time, by Jurybox's own client."""
    from jurybox.client import connect

    model = connect(address, transport=transport, timeout=60).model("vector")
    return lambda: _equal(model(ROW), 2 * ROW)


def ours_over_libzmq(address: str, transport: str) -> Ask:
    """The same over libzmq, as where a ZMTP connection of our own cannot be."""
    found = []
    # The last two are those of trees before 29 November 2026.
    for name in ("transports.engine_link", "remote.tcp_link", "transports.zmq", "remote.tcp"):
        with contextlib.suppress(ImportError):
            found.append(vars(importlib.import_module(f"jurybox.client.{name}")))
    asking = [module for module in found if "can_dial" in module]
    assert asking, "no module asks can_dial: this would measure a connection of our own"
    for module in asking:
        module["can_dial"] = lambda _: False
    return ours(address, transport)


def pictures(address: str, transport: str = "auto") -> Ask:
    """A picture at a time, by Jurybox's own client."""
    from jurybox.client import connect

    model = connect(address, transport=transport, timeout=60).model("picture")
    return lambda: _equal(model.infer(PICTURE), [7.0])


def triton(
    address: str, model: str = "vector", seconds: float | None = None, priority: int = 0, version: str = ""
) -> Ask:
    """By the client library of Triton over gRPC."""
    import tritonclient.grpc as library

    client = library.InferenceServerClient(address)
    given, name, datatype, expected = (
        (ROW[None], "x", "FP32", 2 * ROW[None]) if model == "vector" else (PICTURE, "image", "UINT8", [7.0])
    )
    tensor = library.InferInput(name, list(given.shape), datatype)
    tensor.set_data_from_numpy(given)

    def ask() -> None:
        answer = client.infer(model, [tensor], client_timeout=seconds, priority=priority, model_version=version)
        _equal(answer.as_numpy("y" if model == "vector" else "score"), expected)

    return ask


def http(address: str, *, binary: bool) -> Ask:
    """Open Inference over HTTP on a kept connection, with tensors in binary or as JSON."""
    import http.client

    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    tensor: dict[str, object] = {"name": "x", "shape": [1, 4], "datatype": "FP32"}
    if binary:
        tensor["parameters"] = {"binary_data_size": 16}
        document = {"inputs": [tensor], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
        head = json.dumps(document).encode()
        body = head + ROW.tobytes()
        fields = {"Inference-Header-Content-Length": str(len(head))}
    else:
        tensor["data"] = ROW.tolist()
        body, fields = json.dumps({"inputs": [tensor]}).encode(), {"Content-Type": "application/json"}

    def ask() -> None:
        connection.request("POST", "/v2/models/vector/infer", body, fields)
        answer = connection.getresponse()
        came = answer.read()
        if binary:
            data = came[int(answer.headers["Inference-Header-Content-Length"]) :]
            _equal(np.frombuffer(data, np.float32), 2 * ROW)
        else:
            _equal(json.loads(came)["outputs"][0]["data"], 2 * ROW)

    return ask


def dialect(address: str) -> Ask:
    """A text at a time, as OpenRLHF asks for rewards."""
    import http.client

    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    body = json.dumps({"query": ["four"], "prompts": ["x"], "labels": ["y"]}).encode()

    def ask() -> None:
        connection.request("POST", "/dialects/openrlhf", body, {"Content-Type": "application/json"})
        _equal(json.loads(connection.getresponse().read())["rewards"], [4.0])

    return ask


WAYS: dict[str, Callable[[dict[str, str]], Ask]] = {
    "shm": lambda at: ours(at["ipc"], "shm"),
    "zmq": lambda at: ours(at["ipc"], "zmq"),
    "libzmq": lambda at: ours_over_libzmq(at["ipc"], "zmq"),
    "tcp": lambda at: ours(at["tcp"]),
    "tcp, libzmq": lambda at: ours_over_libzmq(at["tcp"], "auto"),
    "grpc": lambda at: ours(at["grpc"]),
    "shm, pictures": lambda at: pictures(at["ipc"], "shm"),
    "tcp, pictures": lambda at: pictures(at["tcp"]),
    "grpc, pictures": lambda at: pictures(at["grpc"]),
    # Triton's client: requests that native code answers; those with a deadline too near for it, or with a parameter
    # that changes what is computed, which Python does.
    "triton": lambda at: triton(at["grpc"].removeprefix("grpc://")),
    "triton, pictures": lambda at: triton(at["grpc"].removeprefix("grpc://"), "picture"),
    "triton, hurried": lambda at: triton(at["grpc"].removeprefix("grpc://"), seconds=0.9),
    "triton, pinned": lambda at: triton(at["grpc"].removeprefix("grpc://"), version="0"),
    "triton, generic": lambda at: triton(at["grpc"].removeprefix("grpc://"), priority=2),
    "http, binary": lambda at: http(at["http"], binary=True),
    "http, json": lambda at: http(at["http"], binary=False),
    "dialect": lambda at: dialect(at["http"]),
}


def main() -> None:
    """Obey the lines of standard input."""
    ask = WAYS[sys.argv[1]](json.loads(sys.argv[2]))
    for line in sys.stdin:
        began, cpu = time.monotonic_ns(), time.process_time_ns()
        for _ in range(int(line)):
            ask()
        print(time.process_time_ns() - cpu, time.monotonic_ns() - began, flush=True)


if __name__ == "__main__":
    main()
