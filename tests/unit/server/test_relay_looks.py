"""What the relay does every now and then, and at its end: for its clients, its engines and its log."""

# ruff: noqa: F401, F811  the fixtures of another file are arguments here

from __future__ import annotations

import os

import pytest
from tests.clocks import Clock
from tests.unit.server.test_relay_messages import MINE, OTHERS, X, record, world

from jurybox.protocol.control_pb2 import ControlReply, Done, KeepRequest, LoadRequest, StatusRequest
from jurybox.protocol.errors import Code
from jurybox.server.logs import LogLimiter


def counted(monkeypatch, owner, name):
    """Count the calls of a method from now on, in the list that is returned."""
    calls, method = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append(given) or method(*given))
    return calls


def held_of(world):
    return list(world.relay._lanes.values())


def test_answers_are_sent_when_an_engine_tells_of_them(world):
    lease = world.lease()
    world.say(record(lease.lease), X)
    world.turns(3)
    world.link.lanes[0].answers = True
    os.eventfd_write(world.relay._words.descriptor, 1)
    world.turns(until=lambda: world.front.sent)
    assert world.heads() == [(5, 9, Code.OK, "")]
    with pytest.raises(BlockingIOError):
        os.eventfd_read(world.relay._words.descriptor)


def test_engines_are_looked_after_for_lanes_that_wait_for_them(world, monkeypatch):
    leases = [world.lease(), world.lease(OTHERS)]
    looks = [counted(monkeypatch, held, "look_after") for held in held_of(world)]
    world.relay.look_after()
    assert looks == [[], []]
    world.say(record(leases[0].lease), X)
    world.relay.look_after()
    assert looks == [[()], []]
    assert world.heads() == []


@pytest.mark.parametrize("look", ["look_after", "reclaim"])
def test_messages_of_which_no_descriptor_tells_are_read_soon_after_a_look(world, look):
    """A look may send something, which uses up what a socket's descriptor says of both directions."""
    world.turns(3)
    world.front.came.append([MINE, b"what is this"])
    getattr(world.relay, look)()
    assert world.front.came
    world.turns(until=lambda: not world.front.came)
    assert [code for _, _, code, _ in world.heads()] == [Code.PROTOCOL_MISMATCH]


@pytest.mark.parametrize(
    "request_of", [{"keep": KeepRequest(model="kept", keep=60)}, {"load": LoadRequest(model="kept", keep=60)}]
)
def test_one_who_has_no_lane_gives_up_the_models_that_it_kept_when_it_is_gone(world, request_of):
    world.call(**request_of)
    assert len(world.asked()) == 1
    world.front.gone.add(MINE)
    world.relay.reclaim()
    assert world.asked() == []
    world.relay.reclaim()
    assert [request.keep.model for _, request in world.asked()] == ["kept"]
    assert world.logged == [], "it had no rows"


def test_one_who_kept_no_model_gives_up_its_lane_when_it_is_gone(world):
    world.lease()
    world.front.gone.add(MINE)
    world.relay.reclaim()
    world.relay.reclaim()
    assert world.link.lanes[0].closed == 1 and world.asked() == []


def test_sent_answers_are_forgotten_at_each_look_at_the_clients(world, monkeypatch):
    looks = counted(monkeypatch, world.front, "forget_sent")
    world.relay.reclaim()
    world.relay.reclaim()
    assert len(looks) == 2


def test_bad_messages_are_logged_once_a_second_with_how_many_there_were(world):
    clock, logged = Clock(), []
    world.relay._limited = LogLimiter(
        lambda event, **more: logged.append((event, more.get("times", 1))), clock.monotonic
    )
    for _ in range(4):
        world.say(b"what is this")
    assert logged == [("bad message", 1)]
    world.relay.reclaim()
    assert len(logged) == 1
    clock.now += 1.5
    world.relay.reclaim()
    assert logged[1:] == [("bad message", 3)]


def test_lanes_take_no_more_tickets_by_themselves_while_the_relay_drains(world, monkeypatch):
    world.lease()
    world.lease(OTHERS)
    stops = [counted(monkeypatch, held, "take_no_more") for held in held_of(world)]
    drained = []
    world.relay.drain(lambda: drained.append(1))
    assert stops == [[()], [()]] and drained == [1]


def test_whether_all_is_answered_is_looked_at_until_the_relay_ends(world):
    lease = world.lease()
    world.say(record(lease.lease), X)
    drained = []
    world.relay.drain(lambda: drained.append(1))
    world.turns(10)
    world.relay.end()
    world.link.lanes[0].answers = True
    list(held_of(world)[0].answers())
    world.turns(20)
    assert drained == []


def test_the_event_loop_does_not_look_at_a_relay_that_has_ended(world):
    descriptors = world.relay._descriptors
    world.relay.end()
    assert [world.loop.remove_reader(descriptor) for descriptor in descriptors] == [False] * 3


def test_a_call_that_was_answered_leaves_nothing_behind(world):
    for _ in range(3):
        world.call(status=StatusRequest())
        ((number, _),) = world.asked()
        world.answer(number, done=Done())
    assert world.replies() == [ControlReply(done=Done())] * 3
    assert not world.relay._calls and not +world.relay._calls_of
