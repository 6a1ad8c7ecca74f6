"""The service of weights as a port has it: its methods, and the doors that end its streams."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jurybox.protocol import remote_weights_pb2 as pb
from jurybox.protocol.errors import Refused
from jurybox.protocol.weights.transfer import PUBLISH, READ
from jurybox.server.gateway.remote_weights import service
from jurybox.server.security.doors import Doors


def methods(of):
    """The methods of a service, as a server of gRPC looks them up by their paths."""
    added = []
    of.add(of.servicer, SimpleNamespace(add_generic_rpc_handlers=added.extend))
    (handler,) = added
    return {path: handler.service(SimpleNamespace(method=path)) for path in (PUBLISH, READ, "/jurybox.Other/Read")}


async def nothing():
    return
    yield


def test_the_service_has_two_streams_under_the_paths_that_clients_call():
    found = methods(service("ipc:///nowhere"))
    assert found["/jurybox.Other/Read"] is None
    for path, request, reply in (
        (PUBLISH, pb.PublishRequest(end=pb.EndPublication(bytes=3)), pb.PublishReply(published=7)),
        (READ, pb.ReadRequest(model="m"), pb.ReadReply(head=pb.WeightsHead(newest=7))),
    ):
        assert found[path].request_streaming and found[path].response_streaming
        assert found[path].request_deserializer(request.SerializeToString()) == request
        assert type(reply).FromString(found[path].response_serializer(reply)) == reply
    assert found[READ].response_serializer(b"a piece") == b"a piece", "pieces are serialized once for all readers"


@pytest.mark.parametrize("path", [PUBLISH, READ])
async def test_a_stream_ends_with_a_refusal_when_the_doors_of_its_process_have_closed(path):
    doors = Doors()
    method = methods(service("ipc:///nowhere", doors))[path].stream_stream
    assert [reply async for reply in method(nothing(), None)] == []
    doors.close()
    with pytest.raises(Refused):
        async for _ in method(nothing(), None):
            pass
