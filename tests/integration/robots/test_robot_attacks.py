"""Floods, unfinished messages and idle connections at a port for robots cost no more than their share."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serving import not_ended, serving, wait_until
from websockets.sync.client import connect as websocket

from jurybox.server.gateway.robots.msgpack_arrays import packb

MODELS = {"seen": {"factory": "tests.robot_models:seen", "max_batch": 32}}
ROBOTS = """
[robots.arm]
model = "seen"
listen = "127.0.0.1:0"
clients = 48
"""
MIB = 1 << 20
OMNI = "/v1/realtime/robot/openpi"
BINARY, CONT, TEXT, PING = 2, 0, 1, 9


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, MODELS, more=ROBOTS, http="127.0.0.1:0", max_message_mib=4) as running:
        yield running


@pytest.fixture(scope="module")
def told(server):
    with server.connect() as client:
        return client.status()["server"]


def frame(kind, content=b"", size=None, *, fin=True):
    size = len(content) if size is None else size
    head = bytes([kind | (128 if fin else 0)])
    if size < 126:
        head += bytes([128 | size])
    else:
        head += bytes([128 | 127]) + struct.pack(">Q", size)
    return head + bytes(4) + content  # masked with zeros


def joined(address, path="/"):
    host, port = address.rsplit(":", 1)
    made = socket.create_connection((host, int(port)), timeout=30)
    made.sendall(
        f"GET {path} HTTP/1.1\r\nHost: {address}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    came = b""
    while b"\r\n\r\n" not in came:
        came += made.recv(4096)
    assert b" 101 " in came, came
    return made


def said(peer):
    """Everything that the server has said when it ends the connection."""
    came = b""
    with contextlib.suppress(OSError):
        while part := peer.recv(1 << 16):
            came += part
    return came


def is_answered(address):
    with websocket(f"ws://{address}", compression=None, open_timeout=60) as robot:
        robot.recv(60)
        robot.send(packb({"nothing": 1}))
        return "is missing" in robot.recv(60)


def held(told):
    """The bytes that the gateway holds for its clients."""
    with urllib.request.urlopen(f"http://{told['http']}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        found = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "jurybox_client_bytes" and sample.labels["process"] == "gateway"
        ]
    assert found
    return sum(found)


def rss(server):
    pages = Path(f"/proc/{server.pids()['gateway']}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def test_messages_that_never_end_take_no_more_than_the_bound(server, told):
    """40 frames of 4 MiB of which the last byte does not come; all requests together may take 32 MiB."""
    address, before = told["robots"]["arm"], rss(server)
    with contextlib.ExitStack() as closing:
        peers = [closing.enter_context(joined(address)) for _ in range(40)]
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(frame(BINARY, bytes(4 * MIB - 1), 4 * MIB))
        heard = dict.fromkeys(peers, b"")

        def told_to_come_later():
            for peer in peers:
                peer.setblocking(False)
                with contextlib.suppress(OSError):
                    heard[peer] += peer.recv(1 << 16)
            return sum(b"ask again later" in text for text in heard.values())

        wait_until(lambda: told_to_come_later() > 20, 20.0, "the end of most connections")
        assert rss(server) - before < 80 * MIB
        assert is_answered(address)
    wait_until(lambda: held(told) < MIB, 30, "what was held is returned")


def test_many_parts_of_a_message_end_its_connection(told):
    with joined(told["robots"]["arm"]) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(frame(BINARY, fin=False) + frame(CONT, fin=False) * 5000)
        assert b"send fewer and larger" in said(peer)


def test_who_reads_no_answer_is_not_read(server, told):
    """Each ping is answered with a pong; they do not pile up."""
    before = rss(server)
    with joined(told["robots"]["arm"]) as peer:
        peer.settimeout(2)
        many, sent = frame(PING, bytes(125)) * 1000, 0
        with pytest.raises(TimeoutError):
            while sent < 256 * MIB:
                sent += peer.send(many)
        assert rss(server) - before < 64 * MIB
        assert is_answered(told["robots"]["arm"])


def test_connections_that_say_nothing_are_few_and_let_robots_in(told):
    address = told["robots"]["arm"]
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as closing:
        idle = [closing.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(200)]

        wait_until(
            lambda: not_ended(idle) <= 64, 5.0, "most of the idle connections ended"
        )  # a handshake may take 10 s
        assert is_answered(address)


@pytest.mark.parametrize(
    ("path", "small"), [("/", frame(BINARY, b"\xc0")), (OMNI, frame(TEXT, b"x")), ("/", frame(PING))]
)
def test_a_flood_of_small_frames_leaves_time_to_robots(told, path, small):
    address = told["robots"]["arm"]
    with contextlib.ExitStack() as closing:
        peers = [closing.enter_context(joined(address, path)) for _ in range(4)]
        for peer in peers:
            peer.setblocking(False)
        with websocket(f"ws://{address}", compression=None, open_timeout=60) as robot:
            robot.recv(60)
            for _ in range(20):
                for peer in peers:
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            peer.send(small * 10_000)
                    with contextlib.suppress(BlockingIOError):
                        while peer.recv(1 << 16):
                            pass
                robot.send(packb({"nothing": 1}))
                assert "is missing" in robot.recv(10)
            assert held(told) < 4 * MIB
