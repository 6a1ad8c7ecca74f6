"""What a client that behaves gets while others attack: ``python -m benchmarks.attacks [--write]``.

Each attack runs against a server of its own on loopback, beside one gRPC client in a closed loop: some rounds, each
with a quiet time before and after it. The table has the client's rates, the share of the quiet rate that it keeps (the
median of the rounds), the processor time of the attacker, and the memory of the attacked process before, at its peak,
and 5 s after the last round. Two rows are yardsticks: what a process that only computes leaves to the client, and a
second client that behaves. With `--write` it replaces the table in docs/security.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import select
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import psutil
from tests.serving import serving

from jurybox.client import connect
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.open_inference_pb2_grpc import GRPCInferenceServiceStub
from jurybox.protocol.remote_weights_pb2 import ReadRequest
from jurybox.server.security.limits import most_held

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- attacks: python -m benchmarks.attacks --write -->", "<!-- end of attacks -->"
MIB = 1 << 20
LOCAL = "127.0.0.1:0"
QUIET, SETTLED = 1.2, 1.0  # seconds: of a quiet time, and between an attack and the next one
CONNECTIONS: list[socket.socket] = []  # of the attacker
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
    "big": {"factory": "tests.models:big", "max_batch": 8, "rows": 32},  # 2.3 MiB of output a row
    "learned": {"factory": "tests.models:big", "max_batch": 1, "rows": 2, "lane_rows": 1, "publish": "double_buffer"},
    "brightness": {"factory": "tests.reward_models:brightness", "max_batch": 64, "rows": 128},
    "seen": {"factory": "tests.robot_models:seen", "max_batch": 32},
    "vla": {"factory": "tests.robot_models:vla", "max_batch": 32},
    "by_part": {"factory": "tests.robot_models:by_part", "max_batch": 32},
}
ROBOTS = """
[robots.arm]
model = "seen"
listen = "127.0.0.1:0"
clients = 48

[robots.hand]
model = "by_part"
speaks = "gr00t"
listen = "127.0.0.1:0"

[robots.leg]
model = "vla"
speaks = "act"
listen = "127.0.0.1:0"
"""
DIALECTS = {"flow_grpo": {"model": "brightness", "output": "score"}}


# ---- frames of HTTP/2, by hand

WIDE = struct.pack(">HI", 4, 2**31 - 1)  # SETTINGS: the other side may send answers without end


def joined(where: str) -> socket.socket:
    """Return a new connection, which is closed after the attack."""
    host, port = where.rsplit(":", 1)
    made = socket.create_connection((host, int(port)), timeout=20)
    CONNECTIONS.append(made)
    return made


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def head(stream: int, method: bytes, service: bytes = b"inference.GRPCInferenceService") -> bytes:
    path = b"/" + service + b"/" + method
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
        self.socket = joined(where)
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
    for one in [joined(told["http"]) for _ in range(40)]:
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


def greeted(where: str, kind: bytes, identity: bytes) -> socket.socket:
    """Return a connection of a ZeroMQ socket of this kind."""
    made = joined(where)
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    body += b"\x08Identity" + struct.pack(">I", len(identity)) + identity
    made.sendall(b"\xff" + bytes(8) + b"\x7f\3\1NULL" + bytes(48) + bytes([4, len(body)]) + body)
    return made


def announced_messages(told: dict[str, str], until: float) -> None:
    for i in range(100):
        peer = greeted(told["tcp"], b"DEALER", b"Rhalf%d" % i)
        peer.sendall(b"\x02" + struct.pack(">Q", 64 * MIB) + bytes(700_000))
    time.sleep(max(0.0, until - time.monotonic()))


def one_name(told: dict[str, str], until: float) -> None:
    for _ in range(4096):
        with contextlib.suppress(OSError):
            greeted(told["tcp"], b"DEALER", b"Rsame")
    time.sleep(max(0.0, until - time.monotonic()))


def unread_robots(told: dict[str, Any], until: float) -> None:
    many = (b"\x01\0\0\x0f" + b"\x81\xa8endpoint\xa4ping") * 300

    def attack() -> None:
        peers = [greeted(told["robots"]["hand"], b"REQ", b"") for _ in range(100)]
        while time.monotonic() < until:
            for peer in peers:
                peer.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    peer.send(many)
            time.sleep(0.01)

    again(until, attack)


def unread_scrapes(told: dict[str, str], until: float) -> None:
    for peer in [joined(told["http"]) for _ in range(300)]:
        peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 30)
    time.sleep(max(0.0, until - time.monotonic()))


def slow_readers(told: dict[str, Any], until: float) -> None:
    """Read weights of 12 MiB in small pieces, over as many streams as there may be, while a learner publishes more."""

    def attack() -> None:
        peers = [Peer(told["grpc"], reads=False) for _ in range(32)]
        for peer in peers:
            for call in range(1, 17, 2):
                asked = message(ReadRequest(model="learned").SerializeToString())
                peer.socket.sendall(head(call, b"Read", b"jurybox.RemoteWeights") + frame(0, 0, call, asked))
            peer.socket.setblocking(False)
        with connect(told["address"]) as near, near.publisher("learned") as publisher:
            weights = publisher.channel.layout.views(np.ones(publisher.channel.layout.nbytes, np.uint8))
            published = 0.0
            while (now := time.monotonic()) < until:
                if now - published > 0.5:
                    publisher.publish(weights)
                    published = now
                for peer in peers:
                    with contextlib.suppress(BlockingIOError):
                        peer.socket.recv(16 << 10)
                time.sleep(0.02)

    again(until, attack)


def idle_connections(told: dict[str, str], until: float) -> None:
    for where in ("grpc", "http"):
        for _ in range(2048):
            with contextlib.suppress(OSError):
                joined(told[where])
    time.sleep(max(0.0, until - time.monotonic()))


def pipelined_requests(told: dict[str, str], until: float) -> None:
    peers = [joined(told["http"]) for _ in range(200)]
    asked = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50
    waiting = {peer.fileno(): peer for peer in peers}
    poll = select.poll()
    for number, peer in waiting.items():
        peer.setblocking(False)
        poll.register(number, select.POLLIN | select.POLLOUT)
    while time.monotonic() < until:
        for number, state in poll.poll(100):
            with contextlib.suppress(OSError):
                if state & select.POLLIN:
                    waiting[number].recv(1 << 20)
                if state & select.POLLOUT:
                    waiting[number].send(asked)
        time.sleep(0.01)


def uploads(told: dict[str, str], until: float, many: int = 1) -> None:
    """Send bodies of 60 MiB but for the last byte: they are received, and nothing is made of them."""
    head = b"POST /v2/models/nobody/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (60 * MIB)

    def send() -> None:
        def once() -> None:
            peer, left = joined(told["http"]), 60 * MIB - 1
            peer.sendall(head)
            while left and time.monotonic() < until:
                left -= peer.send(bytes(min(left, MIB)))
            peer.close()

        again(until, once)

    threads = [threading.Thread(target=send) for _ in range(many)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def slow_uploads(told: dict[str, str], until: float) -> None:
    peers = [joined(told["http"]) for _ in range(40)]
    for peer in peers:
        peer.sendall(b"POST /v2/models/nobody/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n")
    while time.monotonic() < until:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(b"x")
        time.sleep(0.01)


def robot(told: dict[str, Any]) -> socket.socket:
    """Return a connection to the port for robots."""
    made = joined(told["robots"]["arm"])
    made.sendall(
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    made.recv(4096)
    return made


def unfinished_frames(told: dict[str, str], until: float) -> None:
    peers = [robot(told) for _ in range(40)]
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.sendall(b"\x82\xff" + struct.pack(">Q", 60 * MIB) + bytes(4))
    while time.monotonic() < until:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(bytes(MIB))


def small_frames(told: dict[str, str], until: float) -> None:
    peers = [robot(told) for _ in range(4)]
    many = (b"\x82\x81\0\0\0\0\xc0" + b"\x89\x80\0\0\0\0") * 1000
    for peer in peers:
        peer.setblocking(False)
    while time.monotonic() < until:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.send(many)
            with contextlib.suppress(OSError):
                peer.recv(1 << 20)
        time.sleep(0.001)


def bodies_of_act(told: dict[str, Any], until: float) -> None:
    """Send large, nested and wide bodies, and JSON in JSON, and read no answer."""
    wide = "a" * (8 * MIB) + "\N{GRINNING FACE}"
    twice = json.dumps({"encoded": json.dumps({"image": wide}, ensure_ascii=False)}, ensure_ascii=False).encode()
    bodies = b'{"image": "' + bytes(60 * MIB), b'{"a":' * MIB, twice, json.dumps({"image": wide}).encode()

    def attack() -> None:
        peers = [joined(told["robots"]["leg"]) for _ in range(8)]
        for peer in peers:
            peer.settimeout(0.5)
        while True:
            for peer, body in zip(peers, bodies * 2, strict=True):
                peer.sendall(b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                if time.monotonic() > until:
                    return

    again(until, attack)


def only_computes(_: dict[str, str], until: float) -> None:
    while time.monotonic() < until:
        pass


def a_client_that_behaves(told: dict[str, str], until: float) -> None:
    with grpc.insecure_channel(told["grpc"]) as channel:
        rate(GRPCInferenceServiceStub(channel), until)


ATTACKS: dict[str, tuple[str, Callable[[dict[str, str], float], None]]] = {
    "none: a process beside it that only computes": ("gateway", only_computes),
    "none: a second client that behaves": ("gateway", a_client_that_behaves),
    "40 gRPC messages of 60 MiB that never end": ("gateway", unfinished_messages),
    "250 gRPC calls whose answers of 18 MiB nobody reads": ("gateway", unread_answers),
    "40 HTTP connections that read no answer": ("gateway", unread_answers_of_http),
    "40 pictures of 8192 x 4096 in a request": ("gateway", large_pictures),
    "gRPC calls that the server must reset": ("gateway", calls_that_the_server_resets),
    "gRPC calls that are cancelled at once": ("gateway", cancelled_calls),
    "empty gRPC messages without end": ("gateway", empty_messages),
    "100 messages of 64 MiB announced to the relay": ("relay", announced_messages),
    "4,096 connections that do nothing": ("gateway", idle_connections),
    "4,096 connections of one name to the relay": ("relay", one_name),
    "300 HTTP connections that read no metrics": ("gateway", unread_scrapes),
    "256 readers of weights that read slowly, while a learner publishes": ("gateway", slow_readers),
    "200 HTTP connections that pipeline 50 GETs": ("gateway", pipelined_requests),
    "one uploader of bodies of 60 MiB": ("gateway", uploads),
    "two uploaders of bodies of 60 MiB": ("gateway", partial(uploads, many=2)),
    "40 uploads of a few bytes a second": ("gateway", slow_uploads),
    "40 robots' frames of 60 MiB that never end": ("gateway", unfinished_frames),
    "4 robots that send small frames and pings without end": ("gateway", small_frames),
    "8 connections that send large bodies to `/act` and read nothing": ("gateway", bodies_of_act),
    "100 robots of GR00T that ask on and on and read nothing": ("gateway", unread_robots),
}


def rate(stub: GRPCInferenceServiceStub, until: float) -> float:
    """Return the requests a second of one client in a closed loop, until that time of the monotonic clock."""
    asked, done, began = pb.ModelInferRequest.FromString(request("affine", 1)), 0, time.monotonic()
    while (now := time.monotonic()) < until:
        with contextlib.suppress(grpc.RpcError):
            stub.ModelInfer(asked, timeout=10)
            done += 1
    return done / (now - began)


def attacker(attack: Callable[[dict[str, str], float], None], told: dict[str, str], orders: Connection) -> None:
    """Attack for as many seconds as each order says, close all connections, and report the processor time in s."""
    while seconds := orders.recv():
        before = time.process_time()
        attack(told, time.monotonic() + seconds)
        while CONNECTIONS:
            with contextlib.suppress(OSError):
                CONNECTIONS[-1].shutdown(socket.SHUT_RDWR)
            CONNECTIONS.pop().close()
        orders.send(time.process_time() - before)


class Seen(NamedTuple):
    """What was seen of one attack: requests/s, shares, and MiB."""

    quiet: float
    under: float
    kept: float  # of the quiet rate just before and just after
    cost: float  # processors that the attacker used
    before: int
    peak: int
    after: int


def measure(what: str, rounds: int, seconds: float) -> Seen:
    """Attack a server of its own."""
    role, attack = ATTACKS[what]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        with serving(where, MODELS, dialects=DIALECTS, more=ROBOTS, http=LOCAL, grpc=LOCAL, tcp=LOCAL) as server:
            with server.connect() as client:
                told = {**client.status()["server"], "address": server.address}
            process = psutil.Process(server.pids()[role])
            orders, others = context.Pipe()
            attacking = context.Process(target=attacker, args=(attack, told, others), daemon=True)
            attacking.start()
            with grpc.insecure_channel(told["grpc"]) as channel:
                stub = GRPCInferenceServiceStub(channel)
                rate(stub, time.monotonic() + 3.0)  # the attacker's process has imported what it needs
                before = process.memory_info().rss
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
                quiet, under, cost = [rate(stub, time.monotonic() + QUIET)], [], []
                for _ in range(rounds):
                    orders.send(seconds)
                    under.append(rate(stub, time.monotonic() + seconds))
                    if not orders.poll(30):
                        raise TimeoutError(f"{what}: the attacker does not end")
                    cost.append(orders.recv() / seconds)
                    time.sleep(SETTLED)
                    quiet.append(rate(stub, time.monotonic() + QUIET))
                time.sleep(max(0.0, 5.0 - SETTLED - QUIET))
                after = process.memory_info().rss
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = int(status.split("VmHWM:")[1].split()[0]) << 10
                assert server.pids()[role] == process.pid, f"{role} died"
            orders.send(0.0)
            attacking.join(5)
            attacking.kill()
    kept = statistics.median(2 * now / (a + b) for a, now, b in zip(quiet, under, quiet[1:], strict=False))
    rates = statistics.median(quiet), statistics.median(under), kept, statistics.median(cost)
    return Seen(*rates, before // MIB, peak // MIB, after // MIB)


def main() -> None:
    """Run the attacks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table to docs/security.md")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="attacks whose name contains this; only their rows are written")
    options = parser.parse_args()
    bound, load = most_held(64 * MIB) // MIB, os.getloadavg()[0]
    lines = [
        "| attack | client, requests/s: quiet, under attack | keeps | attacker, cores | MiB: before, peak, 5 s after |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what in ATTACKS:
        if options.only not in what:
            continue
        seen = measure(what, options.rounds, options.seconds)
        memory = f"{ATTACKS[what][0]} {seen.before}, {seen.peak}, {seen.after}"
        rates = f"{seen.quiet:.0f}, {seen.under:.0f} | {seen.kept:.0%} | {seen.cost:.1f}"
        lines.append(f"| {what} | {rates} | {memory} |")
        print(lines[-1], flush=True)
    told = f"Bound with `max_message_mib = 64`: {bound} MiB beside what a process takes itself. {os.cpu_count()} cores."
    told += f" The machine's load average was {load:.1f} before and {os.getloadavg()[0]:.1f} after."
    if options.write:
        text = PAGE.read_text()
        start, rest = text.split(BEGIN)
        if options.only:
            kept = {line.split(" | ")[0]: line for line in rest.split(END)[0].splitlines() if line.startswith("| ")}
            kept |= {line.split(" | ")[0]: line for line in lines}
            lines = [*lines[:2], *(kept[f"| {what}"] for what in ATTACKS if f"| {what}" in kept)]
        PAGE.write_text("\n".join([start + BEGIN, "", *lines, "", told, "", END]) + rest.split(END)[1])
    else:
        print("\n".join(["", *lines, "", told]))


if __name__ == "__main__":
    sys.exit(main())
