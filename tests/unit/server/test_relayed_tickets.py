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


class Judging(Lane):
    """A lane that answers each ticket with a code; its outputs are the numbers of the arena's rows."""

    def __init__(self, code, spec=None):
        super().__init__()
        self.code = code
        if spec is not None:
            self.columns = Columns.here(spec, 8)
        self.columns.refuse(0, 8, {row: f"row {row}" for row in range(8)})

    def receive_now(self):
        for sent in self.sent:
            sent.answer = Answer(0, self.code, "why", 6, 1)
            for row in range(sent.first, sent.first + sent.rows):
                self.columns.outputs["y"][row] = row
                for extents in self.columns.output_extents.values():
                    extents[row] = 2


NUMBERS = np.float32([4, 5]).tobytes()
ANY = ModelSpec("m", {"x": TensorSpec("bytes", capacity=5)}, {"y": TensorSpec("uint8", (-1,), capacity=9)})


@pytest.mark.parametrize(
    ("code", "frames_after"),
    [(Code.OK, 1), (Code.ROW_FAILED, 2), (Code.SESSION_LOST, 1), (Code.MODEL_FAILED, 0), (Code.TIMEOUT, 0)],
)
def test_an_answer_has_the_rows_and_reasons_that_its_code_needs(code, frames_after):
    lane = Judging(code)
    held = RelayedTickets(lane, b"owner", b"the call", Lease(), 3, 5)
    held.submit(ticket(5, 1, 2), frames(2))
    ((sender, first, *rest),) = [[bytes(frame) for frame in one] for one in held.answers()]
    assert (sender, first) == (b"sender", head(ticket(5, 1, 2), code, "why", 6))
    reasons = lane.columns.reasons[4:6].tobytes()
    assert rest == {0: [], 1: [reasons if code == Code.SESSION_LOST else NUMBERS], 2: [NUMBERS, reasons]}[frames_after]
    assert not held.waits


def sent_of_any_size(code, has_room=lambda *_: True):
    lane = Judging(code, ANY)
    held = RelayedTickets(lane, b"owner", b"the call", Lease(), 3, 5)
    sizes = np.full((2, 1), 4, lane.columns.input_extents["x"].dtype)
    held.submit(ticket(5, 1, 2), [zmq.Frame(sizes.tobytes()), zmq.Frame(b"abcdefgh")])
    assert [row[:4].tobytes() for row in lane.columns.inputs["x"][4:6]] == [b"abcd", b"efgh"]
    return held, [[bytes(frame) for frame in one] for one in held.answers(has_room)], sizes


def test_rows_of_any_size_are_taken_and_sent_with_their_sizes():
    held, ((_, _, *rest),), sizes = sent_of_any_size(Code.OK)
    assert rest == [(sizes // 2).tobytes(), bytes([4, 4, 5, 5])]
    assert (held.input_bytes(2), held.waits) == (0, False)


def test_an_answer_is_measured_with_its_reasons_where_it_has_them():
    asked = []
    held, found, _ = sent_of_any_size(Code.ROW_FAILED, lambda client, size: asked.append(size) or len(asked) < 2)
    assert found == [] and held.waits and len(asked) == 2
    assert asked[1] > held.lane.columns.reasons[4:6].nbytes
    ((_, _, *rest),) = held.answers()
    assert len(rest) == 3 and not held.waits


def test_a_lane_that_is_closed_lets_go_of_everything():
    lane = Judging(Code.OK)
    closed = []
    lane.close = lambda: closed.append(True)
    held = RelayedTickets(lane, b"owner", b"the call", Lease(), 3, 5)
    held.submit(ticket(5, 1, 2), frames(2))
    held.close()
    assert (held.waits, closed) == (False, [True])
    assert not held.answer() and held.take_in() == 0 and not held.arm() and not held.spin() and not held.stay((), 0, 0)
    assert not held.connect(b"sender", None)
