"""What the relay passes on to the server, and what it tells a client whose message it does not pass on."""

# ruff: noqa: F401, F811  the fixtures of another file are arguments here

from __future__ import annotations

import pytest
import zmq
from tests.unit.server.test_relay_messages import MINE, NUMBER, OTHERS, X, record, world

from jurybox.protocol.control_pb2 import (
    ControlReply,
    ControlRequest,
    Done,
    ErrorMessage,
    Hello,
    KeepRequest,
    Lease,
    LeaseRequest,
    LoadRequest,
    ModelMessage,
    StatusRequest,
)
from jurybox.protocol.errors import Code
from jurybox.protocol.wire import BEREFT, MAX_CONTROL, PREFIX
from jurybox.server.relay import relay as module


def failing(*given):
    raise MemoryError("none left")


def test_the_answer_to_a_call_that_could_not_be_handled_has_its_number(world, monkeypatch):
    monkeypatch.setattr(world.relay, "_on_call", failing)
    world.say(PREFIX, NUMBER, b"body")
    world.say(PREFIX)
    numbers = [number for _, prefix, number, _ in world.front.sent if prefix == PREFIX]
    assert numbers == [NUMBER, b""]
    assert [reply.error.code for reply in world.replies()] == [Code.BUSY] * 2


def test_a_message_without_frames_is_answered_with_what_was_expected_and_logged(world):
    world.say()
    ((number, incarnation, code, text),) = world.heads()
    assert (number, incarnation, code) == (0, 0, Code.PROTOCOL_MISMATCH)
    assert "0 bytes came" in text and "expected a Jurybox message" in text
    assert world.logged == [("bad message", {"why": text})]


@pytest.mark.parametrize("whole", [False, True])
def test_a_call_that_is_too_large_is_refused_as_such_whatever_it_says(world, whole):
    body = b"\xff" * (MAX_CONTROL + 1)
    if whole:
        body = ControlRequest(lease=LeaseRequest(model="m" * MAX_CONTROL)).SerializeToString()
    world.say(PREFIX, NUMBER, body)
    (reply,) = world.replies()
    assert (
        reply.error.code == Code.TOO_LARGE and f"at most {MAX_CONTROL} bytes, {len(body)} came" in reply.error.message
    )
    assert world.asked() == []


def test_a_call_that_became_too_large_here_is_refused_and_the_server_gets_no_part_of_it(world):
    """The server would close the connection, and with it the calls of all clients."""
    request = ControlRequest(load=LoadRequest(model="m", settings_json="s"))
    empty = len(request.SerializeToString())
    request.load.settings_json = "s" * (MAX_CONTROL - empty - 3)
    request.load.settings_json += "s" * (MAX_CONTROL - len(request.SerializeToString()))
    body = request.SerializeToString()
    assert len(body) == MAX_CONTROL
    world.say(PREFIX, NUMBER, body)
    (reply,) = world.replies()
    assert reply.error.code == Code.TOO_LARGE and world.asked() == []


def test_every_call_has_a_number_of_eight_bytes_of_the_relays_own(world):
    for _ in range(3):
        world.call(status=StatusRequest())
    numbers = [number for number, _ in world.asked()]
    assert {len(number) for number in numbers} == {8} and len(set(numbers)) == 3
    assert bytes(8) not in numbers and NUMBER not in numbers
    world.answer(numbers[1], done=Done())
    assert [one[:3] for one in world.front.sent] == [[MINE, PREFIX, NUMBER]], "its client's own number"


def test_the_model_of_one_who_is_gone_is_given_up_by_a_call_that_nobody_waits_for(world):
    world.call(keep=KeepRequest(model="kept", keep=60))
    world.asked()
    world.front.gone.add(MINE)
    world.relay.reclaim()
    world.relay.reclaim()
    prefix, number, body = world.server.recv_multipart(zmq.NOBLOCK)
    assert (prefix, number) == (PREFIX, bytes(8))
    assert ControlRequest.FromString(body) == ControlRequest(keep=KeepRequest(model="kept", keep=BEREFT))


def test_a_call_that_the_server_has_no_room_for_is_refused_and_may_be_made_again(world, monkeypatch):
    def full(*given, **more):
        raise zmq.Again

    back = world.relay._back
    monkeypatch.setattr(world.relay, "_back", type("Full", (), {"send_multipart": full, "recv_multipart": full})())
    world.call(status=StatusRequest())
    (reply,) = world.replies()
    assert reply.error.code == Code.BUSY
    assert reply.error.message == "too many calls wait for the server's answer: try again later"
    assert world.logged == [], "its client did nothing bad"
    monkeypatch.setattr(world.relay, "_back", back)
    world.call(status=StatusRequest())
    assert world.replies() == [] and len(world.asked()) == 1


def test_a_hello_that_the_server_refuses_is_answered_with_its_error(world):
    world.call(hello=Hello(client="x"))
    ((number, _),) = world.asked()
    refused = ControlReply(error=ErrorMessage(code=Code.DRAINING, message="later"))
    world.answer(number, error=refused.error)
    assert world.replies() == [refused]


def test_an_answer_for_one_who_is_gone_keeps_no_other_from_its_own(world):
    for sender in (MINE, OTHERS):
        world.call(sender, status=StatusRequest())
    (first, _), (second, _) = world.asked()
    world.front.gone.add(MINE)
    world.answer(first, done=Done())
    world.answer(second, done=Done())
    assert world.replies(OTHERS) == [ControlReply(done=Done())]


def test_the_number_of_an_earlier_call_for_another_model_is_another_call(world):
    world.lease()
    world.call(lease=LeaseRequest(model="another", rows=4))
    ((call, request),) = world.asked()
    assert request.lease.model == "another" and world.replies() == []
    world.answer(call, lease=Lease(model=ModelMessage(name="another", arena_rows=8), lease=78, rows=4))
    (reply,) = world.replies()
    assert reply.lease.model.name == "another" and len(world.link.lanes) == 2


def test_a_lane_that_waits_only_for_its_engine_is_not_looked_at_by_a_timer(world, monkeypatch):
    lease = world.lease()
    later = []
    monkeypatch.setattr(world.loop, "call_later", lambda *given: later.append(given))
    world.say(record(lease.lease), X)
    assert later == []
    world.front.room, world.link.lanes[0].answers = False, True
    world.relay.pump()
    assert [seconds for seconds, _ in later] == [0.01], "there is an answer, and no room for it"
    assert module._SOON == 0.01
