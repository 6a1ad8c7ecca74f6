"""The relay's own connections: where it listens, whose messages come when, and what becomes of those who leave."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from types import SimpleNamespace

import pytest
from tests.serving import wait_until
from tests.unit.server.test_relay_room import ended, joined, named
from tests.unit.server.test_zmtp_connections import connected

from jurybox import native
from jurybox.server.relay import zmtp_listener as module
from jurybox.server.relay.zmtp_listener import ZmtpListener
from jurybox.server.security.limits import ROBOTS, TCP, budget_of

MOST = 1 << 20


def listening(where="127.0.0.1:0", **more):
    return contextlib.closing(ZmtpListener(where, MOST, **more))


@pytest.fixture
def front():
    with listening() as made:
        yield made


@pytest.fixture
def closing():
    with contextlib.ExitStack() as made:
        yield made


def next_of(front):
    found = []
    wait_until(lambda: found.append(front.receive(len)) or found[-1] is not None, 20)
    return found[-1]


def readable(front):
    """Wait until its descriptor says that something has arrived."""
    poll = select.poll()
    poll.register(front.fileno(), select.POLLIN)
    assert poll.poll(20_000)


def frame(body):
    return (b"\0" if len(body) < 256 else b"\2") + len(body).to_bytes(1 if len(body) < 256 else 8, "big") + body


@pytest.mark.parametrize(
    ("where", "told", "reached"),
    [
        ("127.0.0.1:0", "127.0.0.1", ["127.0.0.1"]),
        ("[::1]:0", "[::1]", ["::1"]),
        ("[::]:0", "[::]", ["::1", "127.0.0.1"]),
        ("0.0.0.0:0", "0.0.0.0", ["127.0.0.1"]),
    ],
)
def test_the_address_is_told_with_its_port_and_reached(closing, where, told, reached):
    with listening(where) as front:
        host, port = front.bound.rsplit(":", 1)
        assert host == told and int(port) > 0
        for address in reached:
            closing.enter_context(socket.create_connection((address, int(port)), timeout=20))
            readable(front)
        wait_until(lambda: (front.receive(len), front.held()["connections"])[1] == len(reached), 20)


def test_a_star_stands_for_every_address():
    with listening("*:0") as front:
        port = front.bound.rsplit(":", 1)[1]
        with socket.create_connection(("127.0.0.1", int(port)), timeout=20):
            readable(front)


def test_an_address_in_use_is_refused_and_leaves_no_socket(front, monkeypatch):
    made = []
    of = socket.socket
    monkeypatch.setattr(module.socket, "socket", lambda *given: made.append(of(*given)) or made[-1])
    with pytest.raises(OSError, match="in use"):
        module._bound(front.bound)
    assert [one.fileno() for one in made] == [-1]


def test_an_address_is_free_for_the_next_relay_as_soon_as_one_has_ended(front):
    assert front._listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)


def test_a_socket_that_listens_already_is_taken_and_closed_with_the_relay(closing):
    given = socket.create_server(("127.0.0.1", 0))
    with listening(given) as front:
        named(front, closing, b"client").sendall(frame(b"x"))
        assert next_of(front) == [b"client", b"x"]
        assert not given.getblocking()
    assert given.fileno() == -1


def test_a_listener_that_cannot_be_watched_is_closed(monkeypatch):
    given = socket.create_server(("127.0.0.1", 0))
    made = []

    class Epoll:
        def __init__(self):
            made.append(self)
            self.closed = False

        def register(self, *_):
            raise OSError(errno.ENOSPC, "too many are watched")

        def close(self):
            self.closed = True

    monkeypatch.setattr(module, "select", SimpleNamespace(epoll=Epoll, EPOLLIN=select.EPOLLIN))
    with pytest.raises(OSError, match="too many are watched"):
        ZmtpListener(given, MOST)
    assert given.fileno() == -1 and made[0].closed


def test_a_connection_sends_small_answers_without_delay(front, closing):
    named(front, closing, b"client")
    with socket.socket(fileno=socket.dup(front._named[b"client"].descriptor)) as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_client_learns_that_a_router_answers_it(front, closing):
    client = named(front, closing, b"client")
    greeting = b""
    while b"Socket-Type" not in greeting or len(greeting.partition(b"Socket-Type")[2]) < 10:
        greeting += client.recv(1000)
    assert greeting.partition(b"Socket-Type")[2][4:10] == b"ROUTER"


def test_what_a_client_had_no_room_for_follows_as_soon_as_it_reads(front, closing):
    client = named(front, closing, b"slow")
    client.setblocking(False)
    while not front.unsent:
        assert front.send([b"slow", bytes(MOST // 4)])

    def sent():
        with contextlib.suppress(BlockingIOError):
            while client.recv(1 << 20):
                pass
        assert front.receive(len) is None
        return not front.unsent

    wait_until(sent, 20)


@pytest.mark.parametrize(("more", "room"), [(0, True), (1, False)])
def test_one_with_room_of_its_own_has_none_if_all_together_have_none(front, more, room):
    for number in range(7):
        connected(front, number, b"R%d" % number, pending=MOST)
    connected(front, 7, b"mine", pending=MOST // 2)
    connected(front, 8, b"another", pending=MOST // 4)
    assert front.has_room(b"mine", MOST // 4 + more) is room


def test_clients_are_looked_at_also_behind_one_that_waits_for_a_name(front, closing):
    named(front, closing, b"same")
    closing.enter_context(joined(front, b"same"))
    wait_until(lambda: (front.receive(len), front._parked)[1], 20)
    late = connected(front, 1, b"late", silence=11.0)
    front.forget_sent()
    assert late.closed == 1 and front.held()["connections"] == 2


def test_one_who_has_not_greeted_is_not_asked_whether_it_is_there(front):
    silent = connected(front, 1, None, ready=False, silence=2.5)
    front.forget_sent()
    assert (silent.pings, silent.closed) == (0, 0)


def test_one_who_may_take_messages_first_is_asked_before_they_are_delivered(front, closing):
    client = named(front, closing, b"client")
    taken = []

    def take_in():
        taken.append(front.link(b"client").receive(0, 1))

    front.give_first(b"client", take_in)
    front.give_first(b"nobody", lambda: 1 / 0)
    assert front.receive(len) is None and taken == []
    client.sendall(frame(b"first") + frame(b"second"))
    received = []

    def taken_and_received():
        received.append(front.receive(len))
        return [body for part in taken for (body,) in part], [one for one in received if one is not None]

    wait_until(lambda: sum(map(len, taken_and_received())) == 2, 20)
    first, rest = taken_and_received()
    assert first[0] == b"first" and rest in ([], [[b"client", b"second"]])


def test_what_stays_in_a_link_is_news_if_somebody_says_so(front, closing):
    client = named(front, closing, b"client")
    client.sendall(frame(b"one") + frame(b"two"))
    link = front.link(b"client")
    wait_until(lambda: (link.look(), link.arrived)[1], 20)
    assert not front.has_news()
    front.look_again(b"nobody")
    assert not front.has_news()
    front.look_again(b"client")
    assert front.has_news()
    assert next_of(front) == [b"client", b"one"] and next_of(front) == [b"client", b"two"]


def test_nothing_more_is_read_of_one_that_left_although_it_had_more(front, closing):
    client = named(front, closing, b"client")
    client.sendall(frame(b"one"))
    link = front.link(b"client")
    wait_until(lambda: (link.look(), link.arrived)[1], 20)
    front.look_again(b"client")
    front.end(b"client")
    assert front.receive(len) is None and not front.has_news()


@pytest.mark.parametrize("sent", [1, 63, 64, 65, 128, 200])
def test_every_message_of_one_that_has_left_is_delivered_and_then_it_is_gone(front, closing, sent):
    client = named(front, closing, b"client")
    gone = []
    front.gone = lambda name: gone.append((name, len(received)))
    received = []
    client.sendall(b"".join(frame(b"%d" % number) for number in range(sent)))
    client.close()

    def look():
        while (message := front.receive(len)) is not None:
            received.append(message)
        return gone

    wait_until(look, 20)
    assert received == [[b"client", b"%d" % number] for number in range(sent)]
    assert [name for name, _ in gone] == [b"client"] and front.held()["connections"] == 0
    assert not front.has_news()


def test_a_flood_of_one_client_does_not_keep_anothers_message_waiting(front, closing):
    flooding, quiet = named(front, closing, b"flooding"), named(front, closing, b"quiet")
    flooding.sendall(frame(b"x") * 1000)
    link = front.link(b"flooding")
    wait_until(lambda: (link.look(), link.arrived)[1], 20)
    front.look_again(b"flooding")
    assert next_of(front) == [b"flooding", b"x"]
    quiet.sendall(frame(b"hello"))
    wait_until(lambda: (front.link(b"quiet").look(), front.link(b"quiet").arrived)[1], 20)
    front.look_again(b"quiet")
    senders = []
    while b"quiet" not in senders:
        senders.append(next_of(front)[0])
    assert len(senders) <= 130, "two turns of 64, and its own"
    left = 1000 - 1 - senders.count(b"flooding")
    assert [next_of(front) for _ in range(left)] == [[b"flooding", b"x"]] * left
    assert front.receive(len) is None
    assert front.is_there(b"flooding") and front.is_there(b"quiet")


def test_a_second_connection_of_a_name_waits_and_one_that_leaves_meanwhile_is_forgotten(front, closing):
    gone = []
    front.gone = gone.append
    named(front, closing, b"same")
    second, third = (closing.enter_context(joined(front, b"same")) for _ in range(2))
    wait_until(lambda: (front.receive(len), len(front._parked))[1] == 2, 20)
    third.sendall(frame(b"third"))
    second.close()
    wait_until(lambda: (front.receive(len), front.held()["connections"])[1] == 2, 20)
    assert len(front._parked) == 1 and gone == []
    front.forget_sent()
    assert front.held()["connections"] == 2, "one that waits is not asked whether it is there"
    front.end(b"same")
    assert next_of(front) == [b"same", b"third"]
    assert not front._parked and gone == []


def test_a_waiting_connection_takes_only_the_place_of_its_own_name(front, closing):
    gone = []
    front.gone = gone.append
    for name in (b"a", b"b"):
        named(front, closing, name)
    closing.enter_context(joined(front, b"b"))
    wait_until(lambda: (front.receive(len), front._parked)[1], 20)
    front.end(b"a")
    assert gone == [b"a"] and len(front._parked) == 1 and front.link(b"a") is None
    front.end(b"b")
    assert gone == [b"a"] and not front._parked and front.link(b"b") is not None


def test_what_is_no_greeting_ends_its_connection_and_no_other(front, closing):
    named(front, closing, b"client")
    stranger = closing.enter_context(joined(front))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    wait_until(lambda: ended(front, stranger), 20)
    assert front.held()["connections"] == 1 and front.is_there(b"client")


@pytest.mark.parametrize("door", [TCP, ROBOTS])
def test_a_message_without_room_is_refused_by_its_first_frame_and_counted(closing, door):
    budget = native.Budget((MOST, MOST, 1), (MOST, MOST, 1)) if door == ROBOTS else None
    with contextlib.closing(ZmtpListener("127.0.0.1:0", MOST, budget, door)) as front:
        refused = []
        front.refused = lambda *given: refused.append(given)
        client = named(front, closing, b"client")
        size = 2 * MOST
        client.sendall(b"\1\5first" + b"\2" + size.to_bytes(8, "big"))
        if door == TCP:
            wait_until(lambda: ended(front, client), 20)
            assert refused == [] and front.held()["connections"] == 0, "a frame is larger than any may be"
            return
        client.setblocking(False)
        left = size

        def send():
            nonlocal left
            front.receive(len)
            with contextlib.suppress(BlockingIOError):
                left -= client.send(bytes(min(1 << 16, left)))
            return not left

        wait_until(send, 20)
        wait_until(lambda: (front.receive(len), refused)[1], 20)
        ((who, first, error),) = refused
        assert (who, first) == (b"client", b"first") and f"at most {MOST} bytes" in str(error)
        assert front.is_there(b"client")


def test_what_its_clients_hold_is_in_the_status_document(front, closing):
    named(front, closing, b"client")
    share = budget_of(MOST)
    assert front.held() == {
        "connections": 1,
        "received": {"bytes": 0, "limit": share.in_all[0]},
        "answers": {"bytes": 0, "limit": 8 * MOST},
        "refused": {"connection": 0, "all": 0},
    }
    assert front.account(b"client").held(0) == 0 and front.account(b"nobody") is None


@pytest.mark.parametrize("failing", [OSError(errno.ENOTCONN, "gone"), RuntimeError("no descriptor")])
def test_a_connection_that_cannot_be_made_is_closed_and_keeps_no_other_waiting(front, closing, monkeypatch, failing):
    first, second = (closing.enter_context(joined(front, name)) for name in (b"first", b"second"))
    made = module._FrontConnection
    failed = []

    def connection(*given):
        if not failed:
            failed.append(1)
            raise failing
        return made(*given)

    monkeypatch.setattr(module, "_FrontConnection", connection)
    wait_until(lambda: (front.receive(len), front.link(b"second"))[1] is not None, 20)
    assert front.link(b"first") is None and front.held()["connections"] == 1
    assert ended(front, first) and front.is_there(b"second") and second.fileno() > 0


def test_a_closed_listener_has_no_connections(closing):
    front = ZmtpListener("127.0.0.1:0", MOST)
    client = named(front, closing, b"client")
    link = front.link(b"client")
    front.look_again(b"client")
    front.close()
    assert link.broken and not front.has_news() and front.link(b"client") is None
    assert front.held()["connections"] == 0
    client.settimeout(20)
    while client.recv(1 << 16):
        pass
