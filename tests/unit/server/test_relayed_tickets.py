"""A lane that the relay holds for a client of another host."""

from __future__ import annotations

import numpy as np
import pytest
import zmq

from jurybox.client.in_flight import Answer
from jurybox.protocol.arena import Columns
from jurybox.protocol.control_pb2 import Lease
from jurybox.protocol.errors import Code, Error
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.relay.relayed_tickets import InlineTicket, RelayedTickets, head


class Sent:
    def __init__(self, first, rows):
        self.first, self.rows, self.answer = first, rows, None


class Lane:
    """Takes tickets and keeps them."""

    def __init__(self):
        one = TensorSpec("float32", (1,))
        self.columns = Columns.here(ModelSpec("m", {"x": one}, {"y": one}), 8)
        self.sent, self.deadlines = [], []
        self.transport = None
        self.in_flight = 0

    def submit(self, first, rows, deadline, version, owner=None):
        self.deadlines.append(deadline)
        self.sent.append(Sent(first, rows))
        return self.sent[-1]

    def receive_now(self):
        for sent in self.sent:
            sent.answer = Answer(0, Code.OK, "", 1, 1)


def ticket(sequence, first, rows):
    return InlineTicket(b"sender", sequence, 10**9, first, rows, 0, 1)


def frames(rows):
    return [zmq.Frame(np.ones((rows, 1), np.float32).tobytes())]


def test_a_number_sent_again_with_other_rows_is_refused_and_leaves_no_row_busy():
    held = RelayedTickets(Lane(), b"owner", b"the call", Lease(), 0, 8)
    held.submit(ticket(5, 0, 4), frames(4))
    for first, rows in ((4, 2), (0, 2), (4, 4)):
        with pytest.raises(Error, match="came again with other rows") as caught:
            held.submit(ticket(5, first, rows), frames(rows))
        assert caught.value.code == Code.MALFORMED
    held.submit(ticket(5, 0, 4), frames(4))  # as it was: its client lost the connection
    assert len(list(held.answers(lambda *_: True))) == 1
    held.submit(ticket(6, 0, 8), frames(8))  # every row is free again
    assert len(list(held.answers(lambda *_: True))) == 1


@pytest.mark.parametrize("arrive", [(1, 2), (2, 1)])
def test_a_tickets_answer_goes_to_its_clients_newest_connection_in_whichever_order_they_are_read(arrive):
    held = RelayedTickets(Lane(), b"owner", b"the call", Lease(), 0, 8)
    for incarnation in arrive:
        sent = ticket(5, 0, 4)._replace(sender=b"connection %d" % incarnation, incarnation=incarnation)
        held.submit(sent, frames(4))
    ((sender, *_),) = held.answers()
    assert sender == b"connection 2"


@pytest.mark.parametrize(("first", "rows"), [(0, 0), (0, 5), (1, 4), (4, 1)])
def test_a_ticket_of_rows_that_its_lane_does_not_have_is_refused(first, rows):
    held = RelayedTickets(Lane(), b"owner", b"the call", Lease(), 2, 4)
    with pytest.raises(Error, match="this lane has 4") as caught:
        held.submit(ticket(5, first, rows), frames(rows))
    assert caught.value.code == Code.REFUSED
    assert not held.waits
    held.submit(ticket(5, 3, 1), frames(1))
    assert [(sent.first, sent.rows) for sent in held.lane.sent] == [(5, 1)], "its rows of the arena"


def test_rows_of_a_ticket_in_flight_take_no_other_and_their_neighbours_do():
    held = RelayedTickets(Lane(), b"owner", b"the call", Lease(), 0, 8)
    held.submit(ticket(5, 2, 2), frames(2))
    for first, rows in ((1, 2), (3, 2), (2, 1), (0, 8)):
        with pytest.raises(Error, match="not answered yet") as caught:
            held.submit(ticket(6, first, rows), frames(rows))
        assert caught.value.code == Code.BUSY
    held.submit(ticket(6, 0, 2), frames(2))
    held.submit(ticket(7, 4, 4), frames(4))


def test_a_tickets_deadline_is_within_an_hour_and_never_none(monkeypatch):
    monkeypatch.setattr("time.monotonic_ns", lambda: 1000)
    held = RelayedTickets(Lane(), b"owner", b"the call", Lease(), 0, 8)
    for at, left in enumerate((5, 0, -7, 10**18)):
        held.submit(ticket(at, at, 1)._replace(left=left), frames(1))
    assert held.lane.deadlines == [1005, 1001, 1001, 1000 + 3600 * 10**9]


def test_an_answer_without_room_waits_in_its_rows_and_is_sent_once():
    held = RelayedTickets(Lane(), b"owner", b"the call", Lease(), 0, 8)
    held.submit(ticket(5, 0, 4), frames(4))
    assert (held.waits, held.owes) == (True, False)
    asked = []
    assert list(held.answers(lambda client, size: asked.append((client, size)))) == []
    assert (held.waits, held.owes) == (True, True)
    ((client, size),) = asked
    assert client == b"sender"
    assert size >= 4 * 4 + 255 + len(head(ticket(5, 0, 4), Code.MODEL_FAILED, "x" * 10**6))
    with pytest.raises(Error, match="not answered yet"):
        held.submit(ticket(6, 3, 1), frames(1))
    ((_, first, *_),) = held.answers()
    assert first == head(ticket(5, 0, 4), Code.OK, "", 1)
    assert (held.waits, held.owes, list(held.answers())) == (False, False, [])


def test_an_answers_text_always_fits_a_frame():
    head(ticket(1, 0, 1), Code.MODEL_FAILED, "half \ud800 a pair").decode("latin-1")
    assert len(head(ticket(1, 0, 1), Code.MODEL_FAILED, "é" * 1_000_000)) < 5000
