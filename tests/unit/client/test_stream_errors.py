"""A stream of weights over gRPC: what waits in line, and how its failure is told."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace

import grpc
import pytest

from jurybox.client.remote.grpc_channel import CODE
from jurybox.client.remote.grpc_stream import RemoteStream, _error
from jurybox.protocol.errors import Busy, Code, Error, Refused, ServerGone, Timeout

STATUS = grpc.StatusCode


def told(status, trailing=()):
    return _error(SimpleNamespace(code=lambda: status, details=lambda: "why", trailing_metadata=lambda: trailing))


@pytest.mark.parametrize(
    ("status", "kind", "code", "said"),
    [
        (STATUS.UNAUTHENTICATED, Refused, Code.UNAUTHENTICATED, "the gateway refused: why"),
        (STATUS.PERMISSION_DENIED, Refused, Code.REFUSED, "the gateway refused: why"),
        (STATUS.RESOURCE_EXHAUSTED, Refused, Code.TOO_LARGE, "the gateway refused: why"),
        (STATUS.UNAVAILABLE, ServerGone, Code.SERVER_GONE, "the stream to the gateway broke: why"),
        (STATUS.CANCELLED, ServerGone, Code.SERVER_GONE, "the stream to the gateway broke: why"),
        (STATUS.INTERNAL, Error, None, "the gateway failed: INTERNAL: why"),
    ],
)
def test_a_status_has_the_error_that_says_what_may_help(status, kind, code, said):
    for trailing in ((), None, ((CODE, "nonsense"), ("other", str(int(Code.BUSY))))):
        error = told(status, trailing)
        assert type(error) is kind and str(error) == said and code in (None, error.code)


@pytest.mark.parametrize("status", [STATUS.RESOURCE_EXHAUSTED, STATUS.UNAVAILABLE])
def test_a_server_that_is_busy_is_asked_again_whatever_the_status(status):
    error = told(status, (("other", "1"), (CODE, str(int(Code.BUSY)))))
    assert type(error) is Busy and str(error) == "the gateway refused: why"


@pytest.fixture
def stream():
    """A stream of which nobody sends what it is given."""
    stream = RemoteStream.__new__(RemoteStream)
    stream._timeout, stream._forked, stream.refused = 30.0, False, True
    stream._exchange = SimpleNamespace(ended=False, requests=queue.Queue(2), replies=queue.SimpleQueue())
    return stream


def test_requests_wait_in_line_up_to_a_few_and_then_until_the_time_out(stream):
    stream.send("first")
    stream.send("second")
    assert not stream.refused
    for until in (time.monotonic() - 1.0, time.monotonic() + 0.15):
        with pytest.raises(Timeout, match="the gateway accepted no request for"):
            stream.send("third", until)
    stream._exchange.requests.get()
    stream.send("third")
    assert [stream._exchange.requests.get() for _ in range(2)] == ["second", "third"]


def test_a_request_on_a_stream_that_has_ended_is_told_why_and_so_is_each_later_one(stream):
    stream._exchange.ended = True
    stream._exchange.replies.put(ServerGone("the gateway ended the stream"))
    for _ in range(2):
        with pytest.raises(ServerGone, match="the gateway ended the stream"):
            stream.send("first")
    with pytest.raises(ServerGone):
        stream.receive()
    assert stream._exchange.requests.empty() and not stream.alive


def test_a_stream_of_the_parent_is_refused_in_a_forked_child(stream):
    stream._forked = True
    for ask in (lambda: stream.send("first"), stream.receive):
        with pytest.raises(Refused, match="opened before a fork"):
            ask()
    stream.close()
