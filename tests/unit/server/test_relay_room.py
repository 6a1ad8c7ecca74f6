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


def ended(front, connection):
    """Whether the relay has ended a connection, once it has looked."""
    front.receive(len)
    connection.settimeout(0.05)
    with contextlib.suppress(TimeoutError):
        try:
            return connection.recv(1000) == b""
        except ConnectionError:
            return True


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
            wait_until(lambda: ended(front, last), 20)
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


def named(front, closing, name):
    """A client's connection that the relay knows by its name."""
    made = closing.enter_context(joined(front, name))
    wait_until(lambda: (front.receive(len), front.link(name))[1] is not None, 20)
    return made


def fill(front, client):
    """Send to a client that does not read until something stays here; return how many bytes."""
    while not front.unsent:
        assert front.send([client, bytes(MOST // 4)])
    return front.held()["answers"]["bytes"]


MOST = 1 << 20


def test_a_client_that_does_not_read_has_room_up_to_the_largest_message_and_the_rest_is_dropped(front):
    with contextlib.ExitStack() as closing:
        named(front, closing, b"slow")
        named(front, closing, b"other")
        assert front.has_room(b"slow", 100 * MOST) and front.has_room(b"nobody", 100 * MOST)
        left = MOST - fill(front, b"slow")
        assert front.has_room(b"slow", left) and not front.has_room(b"slow", left + 1)
        assert front.has_room(b"other", 100 * MOST), "one message is always allowed"
        before = front.held()["answers"]
        assert front.send([b"slow", bytes(left + 1)]), "its client is there"
        assert front.held()["answers"] == before == {"bytes": MOST - left, "limit": 8 * MOST}
        assert not front.send([b"nobody", b"x"])


def test_all_clients_together_have_room_for_eight_largest_messages(front, monkeypatch):
    with contextlib.ExitStack() as closing:
        for name in (b"slow", b"slower"):
            named(front, closing, name)
        mine = fill(front, b"slow")
        monkeypatch.setattr(module, "_CLIENTS", 0)
        assert not front.has_room(b"slow", 1) and front.has_room(b"slower", 1)
        monkeypatch.setattr(module, "_CLIENTS", 1)
        assert front.has_room(b"slow", MOST - mine)


def test_a_client_that_is_ended_is_gone_and_one_of_its_name_takes_its_place(front):
    gone = []
    front.gone = gone.append
    with contextlib.ExitStack() as closing:
        first = named(front, closing, b"same")
        second = closing.enter_context(joined(front, b"same"))
        wait_until(lambda: (front.receive(len), front.held()["connections"])[1] == 2, 20)
        wait_until(lambda: (front.receive(len), front._parked)[1], 20)
        second.sendall(b"\0\1x")
        front.end(b"nobody")
        front.end(b"same")
        assert (gone, front.held()["connections"], front.is_there(b"same")) == ([], 1, True)
        received = []
        wait_until(lambda: received.append(front.receive(len)) or received[-1], 20)
        assert received[-1] == [b"same", b"x"]
        front.end(b"same")
        assert (gone, front.held()["connections"], front.is_there(b"same")) == ([b"same"], 0, False)
        assert front.account(b"same") is None and front.link(b"same") is None
        assert all(one.recv(1000) is not None for one in (first, second))


def test_a_connection_that_greets_nobody_is_ended_in_time_and_a_clients_is_not(front, monkeypatch):
    with contextlib.ExitStack() as closing:
        closing.enter_context(joined(front))
        named(front, closing, b"client")
        front.forget_sent()
        assert front.held()["connections"] == 2
        monkeypatch.setattr(module, "_HANDSHAKE", -1.0)
        front.forget_sent()
        assert front.held()["connections"] == 1 and front.is_there(b"client")
        monkeypatch.setattr(module, "_BEAT", -1.0)
        front.forget_sent()
        assert front.is_there(b"client"), "it is asked whether it is there"
        monkeypatch.setattr(module, "_SILENCE", -1.0)
        front.forget_sent()
        assert front.held()["connections"] == 0


def test_a_name_that_only_the_relay_gives_is_refused(front):
    with contextlib.ExitStack() as closing:
        refused = closing.enter_context(joined(front, b"\0mine"))
        wait_until(lambda: ended(front, refused), 20)
        assert front.held()["connections"] == 0
        unnamed = closing.enter_context(joined(front, b""))
        unnamed.sendall(b"\0\1x")
        received = []
        wait_until(lambda: received.append(front.receive(len)) or received[-1], 20)
        assert received[-1][0][:1] == b"\0" and len(received[-1][0]) == 9
