"""Rows in the order of their arrival, each once."""

from __future__ import annotations

import os

import numpy as np
import pytest

from jurybox.training.replay import Field, Replay
from jurybox.training.replay.cursor import Cursor


@pytest.fixture
def replay():
    with Replay.create(f"tail-{os.getpid()}", 8, {"a": Field((), "int64")}) as made:
        yield made


def test_each_row_is_handed_out_once_and_in_order(replay):
    replay.add(a=100)
    cursor = Cursor(replay)
    assert cursor.take()["a"].tolist() == [], "it begins after what is there"
    for a in range(3):
        replay.add(a=a)
    assert cursor.take()["a"].tolist() == [0, 1, 2]
    replay.add(a=3)
    assert cursor.take()["a"].tolist() == [3]
    assert cursor.take()["a"].tolist() == []


def test_rows_that_were_overwritten_are_missed(replay):
    cursor = Cursor(replay)
    for a in range(20):
        replay.add(a=a)
    assert cursor.take()["a"].tolist() == list(range(12, 20))


def test_a_row_that_is_never_finished_holds_nothing_up(replay):
    cursor = Cursor(replay)
    replay.add(a=0)
    held = replay.reserve(1)
    assert cursor.take()["a"].tolist() == [0]
    replay.add(a=2)
    assert cursor.take()["a"].tolist() == [2]
    del held


def killed_in(replay, slot):
    """What a writer leaves that was killed in this slot, long ago."""
    replay.parts[0].sequences[slot] = 1


def test_the_newest_rows_come_though_a_writer_was_killed_laps_ago(replay):
    killed_in(replay, 3)
    for a in range(40):
        replay.add(a=a)
    assert replay.counters.retried > 0, "no writer met the dead slot: this run has shown nothing"
    fresh, cursor = Cursor(replay), Cursor(replay)
    assert fresh.take()["a"].tolist() == [], "a fresh reader begins after what is there"
    for a in range(40, 80):
        replay.add(a=a)
        assert cursor.take()["a"].tolist() == [a], "the newest row comes at once, and no old one with it"


def test_rows_that_were_given_up_are_not_handed_out(replay):
    cursor = Cursor(replay)
    for a in range(4):
        replay.add(a=a)
    replay.discard(3)
    assert cursor.take()["a"].tolist() == [3]


def test_rows_of_more_than_one_number_come_as_they_were_written():
    fields = {"a": Field((2, 3), "int16"), "b": Field((), "float64"), "c": Field((5,), "uint8")}
    with Replay.create(f"tail-wide-{os.getpid()}", 8, fields) as replay:
        cursor = Cursor(replay)
        rng, rows = np.random.default_rng(0), []
        for _ in range(13):
            rows.append(
                {
                    "a": rng.integers(-9, 9, (2, 3), np.int16),
                    "b": rng.normal(),
                    "c": rng.integers(0, 9, 5, np.uint8),
                }
            )
            replay.add(**rows[-1])
        taken = cursor.take()
        for name in fields:
            np.testing.assert_array_equal(taken[name], np.stack([row[name] for row in rows[-8:]]))


@pytest.mark.parametrize("before", [3, 20])
def test_after_a_restore_a_cursor_resumes_where_another_stood_at_the_save(replay, tmp_path, before):
    cursor = Cursor(replay)
    for a in range(before):
        replay.add(a=a)
    cursor.take()
    replay.add(a=100)  # added and not taken when the replay was saved
    replay.save(tmp_path / "rows")
    with Replay.create(f"tail-again-{os.getpid()}", 8, {"a": Field((), "int64")}) as again:
        again.restore(tmp_path / "rows")
        again.add(a=101)  # by a process that was ready first
        resumed = Cursor(again)
        resumed.resume(cursor.at)
        assert resumed.take()["a"].tolist() == [100, 101]
        again.add(a=102)
        assert resumed.take()["a"].tolist() == [102]


def test_a_cursor_resumes_behind_the_rows_of_a_replay_that_was_not_restored(replay):
    replay.add(a=0)
    cursor = Cursor(replay)
    cursor.resume(1000)
    replay.add(a=1)
    assert cursor.take()["a"].tolist() == [1]


def test_a_cursor_tells_the_tickets_of_the_rows_that_it_took_last(replay):
    cursor = Cursor(replay)
    for a in range(12):
        replay.add(a=a)
    replay.parts[0].sequences[6] = 13  # row 6 is being written
    assert cursor.take()["a"].tolist() == cursor.tickets.tolist() == [4, 5, *range(7, 12)]
    assert not len(cursor.take()["a"]) and not len(cursor.tickets)
