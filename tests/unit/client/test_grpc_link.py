"""What a client asks of a gateway that changes nothing is asked again while there is time."""

from __future__ import annotations

import time

import grpc
import pytest

from jurybox.client import ServerGone
from jurybox.client.remote.grpc_link import GrpcLink


class Failure(grpc.RpcError):
    def __init__(self, code):
        self._code = code

    def code(self):
        return self._code

    def details(self):
        return "the server did not answer within 1.0 s"

    def trailing_metadata(self):
        return ()

    initial_metadata = trailing_metadata


class Channels:
    """Fails so often, then answers."""

    def __init__(self, times, code=grpc.StatusCode.DEADLINE_EXCEEDED):
        self.times, self.code, self.timeouts = times, code, []

    def call(self, method, request, timeout):
        self.timeouts.append(timeout)
        if len(self.timeouts) <= self.times:
            raise Failure(self.code)
        return "told"


def link(channels):
    made = GrpcLink.__new__(GrpcLink)
    made._address, made._channels = "grpc://127.0.0.1:1", channels
    return made


def test_a_gateway_that_got_no_answer_itself_is_asked_again():
    channels = Channels(2)
    assert link(channels)._told("ModelMetadata", None, 30.0) == "told"
    assert len(channels.timeouts) == 3 and channels.timeouts == sorted(channels.timeouts, reverse=True)


def test_it_is_gone_when_the_time_is_over_and_at_once_if_it_cannot_be_reached():
    began = time.monotonic()
    with pytest.raises(ServerGone, match=r"within 0\.2 s"):
        link(Channels(10**6))._told("ModelMetadata", None, 0.2)
    assert time.monotonic() - began > 0.1
    channels = Channels(1, grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(ServerGone):
        link(channels)._told("ModelMetadata", None, 30.0)
    assert len(channels.timeouts) == 1


def test_what_changes_something_is_asked_once():
    channels = Channels(1)
    with pytest.raises(ServerGone):
        link(channels)._call("RepositoryModelUnload", None, 30.0)
    assert len(channels.timeouts) == 1
