"""How a juror's threads share the calls that wait."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from jurybox.client.juror import Juror, Passing, _ScoreCall, _Vote
from jurybox.client.juror_calls import WaitingCalls
from jurybox.client.ticket import Reply
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, ModelFailed, Refused, ServerGone, SpecMismatch

SPEC = ModelSpec("m", {"x": TensorSpec("float32", ())}, {"score": TensorSpec("float32", ())})


def call(n):
    return _ScoreCall({"x": [float(i) for i in range(n)]}, n, 0.0)


def waiting(*calls, idle=0):
    """Calls that wait, for one thread that takes them and `idle` others."""
    made = WaitingCalls()
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
    wrong = _ScoreCall({"y": [1.0]}, 1, 0.0)
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


class Member:
    """A panel's member that answers when the test says so."""

    def _hand_over(self, calls):
        (self.vote,) = calls


def voting(asked):
    members = {"a": (2.0, Member()), "b": (1.0, Member())}
    _Vote(asked, members)
    return members["a"][1].vote, members["b"][1].vote


def test_a_panels_reason_is_passing_only_if_each_members_is():
    asked = call(4)
    a, b = voting(asked)
    b.found(0, [0.5, Passing("busy"), "wrong", Passing("busy")], [3])
    assert not asked.answer.done()
    a.found(0, [1.0, Passing("down"), Passing("down"), 1.0], [4])
    scores = asked.answer.result(0)
    assert scores == [2.5, "a: down; b: busy", "a: down; b: wrong", "b: busy"]
    assert [isinstance(score, Passing) for score in scores] == [False, True, False, True]
    assert scores.version == 3 and scores.parts["b"][0] == 0.5


def test_a_member_that_is_down_has_no_score_and_any_other_error_is_raised():
    asked = call(1)
    a, b = voting(asked)
    a.fail(ServerGone("down"))
    b.found(0, [0.5], [3])
    (score,) = asked.answer.result(0)
    assert isinstance(score, Passing) and score == "a: down"
    asked = call(1)
    a, b = voting(asked)
    a.fail(SpecMismatch("wrong"))
    b.found(0, [0.5], [3])
    with pytest.raises(SpecMismatch, match="wrong"):
        asked.answer.result(0)


def test_a_call_that_is_late_takes_its_members_calls_back():
    asked = call(2)
    a, b = voting(asked)
    scores = asked.late(0.5)
    assert all(isinstance(score, Passing) and "within 0.5 s" in score for score in scores) and len(scores) == 2
    assert taken(waiting(a, b)) == [], "they are not sent"
    answered = call(1)
    answered.found(0, [0.5], [1])
    assert answered.late(0.5) == [0.5]


class Scorer:
    """A model whose score is the row's number; `refuses` says which requests it refuses."""

    spec = SPEC

    def __init__(self, refuses):
        self.refuses, self.sizes = refuses, []

    def _reply(self, numbers):
        self.sizes.append(len(numbers))
        if (error := self.refuses(numbers)) is not None:
            raise error
        return Reply(np.array(numbers, np.float32), 1)

    def row_reply(self, row, timeout):
        return self._reply([float(row)])

    def infer_reply(self, inputs, timeout):
        return self._reply(inputs["x"].tolist())


def asked_of(scorer, numbers, seconds=60.0):
    juror = Juror("m", address="/nowhere")
    return juror._ask(scorer, [{"x": np.float32(x)} for x in numbers], time.monotonic() + seconds, [])


FAILS = ModelFailed("bad"), Refused("too large", Code.TOO_LARGE)


@pytest.mark.parametrize("error", FAILS, ids=["failed", "too-large"])
def test_only_the_row_that_the_model_refuses_has_no_score(error):
    scorer = Scorer(lambda numbers: error if 2.0 in numbers else None)
    scores = asked_of(scorer, range(8))
    assert [score if isinstance(score, float) else "none" for score in scores] == [0, 1, "none", 3, 4, 5, 6, 7]
    assert str(error) in scores[2] and not isinstance(scores[2], Passing)
    assert scorer.sizes == [8, 4, 2, 2, 1, 1, 4]


@pytest.mark.parametrize("error", FAILS, ids=["failed", "too-large"])
def test_after_its_deadline_a_call_is_not_divided_any_more(error):
    scorer = Scorer(lambda numbers: error)
    assert len(asked_of(scorer, range(8), -1.0)) == 8 and scorer.sizes == [8]


def test_a_refusal_for_another_reason_is_raised_and_a_score_that_is_no_number_is_a_reason():
    scorer = Scorer(lambda numbers: Refused("not now", Code.REFUSED))
    with pytest.raises(Refused, match="not now"):
        asked_of(scorer, range(4))
    assert scorer.sizes == [4]
    assert asked_of(Scorer(lambda _: None), [1, np.inf, np.nan]) == [1, "the score is inf", "the score is nan"]
    assert asked_of(Scorer(lambda _: None), [np.nan]) == ["the score is nan"]


def test_threads_end_after_the_last_call():
    made = WaitingCalls()
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
