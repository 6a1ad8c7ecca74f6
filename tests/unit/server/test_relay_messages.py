"""What the relay answers to each message of a client, and what it keeps of a client that is gone."""

from __future__ import annotations

import asyncio
import os
from collections import deque

import numpy as np
import pytest
import zmq

from jurybox.client.in_flight import Answer
from jurybox.protocol.arena import Columns
from jurybox.protocol.control_pb2 import (
    ControlReply,
    ControlRequest,
    Done,
    Hello,
    KeepRequest,
    Lease,
    LeaseRequest,
    LoadRequest,
    ModelMessage,
    ReleaseRequest,
    ServerMessage,
    StatusRequest,
)
from jurybox.protocol.errors import Code
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.protocol.wire import BEREFT, PACK_REPLY, PACK_TICKET, PREFIX
from jurybox.server.relay import relay as module
from jurybox.server.relay.relay import Relay
from jurybox.server.relay.zmtp_listener import ZmtpListener
from jurybox.server.security.limits import no_room

ONE = TensorSpec("float32", (1,))
MINE, OTHERS = b"Rmine", b"Rothers"
NUMBER = b"12345678"


class Front:
    """Clients that have sent `came` and read what is in `sent`."""

    def __init__(self):
        self.came, self.sent, self.gone = deque(), [], set()
        self.room, self.unsent = True, False
        self._descriptor = os.eventfd(0)

    def fileno(self):
        return self._descriptor

    def receive(self, sizes):
        return self.came.popleft() if self.came else None

    def send(self, frames):
        if frames[0] in self.gone:
            return False
        self.sent.append([bytes(frame) for frame in frames])
        return True

    def has_news(self):
        return bool(self.came)

    def has_room(self, client, size):
        return self.room

    def is_there(self, client):
        return client not in self.gone

    def forget_sent(self):
        pass


class Lane:
    """A lane whose tickets are answered when `answers` is set."""

    def __init__(self, rows):
        self.columns = Columns.here(ModelSpec("m", {"x": ONE}, {"y": ONE}), 8)
        self.rows, self.transport, self.answers, self.closed, self.sent = rows, None, False, 0, []

    def submit(self, first, rows, deadline, version, owner=None):
        self.sent.append(Sent(first, rows))
        return self.sent[-1]

    def receive_now(self):
        for sent in self.sent if self.answers else ():
            sent.answer = Answer(0, Code.OK, "", 1, 1)

    def receive(self, timeout):
        self.receive_now()

    def watch(self, loop, arrived):
        pass

    def close(self):
        self.closed += 1


class Sent:
    def __init__(self, first, rows):
        self.first, self.rows, self.answer = first, rows, None


class Link:
    """The relay's own connection to the server; `full` if another client has the lane."""

    def __init__(self):
        self.lanes, self.full = [], False

    def enter(self, lease):
        if self.full:
            return None
        self.lanes.append(Lane(lease.rows))
        return self.lanes[-1]


class World:
    """A relay between made-up clients and a made-up server."""

    def __init__(self, share=1.0, front=None):
        self.loop, self.context = asyncio.new_event_loop(), zmq.Context()
        self.front, self.link, self.logged = front or Front(), Link(), []
        self.server = self.context.socket(zmq.PAIR)
        self.server.bind("inproc://server")
        back = self.context.socket(zmq.PAIR)
        back.connect("inproc://server")

        async def made():
            return Relay(self.front, back, self.link, lambda event, **more: self.logged.append((event, more)), share)

        self.relay = self.loop.run_until_complete(made())

    def close(self):
        self.relay.end()
        self.context.destroy(linger=0)
        self.loop.close()

    def say(self, *frames, sender=MINE):
        self.front.came.append([sender, *frames])
        self.relay.pump()

    def call(self, sender=MINE, number=NUMBER, **request):
        self.say(PREFIX, number, ControlRequest(**request).SerializeToString(), sender=sender)

    def turns(self, most=6000, until=lambda: False):
        """Let the event loop turn, until a condition holds."""
        for _ in range(most):
            if until():
                break
            self.loop.run_until_complete(asyncio.sleep(0.001))

    def asked(self):
        """The calls that have reached the server: their numbers and requests."""
        found = []
        while self.server.poll(0):
            _, number, body = self.server.recv_multipart()
            found.append((number, ControlRequest.FromString(body)))
        return found

    def answer(self, number, **reply):
        self.server.send_multipart((PREFIX, number, ControlReply(**reply).SerializeToString()))
        self.relay.pump()

    def replies(self, sender=MINE):
        """What a client has got for its calls since the last look."""
        here = [one for one in self.front.sent if one[0] == sender]
        self.front.sent = [one for one in self.front.sent if one[0] != sender]
        return [ControlReply.FromString(one[3]) for one in here if one[1] == PREFIX]

    def heads(self, sender=MINE):
        """What a client has got for its tickets: number, incarnation, code and text of each."""
        heads = [one[1] for one in self.front.sent if one[0] == sender]
        self.front.sent.clear()
        at = len(PREFIX) + PACK_REPLY.size
        found = [(PACK_REPLY.unpack(head[len(PREFIX) : at]), head[at:].decode()) for head in heads]
        return [(number, incarnation, code, text) for (number, _, incarnation, code), text in found]

    def lease(self, sender=MINE, rows=4, number=NUMBER, **model):
        """Lease a lane; return the lease that the client got."""
        self.call(sender, number, lease=LeaseRequest(model="m", rows=rows))
        ((call, _),) = self.asked()
        found = ModelMessage(**{"name": "m", "arena": "segment", "arena_rows": 8, **model})
        self.answer(call, lease=Lease(model=found, lane=3, lease=77, first_row=2, rows=rows, priority=1))
        (reply,) = self.replies(sender)
        return reply.lease if reply.HasField("lease") else reply.error


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def record(lease, sequence=5, first=0, rows=1, incarnation=9):
    return PREFIX + PACK_TICKET.pack(sequence, lease, 10**10, 0, 0, first, rows, 0, 0, incarnation)


X = np.ones(1, np.float32).tobytes()


def test_a_message_without_room_is_answered_as_its_ticket_or_as_none(monkeypatch):
    front = ZmtpListener("127.0.0.1:0", 1 << 20)
    sent = []
    monkeypatch.setattr(front, "send", lambda frames: sent.append(frames) or True)
    world = World(front=front)
    try:
        for first in (record(77, sequence=5, incarnation=9), b"", b"XX" + record(77)[2:], record(77)[:-1]):
            front.refused(MINE, first, no_room(100))
    finally:
        world.close()
        front.close()
    at = len(PREFIX) + PACK_REPLY.size
    heads = [PACK_REPLY.unpack(head[len(PREFIX) : at]) for _, head in sent]
    assert heads == [(5, 0, 9, Code.BUSY), *[(0, 0, 0, Code.BUSY)] * 3]
    assert all(sender == MINE and b"no room for this message" in head for sender, head in sent)


@pytest.mark.parametrize(
    ("first", "code", "says"),
    [
        (b"J\x63" + record(1)[2:], Code.PROTOCOL_MISMATCH, "protocol version 99 came"),
        (b"GET / HTTP/1.1", Code.PROTOCOL_MISMATCH, "expected a Jurybox message"),
        (record(1)[:-1], Code.MALFORMED, "65 bytes came first: expected a ticket of 66 bytes"),
    ],
)
def test_a_message_that_is_neither_ticket_nor_call_is_answered_with_what_was_expected(world, first, code, says):
    world.say(first)
    ((number, incarnation, came, text),) = world.heads()
    assert (number, incarnation, came) == (0, 0, code)
    assert says in text


def test_a_message_without_frames_and_one_that_fails_stop_no_other(world, monkeypatch):
    world.front.came += [[MINE], [MINE, record(5)], [MINE, record(6, sequence=6)]]
    monkeypatch.setattr(module, "head", lambda ticket, *_: 1 / 0 if ticket.sequence == 5 else b"head of 6")
    world.relay.pump()
    assert world.front.sent[-1] == [MINE, b"head of 6"]


def test_who_sent_a_message_that_could_not_be_handled_is_told_at_once_and_may_send_it_again(world, monkeypatch):
    """Memory or threads may be short for a moment; without an answer its sender waits for its whole time-out."""
    lease = world.lease()
    lane, submit = world.link.lanes[0], world.link.lanes[0].submit
    lane.in_flight, lane.answers = {}, True

    def fail(*given):
        raise RuntimeError("can't start new thread")

    lane.submit = fail
    world.say(record(lease.lease), X)
    ((number, incarnation, code, text),) = world.heads()
    assert (number, incarnation, code) == (5, 9, Code.BUSY)
    assert text == "the relay could not handle a message: RuntimeError: can't start new thread; ask again later"
    assert [event for event, _ in world.logged] == ["bad message"]
    lane.submit = submit
    world.say(record(lease.lease), X)
    assert world.heads() == [(5, 9, Code.OK, "")], "its rows are free"
    with monkeypatch.context() as patch:
        patch.setattr(world.relay, "_carry_out", fail)
        world.call(lease=LeaseRequest(model="m", rows=1))
    (reply,) = world.replies()
    assert reply.error.code == Code.BUSY and "can't start new thread; ask again later" in reply.error.message


def test_a_ticket_that_its_lane_has_is_answered_though_sending_it_failed(world):
    lease = world.lease()
    lane = world.link.lanes[0]
    lane.in_flight = {}

    def fail(first, rows, *more):
        lane.in_flight[1] = Sent(first, rows)
        raise MemoryError

    lane.submit = fail
    world.say(record(lease.lease), X)
    assert not world.heads()
    world.say(record(lease.lease, sequence=6), X)
    ((_, _, code, text),) = world.heads()
    assert code == Code.BUSY and "some of these rows belong to a ticket that is not answered yet" in text
    lane.sent, lane.answers = list(lane.in_flight.values()), True
    world.relay.pump()
    assert world.heads() == [(5, 9, Code.OK, "")]


@pytest.mark.parametrize("where", ["enter", "watch"])
def test_a_lane_that_the_relay_cannot_hold_is_given_back_and_its_client_told(world, monkeypatch, where):
    def fail(*given):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(*((world.link, "enter") if where == "enter" else (Lane, "watch")), fail)
        error = world.lease()
    assert error.code == Code.BUSY and "MemoryError: none left; ask again later" in error.message
    assert [lane.closed for lane in world.link.lanes] == ([] if where == "enter" else [1]) and not world.relay._lanes
    assert world.lease().rows == 4


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        ((), "1 came"),
        ((NUMBER[:-1], b""), "3 came"),
        ((NUMBER, b"", b""), "4 came"),
        ((NUMBER, b"\xff"), "not a control request"),
        ((NUMBER, b""), "unknown control request None"),
    ],
)
def test_a_call_of_another_form_is_refused_and_does_not_reach_the_server(world, frames, says):
    world.say(PREFIX, *frames)
    (reply,) = world.replies()
    assert (reply.error.code, says in reply.error.message) == (Code.MALFORMED, True)
    assert world.asked() == []


def test_a_name_that_no_model_has_does_not_reach_the_server(world):
    for request in ({"lease": LeaseRequest(model="m" * 129)}, {"load": LoadRequest(model="m" * 129)}):
        world.call(**request)
        assert [reply.error.code for reply in world.replies()] == [Code.MODEL_NOT_FOUND]
    assert world.asked() == []


def test_a_ticket_is_answered_to_its_client_and_one_of_an_unknown_lease_is_stale(world):
    lease = world.lease()
    world.say(record(lease.lease), X)
    assert world.heads() == []
    world.link.lanes[0].answers = True
    world.relay.look_after()
    assert world.heads() == [(5, 9, Code.OK, "")]
    world.say(record(lease.lease + 1, sequence=6), X)
    ((number, incarnation, code, text),) = world.heads()
    assert (number, incarnation, code) == (6, 9, Code.STALE_LEASE)
    assert "take a new one" in text


def test_as_many_bytes_are_expected_after_a_ticket_as_its_rows_have(world):
    lease = world.lease()
    expected = [world.relay._expected(record(lease.lease, rows=rows)) for rows in (1, 3, 300)]
    assert expected == [4, 12, 1200]
    unknown = (record(lease.lease + 1), record(lease.lease)[:-1], record(lease.lease) + b"x", b"")
    assert [world.relay._expected(first) for first in unknown] == [0, 0, 0, 0]


def test_a_client_learns_of_its_lane_what_it_needs_and_nothing_of_the_servers_memory(world):
    lease = world.lease(rows=3)
    assert (lease.rows, lease.priority, lease.model.name, lease.model.arena_rows) == (3, 1, "m", 8)
    assert (lease.model.arena, lease.lane, lease.first_row, lease.engine) == ("", 0, 0, 0)
    assert lease.lease not in (0, 77)


def test_the_servers_hello_comes_without_addresses_of_its_own_host(world):
    world.call(hello=Hello(client="x"))
    ((number, _),) = world.asked()
    whole = ServerMessage(server_id="s", build="1", scoreboard="b", engines=["ipc://e"], models=["m"], transport="zmq")
    world.answer(number, server=whole)
    assert world.replies() == [ControlReply(server=ServerMessage(server_id="s", build="1", models=["m"]))]


def test_a_lease_that_is_asked_for_again_is_the_same_lane_and_reaches_the_server_once(world):
    for _ in range(2):
        world.call(lease=LeaseRequest(model="m", rows=4))
    ((call, _),) = world.asked()
    world.answer(call, lease=Lease(model=ModelMessage(name="m", arena_rows=8), lease=77, rows=4))
    (reply,) = world.replies()
    world.call(lease=LeaseRequest(model="m", rows=4))
    assert world.asked() == []
    assert world.replies() == [reply]
    for other in ({"sender": OTHERS}, {"number": b"87654321"}):
        world.call(**other, lease=LeaseRequest(model="m", rows=4))
        assert len(world.asked()) == 1, "another call"


def test_a_call_that_has_been_answered_may_be_made_again(world):
    for _ in range(2):
        world.call(lease=LeaseRequest(model="m", rows=4))
        ((call, _),) = world.asked()
        world.answer(call, done=Done())
        assert world.replies() == [ControlReply(done=Done())]
        world.answer(call, done=Done())
        assert world.replies() == [], "an answer that nobody waits for"


def test_a_lane_whose_client_went_before_its_lease_came_is_released(world):
    world.call(lease=LeaseRequest(model="m", rows=4))
    ((call, _),) = world.asked()
    world.front.gone.add(MINE)
    world.answer(call, lease=Lease(model=ModelMessage(name="m", arena_rows=8), lease=77, rows=4))
    assert world.link.lanes[0].closed == 1


def test_a_lane_that_another_holds_is_not_leased(world):
    world.link.full = True
    error = world.lease()
    assert (error.code, error.message) == (Code.BUSY, "lane 3 is locked by another client: ask again")


def test_no_more_than_the_most_lanes_are_leased(world, monkeypatch):
    monkeypatch.setattr(module, "_MOST_LANES", 1)
    lease = world.lease()
    world.call(number=b"87654321", lease=LeaseRequest(model="m", rows=4))
    (reply,) = world.replies()
    assert (reply.error.code, world.asked()) == (Code.BUSY, [])
    world.call(release=ReleaseRequest(lease=lease.lease))
    assert world.replies() == [ControlReply(done=Done())]
    assert world.lease(number=b"87654321").rows == 4


def test_only_the_holder_releases_a_lane_and_its_tickets_are_stale_from_then_on(world):
    lease = world.lease()
    (lane,) = world.link.lanes
    for sender, closed in ((OTHERS, 0), (MINE, 1), (MINE, 1)):
        world.call(sender, release=ReleaseRequest(lease=lease.lease))
        assert world.replies(sender) == [ControlReply(done=Done())]
        assert lane.closed == closed
    world.say(record(lease.lease), X)
    assert world.heads()[0][2] == Code.STALE_LEASE


@pytest.mark.parametrize(
    ("share", "rows", "leased"), [(0.5, [4], 1), (0.5, [5], 0), (0.5, [3, 1, 1], 2), (1.0, [8], 1)]
)
def test_a_connection_leases_no_more_rows_of_state_than_its_share(share, rows, leased):
    world = World(share)
    state = [{"name": "h", "dtype": "float32", "shape": [1]}]
    try:
        came = [world.lease(rows=n, number=b"%8d" % n, session_state=state) for n in dict.fromkeys(rows)]
        came += [world.lease(rows=n, number=b"again...", session_state=state) for n in rows[len(came) :]]
        assert [isinstance(one, Lease) for one in came] == [at < leased for at in range(len(rows))]
        assert [lane.closed for lane in world.link.lanes] == [int(at >= leased) for at in range(len(rows))]
        if leased:
            assert isinstance(world.lease(OTHERS, 1, session_state=state), Lease), "another connection has its own"
            assert isinstance(world.lease(rows=8, number=b"no state"), Lease), "rows without state are not shared out"
    finally:
        world.close()


def test_one_client_waits_for_a_limited_number_of_calls_until_they_are_answered_or_forgotten(world, monkeypatch):
    monkeypatch.setattr(module, "_MOST_CALLS_EACH", 2)

    def ask(sender=MINE):
        """The error that the client gets at once; 0 if its call reached the server."""
        world.call(sender, status=StatusRequest())
        return next((reply.error.code for reply in world.replies(sender)), 0)

    assert [ask(), ask(), ask(), ask(OTHERS)] == [0, 0, Code.BUSY, 0]
    calls = world.asked()
    world.answer(calls[0][0], done=Done())
    assert world.replies() == [ControlReply(done=Done())]
    assert [ask(), ask()] == [0, Code.BUSY]
    world.relay.reclaim()
    assert ask() == Code.BUSY, "it waits still"
    monkeypatch.setattr(module, "_CALL_TIMEOUT", -1.0)
    world.relay.reclaim()
    assert [ask(), ask(), ask()] == [0, 0, Code.BUSY]
    world.answer(calls[1][0], done=Done())
    assert world.replies() == [], "it was forgotten"


def test_no_more_calls_of_all_clients_wait_than_the_server_takes(world, monkeypatch):
    monkeypatch.setattr(module, "_MOST_CALLS", 1)
    for sender in (MINE, OTHERS):
        world.call(sender, status=StatusRequest())
    assert world.replies(MINE) == []
    assert [reply.error.code for reply in world.replies(OTHERS)] == [Code.BUSY]


def test_a_clients_lane_and_models_are_given_up_at_the_second_look_without_it(world):
    world.lease()
    world.lease(OTHERS)
    world.call(load=LoadRequest(model="loaded", keep=60))
    world.call(load=LoadRequest(model="not kept"))
    world.call(keep=KeepRequest(model="kept", keep=60))
    assert [request.load.remote for _, request in world.asked()] == [True, True, False]
    mine, others = world.link.lanes
    world.front.gone.add(MINE)
    world.relay.reclaim()
    world.front.gone.clear()  # it connects again: the looks without it begin anew
    world.relay.reclaim()
    world.front.gone.add(MINE)
    world.relay.reclaim()
    assert (mine.closed, world.asked()) == (0, [])
    world.relay.reclaim()
    assert (mine.closed, others.closed) == (1, 0)
    given_up = [request.keep for _, request in world.asked()]
    assert sorted(one.model for one in given_up) == ["kept", "loaded"]
    assert {one.keep for one in given_up} == {BEREFT}
    world.relay.reclaim()
    assert (mine.closed, world.asked()) == (1, []), "once"
    assert ("remote clients gone, rows released", {"clients": 1, "rows": 4}) in world.logged


def test_while_it_drains_a_relay_takes_nothing_new_and_ends_when_every_answer_is_sent(world):
    lease = world.lease()
    world.front.came.append([MINE, record(lease.lease), X])
    drained = []
    world.relay.drain(lambda: drained.append(True))
    assert world.heads() == [], "what came before is computed"
    world.say(record(lease.lease, sequence=6, first=2), X)
    assert [(number, code) for number, _, code, _ in world.heads()] == [(6, Code.DRAINING)]
    for request in ({"lease": LeaseRequest(model="m", rows=1)}, {"load": LoadRequest(model="m")}):
        world.call(number=b"87654321", **request)
        assert [reply.error.code for reply in world.replies()] == [Code.DRAINING]
    world.call(status=StatusRequest())
    assert len(world.asked()) == 1, "other calls are passed on"
    assert drained == []
    world.link.lanes[0].answers, world.front.unsent = True, True
    world.relay.look_after()
    assert [(number, code) for number, _, code, _ in world.heads()] == [(5, Code.OK)]
    world.turns(20)
    assert drained == [], "the client has not read it"
    world.front.unsent = False
    world.turns(until=lambda: drained)
    world.turns(20)
    assert drained == [True]


def test_an_answer_without_room_is_sent_once_there_is_some(world):
    lease = world.lease()
    world.front.room = False
    world.link.lanes[0].answers = True
    for sequence in (5, 6):
        world.say(record(lease.lease, sequence=sequence, first=sequence - 5), X)
        world.turns(20)
        assert world.heads() == []
        world.front.room = True
        world.turns(until=lambda: world.front.sent)
        assert [(number, code) for number, _, code, _ in world.heads()] == [(sequence, Code.OK)]
        world.front.room = False
