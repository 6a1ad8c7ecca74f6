"""Any bytes at a ZeroMQ transport: an answer or silence, and the server goes on. No crash, no hang, no leak.

The short version is part of the suite; `make fuzz` sends 100,000 to each.
"""

import contextlib
import itertools
import socket as sockets
import struct
import time
from random import Random

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz import messages

from jurybox.client import connect
from jurybox.protocol import wire
from jurybox.protocol.address import engine_address
from jurybox.protocol.control_pb2 import ControlRequest, Hello

AT_ONCE = 50  # messages between two questions whether the transport still answers
AGAIN = 19
_HANG = 30  # seconds
_numbers = itertools.count(1 << 40)

SHORT = pytest.param(500, id="short")
LONG = pytest.param(100_000, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3000)])


# Of connections that go no further: ZeroMQ, HTTP, HTTP/2.
OPENINGS = [
    b"\xff" + bytes(8) + b"\x7f\x03\x01NULL",
    b"GET / HTTP/1.1\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(50),
]


# A ZeroMQ connection that stands, under a name that all of them bear (rfc.zeromq.org/spec/23).
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x05Rsame"
ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48) + bytes([4, len(_READY)]) + _READY
COMMANDS = [b"\x04\x07\x04PING\x00\x10", b"\x00\x02ab", b"\x01\x02J\x01", b"\x04\x05\x04PONG", b"\x04\x0a\x09SUBSCRIBE"]


class Stranger:
    """A bare DEALER that sends what it is given and asks, now and then, what an honest client would."""

    def __init__(self, address, ask, is_answer, identity=None):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address)
        self._ask, self._is_answer = ask, is_answer
        self.sent = 0

    def send(self, batch):
        for frames in batch:
            self._socket.send_multipart(frames)
            self.sent += 1
        number = next(_numbers)
        self._socket.send_multipart(self._ask(number))
        until = time.monotonic() + _HANG
        while time.monotonic() < until:
            if self._socket.poll(1000) and self._is_answer(self._socket.recv_multipart(), number):
                return
        raise AssertionError(f"the transport hangs: no answer within {_HANG} s, after {self.sent} messages")

    def close(self):
        self._socket.close()
        self._context.term()


def hello(number):
    body = ControlRequest(hello=Hello(client="fuzz")).SerializeToString()
    return (wire.PREFIX, number.to_bytes(8, "little"), body)


def hello_is_answered(frames, number):
    return len(frames) == 3 and frames[1] == number.to_bytes(8, "little")


def reply_to(frames, number):
    return len(frames[0]) >= 30 and wire.PACK_REPLY.unpack_from(frames[0], 2)[0] == number


def bombard(stranger, message, count, watched):
    """Let hypothesis think of messages, and send `count`: each as it is and, of many, `AGAIN` times more, bent."""
    again = AGAIN if count >= 10_000 else 0
    random = Random(count)

    @messages.sending(-(-count // AT_ONCE // (again + 1)), same=count < 10_000)
    @given(st.lists(message, min_size=AT_ONCE, max_size=AT_ONCE))
    def fuzz(batch):
        for turn in range(again + 1):
            stranger.send([messages.bent_frames(frames, random) for frames in batch] if turn else batch)
            watched.came(len(batch))

    try:
        fuzz()
        assert stranger.sent >= count * 0.8
    finally:
        stranger.close()


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_any_bytes_at_the_control_transport(server, nothing_leaks, count):
    bombard(Stranger(server.address, hello, hello_is_answered), messages.CONTROL, count, nothing_leaks)


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_any_bytes_at_an_engines_transport(server, nothing_leaks, count):
    with server.connect(transport="zmq") as client:
        model = client.model("affine", rows=32)
        scoreboard = client._link.scoreboard
        lane = next(i for i, record in enumerate(scoreboard.lanes) if record["lease"] and record["rows"] == 32)
        lease, first = int(scoreboard.lanes["lease"][lane]), int(scoreboard.lanes["first"][lane])
        incarnation = int(scoreboard.engines["incarnation"][0])

        def ask(number):
            # Another ticket in flight may be on the same row: only that an answer comes counts.
            return (wire.PREFIX + wire.PACK_TICKET.pack(number, lease, 0, 0, lane, first, 1, 0, 0, incarnation),)

        stranger = Stranger(engine_address(server.address, 0), ask, reply_to, wire.lane_identity(lane, lease))
        bombard(stranger, messages.engine_messages(lane, lease, first, incarnation), count, nothing_leaks)
        model.close()


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_any_bytes_at_the_relays_transport(server, nothing_leaks, count):
    with connect(f"tcp://{server.told['tcp']}") as client:
        model = client.model("affine", rows=32)
        lease = model.requests.lane._transport._lease
        stranger = Stranger(f"tcp://{server.told['tcp']}", hello, hello_is_answered)
        bombard(stranger, messages.inline_messages(lease), count, nothing_leaks)
        x = np.ones((3, 4), np.float32)
        np.testing.assert_array_equal(client.model("affine", rows=3).infer(x), 2 * x + 1)


# As many connections as the machine can hold leave their ports waiting for a minute: 20,000 is near what there is.
@pytest.mark.parametrize(
    "count", [pytest.param(60, id="short"), pytest.param(15_000, id="long", marks=[pytest.mark.slow])]
)
@pytest.mark.parametrize("transport", ["tcp", "http", "grpc"])
def test_any_bytes_on_a_bare_connection(server, nothing_leaks, transport, count):
    """Garbage, openings of the protocols, ZeroMQ's commands in any order under one name; closed, or cut off."""
    host, port = server.told[transport].rsplit(":", 1)
    commands = st.lists(st.one_of(st.sampled_from(COMMANDS), st.binary(max_size=20)), max_size=40).map(b"".join)

    @messages.sending(count, same=count < 1000)
    @given(
        st.one_of(st.binary(max_size=300), st.sampled_from(OPENINGS), commands.map(lambda sent: ZMTP + sent)),
        st.booleans(),
    )
    def fuzz(content, cut_off):
        with sockets.create_connection((host, int(port)), timeout=5) as connection:
            if cut_off:
                connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):  # the other side may have had enough
                connection.sendall(content)

    fuzz()
