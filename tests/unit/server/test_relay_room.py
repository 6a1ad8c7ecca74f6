"""Connections to the relay that have no name of their own yet make room for clients."""

from __future__ import annotations

import contextlib
import socket
import struct

import pytest
from tests.serving import wait_until

from jurybox.server.relay import zmtp_listener as module
from jurybox.server.relay.zmtp_listener import ZmtpListener


@pytest.fixture
def front(monkeypatch):
    monkeypatch.setattr(module, "RELAY_CONNECTIONS", 8)
    made = ZmtpListener("127.0.0.1:0", 1 << 20)
    yield made
    made.close()


def joined(front, identity=None):
    """A connection, which has been greeted if it has an identity."""
    host, port = front.bound.rsplit(":", 1)
    made = socket.create_connection((host, int(port)), timeout=20)
    if identity is not None:
        body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        body += b"\x08Identity" + struct.pack(">I", len(identity)) + identity
        made.sendall(b"\xff" + bytes(8) + b"\x7f\3\1NULL" + bytes(48) + bytes([4, len(body)]) + body)
    return made


@pytest.mark.parametrize("identity", [b"same", None])
def test_connections_of_one_name_or_of_none_do_not_shut_out_a_client(front, identity):
    with contextlib.ExitStack() as closing:

        def look():
            while front.receive(len) is not None:
                pass
            return front

        first = closing.enter_context(joined(front, b"same"))
        wait_until(lambda: b"same" in look()._named, 20)
        for _ in range(20):
            closing.enter_context(joined(front, identity))
            look()
        wait_until(lambda: len(look()._connections) == 8, 20)
        closing.enter_context(joined(front, b"client"))
        wait_until(lambda: b"client" in look()._named, 20)
        assert front.held()["connections"] == 8
        first.sendall(b"\x01\x00\x00\x01x")
        assert front.is_there(b"same"), "who has a name stays"


def test_where_all_have_names_the_new_connection_is_ended(front):
    with contextlib.ExitStack() as closing:
        for number in range(8):
            closing.enter_context(joined(front, b"client%d" % number))
        wait_until(lambda: (front.receive(len), len(front._named))[1] == 8, 20)
        with joined(front, b"one too many") as last:
            last.settimeout(0.05)

            def ended():
                front.receive(len)
                with contextlib.suppress(TimeoutError):
                    try:
                        return last.recv(1) == b""
                    except ConnectionError:
                        return True

            wait_until(ended, 20)
        assert len(front._named) == 8


@pytest.mark.parametrize("sent", [2, 65, 200])
def test_messages_that_the_descriptor_does_not_tell_of_are_news_until_all_are_received(front, sent):
    with joined(front, b"client") as client:
        client.sendall(b"\0\x01x" * sent)
        received = []
        wait_until(lambda: received.append(front.receive(len)) or received[-1] is not None, 20)
        received = received[-1:]
        while front.has_news():
            received.append(front.receive(len))
        assert received == [[b"client", b"x"]] * sent
        assert front.receive(len) is None
