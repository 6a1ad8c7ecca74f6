"""The relay's socket over libzmq: what it receives and sends, to whom there is room, and who is admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from tests.serving import wait_until

from jurybox.protocol.wire import PREFIX
from jurybox.server.relay.zmq_listener import ZmqListener
from jurybox.server.security.access import make_pair

MOST = 1 << 20


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def front(context: zmq.Context[Any]) -> Iterator[ZmqListener]:
    made = ZmqListener(context, "127.0.0.1:0", None, None, MOST)
    yield made
    made.close()


def joined(context: zmq.Context[Any], front: ZmqListener, name: bytes = b"client", **options: Any) -> Any:
    made = context.socket(zmq.DEALER)
    for option, value in {"identity": name, "linger": 0, "rcvtimeo": 20_000, **options}.items():
        setattr(made, option, value)
    made.connect(f"tcp://{front.bound}")
    return made


def next_of(front: ZmqListener, sizes: Callable[[bytes], int] = len) -> list[Any]:
    found: list[Any] = []
    wait_until(lambda: found.append(front.receive(sizes)) or found[-1] is not None, 20)
    return found[-1]


@pytest.fixture
def client(context: zmq.Context[Any], front: ZmqListener) -> Any:
    """A client that has said something."""
    made = joined(context, front)
    made.send(b"hello")
    assert next_of(front) == [b"client", b"hello"]
    return made


def test_frames_are_bytes_unless_large_ones_are_expected(front: ZmqListener, client: Any) -> None:
    asked: list[bytes] = []
    for expected, kind in ((0, bytes), ((64 << 10) - 1, bytes), (64 << 10, zmq.Frame)):
        client.send_multipart([b"first", bytes(2000), bytes(3000)])
        sender, first, *rest = next_of(front, lambda frame, size=expected: asked.append(frame) or size)
        assert (sender, first) == (b"client", b"first")
        assert [type(frame) for frame in rest] == [kind] * 2 and [len(frame) for frame in rest] == [2000, 3000]
    assert asked == [b"first"] * 3
    assert front.receive(len) is None and not front.has_news()


def test_messages_that_wait_are_news(front: ZmqListener, client: Any) -> None:
    assert not front.has_news()
    for text in (b"one", b"two"):
        client.send(text)
    assert next_of(front) == [b"client", b"one"]
    wait_until(lambda: front.socket.poll(1), 20)
    front.send([b"client", b"answer"])  # which uses up what the descriptor says
    assert front.has_news() and front.receive(len) == [b"client", b"two"]
    assert not front.has_news()


@pytest.mark.parametrize("size", [1, 5000])
def test_an_answer_goes_to_its_client_or_nobody(front: ZmqListener, client: Any, size: int) -> None:
    assert front.send([b"client", PREFIX, bytes(size)])
    assert client.recv_multipart() == [PREFIX, bytes(size)]
    assert not front.send([b"other", PREFIX, bytes(size)])
    assert front.is_there(b"client") and not front.is_there(b"other")
    assert client.recv_multipart() == [PREFIX, bytes(8), b""]
    wait_until(lambda: not front.unsent, 20)
    assert front.held() == {"answers": {"bytes": 0, "limit": 8 * MOST}}


@pytest.fixture
def unsent(front: ZmqListener, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The large answers, which stay unsent until a test says otherwise; `full` is raised instead."""
    answers: list[Any] = []

    def send(frames: list[Any], flags: int, *, copy: bool, track: bool) -> Any:
        assert (flags, copy, track) == (zmq.NOBLOCK, False, True)
        if frames[0] == b"full":
            raise zmq.Again
        answers.append(SimpleNamespace(done=False, size=sum(map(len, frames))))
        return answers[-1]

    monkeypatch.setattr(front.socket, "send_multipart", send)
    return answers


def test_a_client_may_leave_a_messages_bytes_unread_and_no_more(front: ZmqListener, unsent: list[Any]) -> None:
    assert front.has_room(b"a", 100 * MOST), "one message is always allowed"
    assert front.send([b"a", bytes(MOST // 2 - 1)]) and front.unsent
    assert front.held()["answers"]["bytes"] == MOST // 2
    assert front.has_room(b"a", MOST // 2) and not front.has_room(b"a", MOST // 2 + 1)
    assert front.send([b"a", bytes(MOST // 2)]) and len(unsent) == 1, "it is dropped"
    assert front.send([b"a", bytes(MOST // 2 - 1)]) and len(unsent) == 2
    assert not front.has_room(b"a", 1) and front.has_room(b"b", MOST)
    unsent[0].done = True
    assert front.has_room(b"a", MOST // 2) and front.held()["answers"]["bytes"] == MOST // 2
    unsent[1].done = True
    front.forget_sent()
    assert not front.unsent and front.held()["answers"]["bytes"] == 0 and front.has_room(b"a", 100 * MOST)
    assert front.send([b"full", bytes(5000)]) and not front.unsent, "of one with too many messages, too"


def test_all_clients_together_have_a_limit_but_for_one_message_each(front: ZmqListener, unsent: list[Any]) -> None:
    for number in range(9):
        assert front.send([b"%d" % number, bytes(MOST - 2 - 1)])
    assert len(unsent) == 9 and front.held()["answers"]["bytes"] == 9 * (MOST - 2)
    unsent[8].done = True
    front.forget_sent()
    assert front.has_room(b"0", 2)
    assert front.send([b"another", bytes(5000)]) and len(unsent) == 10
    assert not front.has_room(b"0", 2)


def test_small_answers_are_not_counted(front: ZmqListener, client: Any, unsent: list[Any]) -> None:
    assert front.send([b"client", bytes(4096 - 6 - 1)]) and not front.unsent
    assert front.send([b"client", bytes(4096 - 6)]) and [one.size for one in unsent] == [4096]


def test_peers_are_limited_in_time_and_bytes(front: ZmqListener) -> None:
    limits = {
        zmq.MAXMSGSIZE: MOST, zmq.HANDSHAKE_IVL: 5000, zmq.HEARTBEAT_IVL: 2000, zmq.HEARTBEAT_TIMEOUT: 10_000,
        zmq.SNDHWM: 1024, zmq.RCVHWM: 64, zmq.LINGER: 0,
    }  # fmt: skip
    assert {option: front.socket.getsockopt(option) for option in limits} == limits


def test_a_second_connection_of_a_name_does_not_take_the_firsts_messages(
    context: zmq.Context[Any], front: ZmqListener, client: Any
) -> None:
    second, other = joined(context, front), joined(context, front, b"other")
    second.send(b"me too")
    other.send(b"later")
    assert next_of(front) == [b"other", b"later"]
    front.send([b"client", b"answer"])
    assert client.recv() == b"answer"


def test_an_answer_that_was_just_sent_arrives_although_the_socket_is_closed(
    front: ZmqListener, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jurybox.server.relay.zmq_listener._LINGER_MS", 20_000)
    front.send([b"client", b"the last"])
    front.close()
    assert client.recv() == b"the last" and front.socket.closed
    with pytest.raises(zmq.ZMQError):
        front.send([b"client", b"x"])


def test_the_address_is_told_with_its_port_and_of_version_6_too(context: zmq.Context[Any], front: ZmqListener) -> None:
    host, port = front.bound.rsplit(":", 1)
    assert host == "127.0.0.1" and int(port) > 0
    with pytest.raises(zmq.ZMQError, match="in use"):
        ZmqListener(context, front.bound, None, None, MOST)
    six = ZmqListener(context, "[::1]:0", None, None, MOST)
    try:
        assert six.bound.startswith("[::1]:")
        made = joined(context, six, ipv6=1)
        made.send(b"hello")
        assert next_of(six) == [b"client", b"hello"]
    finally:
        six.close()


@pytest.mark.parametrize("listed", [False, True])
def test_with_keys_a_client_needs_one_that_is_listed_or_any_if_there_is_no_list(
    context: zmq.Context[Any], tmp_path: Any, listed: bool
) -> None:
    _, secret_file, server_key = make_pair(tmp_path / "server")
    (tmp_path / "clients").mkdir()
    make_pair(tmp_path / "clients" / "friend")
    public, secret = zmq.curve_keypair()
    if listed:
        public, secret = zmq.auth.load_certificate(str(tmp_path / "clients" / "friend.key_secret"))
    with ExitStack() as closing:
        folder = str(tmp_path / "clients") if listed else None
        front = ZmqListener(context, "127.0.0.1:0", str(secret_file), folder, MOST)
        closing.callback(front.close)
        keys = {"curve_publickey": public, "curve_secretkey": secret, "curve_serverkey": server_key.encode()}
        made = joined(context, front, **keys)
        made.send(b"hello")
        assert next_of(front) == [b"client", b"hello"]


def test_a_list_without_keys_is_refused_and_leaves_no_socket(context: zmq.Context[Any], tmp_path: Any) -> None:
    _, secret_file, _ = make_pair(tmp_path / "server")
    (tmp_path / "clients").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.key file"):
        ZmqListener(context, "127.0.0.1:0", str(secret_file), str(tmp_path / "clients"), MOST)
    context.term()  # it would wait for a socket that is open
