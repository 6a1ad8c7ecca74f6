"""How a stream of weights over gRPC that failed is told."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest

from jurybox.client.remote.grpc_channel import CODE
from jurybox.client.remote.grpc_stream import _error
from jurybox.protocol.errors import Busy, Code, Error, Refused, ServerGone

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
