"""What a client that behaves gets while others attack: ``python -m benchmarks.attacks [--write]``.

Each attack runs for some seconds against a server of its own on loopback, beside one gRPC client in a closed loop. The
table has the client's rate before and during the attack, and the memory of the attacked process before, at its peak,
and 5 s after the attack. With `--write` it replaces the table in docs/security.md. Use two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import psutil
from tests.serving import serving

from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from jurybox.server.security.limits import most_held

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- attacks: python -m benchmarks.attacks --write -->", "<!-- end of attacks -->"
MIB = 1 << 20
LOCAL = "127.0.0.1:0"
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
    "big": {"factory": "tests.models:big", "max_batch": 8, "rows": 32},  # 2.3 MiB of output a row
    "brightness": {"factory": "tests.reward_models:brightness", "max_batch": 64, "rows": 128},
}
DIALECTS = {"flow_grpo": {"model": "brightness", "output": "score"}}


# ---- frames of HTTP/2, by hand

WIDE = struct.pack(">HI", 4, 2**31 - 1)  # SETTINGS: the other side may send answers without end


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def head(stream: int, method: bytes) -> bytes:
    path = b"/inference.GRPCInferenceService/" + method
    fields = (b":path", path), (b":authority", b"x"), (b"content-type", b"application/grpc")
    text = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
    return frame(1, 4, stream, b"\x83\x86" + text)


def message(content: bytes, size: int | None = None) -> bytes:
    return b"\0" + struct.pack(">I", len(content) if size is None else size) + content


def request(model: str, rows: int) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="observation", datatype="FP32", shape=[rows, 4])
    raw = np.ones((rows, 4), np.float32).tobytes()
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw]).SerializeToString()


class Peer:
    """A connection that reads and forgets what it is sent, or does not read."""

    def __init__(self, where: str, settings: bytes = WIDE, *, reads: bool = True) -> None:
        host, port = where.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, settings))
        time.sleep(0.05)
        self.socket.sendall(frame(4, 1, 0) + frame(8, 0, 0, b"\x7f\xff\x00\x00"))
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while self.socket.recv(1 << 20):
                pass


def again(until: float, attack: Callable[[], None]) -> None:
    """Attack until then; a connection that is ended is opened anew."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError, TimeoutError):
            attack()
        time.sleep(0.01)


# ---- the attacks: each gets the addresses and the time when it ends


def unfinished_messages(told: dict[str, str], until: float) -> None:
    peer = Peer(told["grpc"])
    part = bytes(16_000)
    for call in range(1, 81, 2):
        peer.socket.sendall(head(call, b"ModelInfer") + frame(0, 0, call, message(part, 60 * MIB)))
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            for call in range(1, 81, 2):
                peer.socket.sendall(frame(0, 0, call, part))


def unread_answers(told: dict[str, str], until: float) -> None:
    peer = Peer(told["grpc"], struct.pack(">HI", 4, 0))
    asked = message(request("big", 8))
    for call in range(1, 501, 2):
        peer.socket.sendall(head(call, b"ModelInfer") + frame(0, 1, call, asked))
    time.sleep(max(0.0, until - time.monotonic()))


def unread_answers_of_http(told: dict[str, str], until: float) -> None:
    body = b'{"inputs":[{"name":"observation","datatype":"FP32","shape":[8,4],"data":[%b]}],"parameters":' % (
        b",".join([b"1"] * 32)
    )
    body += b'{"binary_data_output":true}}'
    asked = b"POST /v2/models/big/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    host, port = told["http"].rsplit(":", 1)
    kept = [socket.create_connection((host, int(port)), timeout=20) for _ in range(40)]
    for one in kept:
        one.sendall(asked * 20)
    time.sleep(max(0.0, until - time.monotonic()))


def large_pictures(told: dict[str, str], until: float) -> None:
    import pickle

    import requests
    from PIL import Image

    with io.BytesIO() as sink:
        Image.new("RGB", (8192, 4096)).save(sink, "PNG")
        body = pickle.dumps({"images": [sink.getvalue()] * 40})
    again(until, lambda: requests.post(f"http://{told['http']}/dialects/flow_grpo", data=body, timeout=60).close())


def calls_that_the_server_resets(told: dict[str, str], until: float) -> None:
    def attack() -> None:
        peer = Peer(told["grpc"])
        for call in range(1, 100_000, 2):
            peer.socket.sendall(head(call, b"ModelInfer") + frame(8, 0, call, b"\x7f\xff\xff\xff"))
            if time.monotonic() > until:
                return

    again(until, attack)


def cancelled_calls(told: dict[str, str], until: float) -> None:
    def attack() -> None:
        peer = Peer(told["grpc"])
        asked = message(request("affine", 16))
        for call in range(1, 100_000, 2):
            peer.socket.sendall(head(call, b"ModelInfer") + frame(0, 1, call, asked) + frame(3, 0, call, b"\0\0\0\x08"))
            if time.monotonic() > until:
                return

    again(until, attack)


def empty_messages(told: dict[str, str], until: float) -> None:
    def attack() -> None:
        peer = Peer(told["grpc"])
        peer.socket.sendall(head(1, b"ModelStreamInfer"))
        many = frame(0, 0, 1, message(b"") * 3200)
        while time.monotonic() < until:
            peer.socket.sendall(many)

    again(until, attack)


def announced_messages(told: dict[str, str], until: float) -> None:
    host, port = told["tcp"].rsplit(":", 1)
    greeting = b"\xff" + bytes(8) + b"\x7f\3\1NULL" + bytes(48)
    kept = []
    for i in range(100):
        identity = b"Rhalf%d" % i
        body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        body += b"\x08Identity" + struct.pack(">I", len(identity)) + identity
        one = socket.create_connection((host, int(port)), timeout=20)
        one.sendall(greeting + bytes([4, len(body)]) + body + b"\x02" + struct.pack(">Q", 64 * MIB) + bytes(700_000))
        kept.append(one)
    time.sleep(max(0.0, until - time.monotonic()))


def idle_connections(told: dict[str, str], until: float) -> None:
    kept = []
    for where in ("grpc", "http"):
        host, port = told[where].rsplit(":", 1)
        for _ in range(2048):
            with contextlib.suppress(OSError):
                kept.append(socket.create_connection((host, int(port)), timeout=5))
    time.sleep(max(0.0, until - time.monotonic()))


ATTACKS = {
    "40 gRPC messages of 60 MiB that never end": ("gateway", unfinished_messages),
    "250 gRPC calls whose answers of 18 MiB nobody reads": ("gateway", unread_answers),
    "40 HTTP connections that read no answer": ("gateway", unread_answers_of_http),
    "40 pictures of 8192 x 4096 in a request": ("gateway", large_pictures),
    "gRPC calls that the server must reset": ("gateway", calls_that_the_server_resets),
    "gRPC calls that are cancelled at once": ("gateway", cancelled_calls),
    "empty gRPC messages without end": ("gateway", empty_messages),
    "100 messages of 64 MiB announced to the relay": ("relay", announced_messages),
    "4,096 connections that do nothing": ("gateway", idle_connections),
}


def rate(stub: GRPCInferenceServiceStub, seconds: float) -> float:
    """Return the requests a second of one client in a closed loop."""
    asked, done, began = pb.ModelInferRequest.FromString(request("affine", 1)), 0, time.monotonic()
    while (now := time.monotonic()) - began < seconds:
        with contextlib.suppress(grpc.RpcError):
            stub.ModelInfer(asked, timeout=10)
            done += 1
    return done / (now - began)


def measure(what: str, seconds: float) -> tuple[float, float, float, int, int, int]:
    """Return the client's rate before, during and after, and the memory in MiB: before, at the peak, and after."""
    role, attack = ATTACKS[what]
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        with serving(where, MODELS, dialects=DIALECTS, http=LOCAL, grpc=LOCAL, tcp=LOCAL) as server:
            with server.connect() as client:
                told = client.status()["server"]
            process = psutil.Process(server.pids()[role])
            with grpc.insecure_channel(told["grpc"]) as channel:
                stub = GRPCInferenceServiceStub(channel)
                rate(stub, 1.0)
                quiet, before = rate(stub, 3.0), process.memory_info().rss
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
                attacking = multiprocessing.get_context("spawn").Process(
                    target=attack, args=(told, time.monotonic() + seconds), daemon=True
                )
                attacking.start()
                time.sleep(3.0)  # until its process has imported what it needs
                under = rate(stub, seconds - 3.0)
                attacking.join(10)
                attacking.kill()
                time.sleep(5.0)
                after_memory, after = process.memory_info().rss, rate(stub, 2.0)
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = int(status.split("VmHWM:")[1].split()[0]) << 10
                assert server.pids()[role] == process.pid, f"{role} died"
    return quiet, under, after, before // MIB, peak // MIB, after_memory // MIB


def main() -> None:
    """Run the attacks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table to docs/security.md")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    options = parser.parse_args()
    bound = most_held(64 * MIB) // MIB
    lines = [
        "| attack | client, requests/s: quiet, under attack, 5 s after | MiB: before, peak, 5 s after |",
        "| --- | --- | --- |",
    ]
    for what in ATTACKS:
        if options.only not in what:
            continue
        quiet, under, after, before, peak, left = measure(what, options.seconds)
        role = ATTACKS[what][0]
        lines.append(f"| {what} | {quiet:.0f}, {under:.0f}, {after:.0f} | {role} {before}, {peak}, {left} |")
        print(lines[-1], flush=True)
    told = f"Bound with `max_message_mib = 64`: {bound} MiB beside what a process takes itself. {os.cpu_count()} cores."
    if options.write:
        text = PAGE.read_text()
        start, rest = text.split(BEGIN)
        PAGE.write_text("\n".join([start + BEGIN, "", *lines, "", told, "", END]) + rest.split(END)[1])
    else:
        print("\n".join(["", *lines, "", told]))


if __name__ == "__main__":
    sys.exit(main())
