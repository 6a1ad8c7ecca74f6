"""Calls within calls over HTTP/2 lines of our own: a signal handler or a destructor may come at any moment."""

from __future__ import annotations

import itertools
import os
import select
from types import SimpleNamespace

import grpc
import pytest
from tests.moments import Moment
from tests.serving import wait_until
from tests.unit.client.played_gateway import HOLD, Started

from jurybox import native
from jurybox.client.remote import http2_call, http2_calls, http2_line

pytestmark = [
    pytest.mark.skipif(bool(native.nghttp2()[1]), reason="the system has no libnghttp2"),
    pytest.mark.usefixtures("short_pauses"),
]


def test_a_call_may_be_finished_by_a_nested_call_at_any_moment_while_it_is_finished():
    finishes = 0
    for number in itertools.count():
        call, told = http2_call.LineCall(b"x", 30.0), []
        call.done = told.append
        with Moment((http2_call.__file__,), number, lambda: call.finish(b"nested"), anywhere=True) as moment:  # noqa: B023
            call.finish(b"outer")
        if not moment.fell:
            assert told == [b"outer"]
            break
        assert call.outcome in told
        assert call.done is None
        finishes += 1
    assert finishes > 5


@pytest.mark.parametrize("what", ["late", "cut", "answered"])
def test_a_nested_wait_at_any_moment_of_a_wait_finds_and_leaves_lines_in_order(gateway, calls, monkeypatch, what):
    """Both see the same call end: its time is over, its line breaks, or its answer comes."""
    monkeypatch.setattr(http2_calls, "_SWEEP", 0.005)
    started = Started(calls)
    started.start(b"first")
    started.wait_for(b"first")
    for number in itertools.count(0, 5):
        gateway.held.clear()
        gateway.script = [HOLD]
        request = b"%d" % number
        started.start(request, 0.0 if what == "late" else 30.0)
        if what != "late":
            wait_until(lambda: gateway.held)
            peer, call, message = gateway.held[0]
            peer.close() if what == "cut" else peer.answer(call, message)
        with Moment((http2_calls.__file__,), number, lambda: started.calls.wait(0.0), anywhere=True) as moment:
            started.calls.wait(0.0)
        if what == "late":
            (outcome,) = started.wait_for(request)
            assert outcome == b"to " + request or outcome.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            assert started.wait_for(request) == [b"to " + request]
        if not moment.fell:
            break
    assert number > 100
    started.start(b"last")
    assert started.wait_for(b"last") == [b"to last"]
    started.calls.close()


def test_a_call_that_a_nested_one_ends_at_any_moment_of_its_start_is_forgotten(gateway, calls, started):
    files = tuple(module.__file__ for module in (http2_calls, http2_call, http2_line))
    started.start(b"first")
    started.wait_for(b"first")
    for number in itertools.count(0, 2):
        outer, inner = b"outer %d" % number, b"inner %d" % number

        def calls_within() -> None:
            started.start(inner)  # noqa: B023
            started.wait_for(inner)  # noqa: B023

        with Moment(files, number, calls_within, anywhere=True) as moment:
            started.start(outer)
        assert started.wait_for(outer) == [b"to " + outer]
        assert started.ended.get(inner) == (b"to " + inner if moment.fell else None)
        assert not started.calls._under_way
        if not moment.fell:
            break
    assert number > 100


def test_a_line_is_polled_again_that_a_nested_call_polls_in_the_place_of_a_closed_one(calls):
    """It has the descriptor of the one that is being forgotten."""
    for number in itertools.count():
        started = calls.started()
        (reading, writing), (spare, other) = os.pipe(), os.pipe()
        line, successor = (
            SimpleNamespace(broken="", wants=select.POLLIN, descriptor=reading, used=False) for _ in range(2)
        )
        started._settle(line)

        def closes_and_polls_another() -> None:
            started._forget(line)  # noqa: B023
            os.dup2(spare, reading)  # noqa: B023
            started._settle(successor)  # noqa: B023

        with Moment((http2_calls.__file__,), number, closes_and_polls_another, anywhere=True) as moment:
            started._forget(line)
        if not moment.fell:
            closes_and_polls_another()
        started._settle(successor)  # as each wait begins
        os.write(other, b"x")
        assert started._polls.poll(0) == [(reading, select.POLLIN)]
        started.close()
        for descriptor in (reading, writing, spare, other):
            os.close(descriptor)
        if not moment.fell:
            break
    assert number > 10


def test_who_cancels_a_call_that_a_nested_one_has_begun_elsewhere_cancels_no_other_of_its_number(gateway, calls):
    gateway.script = [HOLD]
    line = calls.take(looks=False)
    call, elsewhere = http2_call.LineCall(b"x", 30.0), http2_call.LineCall(b"y", 30.0)
    line.begin(call)
    elsewhere.number = call.number  # on its own line
    line.cancel(elsewhere)
    assert call.line is line and line.calls == {call.number: call}
    while not gateway.held:
        line.wait(1.0)
    gateway.script, (held,) = [], gateway.held
    held[0].answer(*held[1:])
    while call.outcome is None:
        line.wait(1.0)
    assert call.outcome == b"to x"
    assert not gateway.gone
    line.close()


def test_a_nested_wait_makes_the_calls_of_a_line_in_use_again_and_a_look_leaves_it_alone(gateway, started):
    gateway.script = [HOLD]
    started.start(b"x")
    wait_until(lambda: len(gateway.held) == 1)
    (line,) = started.calls._lines

    def nested() -> None:
        started.calls.wait(0.0)
        assert len(line.calls) == 1 and not started.ended
        assert started.wait_for(b"x") == [b"to x"] and not line.calls

    started.calls._use(line, nested)
    peer, call, message = gateway.held[0]
    peer.answer(call, b"late " + message)
    started.calls.wait(0.3)
    assert started.ended == {b"x": b"to x"} and len(gateway.peers) == 2


def test_a_nested_wait_sleeps_although_the_line_in_use_has_something_to_read(gateway, started):
    gateway.script, looks = [HOLD, HOLD], []
    started.start(b"x")
    wait_until(lambda: len(gateway.held) == 1)
    (line,) = started.calls._lines
    tend = started.calls._tend
    started.calls._tend = lambda *, waits: looks.append(waits) or tend(waits=waits)

    def nested() -> None:
        peer, call, message = gateway.held[0]
        peer.answer(call, message)
        wait_until(lambda: bool(select.select([line.descriptor], [], [], 0)[0]), what="its answer")
        started.calls.wait(0.3)  # for the one that is made again

    started.calls._use(line, nested)
    assert len(looks) < 20
    wait_until(lambda: len(gateway.held) == 2)
    peer, call, message = gateway.held[1]
    peer.answer(call, message)
    assert started.wait_for(b"x") == [b"to x"]


def test_an_interrupted_call_leaves_no_line_that_another_one_would_use(gateway, calls, monkeypatch):
    assert calls.ask(b"x", 30.0) == b"to x"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(http2_line.Line, "wait", interrupt)
        calls.ask(b"y", 30.0)
    assert not calls._free and calls.ask(b"z", 30.0) == b"to z" and len(gateway.peers) == 2
