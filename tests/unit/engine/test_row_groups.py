"""Which rows of unlike sizes are computed together: by the bound of elements, the share of padding, and the shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import Code
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.models import ServedModel

NUMBER = TensorSpec("float32", ())
LINE = TensorSpec("float32", (-1,), capacity=100)
PICTURE = TensorSpec("float32", (-1, -1), capacity=100)


class Sums(nn.Module):
    """The sums of rows; notes each forward: the sizes of its rows, and of their places."""

    def __init__(self):
        super().__init__()
        self.forwards = []

    def forward(self, x, x_lengths=None):
        if x_lengths is None:
            self.forwards.append([len(row) if row.dim() == 1 else tuple(row.shape) for row in x])
            return torch.stack([row.sum() for row in x])
        lengths = x_lengths.tolist()
        self.forwards.append([size if isinstance(size, int) else tuple(size) for size in lengths])
        assert x.shape[1:] == torch.Size(x_lengths.reshape(len(x), -1).max(dim=0).values.tolist())
        return x.reshape(len(x), -1).sum(1)


def forwards(spec, sizes, collate="pad", shapes=(), **bounds):
    """The forwards in which rows of these sizes are computed."""
    module = Sums()
    model = ServedModel(module, {"x": spec}, {"y": NUMBER}, collate=collate, **bounds)
    columns = Columns.here(model.spec("m"), 32)
    served = OpenServed("m", model, columns, 16, shapes=shapes)
    columns.inputs["x"][:] = 1
    for row, size in enumerate(sizes):
        columns.input_extents["x"][row] = size
        columns.inputs["x"][row, int(np.prod(size)) :] = 1000  # what is behind a row is not in its sum
    ticket = np.zeros(1, TICKET)
    ticket["rows"] = len(sizes)
    with torch.inference_mode():
        assert served.run(ticket, len(sizes)) is None
    assert columns.outputs["y"][: len(sizes)].tolist() == [np.prod(size) for size in sizes]
    return module.forwards


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([9, 10], 20, [[9, 10]]),
        ([9, 10], 19, [[9], [10]]),
        ([10, 8, 9], 20, [[8, 9], [10]]),
        ([10, 8, 9], 30, [[8, 9, 10]]),
        ([10, 8, 9], 0, [[8, 9, 10]]),
        ([10, 1, 10], 20, [[1, 10], [10]]),
        ([4, 10, 10, 4, 10, 4], 20, [[4, 4, 4], [10, 10], [10]]),
        ([50, 2, 2], 20, [[2, 2], [50]]),
        ([50, 60], 20, [[50], [60]]),
        ([50], 20, [[50]]),
        ([10] * 5, 20, [[10] * 2, [10] * 2, [10]]),
        ([10] * 5, 49, [[10] * 4, [10]]),
        ([10] * 2, 9, [[10], [10]]),
        ([0] * 3, 2, [[0] * 2, [0]]),
    ],
    ids=str,
)
def test_padded_rows_stay_within_the_bound_of_elements(sizes, most, expected):
    found = forwards(LINE, sizes, max_elements=most, max_padding=0.95)
    assert [sorted(forward) for forward in found] == expected


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([2, 10, 3, 5], 20, [[2, 10, 3, 5]]),
        ([2, 10, 3, 5], 19, [[2, 3, 5], [10]]),
        ([2, 10, 3, 5], 0, [[2, 10, 3, 5]]),
        ([10, 2, 10, 10], 20, [[2, 10], [10, 10]]),
        ([1, 100, 1], 20, [[1, 1], [100]]),
        ([50], 20, [[50]]),
        ([10] * 4, 20, [[10, 10], [10, 10]]),
        ([10] * 4, 40, [[10] * 4]),
    ],
    ids=str,
)
def test_rows_in_lists_stay_within_the_bound_of_elements_without_padding(sizes, most, expected):
    assert forwards(LINE, sizes, collate="list", max_elements=most) == expected


@pytest.mark.parametrize(
    ("sizes", "share", "expected"),
    [
        ([2, 4], 0.25, [[2, 4]]),
        ([2, 4], 0.24, [[2], [4]]),
        ([4, 4, 4, 1], 0.2, [[1], [4, 4, 4]]),
        ([4, 4, 4, 2], 0.2, [[2], [4, 4, 4]]),
        ([3, 4, 9, 10, 40], 0.25, [[3, 4], [9, 10], [40]]),
        ([5, 5], 0.0, [[5, 5]]),
        ([5, 5, 6], 0.0, [[5, 5], [6]]),
    ],
    ids=str,
)
def test_padding_stays_within_its_share_of_each_forward(sizes, share, expected):
    found = forwards(PICTURE, [(size, 1) for size in sizes], max_padding=share)
    assert [[size for size, _ in forward] for forward in found] == expected


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([(1, 8), (9, 1), (9, 1)], 20, [[(1, 8)], [(9, 1), (9, 1)]]),
        ([(2, 3), (3, 2)], 18, [[(3, 2), (2, 3)]]),
        ([(2, 3), (3, 2)], 17, [[(3, 2)], [(2, 3)]]),
        ([(1, 5), (2, 5), (3, 5)], 45, [[(1, 5), (2, 5), (3, 5)]]),
        ([(1, 5), (2, 5), (3, 5)], 44, [[(1, 5), (2, 5)], [(3, 5)]]),
    ],
    ids=str,
)
def test_pictures_are_bounded_by_the_largest_of_each_side(sizes, most, expected):
    assert forwards(PICTURE, sizes, max_elements=most, max_padding=0.95) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([3, 4, 3], [[3, 3, 3, 3], [4, 4, 4, 4]]),
        ([3, 3, 3], [[3, 3, 3, 3]]),
        ([5, 3], [[3, 3, 3, 3], [5, 5, 5, 5]]),
        ([3] * 4, [[3] * 4]),
        ([3], [[3] * 4]),
        ([2, 3, 4], [[2] * 4, [3] * 4, [4] * 4]),
    ],
    ids=str,
)
def test_in_a_fixed_shape_only_rows_of_one_size_are_together(sizes, expected):
    """Padding to another row's size might change a row's bytes."""
    assert forwards(LINE, sizes, shapes=(4,), max_padding=0.95) == expected


@pytest.mark.parametrize(("most", "expected"), [(0, 4), (56, 4), (55, 3), (28, 2), (27, 1)])
def test_the_bound_is_of_all_inputs_of_a_row_together(most, expected):
    """Rows of 2 x 3 and of 4, of two numbers each."""

    class Together(nn.Module):
        def forward(self, a, a_lengths, b, b_lengths):
            seen.append(len(a))
            return a.reshape(len(a), -1).sum(1) + b.reshape(len(b), -1).sum(1)

    seen = []
    inputs = {"a": PICTURE, "b": TensorSpec("float32", (-1, 2), capacity=100)}
    model = ServedModel(Together(), inputs, {"y": NUMBER}, collate="pad", max_elements=most, max_padding=0.95)
    columns = Columns.here(model.spec("m"), 8)
    columns.inputs["a"][:], columns.inputs["b"][:] = 1, 1
    columns.input_extents["a"][:], columns.input_extents["b"][:] = (2, 3), 4
    columns.input_extents["b"][0] = 3  # so that they are not all alike
    ticket = np.zeros(1, TICKET)
    ticket["rows"] = 4
    with torch.inference_mode():
        assert OpenServed("m", model, columns, 8).run(ticket, 4) is None
    assert seen[0] == expected and sum(seen) == 4
    assert columns.outputs["y"][:4].tolist() == [12, 14, 14, 14]


@pytest.mark.parametrize(
    "collate", ["pad", "list", lambda rows: {"x": [row["x"] for row in rows]}], ids=["pad", "list", "own"]
)
@pytest.mark.parametrize("bounds", [{}, {"max_elements": 50}], ids=str)
def test_nothing_is_computed_if_no_row_has_sizes_that_it_can_have(collate, bounds):
    module = Sums()
    model = ServedModel(module, {"x": LINE}, {"y": NUMBER}, collate=collate, **bounds)
    columns = Columns.here(model.spec("m"), 8)
    columns.input_extents["x"][:3, 0] = [-1, 101, 1 << 40]
    tickets = np.zeros(2, TICKET)
    tickets["first"], tickets["rows"] = [0, 2], [2, 1]
    with torch.inference_mode():
        outcome = OpenServed("m", model, columns, 8).run(tickets, 3)
    assert not module.forwards and sorted(outcome.refused) == [0, 1] and not outcome.errors
    said = [f"input 'x' came with sizes [{size}], expected float32[-1] up to 100" for size in (-1, 101, 1 << 40)]
    assert columns.failures(0, 3) == dict(enumerate(said))
    assert outcome.refused[0] == (Code.ROW_FAILED, f"2 of 2 rows failed; row 0: {said[0]}")
