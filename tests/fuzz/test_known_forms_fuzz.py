"""Requests that are answered by their known form, beside the same read in full: both accept or both refuse, alike.

A form that took more than the usual way does, or read it otherwise, would answer wrongly without an error. The short
version is part of the suite; `make fuzz` sends 25,000 of each. `test_fast_paths_fuzz.py` compares the other fast paths.
"""

from __future__ import annotations

import json
import socket
from random import Random

import grpc
import numpy as np
from tests.fuzz.cases import cases

from jurybox.protocol import open_inference_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"


def tensors(random):
    """A model, its inputs as (name, datatype, array), and its outputs' names."""
    n = random.choice([1, 1, 2, 3])
    if random.random() < 0.3:
        image = np.frombuffer(random.randbytes(n * 64 * 64 * 3), np.uint8).reshape(n, 64, 64, 3)
        scale = np.array([random.uniform(-3, 3) for _ in range(n)], np.float32)
        return "two", [("image", "UINT8", image), ("scale", "FP32", scale)]
    rows = np.array([[random.randrange(-99, 99) for _ in range(4)] for _ in range(n)], np.float32)
    return "affine", [("observation", "FP32", rows)]


def bent(content, random, most):
    """Bytes changed, put in, taken out, or doubled, among the first `most`."""
    made = bytearray(content)
    for _ in range(random.choice([0, 0, 1, 1, 1, 2, 3])):
        at = random.randrange(min(most, len(made)) or 1)
        match random.randrange(5):
            case 0:
                made[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                made[at : at + 1] = bytes([(made[at] + random.choice([1, -1, 8, 128])) % 256]) if made else b""
            case 2:
                made[at:at] = random.randbytes(random.randrange(1, 4))
            case 3:
                del made[at : at + random.randrange(1, 4)]
            case _:
                made[at:at] = made[at : at + random.randrange(1, 30)]
    return bytes(made)


# ---- gRPC


def message(random):
    model, inputs = tensors(random)
    made = pb.ModelInferRequest(model_name=model, id=random.choice(["", "", "one", "ä"]))
    for name, datatype, array in inputs:
        made.inputs.add(name=name, datatype=datatype, shape=array.shape)
    if random.random() < 0.2:
        made.model_version = random.choice(["", "0", "1", "x"])
    if random.random() < 0.2:
        made.outputs.add(name=random.choice(["action", "score", "nothing"]))
    parts = [made.SerializeToString(), *(tagged(0x3A, array.tobytes()) for _, _, array in inputs)]
    if random.random() < 0.2:
        random.shuffle(parts)  # fields may come in any order
    if random.random() < 0.1:
        parts.insert(random.randrange(len(parts) + 1), tagged(random.choice([0x1A, 0x0A, 0x7A]), b"again"))
    if random.random() < 0.1:
        parts.pop(random.randrange(len(parts)))
    return bent(b"".join(parts), random, 120)


def tagged(tag, content):
    size, head = len(content), [tag]
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + content


class Rpc:
    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.unary = self.channel.unary_unary(SERVICE + "ModelInfer")
        self.stream = self.channel.stream_stream(SERVICE + "ModelStreamInfer")

    def known(self, content):
        try:
            return pb.ModelInferResponse.FromString(self.unary(content, timeout=20))
        except grpc.RpcError as error:
            assert error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN), error
            return None

    def usual(self, content):
        """The answer over a stream, whose requests are always parsed by protobuf."""
        try:
            answer = pb.ModelStreamInferResponse.FromString(next(self.stream(iter([content]), timeout=20)))
        except grpc.RpcError:
            return None
        return None if answer.error_message else answer.infer_response


@cases(600, 25_000)
def test_a_grpc_request_of_a_known_form_is_read_as_one_read_in_full(server, count, seed):
    random = Random(seed)
    rpc = Rpc(server.told["grpc"])
    accepted = 0
    with rpc.channel:
        for _ in range(count):
            content = message(random)
            first, second, usual = rpc.known(content), rpc.known(content), rpc.usual(content)
            assert first == second == usual, content
            accepted += usual is not None
    assert accepted > count / 10


# ---- HTTP


def body(random):
    """The JSON and the tensors of a request; its length stays when it is bent, so that its head stays known."""
    model, inputs = tensors(random)
    told = [
        {"name": name, "datatype": datatype, "shape": array.shape, "parameters": {"binary_data_size": array.nbytes}}
        for name, datatype, array in inputs
    ]
    text = json.dumps({"inputs": told, "parameters": {"binary_data_output": True}}).encode()
    changed = bytearray(text)
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        at = random.randrange(len(changed))
        changed[at] = random.choice(b'0123456789,:[]{}" aetx\\\x00\xff')
    return model, bytes(changed), b"".join(array.tobytes() for _, _, array in inputs)


class Web:
    def __init__(self, address):
        self.where = address.rsplit(":", 1)
        self.line = None

    def ask(self, model, text, raw, length, *, close):
        """Status and body of one request; on one connection, or on one that is closed, which has no known head."""
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: {length}"
        head += f"\r\nContent-Length: {len(text) + len(raw)}\r\n" + ("Connection: close\r\n" if close else "") + "\r\n"
        for _ in range(2):
            line = self.line or socket.create_connection((self.where[0], int(self.where[1])), timeout=20)
            line.sendall(head.encode() + text + raw)
            came = b""
            while b"\r\n\r\n" not in came and (more := line.recv(1 << 16)):
                came += more
            if came:
                break
            self.line = None  # it was closed after the last one
        headers, _, content = came.partition(b"\r\n\r\n")
        size = int(headers.lower().partition(b"content-length: ")[2].split()[0])
        if b"inference-header-content-length" in headers.lower():
            size = int(headers.lower().rpartition(b"\r\ncontent-length: ")[2].split()[0])
        while len(content) < size:
            content += line.recv(1 << 16)
        self.line = None if close or b"connection: close" in headers.lower() else line
        if self.line is None:
            line.close()
        status = int(headers.split()[1])
        return status, content if status == 200 else json.loads(content)["code"]


@cases(600, 25_000)
def test_an_http_request_of_a_known_form_is_read_as_one_read_in_full(server, count, seed):
    random = Random(seed)
    known, usual = Web(server.told["http"]), Web(server.told["http"])
    accepted = 0
    for _ in range(count):
        model, text, raw = body(random)
        length = len(text) + random.choice([0, 0, 0, 0, 0, 1, -1])
        expected = usual.ask(model, text, raw, length, close=True)
        for _ in range(2):
            assert known.ask(model, text, raw, length, close=False) == expected, (model, text, length)
        accepted += expected[0] == 200
    assert accepted > count / 10
    if known.line is not None:
        known.line.close()
