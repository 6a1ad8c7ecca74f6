"""Rows in the order in which they came, each once."""

from __future__ import annotations

import os

import pytest

from jurybox.training.replay import Field, Replay
from jurybox.training.replay.tail import Tail


@pytest.fixture
def replay():
    with Replay.create(f"tail-{os.getpid()}", 8, {"a": Field((), "int64")}) as made:
        yield made


def test_each_row_is_handed_out_once_and_in_order(replay):
    replay.add(a=100)
    tail = Tail(replay)
    assert tail.take()["a"].tolist() == [], "it begins after what is there"
    for a in range(3):
        replay.add(a=a)
    assert tail.take()["a"].tolist() == [0, 1, 2]
    replay.add(a=3)
    assert tail.take()["a"].tolist() == [3]
    assert tail.take()["a"].tolist() == []


def test_rows_that_were_overwritten_are_missed(replay):
    tail = Tail(replay)
    for a in range(20):
        replay.add(a=a)
    assert tail.take()["a"].tolist() == list(range(12, 20))


def test_a_row_that_is_never_finished_holds_nothing_up(replay):
    tail = Tail(replay)
    replay.add(a=0)
    held = replay.reserve(1)
    assert tail.take()["a"].tolist() == [0]
    replay.add(a=2)
    assert tail.take()["a"].tolist() == [2]
    del held
