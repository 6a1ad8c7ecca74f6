"""The cache of answers by the row: rows that differ in size, versions that a request asks for, and what is kept."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tests.records import records

from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.server.engine.response_cache import ResponseCache

ROWS = 8
ENTRY = 256  # bytes of an entry besides its row's outputs


class Echoes:
    """Answers rows with themselves, and with the version; notes which rows it computed, and in which tickets."""

    def __init__(self, columns):
        self.columns, self.version, self.rows, self.tickets = columns, 0, [], []
        self.meanwhile = lambda: None

    def run(self, tickets, rows, version=0):
        self.tickets += zip(tickets["first"].tolist(), tickets["rows"].tolist(), strict=True)
        columns = self.columns
        for first, n in zip(tickets["first"].tolist(), tickets["rows"].tolist(), strict=True):
            for row in range(first, first + n):
                for name, values in columns.inputs.items():
                    columns.outputs[name][row] = values[row]
                    if name in columns.input_extents:
                        columns.output_extents[name][row] = columns.input_extents[name][row]
                columns.outputs["version"][row] = version or self.version
                self.rows.append(row)
        self.meanwhile()


def cached(limit=1 << 20, **inputs):
    """A cache, and its model."""
    outputs = inputs | {"version": TensorSpec("int64", ())}  # behind those that may differ in size
    columns = Columns.here(ModelSpec("echoes", inputs, outputs), ROWS)
    echoes = Echoes(columns)
    return ResponseCache(echoes, columns, limit), echoes


tickets = partial(records, ("first", "rows"))


def run(cache, *given, version=0):
    asked = tickets(*given, version=version)
    return cache.run(asked, int(asked["rows"].sum()), version)


def put(echoes, row, *, behind=0, **values):
    """Write a row of inputs, with `behind` in the unused part of its slots; clear its outputs."""
    columns = echoes.columns
    for name, given in values.items():
        value = np.frombuffer(given, np.uint8) if isinstance(given, bytes) else np.asarray(given)
        flat = columns.inputs[name][row].reshape(-1)
        flat[:] = behind
        flat[: value.size] = value.reshape(-1)
        spec = columns.spec.inputs[name]
        if spec.variable:
            columns.input_extents[name][row] = spec.extents_of(value.shape)
    for array in (*columns.outputs.values(), *columns.output_extents.values()):
        array[row] = 77


def got(echoes, row, name):
    """The output of a row: bytes, or an array of the row's shape."""
    columns, spec = echoes.columns, echoes.columns.spec.outputs[name]
    sizes = columns.output_extents[name][row].tolist()
    shape = spec.measured(sizes) if spec.shape else sizes
    value = columns.outputs[name][row].reshape(-1)[: int(np.prod(shape))].reshape(shape)
    return value.tobytes() if spec.dtype == "bytes" else value


TEXT = TensorSpec("bytes", capacity=8)
GRID = TensorSpec("int16", (-1, 2, -1), capacity=12)


def test_rows_that_differ_in_size_are_answered_with_their_own_sizes_and_values():
    cache, echoes = cached(text=TEXT, grid=GRID)
    rows = [
        (b"words", np.arange(8, dtype=np.int16).reshape(2, 2, 2)),
        (b"", np.zeros((0, 2, 3), np.int16)),
        (b"eight ch", np.arange(12, dtype=np.int16).reshape(1, 2, 6)),
    ]
    for row, (text, grid) in enumerate(rows):
        put(echoes, row, text=text, grid=grid)
    assert run(cache, (0, 3)) is None and echoes.rows == [0, 1, 2]
    for row, (text, grid) in enumerate(rows):
        put(echoes, 7 - row, text=text, grid=grid, behind=9)
    assert cache.answer(tickets((5, 3))).tolist() == [True]
    for row, (text, grid) in enumerate(rows):
        assert got(echoes, 7 - row, "text") == text
        assert got(echoes, 7 - row, "grid").shape == grid.shape
        np.testing.assert_array_equal(got(echoes, 7 - row, "grid"), grid)
        assert echoes.columns.outputs["version"][7 - row] == 0
    assert echoes.rows == [0, 1, 2] and (cache.hits, cache.misses) == (3, 3)


@pytest.mark.parametrize(
    "other",
    [
        {"text": b"word"},
        {"text": b"wordz"},
        {"grid": np.arange(12).reshape(2, 2, 3)},
        {"grid": np.append(np.arange(11), 99).reshape(3, 2, 2)},
    ],
    ids=["shorter", "its last byte", "its shape", "its last number"],
)
def test_a_row_that_differs_in_size_or_in_its_last_value_is_another(other):
    cache, echoes = cached(text=TEXT, grid=GRID)
    known = {"text": b"words", "grid": np.arange(12).reshape(3, 2, 2)}
    put(echoes, 0, **known)
    run(cache, (0, 1))
    put(echoes, 0, **known)
    assert cache.answer(tickets((0, 1))) is not None
    put(echoes, 0, **(known | other))
    assert cache.answer(tickets((0, 1))) is None


@pytest.mark.parametrize("lie", [(-1, -1), (-1, 3), (2, -3), (3, 3), (1 << 40, 1 << 40)])
def test_a_row_with_sizes_that_it_cannot_have_is_computed_each_time(lie):
    cache, echoes = cached(grid=GRID)
    for _ in range(2):
        put(echoes, 0, grid=np.ones((1, 2, 1)))
        echoes.columns.input_extents["grid"][0] = lie
        assert cache.answer(tickets((0, 1))) is None
        run(cache, (0, 1))
        put(echoes, 1, grid=np.ones((1, 2, 1)))  # so that the cache is not empty
        run(cache, (1, 1))
    assert echoes.rows == [0, 1, 0] and cache.size == 2 * 8 + 2 * 2 + 8 + ENTRY


def test_an_answer_whose_sizes_are_overwritten_before_it_is_read_is_not_kept():
    cache, echoes = cached(text=TEXT)
    put(echoes, 0, text=b"words")
    echoes.meanwhile = lambda: echoes.columns.output_extents["text"].fill(-1)
    run(cache, (0, 1))
    assert cache.size == 0
    echoes.meanwhile = lambda: None
    run(cache, (0, 1))
    assert echoes.rows == [0, 0] and cache.answer(tickets((0, 1))) is not None


# ---- versions that a request asks for


VECTOR = TensorSpec("float32", (2,))


def test_a_batch_of_an_older_version_is_not_answered_with_rows_of_the_newest():
    cache, echoes = cached(x=VECTOR)
    echoes.version = 5
    put(echoes, 0, x=[1, 2])
    run(cache, (0, 1))
    run(cache, (0, 1), version=4)
    assert echoes.columns.outputs["version"][0] == 4 and echoes.rows == [0, 0]
    run(cache, (0, 1))
    assert echoes.columns.outputs["version"][0] == 5 and echoes.rows == [0, 0]


def test_of_a_batch_of_an_older_version_only_unknown_rows_are_computed():
    cache, echoes = cached(x=VECTOR)
    echoes.version = 5
    put(echoes, 0, x=[1, 2])
    run(cache, (0, 1), version=4)
    put(echoes, 0, x=[3, 4])
    put(echoes, 1, x=[1, 2])
    echoes.rows.clear()
    run(cache, (0, 2), version=4)
    assert echoes.rows == [0]
    assert echoes.columns.outputs["version"][:2].tolist() == [4, 4]
    assert (cache.hits, cache.misses) == (1, 2)


# ---- what is computed, and what is kept


def test_neighbouring_rows_that_are_not_known_stay_together():
    """A model reads one run of rows where they are, and copies those of several tickets."""
    cache, echoes = cached(x=VECTOR)
    for row in range(8):
        put(echoes, row, x=[row, row])
    run(cache, (2, 1))
    echoes.tickets.clear()
    run(cache, (0, 6), (6, 2))
    assert echoes.tickets == [(0, 2), (3, 3), (6, 2)]


def test_equal_rows_of_a_batch_are_kept_once():
    cache, echoes = cached(x=VECTOR)
    for row in range(3):
        put(echoes, row, x=[1, 2])
    run(cache, (0, 3))
    assert cache.size == 2 * 4 + 8 + ENTRY


@pytest.mark.parametrize("short", [0, 1])
def test_an_answer_larger_than_the_cache_is_not_kept_and_costs_no_other_its_place(short):
    cache, echoes = cached(limit=ENTRY + 8 + 8 + 8 - short, text=TEXT)
    put(echoes, 0, text=b"")
    run(cache, (0, 1))
    put(echoes, 0, text=b"eight ch")
    run(cache, (0, 1))
    put(echoes, 0, text=b"")
    assert (cache.answer(tickets((0, 1))) is not None) == bool(short)
    put(echoes, 0, text=b"eight ch")
    assert (cache.answer(tickets((0, 1))) is not None) == (not short)
