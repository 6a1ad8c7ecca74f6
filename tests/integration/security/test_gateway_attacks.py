"""Malicious requests to a real server's gateway: each gets an error with a reason and affects no other client."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import socket
import struct
import threading
import time
import zlib
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest
from fastapi import FastAPI
from tests.serving import serving, wait_until

from jurybox.client import ModelNotFound, Refused, connect
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from jurybox.protocol.wire import MAX_CONTROL, MAX_NAME
from jurybox.server.gateway import http_parsers, http_server
from jurybox.server.security.access import Access

LOCAL = "127.0.0.1:0"
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
    "complaining": {"factory": "tests.integration.security.attack_models:complaining", "max_batch": 16, "rows": 64},
    "policy": {"factory": "tests.models:affine", "publish": "double_buffer"},
}
ROW = {"name": "observation", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
ANSWER = [3.0, 5.0, 7.0, 9.0]
INFER = "/v2/models/affine/infer"
SERVICE = "/inference.GRPCInferenceService/"
MIB = 1 << 20
DEEP = b"[" * 900 + b"]" * 900


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all attacks: its gateway must survive them without a restart."""
    with serving(tmp_path_factory.mktemp("server"), MODELS, http=LOCAL, grpc=LOCAL, tcp=LOCAL) as running:
        with running.connect() as client:
            running.listed = client.status()["server"]
        running.gateway = running.pids()["gateway"]
        yield running
        assert running.pids()["gateway"] == running.gateway, "the gateway died and was replaced"
        for defect in ("Exception in ASGI application", "a call failed"):
            assert defect not in running.text()


@pytest.fixture
def web(server):
    with httpx.Client(base_url=f"http://{server.listed['http']}", timeout=30) as client:
        yield client


@pytest.fixture
def channel(server):
    unbounded = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.listed["grpc"], unbounded) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return GRPCInferenceServiceStub(channel)


def request(model="affine", **fields):
    tensor = pb.ModelInferRequest.InferInputTensor(name="observation", datatype="FP32", shape=[1, 4])
    row = np.array([1, 2, 3, 4], np.float32).tobytes()
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[row], **fields)


def refused(call):
    """Return the status and details of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


def peak(server):
    """Return the gateway's peak memory in bytes, since its start or the last reset through clear_refs."""
    status = Path(f"/proc/{server.gateway}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


@pytest.fixture
def memory(server):
    """Limit how much the gateway's memory may grow at any moment of the test."""
    Path(f"/proc/{server.gateway}/clear_refs").write_text("5")
    before = psutil.Process(server.gateway).memory_info().rss
    yield
    assert peak(server) - before < 300 * MIB, f"{(peak(server) - before) / MIB:.0f} MiB more"


@pytest.fixture
def effort(server):
    """Limit the gateway's CPU time during the test; wall time would depend on the machine's load."""

    def spent():
        times = psutil.Process(server.gateway).cpu_times()
        return times.user + times.system

    before = spent()
    yield
    assert spent() - before < 3, f"{spent() - before:.1f} s"


def still_answers(web, stub):
    assert web.post(INFER, json={"inputs": [ROW]}).json()["outputs"][0]["data"] == ANSWER
    assert stub.ModelInfer(request(), timeout=20).model_name == "affine"
    assert web.get("/health").status_code == 200


def test_a_models_name_of_two_mib_is_refused_as_that_and_breaks_nothing(server, web, stub):
    still_answers(web, stub)
    name = "a" * (2 * MIB)
    for call in (
        lambda: stub.ModelInfer(request(name), timeout=20),
        lambda: stub.ModelReady(pb.ModelReadyRequest(name=name), timeout=20),
        lambda: stub.ModelMetadata(pb.ModelMetadataRequest(name=name), timeout=20),
        lambda: stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=20),
        lambda: stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=name), timeout=20),
    ):
        assert refused(call)[0] == "NOT_FOUND"
        assert f"at most {MAX_NAME} characters, one of {len(name)} came" in refused(call)[1]
    with connect(f"grpc://{server.listed['grpc']}", timeout=20) as client:
        for stream in (client.publisher, client.weights):
            with pytest.raises(ModelNotFound, match=f"at most {MAX_NAME} characters"):
                stream("a" * (MAX_NAME + 1))
    answer = web.post(f"/v2/models/{name[:20_000]}/infer", json={"inputs": [ROW]})
    assert (answer.status_code, "at most 128 characters" in answer.json()["error"]) == (404, True)
    still_answers(web, stub)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_models_name_of_two_mib_is_refused_at_the_control_transport_too(server, transport):
    """The client refuses it before sending, and the server if a client does not check."""
    from jurybox.client import connect

    address = server.address if transport == "ipc" else f"tcp://{server.listed['tcp']}"
    with connect(address, timeout=20) as client:
        model = client.model("affine")
        for name in ("a" * (2 * MIB), "a" * (MAX_NAME + 1)):
            for ask in (client.model, client.describe, client.load, client.unload):
                with pytest.raises(ModelNotFound):
                    ask(name)
        with pytest.raises(Refused, match=f"at most {MAX_CONTROL} bytes"):
            client.load("affine", {"factory": "x:" + "y" * (2 * MIB)})
        np.testing.assert_array_equal(model.infer(np.ones((2, 4), np.float32)), np.full((2, 4), 3, np.float32))


def test_a_supervisor_that_is_slow_breaks_no_lane_of_the_gateway(server, web, stub):
    still_answers(web, stub)
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        assert refused(lambda: stub.ModelInfer(request("nobody"), timeout=20))[0] == "UNAVAILABLE"
        for _ in range(3):  # models with a lane are still answered
            assert web.post(INFER, json={"inputs": [ROW]}).json()["outputs"][0]["data"] == ANSWER
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    wait_until(lambda: web.get("/health").status_code == 200, 20, "health")
    still_answers(web, stub)


def test_health_and_a_request_agree_at_every_moment(server, web, stub):
    """They agree while the supervisor hangs, while an unknown model is requested and while a model is reloaded."""
    still_answers(web, stub)
    results, stop = [], threading.Event()

    def ask():
        with httpx.Client(base_url=web.base_url, timeout=10) as client:
            while not stop.is_set():
                body = {"inputs": [ROW], "parameters": {"timeout": 2_000_000}}
                works = client.post(INFER, json=body).status_code == 200
                results.append((works, client.get("/health").status_code == 200))
                stop.wait(0.05)

    for name in MODELS:  # now each has a lane
        assert web.post(f"/v2/models/{name}/infer", json={"inputs": [ROW]}).status_code == 200
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        os.kill(server.process.pid, signal.SIGSTOP)
        web.post("/v2/models/nobody/infer", json={"inputs": [ROW]})
        os.kill(server.process.pid, signal.SIGCONT)
        assert web.post("/v2/repository/models/affine/load").status_code == 200
        time.sleep(0.3)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
        stop.set()
        thread.join(30)
    assert len(results) > 3
    assert all(works == well for works, well in results), results


def test_an_error_of_any_length_and_alphabet_arrives_and_returns_its_rows(web, stub):
    """Errors are cut to a fixed number of bytes: wherever the cut falls, the client gets the error."""
    for mood in range(900, 912):  # cuts at every byte of characters of two to four bytes
        rows = {"name": "observation", "shape": [16, 4], "datatype": "FP32", "data": [mood] * 64}
        body = {"inputs": [rows], "parameters": {"timeout": 10_000_000}}
        answer = web.post("/v2/models/complaining/infer", json=body)
        assert answer.status_code == 500, answer.text  # 504 if the error were lost
    wrong = request("complaining")
    wrong.raw_input_contents[0] = np.full(4, 901, np.float32).tobytes()
    assert refused(lambda: stub.ModelInfer(wrong, timeout=10))[0] == "INTERNAL"
    good = {"inputs": [{**ROW, "shape": [64, 4], "data": [0] * 256}], "parameters": {"timeout": 10_000_000}}
    assert web.post("/v2/models/complaining/infer", json=good).status_code == 200


def test_an_output_named_twice_is_refused(web, stub):
    answer = web.post(INFER, json={"inputs": [ROW], "outputs": [{"name": "action"}] * 2})
    assert (answer.status_code, "asked for twice" in answer.json()["error"]) == (422, True)
    outputs = [pb.ModelInferRequest.InferRequestedOutputTensor(name="action")] * 2
    assert "asked for twice" in refused(lambda: stub.ModelInfer(request(outputs=outputs), timeout=20))[1]


def test_an_output_named_two_million_times_in_a_few_kib_costs_nothing(web, memory, effort):
    outputs = b",".join([b'{"name":"action"}'] * 2_000_000)
    body = gzip.compress(b'{"inputs":[' + json.dumps(ROW).encode() + b'],"outputs":[' + outputs + b"]}", 1)
    answer = web.post(INFER, content=body, headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, "at most" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("mark", [b"[],", b"{},", b'"",', b'{"a":[]},'])
def test_json_of_millions_of_parts_is_refused_before_it_is_read(web, memory, mark):
    body = gzip.compress(b'{"inputs":[' + mark * 4_000_000 + b"1]}", 1)
    assert web.post(INFER, content=body, headers={"Content-Encoding": "gzip"}).status_code == 400


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_not_unpacked_beyond_the_largest_body(web, memory, encoding):
    packed = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | (16 if encoding == "gzip" else 0))
    first, again = (packed.compress(bytes(MIB)) + packed.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    body = first + 299 * again  # what follows a full flush depends on nothing before it
    answer = web.post(INFER, content=body, headers={"Content-Encoding": encoding})
    assert (answer.status_code, answer.json()["code"]) == (413, "TOO_LARGE")


def test_compressed_bodies_end_at_their_end_mark(web):
    whole = gzip.compress(json.dumps({"inputs": [ROW]}).encode())
    for body in (whole[:-9], whole[:12], whole + b"more", whole + whole):
        assert web.post(INFER, content=body, headers={"Content-Encoding": "gzip"}).status_code == 400
    assert web.post(INFER, content=whole, headers={"Content-Encoding": "gzip"}).status_code == 200


@pytest.mark.runs
def test_many_large_bodies_at_once_do_not_fill_the_memory(server, web):
    """Decompressed they have 2 GiB. Those that do not fit get a status that clients retry."""
    size = 64 * MIB - 4096
    rows = {"name": "observation", "datatype": "FP32", "shape": [size // 16, 4]}
    rows["parameters"] = {"binary_data_size": size}
    head = json.dumps({"inputs": [rows], "parameters": {"timeout": 2_000_000}}).encode()
    body = gzip.compress(head + bytes(size), 1)
    length = {"Inference-Header-Content-Length": str(len(head)), "Content-Encoding": "gzip"}
    codes = []

    def send():
        with httpx.Client(base_url=web.base_url, timeout=60) as client:
            codes.append(client.post("/v2/models/moody/infer", content=body, headers=length).status_code)

    Path(f"/proc/{server.gateway}/clear_refs").write_text("5")
    threads = [threading.Thread(target=send) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(codes) == 32
    assert set(codes) <= {429, 504}
    assert peak(server) < 1500 * MIB


def test_connections_that_did_nothing_leave_no_memory_behind(server, web, stub):
    gateway, many = psutil.Process(server.gateway), 1500
    host, port = server.listed["grpc"].rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(many):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        wait_until(lambda: gateway.num_fds() > many, 20, "the connections")
        still_answers(web, stub)
        under = gateway.memory_info().rss
    wait_until(lambda: under - gateway.memory_info().rss > 8 * MIB, 20, "their memory is the system's again")
    still_answers(web, stub)


def bomb(field, content, count):
    return b"\x0a\x06affine" + (bytes([field << 3 | 2, len(content)]) + content) * count


@pytest.mark.parametrize(
    "message",
    [
        bomb(5, b"", 4 * MIB),  # inputs
        bomb(6, b"", 4 * MIB),  # outputs
        bomb(5, b"\x22\x04\x0a\x02ab", MIB),  # parameters of inputs
        bomb(7, b"", 4 * MIB),  # raw contents
        b"\x2a" + b"\x80\x80\x80\x04" + b"\x18\x01" * (4 * MIB),  # an input of many dimensions, not packed
        b"\x2a" + b"\x84\x80\x80\x04" + b"\x1a\xff\xff\xff\x03" + b"\x01" * (8 * MIB - 1),
    ],
    ids=["inputs", "outputs", "parameters", "raw", "dimensions", "packed"],
)
def test_a_message_of_millions_of_parts_is_refused_before_it_is_read(channel, memory, effort, message):
    code, _ = refused(lambda: channel.unary_unary(SERVICE + "ModelInfer")(message, timeout=30))
    assert code in ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")


def test_a_packed_grpc_message_is_not_unpacked_beyond_the_largest(stub, memory):
    large = pb.ModelInferRequest(model_name="affine", raw_input_contents=[bytes(100 * MIB)])
    code, _ = refused(lambda: stub.ModelInfer(large, timeout=30, compression=grpc.Compression.Gzip))
    assert code == "RESOURCE_EXHAUSTED"


def test_a_shape_alone_allocates_no_memory(web, stub, memory):
    for n in (2**60, 2**40, 10**4000):
        assert web.post(INFER, json={"inputs": [{**ROW, "shape": [n, 4]}]}).status_code == 422
    place = {"shared_memory_region": "x", "shared_memory_byte_size": 2**44}
    tensor = {"name": "observation", "datatype": "FP32", "shape": [2**40, 4], "parameters": place}
    assert web.post(INFER, json={"inputs": [tensor]}).status_code in (400, 404)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{}", {"Inference-Header-Content-Length": "1" * 5000}),
        (b"{}", {"Inference-Header-Content-Length": "\u00b2".encode("latin-1")}),
        (b'{"inputs":[{"name":"\\ud800","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}', {}),
        (b'{"inputs":[{"name":"observation","shape":[1,4],"datatype":"\\ud800","data":[1,2,3,4]}]}', {}),
        (b'{"inputs":[{"name":"observation","shape":["\\ud800",4],"datatype":"FP32","data":[1,2,3,4]}]}', {}),
        (b'{"inputs":[{"name":"observation","shape":[1,4],"datatype":"FP32","data":[1,2,3,"\\udfff"]}]}', {}),
        (b'{"\\ud800":1,"inputs":[]}', {}),
        (b'{"inputs":[],"outputs":[{"name":"\\ud800"}]}', {}),
        (b'{"inputs":[],"parameters":{"\\ud800":1}}', {}),
        (b'{"inputs":[],"parameters":{"priority":1e999}}', {}),
        (b'{"inputs":[],"id":' + DEEP + b"}", {}),
        (b'{"inputs":[{"name":"observation","shape":[1,4],"datatype":"FP32","data":' + DEEP + b"}]}", {}),
        (b'{"inputs":' + b"9" * 5000 + b"}", {}),
    ],
)  # fmt: skip
def test_a_body_of_any_text_and_number_gets_an_answer_that_says_why(web, body, headers):
    answer = web.post(INFER, content=body, headers=headers)
    assert 400 <= answer.status_code < 500 or answer.status_code == 501
    assert answer.json()["error"] and len(answer.content) < 20_000


def test_text_of_any_code_point_in_paths_and_other_bodies_gets_an_answer(web):
    assert web.get("/v2/models/%ED%A0%80").status_code == 404
    assert web.post("/v2/models/%ED%A0%80/infer", json={"inputs": [ROW]}).status_code == 404
    assert web.get("/v2/models/%ff%fe/stats?version=%ED%A0%80").status_code == 404
    half = b'{"key":"/\\ud800","byte_size":3}'
    for region in ("%ED%A0%80", "x"):
        answer = web.post(f"/v2/systemsharedmemory/region/{region}/register", content=half)
        assert 400 <= answer.status_code < 500
    assert web.post("/v2/repository/models/affine/load", content=b'{"parameters":{"\\ud800":3}}').status_code == 403
    answered = web.post(INFER, content=b'{"id":"\\ud800","inputs":[' + json.dumps(ROW).encode() + b"]}")
    assert answered.status_code == 200


@pytest.mark.parametrize("version", [2**63, 2**63 - 1, 10**19 - 1, 2**64])
@pytest.mark.parametrize("model", ["affine", "policy"])
def test_a_version_of_any_size_is_one_that_is_not_there(web, stub, model, version):
    for answer in (
        web.post(f"/v2/models/{model}/versions/{version}/infer", json={"inputs": [ROW]}),
        web.get(f"/v2/models/{model}/versions/{version}"),
    ):
        assert 400 <= answer.status_code < 500
    assert web.get(f"/v2/models/{model}/versions/{version}/ready").status_code in (404, 503)
    wrong = request(model, model_version=str(version))
    assert refused(lambda: stub.ModelInfer(wrong, timeout=20))[0] in (
        "NOT_FOUND", "PERMISSION_DENIED", "FAILED_PRECONDITION",
    )  # fmt: skip


def test_bytes_that_are_no_message_get_an_error(channel):
    for method in ("ModelInfer", "ServerLive", "RepositoryIndex", "SystemSharedMemoryRegister"):
        code, details = refused(lambda m=method: channel.unary_unary(SERVICE + m)(b"\xff\xff", timeout=20))
        assert (code, "no message came" in details) == ("INVALID_ARGUMENT", True)
    for stream in (SERVICE + "ModelStreamInfer", "/jurybox.RemoteWeights/Publish", "/jurybox.RemoteWeights/Read"):
        call = channel.stream_stream(stream)(iter([b"\xff\xff"]), timeout=20)
        assert refused(lambda call=call: list(call))[0] == "INVALID_ARGUMENT"
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"\xff\xff", timeout=20)
    assert refused(lambda: list(watch))[0] == "INVALID_ARGUMENT"


def test_errors_quote_a_bounded_part_of_a_request(stub):
    long = request()
    long.inputs[0].name = "o" * MIB
    code, details = refused(lambda: stub.ModelInfer(long, timeout=20))
    assert (code, len(details) <= 1000) == ("INVALID_ARGUMENT", True)
    answers = stub.ModelStreamInfer(iter([long, request()]), timeout=20)
    assert [len(answer.error_message) for answer in answers] == [1000, 0]


HEAD = b"POST /health/live HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "many headers": (HEAD, b"X-Long: " + b"x" * 8000 + b"\r\n"),
    "one header": (HEAD + b"X-Long: ", b"x" * 8000),
    "one header's name": (HEAD, b"x" * 8000),
    "the request's line": (b"GET /", b"x" * 8000),
    "empty lines": (b"", b"\r\n" * 4000),
    "headers behind the body": (CHUNKED + b"1\r\nx\r\n0\r\n", b"X-Long: " + b"x" * 8000 + b"\r\n"),
    "one header behind the body": (CHUNKED + b"1\r\nx\r\n0\r\nX-Long: ", b"x" * 8000),
    "what a chunk says besides its size": (CHUNKED + b"1;", b"x" * 8000),
}


@pytest.fixture
def open_raw(server):
    """Return a function that opens a raw connection to the HTTP server."""
    import socket

    host, port = server.listed["http"].rsplit(":", 1)
    connections = []

    def connection():
        connections.append(socket.create_connection((host, int(port)), timeout=20))
        return connections[-1]

    yield connection
    for one in connections:
        one.close()


def until_closed(connection):
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionError:
        pass
    return received


@pytest.mark.parametrize("what", ENDLESS)
def test_the_parts_around_a_body_are_bounded(open_raw, web, what):
    start, more = ENDLESS[what]
    connection = open_raw()
    connection.sendall(start)
    sent = 0
    with pytest.raises(OSError):
        while sent < 64 * MIB:
            connection.sendall(more)
            sent += len(more)
    assert sent < 16 * MIB
    assert web.get("/health/live").status_code == 200


@pytest.mark.parametrize("header", [b"X-Long: " + b"x" * 40_000 + b"\r\n", b"X: x\r\n" * 10_000])
def test_long_headers_in_one_piece_are_refused_with_400(open_raw, header):
    connection = open_raw()
    connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n")
    assert until_closed(connection).startswith(b"HTTP/1.1 400")


def test_pipelined_requests_are_bounded(open_raw, web):
    one = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    few, many = open_raw(), open_raw()
    few.sendall(one * 20 + one[:-2] + b"Connection: close\r\n\r\n")
    assert until_closed(few).count(b"HTTP/1.1 200") == 21
    many.sendall(one * 2000)
    received = until_closed(many)
    assert b"HTTP/1.1 400" in received and received.count(b"HTTP/1.1 200") < 100
    assert web.get("/health/live").status_code == 200


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
def test_a_request_names_one_host(open_raw, hosts):
    connection = open_raw()
    connection.sendall(b"GET /health/live HTTP/1.1\r\n" + hosts + b"\r\n")
    assert until_closed(connection).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "lies",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: +5\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: chunked, chunked\r\n",
        b"X y: z\r\n",
        b"X:\0z\r\n",
    ],
)
def test_a_head_that_two_parsers_may_read_differently_is_refused(open_raw, lies):
    connection = open_raw()
    connection.sendall(HEAD + lies + b"\r\n5\r\nhello\r\n0\r\n\r\n")
    assert until_closed(connection).startswith(b"HTTP/1.1 4")


def test_the_http_parser_is_the_one_with_limits_whatever_is_installed():
    """By default uvicorn uses httptools if it is installed, which accepts headers of any size."""
    server = http_server.HttpServer("127.0.0.1:0", FastAPI(), Access())
    try:
        config = server._uvicorn.config
        config.load()
        assert issubclass(config.http_protocol_class, http_parsers.Connection)
        assert config.ws_protocol_class is None
    finally:
        server._listener.close()


def test_a_websocket_is_not_spoken(server):
    import socket

    host, port = server.listed["http"].rsplit(":", 1)
    handshake = (
        f"GET /events HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(handshake.encode())
        assert not connection.recv(200).startswith(b"HTTP/1.1 101")


@pytest.fixture
def diary():
    """Shared memory of this user that was not made for the server."""
    path = Path(f"/dev/shm/diary-{os.getpid()}")
    path.write_bytes(b"dear diary" * 100)
    path.chmod(0o600)
    yield path
    path.unlink()


def test_no_client_accesses_memory_of_the_servers_user_without_opt_in(web, stub, diary):
    """What any user of the host can try over loopback with default settings."""
    registration = {"key": f"/{diary.name}", "byte_size": 1000}
    answer = web.post("/v2/systemsharedmemory/region/r/register", json=registration)
    assert (answer.status_code, "shared_memory_prefix" in answer.json()["error"]) == (403, True)
    register = pb.SystemSharedMemoryRegisterRequest(name="r", key=f"/{diary.name}", byte_size=1000)
    assert refused(lambda: stub.SystemSharedMemoryRegister(register, timeout=20))[0] == "PERMISSION_DENIED"
    assert web.get("/v2/systemsharedmemory/status").json() == []
    assert "system_shared_memory" not in web.get("/v2").json()["extensions"]
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    output = {"name": "action", "parameters": place}
    assert web.post(INFER, json={"inputs": [ROW], "outputs": [output]}).status_code == 404
    assert diary.read_bytes() == b"dear diary" * 100


def test_no_operation_id_is_given_twice(server):
    import warnings

    from jurybox.server.frontend.frontend import Frontend
    from jurybox.server.gateway.app import create_app
    from jurybox.server.gateway.inference import http_inference
    from jurybox.server.gateway.inference.inference import OpenInference

    transport = OpenInference(Frontend(server.address, None), None, shared_memory="")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        described = create_app(None, routers=[http_inference.router(transport)]).openapi()
    names = [one["operationId"] for path in described["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))


def test_a_cancelled_stream_leaves_nothing_behind(server, channel, stub):
    slow = np.full((1, 4), 100_000, np.float32).tobytes()

    def endless(started):
        while True:
            message = request("moody")
            message.raw_input_contents[0] = slow
            started.set()
            yield message

    for _ in range(5):
        started = threading.Event()
        stream = stub.ModelStreamInfer(endless(started), timeout=30)
        assert started.wait(10)
        stream.cancel()
    assert stub.ModelInfer(request("moody"), timeout=30).model_name == "moody"


def test_an_http2_frame_with_a_wrong_size_ends_only_its_connection(server, web):
    import socket

    host, port = server.listed["grpc"].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0xFFFFFF04) + bytes(5))
        connection.settimeout(2)
        try:
            while connection.recv(4096):
                pass
        except OSError:
            pass
    assert web.get("/health").status_code == 200
