"""Arbitrary bytes on a transport get an answer or none, and the server keeps serving."""

import random

import numpy as np
import pytest
import zmq

from jurybox.client import ProtocolMismatch, connect
from jurybox.protocol import wire
from jurybox.protocol.address import engine_address
from jurybox.protocol.control_pb2 import ControlReply
from jurybox.protocol.errors import Code


@pytest.fixture
def server(enduring):
    return enduring


@pytest.fixture
def dealer():
    context = zmq.Context()
    sockets = []

    def open_one(address, identity=b"stranger"):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(address)
        sockets.append(socket)
        return socket

    yield open_one
    for socket in sockets:
        socket.close()
    context.term()


def still_serves(server):
    x = np.ones((3, 4), np.float32)
    with server.connect() as client:
        assert np.array_equal(client.model("affine").infer(x), 2 * x + 1)


def reply_of(socket):
    frame = socket.recv()
    assert frame[:2] == wire.PREFIX
    _, _, _, code = wire.PACK_REPLY.unpack_from(frame, 2)
    return code, frame[2 + wire.PACK_REPLY.size :].decode()


@pytest.mark.parametrize("frames", [[b"hello"], [b""], [b"GET / HTTP/1.1\r\n\r\n"], [wire.PREFIX, b"and", b"more"]])
def test_garbage_at_an_engine_is_answered_with_what_was_expected(server, dealer, frames):
    socket = dealer(engine_address(server.address, 0))
    socket.send_multipart(frames)
    code, message = reply_of(socket)
    assert code in (Code.PROTOCOL_MISMATCH, Code.MALFORMED)
    assert "expected" in message
    still_serves(server)


def test_a_ticket_of_another_length_is_answered(server, dealer):
    socket = dealer(engine_address(server.address, 0))
    socket.send(wire.PREFIX + b"\xff\xff\xff\xff")
    assert "6 bytes in 1 frames came that are not a ticket" in reply_of(socket)[1]


def test_a_peer_of_another_protocol_version_gets_an_error_with_both_versions(server, dealer, monkeypatch):
    socket = dealer(server.address)
    socket.send_multipart([b"J\x63", b"12345678", b""])
    frames = socket.recv_multipart()
    told = ControlReply.FromString(frames[2]).error.message
    assert f"protocol version 99 came, {wire.PROTOCOL_VERSION} is spoken here" in told
    import jurybox.client.control

    monkeypatch.setattr(jurybox.client.control, "PREFIX", b"J\x63")
    with pytest.raises(ProtocolMismatch, match="version 99 came"):
        connect(server.address, timeout=3)


def ticket(server, client, **fields):
    model = client.model("affine")
    lease = model.requests.lane
    scoreboard = client._link.scoreboard
    lane = next(i for i, record in enumerate(scoreboard.lanes) if record["lease"])
    record = scoreboard.lanes[lane]
    ticket = np.zeros(1, wire.TICKET)
    good = {"sequence": 5, "lane": lane, "lease": int(record["lease"]), "first": int(record["first"]), "rows": 1}
    for name, value in {**good, **fields}.items():
        ticket[name] = value
    ticket.view(np.uint64)[-1] = scoreboard.engines["incarnation"][0]
    assert lease is not None
    return model, ticket[0]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"rows": 0}, Code.REFUSED),
        ({"rows": 4_000_000_000}, Code.REFUSED),
        ({"first": 4_294_967_295}, Code.REFUSED),
        ({"first": 0, "rows": 64}, Code.REFUSED),  # beyond its lane, and beyond a batch
        ({"lease": 1}, Code.STALE_LEASE),
        ({"lane": 4_294_967_295}, Code.STALE_LEASE),
    ],
)
def test_a_ticket_beyond_its_lane_is_refused(server, dealer, fields, code):
    with server.connect(transport="zmq") as client:
        model, message = ticket(server, client, **fields)
        socket = dealer(
            engine_address(server.address, 0), wire.lane_identity(int(message["lane"]), int(message["lease"]))
        )
        socket.send(wire.PREFIX + message.tobytes())
        assert reply_of(socket)[0] == code
        model.close()
    still_serves(server)


def test_garbage_at_the_control_transport_is_answered(server, dealer):
    socket = dealer(server.address)
    for frames in (
        [b"nonsense"],
        [wire.PREFIX, b"short", b"x"],
        [wire.PREFIX, b"12345678", b"\xff\xff"],
        [wire.PREFIX],
    ):
        socket.send_multipart(frames)
        reply = ControlReply.FromString(socket.recv_multipart()[-1])
        assert reply.error.code in (Code.PROTOCOL_MISMATCH, Code.MALFORMED)
    still_serves(server)


def test_ten_thousand_random_messages_do_no_harm(server, dealer):
    rng = random.Random(3)
    sockets = [dealer(server.address, b"a"), dealer(engine_address(server.address, 0), b"b")]
    for _ in range(10_000):
        frames = [wire.PREFIX if rng.random() < 0.7 else b""]
        frames += [rng.randbytes(rng.choice([0, 1, 8, 8, 30, 300])) for _ in range(rng.randrange(4))]
        if rng.random() < 0.3:
            frames[0] += rng.randbytes(rng.randrange(80))
        rng.choice(sockets).send_multipart(frames)
    still_serves(server)
    assert server.process.poll() is None
