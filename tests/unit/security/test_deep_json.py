"""JSON that nests deeper than Python's parser goes is bad input like any other, at every door and in every answer."""

from __future__ import annotations

import pytest

from jurybox.client.remote.grpc_link import _tell
from jurybox.protocol.control_pb2 import ModelMessage
from jurybox.protocol.errors import Error, ProtocolMismatch, Refused
from jurybox.protocol.weights.channel import decode_extra
from jurybox.protocol.weights.layout import WeightsLayout
from jurybox.server.gateway.dialects.json_dialects import read
from jurybox.server.gateway.inference.tensors import read_json
from jurybox.server.gateway.robots.json_arrays import loads
from jurybox.server.settings.config import model_settings_from_json

DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("parse", "error"),
    [
        (lambda: model_settings_from_json("m", DEEP.decode()), Refused),
        (lambda: read_json(DEEP[:1000] + b"1" + b"]" * 1000), ProtocolMismatch),
        (lambda: read(DEEP), ProtocolMismatch),
        (lambda: loads(DEEP), ProtocolMismatch),
        (lambda: decode_extra(len(DEEP).to_bytes(8, "little") + DEEP), ProtocolMismatch),
        (lambda: WeightsLayout.from_json(DEEP), ProtocolMismatch),
        (lambda: _tell(ModelMessage(name="m"), DEEP.decode()), Refused),
    ],
    ids=["settings of a model", "inference", "dialect", "robot", "extra of weights", "layout of weights", "contract"],
)
def test_json_that_is_nested_too_deep_is_refused(parse, error):
    with pytest.raises(error) as caught:
        parse()
    assert isinstance(caught.value, Error)
    assert len(str(caught.value)) < 1000, "a message of no use to anyone"
