"""Whatever a stranger sends to any door, however often, the log grows by a few lines a second."""

from __future__ import annotations

import base64
import contextlib
import json
import socket

import grpc
import pytest
import zmq
from tests.serving import serving
from websockets.sync.client import connect as websocket

from jurybox.protocol.open_inference_pb2 import ModelInferRequest
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from jurybox.protocol.weights.transfer import PUBLISH, READ

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64},
    "brightness": {"factory": "tests.reward_models:brightness", "max_batch": 16, "rows": 32},
    **{name: {"factory": f"tests.robot_models:{name}", "max_batch": 8} for name in ("seen", "by_part", "vla")},
}
DIALECTS = {"flow_grpo": {"model": "brightness", "output": "score"}}
ROBOTS = """
[robots.arm]
model = "seen"
listen = "127.0.0.1:0"
clients = 8

[robots.hand]
model = "by_part"
speaks = "gr00t"
listen = "127.0.0.1:0"

[robots.leg]
model = "vla"
speaks = "act"
listen = "127.0.0.1:0"
"""
LOCAL = "127.0.0.1:0"
MANY = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    doors = dict.fromkeys(("http", "grpc", "tcp"), LOCAL) | {"cuda_shared_memory": True}
    with serving(folder, MODELS, dialects=DIALECTS, more=ROBOTS, **doors) as running:
        yield running


@pytest.fixture(scope="module")
def told(server):
    with server.connect() as client:
        return client.status()["server"]


def connected(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=30)


def broken_http(told):
    for i in range(MANY):
        with connected(told["http"]) as peer, contextlib.suppress(OSError):
            peer.sendall([b"\x16\x03\x01 no http\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nHo"][i % 3])
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1000)


def upgrades(told):
    head = b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    for _ in range(MANY):
        with connected(told["http"]) as peer, contextlib.suppress(OSError):
            peer.sendall(b"GET / HTTP/1.1\r\n" + head)
            peer.recv(1000)


def posted(told, path, *bodies, where=""):
    for body in bodies:
        posted_one(where or told["http"], path, body, MANY // len(bodies))


def posted_one(where, path, body, many):
    asked = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path, len(body)) + body
    with connected(where) as peer:
        for _ in range(many):
            peer.sendall(asked)
            came = b""
            while b"\r\n\r\n" not in came:
                if not (part := peer.recv(1 << 16)):
                    return
                came += part
            head, _, rest = came.partition(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            while len(rest) < size:
                rest += peer.recv(1 << 16)


def wrong_json(told):
    posted(told, b"/v2/models/affine/infer", b'{"inputs": [')


def wrong_names(told):
    posted(told, b"/v2/models/nobody/infer", b"{}")


def wrong_loads(told):
    posted(told, b"/v2/repository/models/nobody/load", b'{"parameters": {}}')


def wrong_pickles(told):
    posted(told, b"/dialects/flow_grpo", b"\x80\x04.")


def wrong_acts(told):
    twice = json.dumps({"encoded": json.dumps({"encoded": "{}"})}).encode()
    bodies = (
        b"",
        b"[" * 5000,
        b'{"image": {"__numpy__": "AA", "dtype": "O"}}',
        twice,
        b'{"a": ' * 900 + b"1" + b"}" * 900,
    )
    posted(told, b"/act", *bodies, where=told["robots"]["leg"])


def wrong_regions(told):
    """Of device memory, with handles that are none; and requests that name them."""
    path = b"/v2/cudasharedmemory/region/%b/register"
    handle = base64.b64encode(bytes(range(64))).decode()
    for name, given in ((b"short", "AAAA"), (b"garbage", handle), (b"x" * 300, handle)):
        body = json.dumps({"raw_handle": {"b64": given}, "device_id": 0, "byte_size": 16}).encode()
        posted_one(told["http"], path % name, body, MANY // 4)
    place = {"shared_memory_region": "garbage", "shared_memory_byte_size": 16}
    tensor = {"name": "observation", "datatype": "FP32", "shape": [1, 4], "parameters": place}
    body = json.dumps({"inputs": [tensor], "outputs": [{"name": "action", "parameters": place}]}).encode()
    posted_one(told["http"], b"/v2/models/affine/infer", body, MANY // 4)


def wrong_robots(told):
    """Of GR00T."""
    context = zmq.Context()
    with context, context.socket(zmq.REQ) as robot:
        robot.setsockopt(zmq.LINGER, 0)
        robot.setsockopt(zmq.RCVTIMEO, 60_000)
        robot.connect(f"tcp://{told['robots']['hand']}")
        for i in range(MANY):
            robot.send([b"\xc1", b"", b"\x81\xa8endpoint\xa1x", b"\x81\xa8endpoint\xaaget_action"][i % 4])
            robot.recv()


def wrong_weights(told):
    """Of publishers and readers on other hosts: streams that begin with no request that can be."""
    with grpc.insecure_channel(told["grpc"]) as channel:
        for i in range(MANY // 2):
            call = channel.stream_stream((PUBLISH, READ)[i % 2])(iter([(b"\xff", b"")[i // 2 % 2]]), timeout=60)
            with contextlib.suppress(grpc.RpcError):
                list(call)


def broken_grpc(told):
    for _ in range(MANY):
        with connected(told["grpc"]) as peer, contextlib.suppress(OSError):
            peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64)
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1000)


def wrong_grpc(told):
    with grpc.insecure_channel(told["grpc"]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for i in range(MANY):
            with pytest.raises(grpc.RpcError):
                stub.ModelInfer(ModelInferRequest(model_name=("affine", "nobody")[i % 2]), timeout=60)


def broken_tcp(told):
    for i in range(MANY):
        with connected(told["tcp"]) as peer, contextlib.suppress(OSError):
            peer.sendall([b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\xff" * 64, b"GET / HTTP"][i % 2])
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1000)


def broken_robots(told):
    for i in range(MANY):
        with connected(told["robots"]["arm"]) as peer, contextlib.suppress(OSError):
            peer.sendall([b"\x16\x03\x01 no http\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"][i % 2])
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1000)


def wrong_frames(told):
    with websocket(f"ws://{told['robots']['arm']}", compression=None, open_timeout=60) as robot:
        robot.recv(60)
        for _ in range(MANY):
            robot.send(b"\xc0")
            robot.recv(60)


DOORS = (
    broken_http, upgrades, wrong_json, wrong_names, wrong_loads, wrong_pickles, broken_grpc, wrong_grpc, broken_tcp,
    broken_robots, wrong_frames, wrong_acts, wrong_regions, wrong_robots, wrong_weights,
)  # fmt: skip


@pytest.mark.parametrize("attack", DOORS, ids=lambda attack: attack.__name__)
def test_hundreds_of_wrong_requests_write_a_few_lines(server, told, attack):
    before = server.log.stat().st_size
    attack(told)
    lines = server.log.read_bytes()[before:].count(b"\n")
    assert lines <= 60, server.log.read_text()[before:][-3000:]
