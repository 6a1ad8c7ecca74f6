"""Inputs whose rows differ in size, as a module gets them: where they lie, and how they are padded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from jurybox import native
from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.models import ServedModel

NUMBER = TensorSpec("float32", ())


class Keeps(nn.Module):
    """Keeps copies of its inputs, and where they lay."""

    def __init__(self):
        super().__init__()
        self.calls, self.places = [], []

    def forward(self, x, x_lengths=None):
        rows = list(x)
        self.calls.append(([row.clone() for row in rows], x_lengths if x_lengths is None else x_lengths.clone()))
        self.places += [row.data_ptr() for row in rows]
        return torch.zeros(len(rows))


class Batch:
    """A model whose module gets rows of one spec, and its columns."""

    def __init__(self, spec, collate, **given):
        self.module = Keeps()
        model = ServedModel(self.module, {"x": spec}, {"y": NUMBER}, collate=collate, **given)
        self.columns = Columns.here(model.spec("m"), 16)
        self.columns.inputs["x"][:] = 1
        self.served = OpenServed("m", model, self.columns, 16)

    def put(self, *rows, first=0):
        for at, row in enumerate(rows, first):
            self.columns.inputs["x"][at, : row.size] = row.reshape(-1)
            self.columns.input_extents["x"][at] = self.columns.spec.inputs["x"].extents_of(row.shape)

    def run(self, *firsts_and_rows):
        tickets = np.zeros(len(firsts_and_rows), TICKET)
        tickets["first"], tickets["rows"] = zip(*firsts_and_rows, strict=True)
        with torch.inference_mode():
            assert self.served.run(tickets, int(tickets["rows"].sum())) is None


def numbered(*shapes, dtype=np.float32):
    return [np.arange(1, 1 + np.prod(shape), dtype=dtype).reshape(shape) for shape in shapes]


# Rows by their size, which is the order in which rows of unlike sizes are computed.
SHAPES = [
    ((-1,), [(3,), (4,), (4,)]),
    ((-1, 3), [(3, 3), (4, 3), (4, 3)]),
    ((3, -1), [(3, 3), (3, 4), (3, 4)]),
    ((2, -1, 2), [(2, 3, 2), (2, 4, 2), (2, 4, 2)]),
    ((-1, -1), [(3, 3), (3, 4), (4, 4)]),
    ((-1, -1), [(4, 3), (3, 4), (2, 6)]),
    ((-1, -1), [(1, 1), (0, 2), (2, 1)]),
]


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
@pytest.mark.parametrize(("shape", "sizes"), SHAPES, ids=str)
def test_a_row_lies_at_the_beginning_of_each_side_of_its_padded_place(shape, sizes, dtype):
    rows = numbered(*sizes, dtype=dtype)
    batch = Batch(TensorSpec(dtype, shape, capacity=16), "pad", max_padding=0.7)
    batch.put(*rows)
    batch.run((0, 3))
    ((given, lengths),) = batch.module.calls
    for got, row in zip(given, rows, strict=True):
        expected = np.zeros(np.max(sizes, axis=0), dtype)
        expected[tuple(slice(side) for side in row.shape)] = row
        np.testing.assert_array_equal(got, expected, strict=True)
    open_sides = [axis for axis, side in enumerate(shape) if side < 0]
    expected = np.array(sizes)[:, open_sides]
    np.testing.assert_array_equal(lengths, expected[:, 0] if len(open_sides) == 1 else expected, strict=True)


@pytest.mark.parametrize(("shape", "sizes"), [*SHAPES, ((-1, 2), [(3, 2)] * 3), ((-1, -1), [(3, 2)] * 3)], ids=str)
def test_rows_in_a_list_have_their_own_sizes(shape, sizes):
    rows = numbered(*sizes)
    batch = Batch(TensorSpec("float32", shape, capacity=16), "list", max_padding=0.7)
    batch.put(*rows)
    batch.run((0, 3))
    ((given, _),) = batch.module.calls
    for got, row in zip(given, rows, strict=True):
        np.testing.assert_array_equal(got, row, strict=True)


@pytest.mark.parametrize(
    ("texts", "padded"),
    [(["", ""], [[0], [0]]), (["", "a"], [[0], [97]]), (["a", "a"], [[97], [97]]), (["b", "ab"], [[98, 0], [97, 98]])],
    ids=str,
)
def test_texts_are_padded_to_the_longest_and_to_one_byte_at_least(texts, padded):
    batch = Batch(TensorSpec("bytes", capacity=4), "pad", max_padding=0.9)
    batch.put(*(np.frombuffer(text.encode(), np.uint8) for text in texts))
    batch.run((0, 2))
    ((given, lengths),) = batch.module.calls
    assert [row.tolist() for row in given] == padded and given[0].dtype == torch.uint8
    assert lengths.tolist() == [len(text) for text in texts] and lengths.dtype == torch.int64


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (0, 1, 1, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("collate", ["pad", "list"])
@pytest.mark.parametrize(("most", "forwards"), [(4, [4]), (3, [3, 1])])
def test_a_row_without_elements_costs_as_much_as_one_with_a_single_element(collate, sizes, most, forwards):
    batch = Batch(TensorSpec("float32", (-1,), capacity=16), collate, max_elements=most, max_padding=0.9)
    batch.put(*numbered(*((size,) for size in sizes)))
    batch.run((0, 4))
    assert [len(given) for given, _ in batch.module.calls] == forwards


def test_a_ticket_costs_its_elements_and_at_least_one_for_each_row():
    batch = Batch(TensorSpec("float32", (-1, 2), capacity=16), "list", max_elements=100)
    batch.put(*numbered((3, 2), (0, 2), (1, 2), (8, 2), (5, 2)))
    batch.columns.input_extents["x"][4] = -5
    tickets = np.zeros(3, TICKET)
    tickets["first"], tickets["rows"] = [3, 0, 4], [1, 3, 1]
    assert batch.served.costs(tickets).tolist() == [16, 6 + 1 + 2, 1]
    assert batch.served.max_cost == 100


@pytest.mark.parametrize("collate", ["pad", "list"])
def test_what_a_large_batch_has_left_is_not_in_a_small_one(collate):
    batch = Batch(TensorSpec("float32", (-1,), capacity=16), collate, max_padding=0.5)
    for sizes in [(8, 8, 7), (2, 2), (3, 2), (16,) * 9, (2, 2), (3, 2)]:
        rows = numbered(*((size,) for size in sizes))
        batch.put(*rows)
        batch.run((0, len(sizes)))
        given, lengths = batch.module.calls[-1]
        for got, row in zip(given, rows, strict=True):
            padding = max(sizes) - row.size if collate == "pad" else 0
            np.testing.assert_array_equal(got, np.append(row, np.zeros(padding)))
        assert lengths is None or lengths.tolist() == list(sizes)


LARGE = TensorSpec("float32", (-1,), capacity=1024)  # 4096 bytes


@pytest.mark.parametrize("collate", ["pad", "list"])
@pytest.mark.parametrize("first", [0, 5])
def test_large_rows_that_lie_together_are_read_once_where_they_are(collate, first, monkeypatch):
    batch = Batch(LARGE, collate)
    rows = numbered(*[(1024,)] * 3)
    batch.put(*rows, first=first)
    reads, gather = [], native.gather_variable
    monkeypatch.setattr(native, "gather_variable", lambda *given: reads.append(1) or gather(*given))
    for _ in range(2):
        batch.run((first, 2), (first + 2, 1))
    column = batch.columns.inputs["x"]
    assert batch.module.places == 2 * [column[first + row].ctypes.data for row in range(3)]
    assert reads == [1, 1]
    for given, _ in batch.module.calls:
        np.testing.assert_array_equal(torch.stack(given), rows)


@pytest.mark.parametrize("collate", ["pad", "list"])
def test_large_rows_that_lie_apart_are_copied(collate):
    batch = Batch(LARGE, collate)
    column = batch.columns.inputs["x"]
    for firsts in [(0, 2), (4, 7), (9, 3)]:
        for first in firsts:
            batch.put(np.full(1024, first, np.float32), first=first)
        batch.run(*((first, 1) for first in firsts))
        given, _ = batch.module.calls[-1]
        assert [float(row.min()) for row in given] == [float(row.max()) for row in given] == list(firsts)
    begin, end = column.ctypes.data, column.ctypes.data + column.nbytes
    assert not any(begin <= place < end for place in batch.module.places)


def test_rows_of_many_sizes_in_turn_are_each_those_of_their_batch():
    """There are more sizes than views that are kept of them."""
    batch = Batch(LARGE, "pad")
    for size in [*range(299, 0, -1), 299, 2, 1]:
        row = np.full(size, size, np.float32)
        batch.put(row, row)
        batch.run((0, 2))
        given, lengths = batch.module.calls[-1]
        assert lengths.tolist() == [size, size]
        np.testing.assert_array_equal(torch.stack(given), [row, row])
    assert len(batch.served._variable["x"]._views) <= 256
