"""Clients of other hosts that mean harm, or do not read: the relay stays, small, and the others are answered."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import threading
import time

import numpy as np
import psutil
import pytest
import zmq
from tests.faults.conftest import leaving_nothing
from tests.serving import serving, wait_until

from jurybox.client import Error, connect
from jurybox.protocol import wire
from jurybox.protocol.control_pb2 import ControlReply, ControlRequest, Hello, LeaseRequest, LoadRequest, StatusRequest
from jurybox.protocol.errors import Code

MIB = 1 << 20
X = np.ones((2, 4), np.float32)
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 256},
    "big": {"factory": "tests.models:big", "max_batch": 8, "rows": 32},  # 2.3 MiB of output a row
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all: the relay that it began with must still be there at the end."""
    with leaving_nothing(), serving(tmp_path_factory.mktemp("server"), MODELS, tcp="127.0.0.1:0") as running:
        running.where = f"tcp://{running.listening('tcp')}"
        running.relay = running.pids()["relay"]
        yield running
        assert running.pids().get("relay") == running.relay, running.text()[-2000:]


@pytest.fixture
def dealer(server):
    """A bare client's socket, by its identity."""
    context, sockets = zmq.Context(), []

    def open_one(identity=b"Rsomebody", **options):
        one = context.socket(zmq.DEALER)
        for name, value in {"LINGER": 0, "RCVTIMEO": 20_000, "IDENTITY": identity, **options}.items():
            one.setsockopt(getattr(zmq, name), value)
        one.connect(server.where)
        sockets.append(one)
        return one

    yield open_one
    for one in sockets:
        one.close()
    context.term()


def call(one, number=b"12345678", **request):
    one.send_multipart((wire.PREFIX, number, ControlRequest(**request).SerializeToString()))
    while True:
        frames = one.recv_multipart()
        if frames[1] == number:  # not a probe
            return ControlReply.FromString(frames[2])


def still_answers(server):
    with connect(server.where, timeout=30) as client:
        np.testing.assert_array_equal(client.model("affine").infer(X), 2 * X + 1)


def test_a_client_that_does_not_read_costs_the_relay_no_more_than_one_lane(server, dealer):
    """A client sends requests without end and never reads an answer; other clients are answered meanwhile."""
    control = dealer()
    lease = call(control, lease=LeaseRequest(model="big", rows=8)).lease
    relay = psutil.Process(server.relay)
    still_answers(server)
    before, most = relay.memory_info().rss, 0
    deaf = dealer(b"Rdeaf", RCVHWM=1, RCVBUF=4096)
    ticket = struct.Struct("<QQqqIIIIQQ")
    row = bytes(16)
    sequence = 0
    until = time.monotonic() + 3
    while time.monotonic() < until:
        for first in range(8):
            sequence += 1
            record = ticket.pack(sequence, lease.lease, 10**10, 0, 0, first, 1, 0, 0, 1)
            with contextlib.suppress(zmq.Again):
                deaf.send_multipart((wire.PREFIX + record, row), zmq.NOBLOCK)
        most = max(most, relay.memory_info().rss)
        time.sleep(0.002)
    assert most - before < 250 * MIB, f"{(most - before) / MIB:.0f} MiB more"
    still_answers(server)


def test_a_client_that_reads_slowly_gets_every_answer(server):
    """More than the relay keeps for one client: the answers wait in their rows, and none is lost or mixed up."""
    with connect(server.where, timeout=60) as client:
        model = client.model("big", rows=24)
        expected = model.infer(np.ones((1, 4), np.float32))
        for _ in range(2):
            tickets = [model.submit(np.full((1, 4), 1, np.float32)) for _ in range(24)]  # 55 MiB
            time.sleep(0.5)
            for ticket in tickets:
                np.testing.assert_allclose(ticket.result(timeout=60).outputs, expected, atol=1e-5)


def test_unread_control_answers_are_bounded(server, dealer):
    relay = psutil.Process(server.relay)
    still_answers(server)
    before = relay.memory_info().rss
    deaf = dealer(b"Rdeaf2", RCVHWM=1, RCVBUF=4096)
    body = ControlRequest(status=StatusRequest()).SerializeToString()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        with contextlib.suppress(zmq.Again):
            deaf.send_multipart((wire.PREFIX, b"12345678", body), zmq.NOBLOCK)
    assert relay.memory_info().rss - before < 150 * MIB
    still_answers(server)


def test_a_control_message_too_large_for_the_supervisor_fails_no_other_call(server, dealer):
    rude, polite = dealer(b"Rrude"), dealer(b"Rpolite")
    assert call(polite, hello=Hello(client="x")).HasField("server")
    stop, failed, asked = threading.Event(), [], [0]

    def ask():
        with connect(server.where, timeout=20) as client:
            while not stop.is_set():
                try:
                    client.models()
                    asked[0] += 1
                except Error as error:
                    failed.append(error)
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for request in (
            {"hello": Hello(client="x" * (2 * MIB))},
            {"load": LoadRequest(model="affine", settings_json="x" * (2 * MIB))},
            {"lease": LeaseRequest(model="a" * (2 * MIB))},
        ):
            assert call(rude, **request).error.code == Code.TOO_LARGE
        assert call(rude, lease=LeaseRequest(model="a" * 129)).error.code == Code.MODEL_NOT_FOUND
        wait_until(lambda: asked[0] > 20 or failed, 20, "calls of others")
    finally:
        stop.set()
        thread.join(30)
    assert not failed
    assert call(rude, hello=Hello(client="x")).HasField("server")


def test_more_calls_than_the_supervisor_accepts_get_an_error(server, dealer):
    """The supervisor hangs. When it continues, all clients are answered."""
    one = dealer(b"Rmany", SNDHWM=0, RCVHWM=0)
    assert call(one, hello=Hello(client="x")).HasField("server")
    body = ControlRequest(hello=Hello(client="x")).SerializeToString()
    codes = set()
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for number in range(8000):
            one.send_multipart((wire.PREFIX, number.to_bytes(8, "little"), body))
        until = time.monotonic() + 20
        while Code.BUSY not in codes and time.monotonic() < until:
            if one.poll(100):
                codes.add(ControlReply.FromString(one.recv_multipart()[2]).error.code)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert Code.BUSY in codes
    still_answers(server)
    assert "Traceback" not in server.text()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)  # rfc.zeromq.org/spec/23


def ready(identity):
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        body += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return bytes([4, len(body)]) + body


PING = b"\x04\x07\x04PING\x00\x10"
DATA = b"\x00\x02ab"
COMMANDS = [
    PING,
    DATA,
    b"\x04\x05\x04PONG",
    b"\x04\x0a\x09SUBSCRIBE",
    b"\x04\x04\x06CAN",
    b"\x04\x03\x05ER",
    b"\x06\xff",
]


@pytest.mark.parametrize("identity", [b"Rsame", b""], ids=["one name", "no name"])
def test_a_flood_of_connections_with_pings_ends_no_relay(server, identity):
    """Connections that all use one name, send ZeroMQ's commands in any order, and end in the middle."""
    host, port = server.where.removeprefix("tcp://").rsplit(":", 1)
    rng = random.Random(7)
    until, kept = time.monotonic() + 2.5, []
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            one = socket.create_connection((host, int(port)), timeout=5)
            kept.append(one)
            one.settimeout(2)
            one.sendall(GREETING + ready(identity))
            for _ in range(rng.randrange(60)):
                one.sendall(PING + DATA if rng.random() < 0.8 else rng.choice(COMMANDS))
            if rng.random() < 0.5:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if rng.random() < 0.7:
                kept.pop().close()
        if len(kept) > 100:
            for one in kept:
                one.close()
            kept.clear()
    for one in kept:
        one.close()
    still_answers(server)
    assert server.pids()["relay"] == server.relay


def test_messages_that_were_announced_and_do_not_arrive_take_no_more_than_their_share(server):
    """A hundred connections announce 64 MiB, send a few of them and wait; a client is answered meanwhile."""
    host, port = server.where.removeprefix("tcp://").rsplit(":", 1)
    still_answers(server)
    relay = psutil.Process(server.relay)
    before, sent = relay.memory_info().rss, bytes(700_000)
    with contextlib.ExitStack() as stack:
        for i in range(100):
            one = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            one.sendall(GREETING + ready(b"Rhalf%d" % i) + b"\x02" + struct.pack(">Q", 64 * MIB) + sent)
        still_answers(server)
        assert relay.memory_info().rss - before < 2.5 * 100 * len(sent), "no more than twice what came"
        with server.connect() as client:
            wait_until(lambda: client.status()["relay"]["received"]["bytes"] > 90 * len(sent), 20, "its status")
            assert client.status()["relay"]["received"]["limit"] == 8 * 64 * MIB
    still_answers(server)
    wait_until(lambda: relay.memory_info().rss - before < 16 * MIB, 20, "the relay's memory is the system's again")


def test_no_client_replaces_another_by_its_name(server, dealer):
    first = dealer(b"Rvictim")
    lease = call(first, lease=LeaseRequest(model="affine", rows=2)).lease
    thief = dealer(b"Rvictim")
    thief.send_multipart((wire.PREFIX, b"12345678", ControlRequest(hello=Hello(client="x")).SerializeToString()))
    assert not thief.poll(500)
    record = wire.PACK_TICKET.pack(7, lease.lease, 10**10, 0, 0, 0, 2, 0, 0, 1)
    first.send_multipart((wire.PREFIX + record, X.tobytes()))
    while len(frames := first.recv_multipart()) != 2 or frames[0][:2] != wire.PREFIX or len(frames[0]) < 30:
        pass  # a probe
    np.testing.assert_array_equal(np.frombuffer(frames[1], np.float32).reshape(2, 4), 2 * X + 1)
