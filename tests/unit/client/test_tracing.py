"""Spans of tickets over a scripted transport: each ends, whatever becomes of its ticket."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from jurybox.client import tracing
from jurybox.client.in_flight import Answer, InFlight
from jurybox.client.tracing import TracedTransport
from jurybox.protocol.errors import Code


class Transport:
    """Notes what is called, and returns what it is given."""

    def __init__(self):
        self.calls, self.answers = [], []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            if name == "receive":
                return self.answers
            return self.answers[0] if name == "exchange" and self.answers else name

        return call


@pytest.fixture
def traced():
    def make(timings=None, lane=4, sampler=ALWAYS_ON):
        memory, inner = InMemorySpanExporter(), Transport()
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(memory))
        return TracedTransport(inner, "m", lane, timings, provider.get_tracer("test")), inner, memory

    return make


def ticket(sequence=5):
    made = InFlight(sequence, 0, 3, 0, 0)
    made.submitted, made.engine = time.monotonic_ns(), 1
    return made


def told(memory):
    return [(span.name, dict(span.attributes), span.status.status_code.name) for span in memory.get_finished_spans()]


ABOUT = {"jurybox.model": "m", "jurybox.rows": 3, "jurybox.sequence": "5"}


@pytest.mark.parametrize("lane", [4, 0, None])
@pytest.mark.parametrize("code", [Code.OK, Code.MODEL_FAILED])
def test_a_span_tells_of_its_ticket_and_its_answer(traced, code, lane):
    transport, inner, memory = traced(lane=lane)
    sent = ticket()
    inner.answers = [Answer(5, code, "no", 6, 1)]
    assert transport.exchange(sent, 1.0) is inner.answers[0] and inner.calls == [("exchange", sent, 1.0)]
    about = ABOUT | {"jurybox.weights.version": 6} | ({} if lane is None else {"jurybox.lane": lane})
    assert told(memory) == [("infer m", about, "UNSET" if code == Code.OK else "ERROR")]
    (span,) = memory.get_finished_spans()
    assert span.status.description == (None if code == Code.OK else "no")
    assert abs(span.start_time - time.time_ns() + time.monotonic_ns() - sent.submitted) < 10**9
    assert span.end_time >= span.start_time
    assert list(transport.receive(0)) == inner.answers, "until it is settled"
    assert len(memory.get_finished_spans()) == 1


def test_a_ticket_that_is_sent_again_has_one_span_that_says_so(traced):
    transport, _, memory = traced()
    sent = ticket()
    transport.send(sent)
    sent.engine, sent.submitted = 2, sent.submitted + 5000
    transport.send(sent)
    transport._transport.answers = [Answer(5, Code.OK, "", 6, 1)]
    transport.receive(0)
    (span,) = memory.get_finished_spans()
    assert [(event.name, dict(event.attributes)) for event in span.events] == [("sent again", {"jurybox.engine": 2})]
    assert span.events[0].timestamp == span.start_time + 5000


@pytest.mark.parametrize("end", ["close", "forked"])
def test_spans_without_an_answer_end_with_the_lane_and_not_in_a_forked_child(traced, end):
    closed = []
    transport, inner, memory = traced(SimpleNamespace(close=lambda: closed.append(True)))
    for sequence in (5, 6):
        transport.send(ticket(sequence))
    getattr(transport, end)()
    assert inner.calls[-1] == (end,) and closed == [True]
    assert [(name, status) for name, _, status in told(memory)] == [("infer m", "ERROR")] * (2 if end == "close" else 0)
    transport.close()
    assert len(told(memory)) == (2 if end == "close" else 0)


def test_of_too_many_open_spans_the_oldest_ends(traced, monkeypatch):
    monkeypatch.setattr(tracing, "_MOST_OPEN", 2)
    transport, _, memory = traced()
    for sequence in (5, 6, 7):
        transport.send(ticket(sequence))
    ((_, about, status),) = told(memory)
    assert about["jurybox.sequence"] == "5" and status == "ERROR"
    assert memory.get_finished_spans()[0].status.description == "no answer came"


def test_a_ticket_that_is_not_sampled_keeps_nothing_open(traced):
    transport, inner, memory = traced(sampler=ALWAYS_OFF)
    transport.send(ticket())
    assert not transport._open
    inner.answers = [Answer(5, Code.OK, "", 6, 1)]
    assert transport.receive(0) == inner.answers and not told(memory)


def test_the_times_that_an_engine_recorded_are_spans_within_the_tickets(traced):
    sent, asked = ticket(), []
    began, ended = sent.submitted + 1000, sent.submitted + 3000
    timing = {"began": began, "ended": ended, "rows": 9, "tickets": 2, "engine": 3}
    transport, inner, memory = traced(SimpleNamespace(read=lambda *of: asked.append(of) or timing))
    transport.send(sent)
    inner.answers = [Answer(5, Code.OK, "", 6, 1)]
    transport.receive(0)
    queue, batch, reply, whole = memory.get_finished_spans()
    assert asked == [(4, 5)] and [span.name for span in (queue, batch, reply)] == ["queue", "batch", "reply"]
    assert {span.parent.span_id for span in (queue, batch, reply)} == {whole.context.span_id}
    assert (queue.start_time, batch.start_time, reply.start_time) == (
        whole.start_time, whole.start_time + 1000, whole.start_time + 3000)  # fmt: skip
    assert (queue.end_time, batch.end_time, reply.end_time) == (batch.start_time, reply.start_time, whole.end_time)
    assert dict(batch.attributes) == {"jurybox.batch.rows": 9, "jurybox.batch.tickets": 2, "jurybox.engine": 3}
    assert not queue.attributes and not reply.attributes


def test_all_else_is_the_transports_own(traced):
    transport, inner, _ = traced()
    sent, answer = ticket(), Answer(5, Code.OK, "", 6, 1)
    assert transport.holds(sent) == "holds" and transport.is_reading(sent) == "is_reading"
    transport.settled(answer)
    transport.watch("loop", "arrived")
    assert inner.calls == [("holds", sent), ("is_reading", sent), ("settled", answer), ("watch", "loop", "arrived")]
    assert transport.caller(None) is None, "so that every ticket is seen"
