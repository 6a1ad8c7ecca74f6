"""How calls of a juror are divided among threads that have nothing else to do."""

from __future__ import annotations

from types import SimpleNamespace

from jurybox.client.juror_calls import WaitingCalls


def call(n):
    return SimpleNamespace(n=n, begin=lambda: True)


def test_idle_threads_share_all_rows_and_a_call_that_is_divided_loses_and_repeats_none():
    calls, small, large = WaitingCalls(), call(2), call(10)
    calls._idle = 1
    calls.put([small, large])
    first, second = calls.take(), calls.take()
    assert [(part.asked is small, part.first, part.end) for part in first] == [(True, 0, 2), (False, 0, 4)]
    third = calls.take()
    assert [(part.first, part.end) for part in (*second, *third)] == [(4, 7), (7, 9)]
    assert [(part.first, part.end) for part in calls.take()] == [(9, 10)]
    assert not calls


def test_a_thread_takes_everything_if_no_other_is_idle():
    calls = WaitingCalls()
    calls.put([call(2), call(10)])
    assert [(part.first, part.end) for part in calls.take()] == [(0, 2), (0, 10)]
