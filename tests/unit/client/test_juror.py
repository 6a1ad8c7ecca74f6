"""How a juror's threads share the calls that wait."""

from __future__ import annotations

import threading

import pytest

from jurybox.client.juror import _Asked
from jurybox.client.juror_calls import Waiting
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import ServerGone, SpecMismatch

SPEC = ModelSpec("m", {"x": TensorSpec("float32", ())}, {"score": TensorSpec("float32", ())})


def call(n):
    return _Asked({"x": [float(i) for i in range(n)]}, n, 0.0)


def waiting(*calls, idle=0):
    """Calls that wait, for one thread that takes them and `idle` others."""
    made = Waiting()
    made._idle = idle
    made.put(calls)
    return made


def taken(made):
    return [(part.asked, part.first, part.end) for part in made.take()]


def test_a_lone_thread_takes_all_calls_in_order():
    a, b, c = call(3), call(0), call(2)
    made = waiting(a, b, c)
    assert taken(made) == [(a, 0, 3), (b, 0, 0), (c, 0, 2)]
    assert not made and taken(made) == []


def test_threads_share_the_rows_of_few_calls_and_of_many():
    large, small = call(5), [call(1) for _ in range(3)]
    made = waiting(large, *small, idle=1)
    assert taken(made) == [(large, 0, 4)]
    made._idle = 0
    assert taken(made) == [(large, 4, 5), *((one, 0, 1) for one in small)]
    assert taken(waiting(call(0), idle=3))[0][1:] == (0, 0)


def test_what_was_put_back_is_first():
    a, b = call(2), call(2)
    made = waiting(a, idle=1)
    parts = made.take()
    made.put([b])
    made.put_back(parts)
    made._idle = 0
    assert taken(made) == [(a, 0, 1), (a, 1, 2), (b, 0, 2)]


def test_a_cancelled_or_failed_call_is_not_sent():
    cancelled, failed, other = call(2), call(4), call(1)
    assert cancelled.answer.cancel()
    made = waiting(cancelled, failed, other, idle=1)
    assert taken(made) == [(failed, 0, 4)]
    assert not failed.answer.cancel(), "a part of it is being sent"
    failed.fail(ServerGone("over"))
    made = waiting(failed, other)
    assert taken(made) == [(other, 0, 1)]
    with pytest.raises(ServerGone):
        failed.answer.result(0)


def test_a_call_is_answered_with_its_last_part():
    asked = call(3)
    asked.found(1, [0.5, "no score"], [7])
    assert not asked.answer.done()
    asked.found(0, [0.25], [5])
    scores = asked.answer.result(0)
    assert scores == [0.25, 0.5, "no score"] and scores.version == 5
    asked.fail(ServerGone("too late"))
    assert asked.answer.result(0) is scores


def test_parts_that_several_threads_have_scored_are_all_counted():
    asked = call(2)
    other = threading.Thread(target=asked.found, args=(1, [0.5], [5]))

    def versions():
        yield 7
        other.start()
        other.join(0.05)
        assert other.is_alive(), "it waits until this part is counted"

    asked.found(0, [0.25], versions())
    other.join(30)
    scores = asked.answer.result(0)
    assert scores == [0.25, 0.5] and scores.version == 5


def test_a_call_is_fitted_once_and_fails_once():
    asked = call(2)
    asked.fit_once(SPEC, {})
    rows = asked.rows
    asked.fit_once(SPEC, {})
    assert asked.rows is rows and len(rows) == 2
    wrong = _Asked({"y": [1.0]}, 1, 0.0)
    for _ in range(2):
        with pytest.raises(SpecMismatch, match="expected a column"):
            wrong.fit_once(SPEC, {})


def test_a_call_that_two_threads_send_is_fitted_once():
    asked, fits = call(2), []
    fit = asked.fit
    other = threading.Thread(target=asked.fit_once, args=(SPEC, {}))

    def counted(*args, **options):
        fits.append(1)
        if len(fits) == 1:
            other.start()
            other.join(0.05)
        fit(*args, **options)

    asked.fit = counted
    asked.fit_once(SPEC, {})
    other.join(30)
    assert len(fits) == 1 and len(asked.rows) == 2


def test_threads_end_after_the_last_call():
    made = Waiting()
    found = []

    def work():
        while made.wait():
            found.extend(part.asked for part in made.take())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    calls = [call(1) for _ in range(50)]
    for one in calls:
        made.put([one])
    made.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(map(id, found)) == sorted(map(id, calls))
