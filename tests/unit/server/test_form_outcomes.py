"""Requests of a known form: what their answers hold, and what is known of the model from how each ended."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.server.test_open_inference import asked, frontend, lane, oip  # noqa: F401  fixtures

from jurybox.protocol.errors import Code, Error, ModelFailed, ProtocolMismatch, Refused, RowFailed
from jurybox.server.gateway.inference.forms import Forms
from jurybox.server.gateway.inference.parameters import of_tensor, request_parameters
from jurybox.server.gateway.inference.tensors import read_json
from jurybox.server.security.limits import OF_REQUEST


class Lane:
    """The coalescer of a lane, which keeps what is put."""

    def __init__(self):
        self.answers, self.overs = [], 0

    def put(self, inputs, n, seconds, version, answer, sessions, client):
        self.answers.append(answer)
        return SimpleNamespace(over=self.over)

    def over(self):
        self.overs += 1


class Peer:
    connection = None

    def __init__(self):
        self.got = []

    def done(self):
        return False

    def reply(self, pieces):
        self.got.append(b"".join(pieces))

    def fail(self, error):
        self.got.append(error)


class Room:
    def __init__(self, most=1000):
        self.held, self.most = 0, most

    def take(self, size):
        if size > self.most:
            raise Refused("no room", Code.BUSY)
        self.held += size

    def give(self):
        self.held = 0


@pytest.fixture
def form(oip, frontend):  # noqa: F811
    frontend.held = lane()
    frontend.held.coalescer = Lane()
    return Forms(oip, lambda _: asked(), lambda *_: [b"head "]).get(b"a")


def test_an_answer_holds_the_bytes_of_its_rows_until_it_is_given(form, frontend):  # noqa: F811
    room, peer, waiting = Room(), Peer(), form.held.coalescer
    request = form.ask({}, None, peer, room)
    assert room.held == 2 * 4 and not request.done() and not frontend.outcomes
    scores = np.array([1, 2], np.float32)
    waiting.answers[0].set_result(({"score": scores}, 7))
    assert peer.got == [b"head " + scores.tobytes()] and room.held == 0 and waiting.overs == 1
    assert request.done() and frontend.outcomes == [(form.held.spec.name, True)]


def test_a_request_without_room_for_its_answer_has_ended_and_says_nothing_of_the_model(form, frontend):  # noqa: F811
    peer = Peer()
    request = form.ask({}, None, peer, Room(7))
    assert request.done() and [error.code for error in peer.got] == [Code.BUSY]
    request.drop()
    assert not form.held.coalescer.answers and not frontend.outcomes


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RowFailed("a row"), [True]),
        (ModelFailed("the model"), [False]),
        (Error("late", Code.TIMEOUT), [False]),
        (Refused("another lane", Code.STALE_LEASE), []),
    ],
)
def test_a_failure_says_whether_the_model_answers_unless_its_lane_was_taken_back(form, frontend, error, outcome):  # noqa: F811
    peer = Peer()
    form.ask({}, None, peer)
    form.held.coalescer.answers[0].set_exception(error)
    assert peer.got == [error] and frontend.outcomes == [(form.held.spec.name, one) for one in outcome]


def test_a_request_that_wants_the_reasons_of_failed_rows_gets_the_others_scores_with_them(oip, frontend):  # noqa: F811
    frontend.held, told, peer = lane(), [], Peer()
    frontend.held.coalescer = Lane()

    def heads(model, version, outputs, sizes, parameters):
        told.append((version, sizes, parameters))
        return [b"head "]

    form = Forms(oip, lambda _: asked(row_errors=True), heads).get(b"a")
    form.ask({}, None, peer)
    scores = np.array([1, 2], np.float32)
    form.held.coalescer.answers[0].set_exception(RowFailed("one of two", None, {1: "broken"}, scores, 9))
    ((version, sizes, parameters),) = told
    assert version == "9" and sizes == [2 * 4] and "broken" in str(parameters)
    (answer,) = peer.got
    assert answer[:5] == b"head " and np.frombuffer(answer[5:], np.float32)[0] == 1
    assert frontend.outcomes == [(form.held.spec.name, True)]


@pytest.mark.parametrize("size", ["x", "1_0", " 1", "+1", "-1", "1.0", "", "9" * 20, None, 1.0, True])
def test_a_size_in_shared_memory_is_a_whole_number_or_its_digits(size):
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": size}
    with pytest.raises(ProtocolMismatch, match=r"shared_memory_byte_size=.*expected a whole number"):
        of_tensor("x", parameters)
    place, _ = of_tensor("x", {**parameters, "shared_memory_byte_size": "010"})
    assert place.size == 10


@pytest.mark.parametrize("timeout", ["x", "1_0", " 1"])
def test_a_time_out_is_a_whole_number_or_its_digits(timeout):
    with pytest.raises(ProtocolMismatch, match="expected a whole number"):
        request_parameters({"timeout": timeout})


def test_what_json_takes_while_it_is_parsed_counts_for_its_request():
    class Held:
        def __init__(self):
            self.taken = []
            self.account, self.budget, self.size = None, SimpleNamespace(each=(1 << 40,)), 0

        def take(self, size, whole=0):
            self.taken.append(size)

    token = OF_REQUEST.set(held := Held())
    try:
        assert read_json(b'{"a": "' + b"x" * (1 << 20) + b'"}')["a"][:1] == "x"
    finally:
        OF_REQUEST.reset(token)
    assert sum(held.taken) >= 1 << 20
