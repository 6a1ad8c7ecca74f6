"""The cache of answers: bounded, of one version, and never of a row that was changed."""

from __future__ import annotations

from functools import partial

import pytest
from tests.records import records

from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.server.engine.response_cache import ResponseCache
from jurybox.server.engine.served import BatchOutcome
from jurybox.server.settings.config import ModelSettings

ROWS = 16


class Adds:
    """Adds the version to rows, and counts them."""

    def __init__(self, columns):
        self.columns, self.version, self.rows = columns, 0, []
        self.meanwhile = lambda: None
        self.outcome = None

    def run(self, tickets, rows, version=0):
        assert rows == tickets["rows"].sum()
        for first, n in zip(tickets["first"].tolist(), tickets["rows"].tolist(), strict=True):
            self.columns.outputs["y"][first : first + n] = self.columns.inputs["x"][first : first + n] + self.version
            self.rows += range(first, first + n)
        self.meanwhile()
        return self.outcome


@pytest.fixture
def columns():
    spec = ModelSpec("adds", {"x": TensorSpec("float32", (4,))}, {"y": TensorSpec("float32", (4,))})
    return Columns.here(spec, ROWS)


@pytest.fixture
def adds(columns):
    return Adds(columns)


tickets = partial(records, ("first", "rows"))


def put(columns, *values):
    columns.outputs["y"][:] = -1
    for row, value in enumerate(values):
        columns.inputs["x"][row] = value


def run(cache, columns, *given):
    asked = tickets(*given)
    rows = int(asked["rows"].sum())
    return cache.run(asked, rows, 0)


def test_only_unknown_rows_are_computed(columns, adds):
    cache = ResponseCache(adds, columns, 1 << 20)
    put(columns, 1, 2, 3, 4)
    assert cache.answer(tickets((0, 2))) is None
    assert run(cache, columns, (0, 2)) is None and adds.rows == [0, 1]
    put(columns, 9, 1, 8, 2, 7, 6)
    adds.rows.clear()
    assert run(cache, columns, (0, 4), (4, 2)) is None
    assert adds.rows == [0, 2, 4, 5]
    assert columns.outputs["y"][:6, 0].tolist() == [9, 1, 8, 2, 7, 6]
    assert (cache.hits, cache.misses) == (2, 6)
    put(columns, 7, 5, 1, 2, 9)
    assert cache.answer(tickets((0, 2), (2, 3), (3, 1))).tolist() == [False, True, True]
    assert columns.outputs["y"][:5, 0].tolist() == [-1, -1, 1, 2, 9]


def test_an_answer_has_the_version_in_use(columns, adds):
    cache = ResponseCache(adds, columns, 1 << 20)
    put(columns, 1)
    run(cache, columns, (0, 1))
    adds.version = 5
    assert cache.answer(tickets((0, 1))) is None
    run(cache, columns, (0, 1))
    assert columns.outputs["y"][0, 0] == 6
    assert cache.answer(tickets((0, 1), version=4)) is None, "a batch says whether that version is held"
    assert cache.answer(tickets((0, 1), version=5)).tolist() == [True]
    assert cache.answer(tickets((0, 1))).tolist() == [True] and columns.outputs["y"][0, 0] == 6


def test_no_answer_has_rows_of_two_versions_if_new_weights_come_with_the_batch(columns, adds):
    cache = ResponseCache(adds, columns, 1 << 20)
    put(columns, 1, 2)
    run(cache, columns, (0, 1))

    def newer():
        adds.meanwhile = lambda: None
        adds.version = 7

    adds.meanwhile = newer
    run(cache, columns, (0, 2))
    assert columns.outputs["y"][:2, 0].tolist() == [8, 9]
    adds.version = 0
    put(columns, 2)
    assert cache.answer(tickets((0, 1))) is None, "and nothing was kept as of the version before"


def test_a_row_that_changes_while_it_is_computed_is_not_kept(columns, adds):
    cache = ResponseCache(adds, columns, 1 << 20)
    put(columns, 1)
    adds.meanwhile = lambda: columns.inputs["x"].fill(3)
    run(cache, columns, (0, 1))
    for value in (1, 3):
        put(columns, value)
        assert cache.answer(tickets((0, 1))) is None


def test_a_batch_with_failed_rows_keeps_nothing_and_names_the_rows_of_the_whole_batch(columns, adds):
    cache = ResponseCache(adds, columns, 1 << 20)
    put(columns, 1, 2, 3)
    run(cache, columns, (0, 1))
    adds.outcome = BatchOutcome()
    adds.rows.clear()
    assert run(cache, columns, (0, 3)) is adds.outcome
    assert adds.rows == [1, 2, 0, 1, 2], "the last run is that of the whole batch"
    put(columns, 2)
    assert cache.answer(tickets((0, 1))) is None


def test_the_cache_is_bounded_and_drops_what_was_not_asked_for_longest(columns, adds):
    cache = ResponseCache(adds, columns, 10 * (16 + 256))
    for value in range(10):
        put(columns, value)
        run(cache, columns, (0, 1))
    put(columns, 0)
    assert cache.answer(tickets((0, 1))) is not None
    for value in range(10, 15):
        put(columns, value)
        run(cache, columns, (0, 1))
        assert cache.size <= 10 * (16 + 256)
    known = []
    for value in range(15):
        put(columns, value)
        if cache.answer(tickets((0, 1))) is not None:
            known.append(value)
    assert known == [0, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def test_a_cache_needs_a_deterministic_model():
    with pytest.raises(ValueError, match="cache_mib is for models whose answer depends only on the row"):
        ModelSettings(factory="tests.models:affine", cache_mib=1)
    assert ModelSettings(factory="tests.models:affine", cache_mib=1, deterministic=True).cache_mib == 1
