"""The relay's connections: which are accepted, asked whether they are still there, and ended."""

from __future__ import annotations

import errno
import socket
import time
from types import SimpleNamespace

import pytest
from tests.clocks import Clock, given

from jurybox.protocol.wire import PREFIX
from jurybox.server.relay import zmtp_listener as module
from jurybox.server.relay.zmtp_listener import ZmtpListener

MIB = 1 << 20


@pytest.fixture
def front():
    front = ZmtpListener("127.0.0.1:0", MIB)
    front.ended = []
    front.gone = front.ended.append
    yield front
    front.close()


class Link:
    """A connection's native part, as far as it is looked at."""

    def __init__(self, number, **more):
        self.descriptor, self.silence, self.ready, self.broken, self.pending, self.peer = (
            number,
            0.0,
            True,
            False,
            0,
            b"",
        )
        self.pings = self.looks = self.closed = 0
        self.posts, self.heard = [], False
        vars(self).update(more)

    def ping(self):
        self.pings += 1

    def look(self):
        self.looks += 1
        if self.heard:
            self.silence = 0.0
        return self.heard

    def post(self, frames):
        self.posts.append(list(frames))
        return not self.broken

    def close(self):
        self.closed += 1


def connected(front, number, name=b"R1", since=None, **more):
    """A connection with this name; its descriptors are no files."""
    link = Link(100_000 + number, **more)
    since = time.monotonic() if since is None else since
    made = SimpleNamespace(link=link, descriptor=200_000 + number, name=name, since=since, take_in=None)
    front._connections[link.descriptor] = made
    if name is not None:
        front._named[name] = made
    return link


@pytest.mark.parametrize(
    ("more", "pinged"),
    [
        ({}, 0),
        ({"silence": 2.0}, 0),
        ({"silence": 2.1}, 1),
        ({"silence": 2.1, "heard": True}, 0),
        ({"silence": 9.9}, 1),
    ],
)
def test_only_a_client_that_is_silent_is_asked_whether_it_is_still_there(front, more, pinged):
    link = connected(front, 1, **more)
    front.forget_sent()
    assert (link.pings, link.closed) == (pinged, 0) and not front.ended
    assert link.looks == (more.get("silence", 0.0) > 2.0), "a large frame may be arriving slowly"
    assert front.has_news() == bool(more.get("heard"))


@pytest.mark.parametrize("more", [{"broken": True}, {"silence": 10.1}, {"ready": False, "since": 0.0}])
def test_a_client_that_is_gone_is_forgotten_and_told_of_once(front, more, monkeypatch):
    given(Clock(1000.0), monkeypatch, module)
    link, other = connected(front, 1, **more), connected(front, 2, b"R2")
    front.forget_sent()
    front.forget_sent()
    assert (link.closed, other.closed, front.ended) == (1, 0, [b"R1"])
    assert not front.is_there(b"R1") and front.is_there(b"R2") and link.pings == 0


def test_a_handshake_has_a_few_seconds(front, monkeypatch):
    clock = given(Clock(1000.0), monkeypatch, module)
    link = connected(front, 1, None, since=1000.0, ready=False)
    clock.now = 1005.0
    front.forget_sent()
    assert not link.closed
    clock.now = 1005.1
    front.forget_sent()
    assert link.closed and not front.ended, "it never had a name"


def test_a_client_that_cannot_be_written_to_is_gone(front):
    link = connected(front, 1)
    assert front.send([b"R1", b"a", b"b"]) and link.posts == [[b"a", b"b"]]
    link.broken = True
    assert not front.send([b"R1", b"c"]) and link.closed == 1 and front.ended == [b"R1"]
    assert not front.send([b"R1", b"d"]) and len(link.posts) == 2
    assert not front.is_there(b"other") and front.link(b"R1") is None


def test_one_is_there_if_a_control_reply_for_nobody_can_be_sent_to_it(front):
    link = connected(front, 1)
    assert front.is_there(b"R1") and link.posts == [[PREFIX, bytes(8), b""]]


@pytest.mark.parametrize(
    ("unsent", "others", "size", "room"),
    [
        (0, 0, 9 * MIB, True),
        (1, 0, MIB - 1, True),
        (1, 0, MIB, False),
        (1, 7 * MIB, MIB - 1, True),
        (1, 7 * MIB, MIB, False),
    ],
)
def test_unread_bytes_have_a_limit_of_each_client_and_of_all(front, unsent, others, size, room):
    link = connected(front, 1, pending=unsent)
    for number in range(7):
        connected(front, number + 2, b"R%d" % (number + 2), pending=others // 7)
    assert front.has_room(b"R1", size) is room and front.has_room(b"nobody", 1 << 40)
    assert front.send([b"R1", bytes(size)]) and len(link.posts) == room, "else it is dropped"


class Accepting:
    """A listening socket, whose next connections and errors are these."""

    def __init__(self, front, *found):
        self._real, self._found = front._listener, list(found)
        front._listener = self

    def __getattr__(self, name):
        return getattr(self._real, name)

    def accept(self):
        found = self._found.pop(0) if self._found else BlockingIOError()
        if isinstance(found, Exception):
            raise found
        return found, ("127.0.0.1", 1)


@pytest.fixture
def client():
    """A function that returns an accepted connection of TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = []

        def connect():
            made.append(socket.create_connection(server.getsockname()))
            return server.accept()[0]

        yield connect
        for each in made:
            each.close()


def test_a_client_that_is_gone_before_it_was_accepted_keeps_no_other_waiting(front, client):
    Accepting(front, OSError(errno.ECONNABORTED, "gone"), client(), OSError(errno.EPROTO, "gone"), client())
    front._accept()
    assert len(front._connections) == 2


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_without_resources_nothing_is_accepted_until_the_next_look(front, client, number):
    late = client()
    Accepting(front, OSError(number, "none"), late)
    descriptor = front._listener.fileno()
    front._accept()
    with pytest.raises(FileNotFoundError):
        front._epoll.unregister(descriptor)
    front._accept()
    front.forget_sent()
    front._epoll.unregister(descriptor)
    front._listen()
    assert len(front._connections) == 1


def test_among_too_many_connections_one_without_a_name_makes_room_and_if_all_have_one_the_newest_goes(
    front, client, monkeypatch
):
    monkeypatch.setattr(module, "RELAY_CONNECTIONS", 2)
    nameless, named = connected(front, 1, None), connected(front, 2)
    Accepting(front, client(), client())
    front._accept()
    assert (nameless.closed, named.closed) == (1, 0) and len(front._connections) == 2
    (first,) = [one for one in front._connections.values() if one.name is None]
    assert first.link.descriptor != nameless.descriptor, "the second took the place of the first, which had no name yet"
    front._named[b"R9"], first.name = first, b"R9"
    refused = client()
    Accepting(front, refused)
    front._accept()
    assert refused.fileno() == -1 and len(front._connections) == 2
