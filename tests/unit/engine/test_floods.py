"""Clients that send tickets or garbage without end: the engine's memory does not grow, and others are served."""

from __future__ import annotations

import select
import time

import numpy as np
import pytest
import zmq
from tests.models import affine
from tests.serving import wait_until

from jurybox.protocol.errors import Code
from jurybox.protocol.wire import PACK_REPLY, PACK_TICKET, PREFIX, TICKET, lane_identity
from jurybox.server.inproc import InprocServer
from jurybox.server.logs import LogLimiter
from jurybox.server.transports import ZmqTickets

INCARNATION = 5


class Flood:
    """A transport at which a full turn's tickets of one lane always wait."""

    number = 0
    slow = False

    def __init__(self, lane):
        self.answers = {}
        self._ticket = np.zeros(1, TICKET)
        for name, value in {"lane": lane.lane, "lease": lane.lease, "first": lane.first, "rows": 1}.items():
            self._ticket[name] = value

    def collect(self, out):
        out[:] = self._ticket
        return len(out)

    def reply(self, tickets, code, version, message):
        self.answers[code] = self.answers.get(code, 0) + len(tickets)


def test_a_lane_that_floods_waits_with_no_more_than_its_rows_and_others_are_answered():
    with InprocServer({"a": affine()}, max_batch=4) as server:
        flooding = server._leases.grant(0, 8, 256)
        transport = Flood(flooding)
        server.engine.add_transport(transport)
        model = server.model("a", rows=2)
        slot = server.engine.slots[0]
        x = np.ones((2, 4), np.float32)
        for _ in range(200):
            np.testing.assert_array_equal(model.infer(x, timeout=20), 2 * x + 1)
            assert len(slot.queue) <= 8 + 2
        assert len(slot.queue._tickets) <= 256  # it never grew
        assert transport.answers[Code.OK] > 0 and transport.answers[Code.BUSY] > 100_000


def test_a_number_sent_again_with_other_rows_leaves_no_row_busy():
    with InprocServer({"a": affine()}) as server:
        lane = server._leases.grant(0, 4, 256)
        transport, sent = Flood(lane), np.zeros(2, TICKET)
        sent["lane"], sent["lease"], sent["sequence"] = lane.lane, lane.lease, 7
        sent["first"], sent["rows"] = [lane.first, lane.first + 1], [1, 3]
        waiting = [sent, sent]

        def collect(out):
            if not waiting:
                return 0
            out[:2] = waiting.pop()
            return 2

        transport.collect = collect
        server.engine.add_transport(transport)
        for _ in range(20):
            server._turn()
        assert transport.answers == {Code.OK: 4}


@pytest.fixture
def meeting(tmp_path):
    """A transport, and sockets connected to it."""
    context, reported, opened = zmq.Context(), [], []
    address = f"ipc://{tmp_path}/transport"
    limited = LogLimiter(lambda event, **fields: reported.append((event, fields)))
    transport = ZmqTickets(context, address, INCARNATION, limited)

    def dealer(identity):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(address)
        opened.append(socket)
        return socket

    yield transport, dealer, reported
    for socket in opened:
        socket.close()
    transport.close()
    context.term()


def ticket(sequence):
    return PREFIX + PACK_TICKET.pack(sequence, 9, 0, 0, 1, 0, 1, 0, 0, INCARNATION)


def test_garbage_takes_its_part_of_a_turn_and_a_ticket_behind_it_is_found_in_the_next(meeting):
    transport, dealer, reported = meeting
    rude, good = dealer(b"rude"), dealer(lane_identity(1, 9))
    rude.send(b"x")
    wait_until(transport.pending, 20)
    for _ in range(5000):
        rude.send(b"no ticket of ours")
    good.send(ticket(4))
    out = np.zeros(64, TICKET)
    turns, longest, until = 0, 0.0, time.monotonic() + 60
    while not (n := transport.collect(out)) and time.monotonic() < until:
        turns += 1
        wait_until(transport.pending, 20)  # the dealers' threads may be slower than these turns
    assert n == 1 and out["sequence"][0] == 4
    assert turns < 200
    assert len(reported) <= 3 + longest  # once a second, with a count, not once a message


def test_one_turn_reads_a_bounded_number_of_messages_while_they_keep_coming(meeting, monkeypatch):
    transport, dealer, _ = meeting
    rude = dealer(b"rude")
    for _ in range(4000):
        rude.send(b"garbage")
    wait_until(transport.pending, 20)
    complaints = []
    monkeypatch.setattr(transport, "_complain", lambda *message: complaints.append(message))
    transport.collect(np.zeros(1024, TICKET))
    assert 0 < len(complaints) <= 64


def test_a_message_of_very_many_frames_is_dropped_over_several_turns_and_misread_by_none(meeting):
    transport, dealer, _ = meeting
    rude, good = dealer(b"rude"), dealer(lane_identity(1, 9))
    rude.send_multipart([ticket(1)] * 10_000)
    wait_until(transport.pending, 20)
    out, found, until = np.zeros(64, TICKET), [], time.monotonic() + 20
    good.send(ticket(4))
    while not found and time.monotonic() < until:
        n = transport.collect(out)
        found += out["sequence"][:n].tolist()
    for _ in range(50):
        found += out["sequence"][: transport.collect(out)].tolist()
    assert found == [4]
    assert PACK_REPLY.unpack_from(rude.recv(), 2)[3] == Code.MALFORMED


@pytest.mark.parametrize("text", ["half \ud800 a pair", "é" * 10_000, "\0"])
def test_the_answer_of_a_failure_arrives_with_any_text(meeting, text):
    transport, dealer, _ = meeting
    good = dealer(lane_identity(1, 9))
    good.send(ticket(4))
    wait_until(transport.pending, 20)
    out = np.zeros(4, TICKET)
    until = time.monotonic() + 20
    while not (n := transport.collect(out)) and time.monotonic() < until:
        pass
    transport.reply(out[:n], Code.MODEL_FAILED, 0, text)
    frame = good.recv()
    sequence, _, _, code = PACK_REPLY.unpack_from(frame, 2)
    assert (sequence, code) == (4, Code.MODEL_FAILED)
    frame[2 + PACK_REPLY.size :].decode()
    assert len(frame) < 5000


def test_frequent_messages_are_logged_once_a_second_with_a_count():
    now, said = [0.0], []
    limited = LogLimiter(lambda event, **fields: said.append((event, fields)), clock=lambda: now[0])
    for _ in range(1000):
        limited("bad message", error="x")
    limited("model failed", model="a")
    limited("model failed", model="b")
    assert said == [("bad message", {"error": "x"}), ("model failed", {"model": "a"}), ("model failed", {"model": "b"})]
    limited.flush()
    assert len(said) == 3
    now[0] = 1.5
    limited.flush()
    assert said[3:] == [("bad message", {"error": "x", "times": 999})]
    now[0] = 3.0
    limited("bad message", error="y")
    assert said[4:] == [("bad message", {"error": "y"})]


def collected(transport, n=1):
    """Wait until a number of tickets were collected; return their sequence numbers."""
    out, found = np.zeros(64, TICKET), []

    def enough():
        found.extend(out["sequence"][: transport.collect(out)].tolist())
        return len(found) >= n

    wait_until(enough, 20)
    return found


def test_each_reply_goes_to_the_lane_and_lease_of_its_ticket_with_what_it_says(meeting):
    transport, dealer, _ = meeting
    lanes = dealer(lane_identity(1, 9)), dealer(lane_identity(2, 9)), dealer(lane_identity(1, 10))
    for sequence, lane in enumerate(lanes, start=4):
        lane.send(ticket(sequence))
    collected(transport, 3)
    answered = np.zeros(3, TICKET)
    answered["lane"], answered["lease"], answered["sequence"] = [1, 2, 1], [9, 9, 10], [4, 5, 6]
    transport.reply(answered[:2], Code.OK, 7, "")
    transport.reply(answered[2:], Code.DRAINING, 0, "it stops")
    frames = [lane.recv() for lane in lanes]
    assert [frame[:2] for frame in frames] == [PREFIX] * 3
    assert [PACK_REPLY.unpack_from(frame, 2) for frame in frames] == [
        (4, 7, INCARNATION, Code.OK),
        (5, 7, INCARNATION, Code.OK),
        (6, 0, INCARNATION, Code.DRAINING),
    ]
    assert [frame[2 + PACK_REPLY.size :] for frame in frames] == [b"", b"", b"it stops"]


def test_a_ticket_for_another_incarnation_is_dropped_and_counts_once_it_is_this_ones(meeting):
    transport, dealer, reported = meeting
    good = dealer(lane_identity(1, 9))
    transport.renew(INCARNATION + 1)
    good.send(ticket(4))
    good.send(ticket(5)[:-8] + (INCARNATION + 1).to_bytes(8, "little"))
    assert collected(transport) == [5] and reported == []
    transport.renew(INCARNATION)
    good.send(ticket(6))
    assert collected(transport) == [6]
    answered = np.zeros(1, TICKET)
    answered["lane"], answered["lease"], answered["sequence"] = 1, 9, 6
    transport.reply(answered, Code.OK, 0, "")
    assert PACK_REPLY.unpack_from(good.recv(), 2)[2] == INCARNATION


OTHER_VERSION = bytes([PREFIX[0], PREFIX[1] + 1])


@pytest.mark.parametrize(
    ("frames", "code", "text"),
    [
        ([b"short"], Code.PROTOCOL_MISMATCH, "5 bytes came that begin with b'short'"),
        ([PREFIX + b"short"], Code.MALFORMED, "7 bytes in 1 frames came that are not a ticket"),
        ([ticket(1) + b"x"], Code.MALFORMED, f"{len(ticket(1)) + 1} bytes in 1 frames came"),
        ([ticket(1), b""], Code.MALFORMED, f"several frames came that are not a ticket: expected {len(ticket(1))} "),
        ([OTHER_VERSION + ticket(1)[2:]], Code.PROTOCOL_MISMATCH, ""),
    ],
)
def test_what_is_no_ticket_is_answered_with_the_reason_and_the_tickets_around_it_count(meeting, frames, code, text):
    transport, dealer, reported = meeting
    rude = dealer(lane_identity(1, 9))
    rude.send(ticket(4))
    rude.send_multipart(frames)
    rude.send(ticket(5))
    assert collected(transport, 2) == [4, 5]
    frame = rude.recv()
    assert PACK_REPLY.unpack_from(frame, 2) == (0, 0, INCARNATION, code)
    said = frame[2 + PACK_REPLY.size :].decode()
    assert text in said and [(event, fields["error"]) for event, fields in reported] == [("bad message", said)]


def test_a_message_that_came_before_a_reply_was_sent_is_found_after_it(meeting):
    """Sending takes the signal of the socket's descriptor with it."""
    transport, dealer, _ = meeting
    good, other = dealer(lane_identity(1, 9)), dealer(lane_identity(2, 9))
    other.send(ticket(4))
    collected(transport)
    wait_until(lambda: not transport.pending(), 20)
    assert transport.may_sleep()
    good.send(ticket(5))
    select.select([transport.fileno()], [], [], 20)
    answered = np.zeros(1, TICKET)
    answered["lane"], answered["lease"], answered["sequence"] = 2, 9, 4
    transport.reply(answered, Code.OK, 0, "")
    other.recv()
    assert not transport.may_sleep() and collected(transport) == [5]


def test_a_lanes_holder_that_connects_again_gets_its_answers(meeting):
    transport, dealer, _ = meeting
    first = dealer(lane_identity(1, 9))
    first.send(ticket(4))
    collected(transport)
    again = dealer(lane_identity(1, 9))
    again.send(ticket(5))
    collected(transport)
    answered = np.zeros(1, TICKET)
    answered["lane"], answered["lease"], answered["sequence"] = 1, 9, 5
    transport.reply(answered, Code.OK, 0, "")
    assert PACK_REPLY.unpack_from(again.recv(), 2)[0] == 5


def test_a_message_larger_than_any_ticket_ends_its_connection_and_is_not_kept(meeting):
    transport, dealer, reported = meeting
    rude, good = dealer(b"rude"), dealer(lane_identity(1, 9))
    ended = rude.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    rude.send(bytes(5000))
    assert ended.poll(20_000)
    rude.disable_monitor()
    good.send(ticket(4))
    assert collected(transport) == [4] and reported == []
