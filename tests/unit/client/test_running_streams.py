"""A stream of weights over gRPC while it runs: what its call is given, how it ends, and who waits for that."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.forking import Child
from tests.serving import wait_until

from jurybox.client.remote import grpc_stream
from jurybox.client.remote.grpc_stream import RemoteStream
from jurybox.client.remote.infer_calls import Failed
from jurybox.protocol.errors import Code, Error, ModelNotFound, Refused, ServerGone, Timeout
from jurybox.protocol.locks import is_serving, mark_serving


class Request:
    """A message that is sent as its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def SerializeToString(self) -> bytes:
        return self.text.encode()


class Gateway:
    """A channel whose call gives a reply for each request that it takes, while it may."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, Any]] = []
        self.taken: list[Any] = []
        self.canceled = 0
        self.takes = threading.Event()
        self.takes.set()
        self.reply: Callable[[Any], Any] = lambda request: reply(request.text)
        self.refuses: BaseException | None = None
        self.before_call: Callable[[], None] = lambda: None

    def stream_stream(self, method: str, serialize: Any, parse: Any) -> Any:
        self.serialize, self.parse = serialize, parse

        def call(requests: Iterator[Any], metadata: Any) -> Any:
            self.opened.append((method, metadata))
            self.before_call()
            if self.refuses is not None:
                raise self.refuses
            self.ended = threading.Event()
            return self.call_of(requests)

        return call

    def call_of(self, requests: Iterator[Any]) -> Any:
        gateway, ended = self, self.ended

        class Call:
            def __iter__(self) -> Iterator[Any]:
                while not ended.is_set():
                    gateway.takes.wait(60)
                    try:
                        request = next(requests)
                    except StopIteration:
                        break
                    gateway.taken.append(request)
                    yield gateway.reply(request)
                raise failed()

            def cancel(self) -> None:
                gateway.canceled += 1
                ended.set()
                gateway.takes.set()

        return Call()


def failed() -> Failed:
    return Failed(grpc_stream.grpc.StatusCode.CANCELLED, "cancelled", ())


def reply(text: str) -> Any:
    return SimpleNamespace(WhichOneof=lambda _: "answer", text=text)


def refusal(code: Code, message: str) -> Any:
    told = SimpleNamespace(code=int(code), message=message)
    return SimpleNamespace(WhichOneof=lambda _: "refusal", refusal=told)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.takes.set()


def opened(gateway: Gateway, timeout: float = 60.0) -> RemoteStream:
    message = SimpleNamespace(FromString=bytes)
    return RemoteStream(gateway, "/a.B/C", message, (("a", "b"),), timeout)  # type: ignore[arg-type]


def test_each_request_is_sent_in_order_and_its_reply_returned(gateway: Gateway) -> None:
    stream = opened(gateway)
    assert not stream.refused
    assert gateway.serialize(Request("x")) == b"x" and gateway.parse is bytes
    for text in ("one", "two", "three"):
        stream.send(Request(text))  # type: ignore[arg-type]
        assert stream.receive().text == text
    assert gateway.opened == [("/a.B/C", (("a", "b"),))] and stream.alive and not gateway.canceled
    stream.close()


def test_four_requests_wait_for_a_gateway_that_takes_none_and_the_next_until_there_is_room(gateway: Gateway) -> None:
    gateway.takes.clear()
    stream = opened(gateway)
    for text in "abcd":
        stream.send(Request(text), time.monotonic())  # type: ignore[arg-type]
    with pytest.raises(Timeout, match="the gateway accepted no request for"):
        stream.send(Request("e"), time.monotonic())  # type: ignore[arg-type]
    sender = threading.Thread(target=stream.send, args=(Request("e"),))
    sender.start()
    gateway.takes.set()
    assert [stream.receive().text for _ in "abcde"] == list("abcde")
    sender.join(60)
    stream.close()


def test_a_reply_is_waited_for_until_the_deadline_and_may_come_later(gateway: Gateway) -> None:
    gateway.takes.clear()
    stream = opened(gateway, 0.01)
    stream.send(Request("late"))  # type: ignore[arg-type]
    for until, told in ((None, "0.0 s"), (time.monotonic() - 5.0, "0.0 s")):
        with pytest.raises(Timeout, match=f"the gateway did not answer for {told}"):
            stream.receive(until)
    gateway.takes.set()
    assert stream.receive(time.monotonic() + 60.0).text == "late"
    stream._timeout = 60.0
    stream.close()


def test_a_refusal_is_raised_and_leaves_the_stream_as_usable_as_before(gateway: Gateway) -> None:
    stream = opened(gateway)
    gateway.reply = lambda _: refusal(Code.MODEL_NOT_FOUND, "no such model")
    stream.send(Request("one"))  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound, match="^no such model$"):
        stream.receive()
    assert stream.refused and stream.alive
    gateway.reply = lambda request: reply(request.text)
    stream.send(Request("two"))  # type: ignore[arg-type]
    assert not stream.refused and stream.receive().text == "two"
    stream.close()


def test_a_refusal_before_the_end_of_a_stream_is_what_the_next_request_is_told(gateway: Gateway) -> None:
    stream = opened(gateway)
    stream._exchange.replies.put(reply("unread"))
    stream._exchange.replies.put(refusal(Code.REFUSED, "another publisher"))
    stream._exchange.end()
    wait_until(lambda: gateway.canceled > 0)
    with pytest.raises(Refused, match="another publisher"):
        stream.send(Request("one"))  # type: ignore[arg-type]
    with pytest.raises(ServerGone, match="broke: cancelled"):
        stream.send(Request("two"))  # type: ignore[arg-type]


def test_who_closes_a_stream_waits_for_its_thread(gateway: Gateway) -> None:
    stream = opened(gateway)
    stream.send(Request("one"))  # type: ignore[arg-type]
    assert stream.receive().text == "one"
    for _ in range(2):
        stream.close()
    assert gateway.canceled == 1 and not stream.alive
    assert stream._exchange.over.acquire(blocking=False), "the thread has released it, and so has who waited"
    with pytest.raises(ServerGone, match="the stream to the gateway broke"):
        stream.receive()


def test_a_thread_that_carries_answers_closes_a_stream_without_a_wait_and_sends_nothing(gateway: Gateway) -> None:
    stream = opened(gateway)
    over, waited = stream._exchange.over, []
    watched: Any = SimpleNamespace(release=over.release, acquire=lambda **_: waited.append(1))
    stream._exchange.over = watched

    def serve() -> None:
        mark_serving()
        for use in (lambda: stream.send(Request("one")), stream.receive):  # type: ignore[arg-type]
            with pytest.raises(Refused, match="no weights can be sent or received here"):
                use()
        stream.close()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(60)
    assert over.acquire(timeout=60) and gateway.canceled == 1
    assert not gateway.taken and not waited


def test_a_stream_that_is_dropped_ends(gateway: Gateway) -> None:
    stream = opened(gateway)
    stream.send(Request("one"))  # type: ignore[arg-type]
    stream.receive()
    exchange = stream._exchange
    del stream
    gc.collect()
    assert exchange.ended and gateway.canceled == 1
    assert exchange.over.acquire(timeout=60)


def test_a_stream_that_was_closed_before_its_call_began_cancels_it(gateway: Gateway) -> None:
    begins = threading.Event()
    gateway.before_call = lambda: begins.wait(60) and None
    stream = opened(gateway, 0.01)
    stream.close()
    assert not gateway.canceled, "there is no call yet"
    begins.set()
    assert stream._exchange.over.acquire(timeout=60)
    assert gateway.canceled == 1


def test_a_channel_that_is_closed_has_no_streams(gateway: Gateway) -> None:
    gateway.refuses = ValueError("Cannot invoke RPC on closed channel!")
    stream = opened(gateway)
    for _ in range(2):
        with pytest.raises(Refused, match="this connection was closed: connect again .Cannot invoke") as told:
            stream.receive()
        assert told.value.code == Code.NOT_READY
    stream.close()


def test_a_call_whose_replies_cannot_be_decoded_is_cancelled(gateway: Gateway) -> None:
    def wrong(_: Any) -> Any:
        raise ValueError("no such tag")

    gateway.reply = wrong
    stream = opened(gateway)
    stream.send(Request("one"))  # type: ignore[arg-type]
    with pytest.raises(Error, match="the gateway's reply cannot be decoded: no such tag") as told:
        stream.receive()
    assert told.value.code == Code.MALFORMED
    assert stream._exchange.over.acquire(timeout=60)
    assert gateway.canceled == 1 and not stream.alive


def test_a_stream_stays_open_while_nothing_is_sent(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream, "_SLICE", 0.001)
    gateway.takes.clear()
    stream = opened(gateway)
    requests, looks = stream._exchange.requests, []
    get = requests.get
    monkeypatch.setattr(requests, "get", lambda **more: looks.append(1) or get(**more))
    gateway.takes.set()
    wait_until(lambda: len(looks) > 2 or not stream.alive, 60.0, "a look for a request after others")
    stream.send(Request("one"))  # type: ignore[arg-type]
    assert stream.receive().text == "one"
    stream.close()


def test_a_destructor_in_a_streams_thread_must_not_wait_for_an_answer(gateway: Gateway) -> None:
    stream = opened(gateway)
    gateway.reply = lambda _: reply(str(is_serving()))
    stream.send(Request("one"))  # type: ignore[arg-type]
    assert stream.receive().text == "True" and not is_serving()
    stream.close()


def test_a_forked_child_leaves_its_parents_stream_to_the_parent(gateway: Gateway) -> None:
    stream = opened(gateway)
    stream.send(Request("one"))  # type: ignore[arg-type]
    stream.receive()

    def child() -> tuple[int, bool]:
        nonlocal stream
        with pytest.raises(Refused, match="opened before a fork"):
            stream.send(Request("two"))  # type: ignore[arg-type]
        exchange = stream._exchange
        stream.close()
        del stream
        gc.collect()
        return gateway.canceled, exchange.ended

    assert Child(child).result() == (0, False)
    stream.send(Request("two"))  # type: ignore[arg-type]
    assert stream.receive().text == "two"
    stream.close()
