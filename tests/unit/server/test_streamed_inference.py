"""Requests in a gRPC stream and of known forms, and regions as HTTP shows them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jurybox import native
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.errors import Busy, Code, Refused
from jurybox.server.gateway.inference.grpc_inference import (
    InferenceServicer,
    KnownForms,
    _GrpcResponder,
    _written_heads,
)
from jurybox.server.gateway.inference.http_inference import _region
from jurybox.server.gateway.inference.requests import Output
from jurybox.server.gateway.inference.shared_memory import Region
from jurybox.server.security.doors import Doors
from jurybox.server.security.limits import GRPC, RECEIVED

MIB = 1 << 20


class Oip:
    """What answers a request of a stream, which always fails."""

    def __init__(self, error):
        self.error, self.lost, self.held = error, [], []
        self.sequences = SimpleNamespace(lose=lambda *given: self.lost.append(given))

    async def infer(self, request):
        self.held.append(self.budget.held(RECEIVED))
        raise self.error


@pytest.mark.parametrize("error", [Busy("not now"), RuntimeError("a fault")])
async def test_the_error_of_a_streamed_request_names_its_model_and_gives_back_what_it_held(error):
    oip = Oip(error)
    oip.budget = native.Budget((MIB, MIB, 9), (MIB, MIB, 9))
    request = pb.ModelInferRequest(model_name="m", id="an id")
    account = native.Account(oip.budget, GRPC)
    answer = await InferenceServicer(oip, oip.budget, Doors())._streamed(request, account)
    assert answer.error_message in ("not now", "RuntimeError: a fault", "a fault")
    assert (answer.infer_response.model_name, answer.infer_response.id) == ("m", "an id")
    assert oip.held == [request.ByteSize()] and oip.budget.held(RECEIVED) == 0 and not oip.lost


class Call:
    """A gRPC call, which notes how it ended."""

    connection = None

    def __init__(self):
        self.ends = []

    def done(self):
        return bool(self.ends)

    def reply(self, message):
        self.ends.append(message)

    def fail(self, error):
        self.ends.append(error)

    def as_usual(self):
        self.ends.append("as usual")


@pytest.mark.parametrize("ident", [b"", b"an id"])
def test_an_answer_of_a_form_has_the_name_of_its_request(ident):
    call, outputs = Call(), [Output("y", "FP32", (1, 2), None), Output("z", "UINT8", (1, 3), None)]
    heads = _written_heads("m", "3", outputs, [8, 3], {"row_errors": "{}"})
    _GrpcResponder(call, ident).reply([heads[0], b"8 bytes.", heads[1], b"123"])
    answer = pb.ModelInferResponse.FromString(call.ends[0])
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "3", ident.decode())
    assert [(one.name, one.datatype, list(one.shape)) for one in answer.outputs] == [
        ("y", "FP32", [1, 2]), ("z", "UINT8", [1, 3]),
    ]  # fmt: skip
    assert list(answer.raw_output_contents) == [b"8 bytes.", b"123"]
    assert answer.parameters["row_errors"].string_param == "{}"


def test_a_form_that_is_stale_leaves_its_request_to_the_ordinary_path_and_tells_other_errors():
    stale, busy = Refused("another lane", Code.STALE_LEASE), Busy("not now")
    for error, end in ((stale, "as usual"), (busy, busy)):
        responder = _GrpcResponder(call := Call(), b"")
        assert not responder.done()
        responder.fail(error)
        assert call.ends == [end] and responder.done()


def test_a_region_is_shown_with_its_place():
    assert _region(Region("r", 64, "/key", 8, 3)) == {"name": "r", "key": "/key", "offset": 8, "byte_size": 64}


@pytest.mark.parametrize(
    ("cut", "has_form", "rows", "answers"),
    [
        ((b"head", b"an id", [(4, 4)]), True, {"x": 1}, True),
        (None, True, {"x": 1}, False),
        ((b"head", b"an id", [(4, 4)]), False, {"x": 1}, False),
        ((b"head", b"an id", [(4, 3)]), True, None, False),
    ],
    ids=["it has one", "no request", "no form", "another size"],
)
def test_a_request_that_has_no_form_is_left_to_the_ordinary_path(monkeypatch, cut, has_form, rows, answers):
    asked, considered = [], []

    def ask(inputs, seconds, responder, room):
        asked.append((inputs, seconds, responder._ident, room))
        return SimpleNamespace(drop="drop")

    form = SimpleNamespace(rows=lambda message, raw: rows, ask=ask) if has_form else None
    frontend = SimpleNamespace(lanes=None, record_outcome=None)
    forms = KnownForms(SimpleNamespace(frontend=frontend))
    forms._forms = SimpleNamespace(get=lambda head: form)
    forms.lanes = SimpleNamespace(consider=lambda *given: considered.append(given))
    monkeypatch.setattr(native, "cut_infer_request", lambda message: cut)
    call = Call()
    call.time_remaining, call.room, call.on_gone = lambda: 3.0, lambda: "room", None
    assert forms(b"message", call) == answers
    assert asked == [({"x": 1}, 3.0, b"an id", "room")] * answers and considered == [(b"head", form)] * answers
    assert call.on_gone == ("drop" if answers else None)
