"""The tickets of a relayed lane that native code sends on, and when they change hands."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox import native
from jurybox.client.in_flight import Answer
from jurybox.client.transports.shm import ShmTransport
from jurybox.client.transports.transport import NotSent
from jurybox.protocol.arena import Columns
from jurybox.protocol.control_pb2 import Lease
from jurybox.protocol.errors import Code, Error, TooManyFiles
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.relay.relayed_tickets import InlineTicket, RelayedTickets

ONE = TensorSpec("float32", (1,))
FIXED = ModelSpec("m", {"x": ONE}, {"y": ONE})
VARIABLE = TensorSpec("uint8", (-1,), capacity=8)


class Shm(ShmTransport):
    """Rings of engines that are there, or not."""

    def __init__(self):
        self.rings: dict[int, object] = {0: "ring 0", 1: "ring 1"}
        self.quieted = 0

    def attach(self, engine, incarnation):
        ring = self.rings[engine]
        if ring in (TooManyFiles, NotSent):
            raise ring("no descriptor, or no thread")
        return ring

    def quiet(self):
        self.quieted += 1


class Sent:
    def __init__(self, first, rows):
        self.first, self.rows, self.answer = first, rows, None


class Lane:
    """A lane of two engines, which keeps what it is told to take over."""

    def __init__(self, spec=FIXED, transport=None):
        self.columns = Columns.here(spec, 8)
        self.transport = Shm() if transport is None else transport
        self.engines = ((0, 11), (1, 12))
        self.in_flight: dict[int, object] = {}
        self.adopted: list[tuple] = []
        self.number = 100
        self.looked: list[float] = []

    def able(self):
        return self.engines

    def record(self, engine):
        return f"record {engine}"

    def adopt(self, ticket, engine, incarnation, submitted):
        self.adopted.append((ticket.sequence, ticket.first, ticket.rows, engine, incarnation, submitted))
        self.in_flight[ticket.sequence] = ticket

    def advance(self, number=0):
        self.number = max(self.number, number) + 1
        return self.number

    def submit(self, first, rows, deadline, version, owner=None):
        self.in_flight[self.advance()] = sent = Sent(first, rows)
        return sent

    def receive(self, seconds):
        self.looked.append(seconds)

    def receive_now(self):
        for sent in self.in_flight.values():
            sent.answer = Answer(0, Code.OK, "", 1, 1)
        self.in_flight.clear()


class Native:
    """In the place of native.RelayLane: what it has, and what was asked of it."""

    made: list[Native] = []

    def __init__(self, link, engines, lease, first, rows, inputs, outputs, prefix):
        self.link, self.engines, self.span, self.prefix = link, engines, (first, rows), prefix
        self.mine = True
        self.tickets: list[tuple] = []
        self.number = 500
        self.old = self.closed = False
        self.taken_over: list[int] = []
        self.stayed: list[tuple] = []
        Native.made.append(self)

    @property
    def in_flight(self):
        return len(self.tickets)

    def hand_over(self):
        self.mine = False
        tickets, self.tickets = self.tickets, []
        return tickets

    def take_over(self, number):
        self.mine = True
        self.taken_over.append(number)

    def overdue(self):
        return self.old

    def take_in(self):
        return 3

    def answer(self):
        return True

    def stay(self, *given):
        self.stayed.append(given)

    def close(self):
        self.closed = True


class Link:
    def __init__(self, arrived=False):
        self.arrived = arrived


@pytest.fixture(autouse=True)
def natively(monkeypatch):
    monkeypatch.setattr(native, "RelayLane", Native)
    monkeypatch.setattr(Native, "made", [])


def relayed(lane):
    return RelayedTickets(lane, b"owner", b"the call", Lease(lease=7), 2, 4)


def connected():
    """A lane, its connection, its tickets, and the native lane that sends them on."""
    lane, link = Lane(), Link()
    held = relayed(lane)
    assert held.connect(b"sender", link)
    return lane, link, held, Native.made[0]


def in_native(sequence, first, rows, at=0):
    """A ticket of the native lane: its number is 900 above its client's."""
    return (at, 900 + sequence, sequence, first, rows, 3, 1, 10**6, 10**12)


@pytest.mark.parametrize(
    ("spec", "transport"),
    [
        pytest.param(ModelSpec("m", {"x": VARIABLE}, {"y": ONE}), None, id="inputs of any size"),
        pytest.param(ModelSpec("m", {"x": ONE}, {"y": VARIABLE}), None, id="outputs of any size"),
        pytest.param(FIXED, "zmq", id="no rings"),
    ],
)
def test_python_handles_rows_without_a_fixed_size_and_engines_without_rings(spec, transport):
    held = relayed(Lane(spec, transport))
    assert not held.connect(b"sender", Link())
    assert not Native.made
    assert held.take_in() == 0
    assert not held.answer()
    assert not held.stay([], 0.0, 1.0)


def test_no_native_lane_is_made_while_no_engine_serves():
    lane = Lane()
    lane.engines = ()
    assert not relayed(lane).connect(b"sender", Link())
    assert not Native.made


def test_without_rings_the_lane_tells_the_event_loop_of_answers():
    lane, told = Lane(transport="zmq"), []
    lane.watch = lambda *given: told.append(given)
    held = relayed(lane)
    held.watch("loop", "words", "arrived")
    assert told == [("loop", "arrived")]
    assert held.arm() is False
    assert held.spin() is False


def test_with_rings_answers_are_told_by_words():
    lane, told = Lane(), []
    lane.transport.tell, lane.transport.arm, lane.transport.spin = told.append, lambda: "armed", lambda: "spun"
    held = relayed(lane)
    held.watch("loop", "words", "arrived")
    assert told == ["words"]
    assert held.arm() == "armed"
    assert held.spin() == "spun"


@pytest.mark.parametrize("spec", [FIXED, ModelSpec("m", {"x": TensorSpec("float32", (-1,), capacity=4)}, {"y": ONE})])
def test_a_tickets_rows_are_written_where_its_lane_has_them(spec):
    lane = Lane(spec)
    held = relayed(lane)
    sizes = [] if spec is FIXED else [np.ones((2, 1), np.int64).tobytes()]
    bodies = [*sizes, np.array([3, 4], np.float32).tobytes()]
    held.submit(InlineTicket(b"sender", 7, 10**9, 1, 2, 0, 1), bodies)
    assert lane.columns.inputs["x"][:, 0].tolist() == [0, 0, 0, 3, 4, 0, 0, 0]


@pytest.mark.parametrize("ring", [None, TooManyFiles, NotSent])
def test_an_engine_that_cannot_be_attached_leaves_the_lane_as_it_was(ring):
    lane, link = Lane(), Link()
    held = relayed(lane)
    lane.transport.rings[1] = ring
    assert not held.connect(b"sender", link)
    assert not Native.made
    lane.transport.rings[1] = "ring 1"
    assert held.connect(b"sender", link)  # it is tried again


def test_a_native_lane_knows_every_engine_with_its_record_and_incarnation():
    _, link, held, made = connected()
    assert made.link is link
    assert made.engines == [("ring 0", "record 0", 11), ("ring 1", "record 1", 12)]
    assert made.span == (2, 4)
    assert held.sender == b"sender"
    assert held.take_in() == 3
    assert held.answer()


def test_the_native_lane_stays_until_its_connection_or_its_engines_are_others():
    lane, link, held, made = connected()
    assert not held.connect(b"sender", link)
    assert len(Native.made) == 1
    made.tickets = [in_native(5, 0, 1)]
    assert held.connect(b"another", Link())
    assert made.closed
    assert lane.adopted  # what it had
    assert held.sender == b"another"
    lane.engines = ((0, 21),)
    assert held.connect(b"another", link)
    assert Native.made[1].closed
    assert Native.made[2].engines == [("ring 0", "record 0", 21)]
    assert not Native.made[2].closed


def test_tickets_that_are_handed_over_keep_numbers_rows_and_engines():
    lane, _, held, made = connected()
    made.tickets = [in_native(5, 0, 1), in_native(6, 2, 2, at=1)]
    assert held.waits
    held.take_no_more()
    assert lane.adopted == [(905, 2, 1, 0, 11, 10**6), (906, 4, 2, 1, 12, 10**6)]
    assert lane.number == 501  # above all that the native lane used
    assert made.closed
    assert held.take_in() == 0
    assert held.waits
    with pytest.raises(Error, match="not answered yet"):
        held.submit(InlineTicket(b"sender", 7, 10**9, 3, 1, 0, 1), [np.ones(1, np.float32).tobytes()])
    held.submit(InlineTicket(b"sender", 7, 10**9, 1, 1, 0, 1), [np.ones(1, np.float32).tobytes()])  # a free row
    assert {frames[0] for frames in held.answers()} == {b"sender"}
    assert not held.waits
    held.submit(InlineTicket(b"sender", 8, 10**9, 0, 4, 0, 1), [np.ones((4, 1), np.float32).tobytes()])  # all are free


def test_the_native_lane_gets_its_tickets_back_when_nothing_is_in_flight():
    lane, _, held, made = connected()
    one = InlineTicket(b"sender", 7, 10**9, 0, 1, 0, 1)
    held.submit(one, [np.ones(1, np.float32).tobytes()])
    assert not made.mine
    assert not made.taken_over
    list(held.answers())
    assert made.mine
    assert made.taken_over == [lane.number]
    with pytest.raises(Error, match="rows"):
        held.submit(one._replace(rows=9), [])  # it sends nothing, and nothing is in flight
    assert made.mine
    assert len(made.taken_over) == 2


def test_the_native_lane_gets_nothing_back_for_other_engines_than_its_own():
    lane, _, held, made = connected()
    lane.engines = ((0, 11),)
    with pytest.raises(Error, match="rows"):
        held.submit(InlineTicket(b"sender", 7, 10**9, 0, 9, 0, 1), [])
    assert not made.taken_over


def test_a_single_client_is_served_natively_until_its_connection_has_something_else():
    lane, link, held, made = connected()
    assert held.stay([4], 0.5, 2.0) is False
    assert made.stayed == [([4], 0.5, 2.0)]
    assert lane.transport.quieted == 1
    link.arrived = True
    assert held.stay([4], 0.5, 2.0) is True
    made.mine = False
    assert not held.stay([4], 0.5, 2.0)
    assert len(made.stayed) == 2


@pytest.mark.parametrize(
    ("overdue", "engines", "looks"),
    [
        pytest.param(False, ((0, 11), (1, 12)), False, id="new ones, the same engines"),
        pytest.param(True, ((0, 11), (1, 12)), True, id="one is old"),
        pytest.param(False, ((0, 11), (1, 13)), True, id="an engine was replaced"),
    ],
)
def test_native_tickets_are_looked_after_if_they_are_old_or_an_engine_was_replaced(overdue, engines, looks):
    lane, _, held, made = connected()
    made.tickets, made.old = [in_native(5, 0, 1)], overdue
    lane.engines = engines
    held.look_after()
    assert bool(lane.adopted) is looks
    assert lane.looked == ([0] if looks else [])


def test_without_native_tickets_the_lane_itself_is_looked_after():
    lane, _, held, _ = connected()
    held.look_after()
    assert lane.looked == [0]
    assert not lane.adopted


def test_answers_takes_over_what_the_native_lane_has_and_yields_it():
    lane, _, held, made = connected()
    made.tickets = [in_native(5, 1, 1)]
    ((sender, *_),) = held.answers()
    assert sender == b"sender"
    assert lane.adopted
    assert not held.waits


def test_a_closed_lane_holds_no_tickets_and_no_native_lane():
    lane, _, held, made = connected()
    held.submit(InlineTicket(b"sender", 7, 10**9, 0, 1, 0, 1), [np.ones(1, np.float32).tobytes()])
    closes = []
    lane.close = lambda: closes.append(True)
    held.close()
    assert made.closed
    assert not held.waits
    assert closes
