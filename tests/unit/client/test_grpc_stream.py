"""A stream of weights that ends: what its caller is told, by how gRPC ended it."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from jurybox.client.remote.grpc_channel import CODE
from jurybox.client.remote.grpc_stream import RemoteStream
from jurybox.client.remote.infer_calls import Failed
from jurybox.protocol.errors import Busy, Code, Error, Refused, ServerGone


def stream(outcome):
    """A stream whose call gives replies, or ends with the error among them."""

    def call(requests, metadata):
        def replies():
            for each in outcome:
                if isinstance(each, BaseException):
                    raise each
                yield each

        class Call:
            def __iter__(self):
                return replies()

            def cancel(self):
                pass

        return Call()

    channel = SimpleNamespace(stream_stream=lambda *_: call)
    return RemoteStream(channel, "/a.B/C", SimpleNamespace(FromString=bytes), (), timeout=20.0)


def failed(status, trailing=()):
    return Failed(getattr(grpc.StatusCode, status), "so it said", trailing)


BUSY = ((CODE, str(int(Code.BUSY))),)


@pytest.mark.parametrize(
    ("error", "kind", "code", "said"),
    [
        (failed("RESOURCE_EXHAUSTED", BUSY), Busy, Code.BUSY, "the gateway refused: so it said"),
        (failed("UNAUTHENTICATED"), Refused, Code.UNAUTHENTICATED, "the gateway refused: so it said"),
        (failed("PERMISSION_DENIED"), Refused, Code.REFUSED, "the gateway refused: so it said"),
        (failed("RESOURCE_EXHAUSTED"), Refused, Code.TOO_LARGE, "the gateway refused: so it said"),
        (failed("UNAVAILABLE"), ServerGone, ServerGone("").code, "the stream to the gateway broke: so it said"),
        (failed("CANCELLED"), ServerGone, ServerGone("").code, "the stream to the gateway broke: so it said"),
        (failed("INTERNAL"), Error, Error("").code, "the gateway failed: INTERNAL: so it said"),
        (ValueError("no such tag"), Error, Code.MALFORMED, "the gateway's reply cannot be decoded: no such tag"),
    ],
)
def test_how_a_stream_was_ended_is_told_again_and_again_after_what_came_before(error, kind, code, said) -> None:
    came = SimpleNamespace(WhichOneof=lambda _: "answer")
    opened = stream([came, error])
    assert opened.receive() is came
    for ask in (opened.receive, opened.receive, lambda: opened.send(object())):
        with pytest.raises(Error) as told:
            ask()
        assert (type(told.value), told.value.code, str(told.value)) == (kind, code, said)
    assert not opened.alive and not opened.refused
    opened.close()


def test_a_stream_that_the_gateway_ends_without_an_error_is_over() -> None:
    with pytest.raises(ServerGone, match="the gateway ended the stream"):
        stream([]).receive()
