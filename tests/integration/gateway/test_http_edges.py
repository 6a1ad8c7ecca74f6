"""HTTP as probes, proxies and clients that fail speak it: methods, versions, encodings, numbers, hang-ups."""

from __future__ import annotations

import gzip
import json
import socket
import time
import zlib

import numpy as np
import pytest
from tests.serving import wait_until

from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub

grpc = pytest.importorskip("grpc")
BODY = {"inputs": [{"name": "observation", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


def raw(gateway, request: bytes) -> bytes:
    host, _, port = gateway.http.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(request)
        answer = b""
        while b"\r\n" not in answer and (part := connection.recv(65536)):
            answer += part
        return answer.partition(b"\r\n")[0]


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/version", "/status", "/metrics", "/", "/v2", "/v2/models/affine", "/events"]
)
def test_a_head_request_gets_the_headers_of_a_get(curl, path):
    head = curl.head(path)
    assert (head.status_code, head.content) == (200, b"")
    if path != "/events":  # a GET of it does not end
        assert head.headers["content-type"] == curl.get(path).headers["content-type"]


@pytest.mark.parametrize("path", ["/health", "/v2/health/ready"])
def test_a_probe_of_http_1_0_needs_no_host_on_loopback(gateway, path):
    assert raw(gateway, f"GET {path} HTTP/1.0\r\n\r\n".encode()).startswith(b"HTTP/1.1 200")
    # A page whose name was made to resolve to this host names it, and speaks HTTP/1.1.
    assert b" 421 " in raw(gateway, f"GET {path} HTTP/1.0\r\nHost: evil.example\r\n\r\n".encode())
    assert b" 421 " in raw(gateway, f"GET {path} HTTP/1.0\r\nHost:\r\n\r\n".encode())
    assert b" 400 " in raw(gateway, f"GET {path} HTTP/1.1\r\n\r\n".encode())


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/health", "GET, HEAD"),
        ("/v2/models/affine/infer", "GET, HEAD, POST"),
        ("/v2/models/affine/versions/1/infer", "GET, HEAD, POST"),
        ("/v2/repository/index", "POST"),
        ("/v2/repository/models/affine/load", "POST"),
        ("/v2/logging", "GET, HEAD, POST"),
        ("/v2/systemsharedmemory/unregister", "POST"),
    ],
)
def test_other_methods_are_told_which_a_path_takes(curl, path, allowed):
    for method in ("PUT", "DELETE", "PATCH"):
        answer = curl.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed), (method, path)
        assert answer.json() == {"error": f"{method} {path} is not served: expected {allowed}", "code": "UNSUPPORTED"}
    options = curl.options(path)
    assert (options.status_code, options.headers["allow"], options.content) == (204, allowed, b"")


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS"])
def test_a_path_that_does_not_exist_is_said_to_be_missing(curl, method):
    answer = curl.request(method, "/nowhere")
    assert (answer.status_code, answer.json()["code"]) == (404, "MODEL_NOT_FOUND")


@pytest.mark.parametrize("name", ["gzip", "GZIP", "x-gzip", "X-Gzip", "deflate", "Deflate", "identity", "Identity", ""])
def test_the_names_of_encodings_are_read_in_any_case(curl, name):
    body = json.dumps(BODY).encode()
    kind = name.lower().removeprefix("x-")
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}.get(kind, bytes)(body)
    answer = curl.post("/v2/models/affine/infer", content=packed, headers={"content-encoding": name})
    assert answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [3, 5, 7, 9], answer.text


@pytest.mark.parametrize("number", ["1e39", "1e400", "-1e400", "1" + "0" * 400 + ".0"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_number_that_does_not_fit_is_refused_however_large(curl, number, nested):
    data = f"[1, 2, 3, {number}]"
    text = json.dumps(BODY).replace("[1, 2, 3, 4]", f"[{data}]" if nested else data)
    answer = curl.post("/v2/models/affine/infer", content=text)
    assert answer.status_code == 422 and "does not fit FP32" in answer.json()["error"], answer.text
    text = json.dumps(BODY).replace("[1, 2, 3, 4]", "[1, 2, -Infinity, NaN]")  # what Python's JSON says on purpose
    answer = curl.post("/v2/models/affine/infer", content=text)
    assert "holds NaN or infinity" in answer.json()["error"], answer.text  # computed, and not for JSON


@pytest.mark.parametrize("value", [[], {}, [[]], 1, True, None, ""])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_region_that_is_no_name_is_refused(curl, value, side):
    part = {"name": "observation", "datatype": "FP32", "shape": [1, 4]} if side == "inputs" else {"name": "action"}
    part["parameters"] = {"shared_memory_region": value, "shared_memory_byte_size": 16}
    answer = curl.post("/v2/models/affine/infer", json=BODY | {side: [part]})
    assert answer.status_code == 400 and "shared memory needs shared_memory_region (a name)" in answer.text, answer.text


def test_clients_that_hang_up_within_a_request_are_no_error(gateway, curl):
    host, _, port = gateway.http.rpartition(":")
    before = gateway.server.text()
    for path in ("/v2/models/affine/infer", "/v2/repository/models/affine/load", "/v2/repository/index", "/nowhere"):
        for framing in ("Content-Length: 1000", "Transfer-Encoding: chunked"):
            with socket.create_connection((host, int(port)), 20) as connection:
                head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{framing}\r\n\r\n"
                connection.sendall(head.encode() + (b'{"inputs": ' if "Length" in framing else b"5\r\n{    "))
                time.sleep(0.02)
    answers = []
    wait_until(lambda: answers.append(curl.get("/health").status_code) or len(answers) > 3, what="some answers")
    new = gateway.server.text()[len(before) :]
    assert "Traceback" not in new and " error " not in new, new


@pytest.mark.parametrize("name", ["absent", "team/absent"])
def test_a_model_that_is_not_here_is_not_ready(gateway, curl, name):
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert stub.ModelReady(pb.ModelReadyRequest(name="affine"), timeout=20).ready
        assert not stub.ModelReady(pb.ModelReadyRequest(name=name), timeout=20).ready
        assert not stub.ModelReady(pb.ModelReadyRequest(name="affine", version="7"), timeout=20).ready
        assert not stub.ModelReady(pb.ModelReadyRequest(name="affine", version="seven"), timeout=20).ready
    assert curl.get(f"/v2/models/{name}/ready").status_code == 404


def test_a_deadline_that_has_passed_is_never_a_negative_time(gateway):
    said = set()
    with grpc.insecure_channel(gateway.grpc) as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        rows = np.full((1, 4), 300_000, np.float32)
        for seconds in np.linspace(0.0, 0.004, 40):
            tensor = pb.ModelInferRequest.InferInputTensor(name="observation", datatype="FP32", shape=rows.shape)
            message = pb.ModelInferRequest(model_name="affine", inputs=[tensor], raw_input_contents=[rows.tobytes()])
            message.parameters["timeout"].int64_param = max(1, int(seconds * 1e6))
            try:
                infer(message, timeout=20)
            except grpc.RpcError as error:
                said.add(error.details())
    assert said and not [text for text in said if "-0." in text], said
