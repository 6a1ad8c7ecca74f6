"""The relay's socket over libzmq: when it has news, and how many bytes may be unread in all."""

# ruff: noqa: F401, F811  the fixtures of another file are arguments here

from __future__ import annotations

import select
from typing import Any

import pytest
import zmq
from tests.serving import wait_until
from tests.unit.server.test_relay_room import joined as connected
from tests.unit.server.test_zmq_listener import MOST, client, context, front, joined, next_of, unsent

from jurybox.server.relay.zmq_listener import ZmqListener


def arrived(front: ZmqListener) -> None:
    """Wait until a message is there, without a look of the listener's own."""
    wait_until(lambda: front.socket.poll(1), 20)


def test_a_message_is_news_before_anything_was_received_and_until_it_is(
    context: zmq.Context[Any], front: ZmqListener
) -> None:
    made = joined(context, front)
    made.send(b"hello")
    arrived(front)
    assert front.has_news()
    assert front.has_news(), "however often one asks"
    assert front.receive(len) == [b"client", b"hello"]
    assert not front.has_news()


def test_a_message_that_came_after_the_last_look_is_news_once_something_was_sent(
    front: ZmqListener, client: Any
) -> None:
    """Sending uses up what the descriptor says of it."""
    assert not front.has_news()
    client.send(b"one")
    arrived(front)
    front.send([b"client", b"answer"])
    assert front.has_news() and front.receive(len) == [b"client", b"one"]


def test_its_descriptor_tells_of_messages_that_arrive(front: ZmqListener, client: Any) -> None:
    assert front.receive(len) is None and not front.has_news()
    poll = select.poll()
    poll.register(front.fileno(), select.POLLIN)
    client.send(b"one")
    assert poll.poll(20_000)
    assert next_of(front) == [b"client", b"one"]


def test_all_clients_together_may_leave_eight_messages_bytes_unread_and_no_more(
    front: ZmqListener, unsent: list[Any]
) -> None:
    for name, size in [(b"a", MOST // 2), *[(b"%d" % number, MOST) for number in range(7)]]:
        assert front.send([name, bytes(size - 1)])
    assert front.has_room(b"a", MOST // 2) and not front.has_room(b"a", MOST // 2 + 1)
    assert front.send([b"b", bytes(MOST // 4 - 1)]) and len(unsent) == 9
    assert front.has_room(b"a", MOST // 4) and not front.has_room(b"a", MOST // 4 + 1)


def test_nothing_is_remembered_of_a_client_that_has_read_everything(front: ZmqListener, unsent: list[Any]) -> None:
    for number in range(3):
        assert front.send([b"%d" % number, bytes(5000)])
    assert front.unsent
    unsent[0].done = True
    assert front.held()["answers"]["bytes"] == 2 * (5000 + 1)
    for one in unsent:
        one.done = True
    assert not front.unsent
    assert front._unsent == front._unsent_to == {}


def test_what_a_client_has_not_read_yet_is_sent_for_a_moment_after_the_end(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jurybox.server.relay.zmq_listener._LINGER_MS", 20_000)
    size = 32 << 20  # more than the kernel takes
    ending = ZmqListener(context, "127.0.0.1:0", None, None, size)
    try:
        with connected(ending, b"slow") as client:
            wait_until(lambda: ending.is_there(b"slow"), 20)
            assert ending.send([b"slow", bytes(size)]) and ending.unsent
            ending.close()
            received = 0
            while received < size and (part := client.recv(1 << 20)):
                received += len(part)
            assert received >= size
    finally:
        ending.close()
