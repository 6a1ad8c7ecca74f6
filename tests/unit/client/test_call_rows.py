"""What rows that calls reuse do with each result of a native call, over a scripted one."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
from tests.unit.client.scripted import SERVING, SPEC, Transport, compute, lane_of, serving_engine

from jurybox.client.call_rows import CallRow
from jurybox.client.in_flight import Answer
from jurybox.client.transports.transport import NOT_ANSWERED, NOT_FIT, NOT_SENT
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, ModelFailed, ModelNotFound, SpecMismatch, StaleLease, Timeout
from jurybox.protocol.scoreboard import ENGINE, EngineState
from jurybox.protocol.spec import VARIABLE

TEN = np.array([10, 20], np.float32)
DEADLINE = 10**15


class Native:
    """A native caller: it writes the row as that does, and its results are what it is told; at the end, outputs."""

    def __init__(self, wire, place):
        self.wire, self.place, self.version, self.deadline = wire, place, 0, 0

    def __call__(self, row, sequence, seconds):
        self.wire.calls.append((self.place.number, sequence, seconds))
        if row is not None and not self.place.write(row):
            return NOT_FIT
        does = self.wire.does.pop(0) if self.wire.does else None
        if callable(does):
            does(sequence)
        elif does:
            self.deadline = time.monotonic_ns() + int(seconds * 1e9)
            self.version = 3
            return int(does)
        self.version = 7
        compute(self.wire.columns, self.place.first, self.place.rows)
        return self.place.copied()

    def message(self):
        return "what it said"


class Wire(Transport):
    """A transport with native callers. Outputs are ten times the inputs; `exchange` computes, too."""

    def __init__(self, *does):
        super().__init__()
        self.does, self.calls, self.callers, self.exchanged = list(does), [], [], []
        self.columns = None
        self.late = self.none = False

    def caller(self, place):
        self.callers.append((place.number, place.incarnation))
        return None if self.none else Native(self, place)

    def exchange(self, ticket, timeout):
        self.exchanged.append((ticket.first, ticket.rows, ticket.version))
        if self.late:
            return None
        compute(self.columns, ticket.first, ticket.rows)
        return Answer(ticket.sequence, Code.OK, "", 9, ticket.incarnation)

    def send(self, ticket):
        self.sent.append((ticket.engine, ticket.incarnation, ticket.first, ticket.rows, ticket.version))

    def is_reading(self, ticket):
        return False


def rows_of(wire, n=None, engines=None, spec=SPEC, **more):
    """A lane over `wire`, and rows of it that calls reuse."""
    lane = lane_of(serving_engine() if engines is None else engines, wire, spec, **more)
    wire.columns = lane.columns
    return lane, CallRow(lane, lane.take(n or 1), single=n is None)


def two_engines():
    engines = np.zeros(2, ENGINE)
    engines["incarnation"], engines["state"] = (11, 22), SERVING
    return engines


@pytest.mark.parametrize("n", [None, 3])
def test_a_call_copies_rows_in_and_outputs_out_and_leaves_nothing_in_flight(n):
    wire = Wire()
    lane, kept = rows_of(wire, n)
    given = np.arange(2, dtype=np.float32) if n is None else np.arange(6, dtype=np.float32).reshape(3, 2)
    for _ in range(2):
        outputs = kept.ask(given, 1.5)
        assert outputs.shape == given.shape and (outputs == given * 10).all()
    assert not np.shares_memory(outputs, lane.columns.outputs["y"]), "the next call overwrites those"
    assert kept.version == 7 and kept.answer is None and not lane.in_flight
    (_, one, seconds), (_, other, _) = wire.calls
    assert other == one + 1 and seconds == 1.5, "no number is used twice"
    assert wire.callers == [(0, 11)] and not wire.exchanged, "one native caller makes all calls"


def test_a_row_that_does_not_fit_is_converted_or_refused_and_nothing_stays_in_flight():
    wire = Wire()
    lane, kept = rows_of(wire)
    assert kept.ask(list(TEN), 1.0).tolist() == [100, 200] and len(wire.calls) == 2
    assert kept.ask({"x": list(TEN)}, 1.0).tolist() == [100, 200] and len(wire.calls) == 3, "it is written before"
    for wrong in (np.zeros(3, np.float32), np.zeros(2, np.float64), {"z": TEN}):
        with pytest.raises(SpecMismatch):
            kept.ask(wrong, 1.0)
        assert not lane.in_flight
    assert kept.ask(TEN, 1.0).tolist() == [100, 200]


def test_a_call_that_could_not_be_sent_goes_through_the_lane_and_the_next_has_a_new_caller():
    wire = Wire(NOT_SENT)
    lane, kept = rows_of(wire, 2)
    given = np.array([[1, 2], [3, 4]], np.float32)
    kept.answer = None
    assert (kept.ask(given, 1.0) == given * 10).all() and wire.exchanged == [(kept.first, 2, 0)]
    assert kept.version == 9 and kept.answer.version == 9, "that of the answer that came"
    assert wire.callers == [(0, 11)] * 2 and not lane.in_flight
    kept.answer = None
    assert (kept.ask(given, 1.0) == given * 10).all() and kept.version == 7 and len(wire.exchanged) == 1


def test_where_no_native_caller_can_be_opened_each_call_goes_through_the_lane():
    wire = Wire()
    wire.none = True
    lane, kept = rows_of(wire)
    assert kept.version == 0, "there was no call"
    assert kept.ask(TEN, 1.0).tolist() == [100, 200] and kept.ask(list(TEN), 1.0).tolist() == [100, 200]
    assert len(wire.exchanged) == 2 and not wire.calls and not lane.in_flight
    with pytest.raises(SpecMismatch, match="a call takes one row"):
        kept.ask(np.zeros(3, np.float32), 1.0)
    assert len(wire.exchanged) == 2


@pytest.mark.parametrize("comes", [True, False])
def test_an_answer_that_comes_later_is_waited_for_until_the_deadline_of_its_call(comes):
    wire = Wire(NOT_ANSWERED, NOT_ANSWERED)
    lane, kept = rows_of(wire)
    waited = []

    def receive(timeout):
        (ticket,) = lane.in_flight.values() or [None]
        waited.append((ticket.deadline, ticket.owner() is kept, ticket.sending))
        if not comes:
            time.sleep(min(timeout, 0.05))
            return []
        compute(lane.columns, kept.first, 1)
        return [Answer(ticket.sequence, Code.OK, "", 4, 11)]

    wire.receive = receive
    called = time.monotonic_ns()
    if comes:
        for _ in range(2):
            assert kept.ask(TEN, 5.0).tolist() == [100, 200] and kept.version == 4 and not lane.in_flight
    else:
        with pytest.raises(Timeout, match="m' did not answer in time"):
            kept.ask(TEN, 0.01)
        (late,) = lane.in_flight.values()
        assert not late.wanted and not late.sending and lane.asked(kept.first, 1), "an engine may still write there"
    for deadline, wanted, sending in waited:
        assert deadline > called and wanted and not sending, "a nested call may receive it meanwhile"
    if not comes:
        calls = len(wire.calls)
        wire.receive = lambda timeout: [Answer(number, Code.OK, "", 4, 11) for number in lane.in_flight]
        kept.ask(TEN, 5.0)
        assert len(wire.calls) == calls and not lane.in_flight, "while one is in flight, others go through the lane"


def test_what_answered_an_interrupted_call_is_not_the_answer_to_the_next():
    """A signal handler's call has received it within the first call, and the handler raises."""

    def handler(sequence):
        lane.settle([Answer(sequence, Code.OK, "", 1, 11)])
        raise KeyboardInterrupt

    def receive(timeout):
        compute(lane.columns, kept.first, 1)
        return [Answer(number, Code.OK, "", 4, 11) for number in lane.in_flight]

    wire = Wire(handler, NOT_ANSWERED)
    lane, kept = rows_of(wire)
    wire.receive = receive
    with pytest.raises(KeyboardInterrupt):
        kept.ask(TEN, 5.0)
    assert not lane.in_flight and kept.ask(2 * TEN, 5.0).tolist() == [200, 400] and kept.version == 4


@pytest.mark.parametrize(("code", "told"), [(Code.MODEL_FAILED, ModelFailed), (Code.STALE_LEASE, StaleLease)])
@pytest.mark.parametrize("engines", [serving_engine, two_engines])
def test_an_error_that_came_within_the_call_is_raised_with_its_message(code, told, engines):
    wire = Wire(code)
    lane, kept = rows_of(wire, engines=engines())
    with pytest.raises(told, match="what it said"):
        kept.ask(TEN, 1.0)
    assert not lane.in_flight and (lane.gone is None) == (code != Code.STALE_LEASE)
    if code == Code.STALE_LEASE:
        with pytest.raises(StaleLease, match="what it said"):
            lane.exchange(0, 1, DEADLINE, 0, 1.0)


def test_failed_rows_are_named_with_the_version_that_failed_them():
    wire = Wire(Code.ROW_FAILED)
    lane, kept = rows_of(wire, 2)
    lane.columns.refuse(kept.first, 2, {1: "bad"})
    with pytest.raises(Exception, match="1 of 2 rows of 'm' failed: row 1: bad") as failed:
        kept.ask(np.zeros((2, 2), np.float32), 1.0)
    assert failed.value.errors == {1: "bad"} and failed.value.version == 3


def test_a_ticket_goes_to_another_engine_if_the_one_that_was_asked_does_not_have_the_model():
    wire = Wire(Code.MODEL_NOT_FOUND)
    lane, kept = rows_of(wire, engines=two_engines())

    def receive(timeout):
        compute(lane.columns, kept.first, 1)
        return [Answer(number, Code.OK, "", 4, 22) for number in lane.in_flight]

    wire.receive = receive
    assert kept.ask(TEN, 1.0).tolist() == [100, 200] and kept.version == 4 and not lane.in_flight
    assert wire.sent == [(1, 22, kept.first, 1, 0)]
    assert kept.ask(TEN, 1.0).tolist() == [100, 200] and wire.callers == [(0, 11), (1, 22)], "nor does the next call"


def test_the_only_engine_that_does_not_have_the_model_says_so():
    wire = Wire(Code.MODEL_NOT_FOUND)
    lane, kept = rows_of(wire)
    with pytest.raises(ModelNotFound, match="what it said"):
        kept.ask(TEN, 1.0)
    assert not lane.in_flight and not wire.sent


def test_each_engine_has_one_caller_and_calls_go_to_the_one_that_is_less_busy():
    engines = two_engines()
    wire = Wire()
    lane, kept = rows_of(wire, engines=engines)
    assert wire.callers == [(0, 11)]
    for waits in ((9, 0), (0, 9), (9, 0)):
        engines["expected_wait"] = waits
        kept.ask(TEN, 1.0)
    assert [number for number, _, _ in wire.calls] == [1, 0, 1] and wire.callers == [(0, 11), (1, 22)]
    held = lane.take(2)
    lane.submit(held.first, 2, time.monotonic_ns() + 10**11)
    engines["expected_wait"] = (0, 9)
    wire.receive = lambda timeout: [Answer(number, Code.OK, "", 4, 11) for number in lane.in_flight]
    kept.ask(TEN, 1.0)
    assert len(wire.calls) == 3, "while others are in flight the lane counts them for its choice"


def test_without_an_engine_that_serves_there_is_no_caller_until_one_does():
    engines = serving_engine()
    engines["state"] = EngineState.LOADING
    wire = Wire()
    lane, kept = rows_of(wire, engines=engines)
    assert not wire.callers
    wire.receive = lambda timeout: [Answer(number, Code.MODEL_FAILED, "", 4, 0) for number in lane.in_flight]
    with pytest.raises(ModelFailed):
        kept.ask(TEN, 1.0)
    engines["state"] = SERVING
    assert kept.ask(TEN, 1.0).tolist() == [100, 200] and len(wire.exchanged) == 1


@pytest.mark.parametrize("version", [0, 5])
def test_a_version_that_is_asked_for_goes_through_the_lane_which_names_it(version):
    wire = Wire()
    lane, kept = rows_of(wire, 2)
    given = np.array([[1, 2], [3, 4]], np.float32)
    reply = kept.reply({"x": given}, time.monotonic_ns() + 1000 * 10**9, version)
    assert (reply.outputs == given * 10).all() and (reply.named["y"] == reply.array).all()
    assert reply.version == (9 if version else 7) and wire.exchanged == ([(kept.first, 2, 5)] if version else [])
    if not version:
        ((_, _, seconds),) = wire.calls
        assert 500 < seconds <= 1000, "what is left"


SIZES = ModelSpec(
    "m",
    {"x": TensorSpec("float32", (VARIABLE,), capacity=4)},
    {"y": TensorSpec("float32", (VARIABLE,), capacity=4)},
)
SEVERAL = ModelSpec(
    "m",
    {"x": TensorSpec("float32", (2,)), "x2": TensorSpec("float32")},
    {"y": TensorSpec("float32", (2,)), "y2": TensorSpec("float32")},
)


def test_rows_of_variable_size_are_written_one_by_one_or_by_the_native_call():
    wire = Wire()
    lane, kept = rows_of(wire, spec=SIZES)
    assert kept.ask(TEN, 1.0).tolist() == [100, 200] and len(wire.calls) == 1
    assert kept.ask(TEN[:1], 1.0).tolist() == [100] and len(wire.calls) == 2
    with pytest.raises(SpecMismatch):
        kept.ask(np.zeros(5, np.float32), 1.0)
    wire.does.append(NOT_SENT)
    assert kept.ask(TEN[:1], 1.0).tolist() == [100] and len(wire.exchanged) == 1
    several = CallRow(lane, lane.take(2), single=False)
    outputs = several.ask([TEN, TEN[:1]], 1.0)
    assert [output.tolist() for output in outputs] == [[100, 200], [100]]
    assert wire.callers == [(0, 11)] * 3, "each has a caller of its own"


@pytest.mark.parametrize("n", [None, 2])
def test_several_inputs_and_outputs_go_by_their_names(n):
    wire = Wire()
    lane, kept = rows_of(wire, n, spec=SEVERAL)
    lead = () if n is None else (n,)
    given = {"x": np.ones((*lead, 2), np.float32), "x2": np.full(lead, 2, np.float32)}
    for _ in range(2):
        outputs = kept.ask(given, 1.0)
        assert outputs.keys() == {"y", "y2"} and outputs["y"].shape == (*lead, 2) and outputs["y2"].shape == lead
        assert (outputs["y"] == 10).all() and (outputs["y2"] == 20).all() and len(outputs) == 2
    with pytest.raises(SpecMismatch, match="give a dict with an array for each"):
        kept.ask(given["x"], 1.0)
    assert not lane.in_flight


def test_closed_rows_are_free_and_nobody_waits_for_what_was_asked_with_them():
    wire = Wire()
    lane, kept = rows_of(wire)
    assert lane.free == 7
    ticket = kept._ticket
    kept.close()
    assert lane.free == 8 and ticket.owner is None and ticket.sender is None
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None
