"""Models with rows of unlike sizes or with states: how they are called, in which shapes, and what they leave."""

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
LINE = TensorSpec("float32", (-1,), capacity=4)


def opened(module, inputs, y=NUMBER, shapes=(), **given):
    model = ServedModel(module, inputs, {"y": y}, **given)
    return OpenServed("m", model, Columns.here(model.spec("m"), 8), 4, shapes=shapes)


def run(served, rows, **inputs):
    columns = served.columns
    for name, values in inputs.items():
        for row, value in enumerate(np.asarray(one, np.float32) for one in values):
            columns.inputs[name][row, ...][: value.size] = value if value.ndim else value[None]
            if name in columns.input_extents:
                columns.input_extents[name][row] = value.shape
    ticket = np.zeros(1, TICKET)
    ticket["rows"] = rows
    with torch.inference_mode():
        return served.run(ticket, rows)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1)], ids=["alike", "unlike"])
@pytest.mark.parametrize("collate", ["pad", "list"])
def test_inputs_of_fixed_and_of_variable_size_are_given_by_their_names(collate, sizes):
    class Padded(nn.Module):
        """With its parameters in another order than the spec's."""

        def forward(self, line_lengths, line, pair):
            return line.sum(1) + 10 * line_lengths + 100 * pair[:, 1]

    class Listed(nn.Module):
        def forward(self, line, pair):
            return torch.stack([row.sum() + 10 * len(row) for row in line]) + 100 * pair[:, 1]

    module = Padded() if collate == "pad" else Listed()
    served = opened(module, {"pair": TensorSpec("float32", (2,)), "line": LINE}, collate=collate)
    assert run(served, 2, pair=[(0, 1), (0, 2)], line=[np.ones(size) for size in sizes]) is None
    assert served.columns.outputs["y"][:2].tolist() == [11 * size + 100 * at for at, size in enumerate(sizes, 1)]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 1)], ids=["alike", "unlike"])
def test_a_number_that_is_not_finite_fails_its_row_whatever_the_sizes(sizes):
    class Reciprocal(nn.Module):
        def forward(self, x):
            return torch.stack([1 / row[0] for row in x])

    served = opened(Reciprocal(), {"x": LINE}, y=TensorSpec("float32", (), finite=True))
    outcome = run(served, 3, x=[np.full(size, value) for size, value in zip(sizes, (1, 0, 4), strict=True)])
    assert outcome.refused == {0: (Code.ROW_FAILED, "1 of 3 rows failed; row 1: output 'y' is not finite")}
    assert served.columns.outputs["y"][[0, 2]].tolist() == [1, 0.25]
    assert run(served, 3, x=[np.full(size, 2) for size in sizes]) is None


class Alike(nn.Module):
    """Computes a row the same in any company."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.rows = []

    def forward(self, x, x_lengths=None, total=None):
        self.rows.append(len(x))
        y = torch.stack([row.sum() for row in x])
        return y if total is None else (y, total + y)


def own(rows):
    return {"x": [row["x"] for row in rows]}


PAIR = TensorSpec("float32", (2,))


class Stateful(Alike):
    def forward(self, x, total):
        return super().forward(x, total=total)


@pytest.mark.parametrize(
    ("module", "given", "shapes"),
    [
        (Stateful, {"inputs": {"x": PAIR}, "state": {"total": NUMBER}}, (1, 2, 4)),
        (Alike, {"inputs": {"x": LINE}, "collate": "pad"}, (4,)),
        (Alike, {"inputs": {"x": LINE}, "collate": "list"}, (1,)),
        (Alike, {"inputs": {"x": LINE}, "collate": own}, (1,)),
        (Alike, {"inputs": {"x": PAIR}, "collate": own}, (1,)),
    ],
    ids=["with a state", "padded", "lists", "own function", "own function of pairs"],
)
def test_rows_are_computed_in_one_shape_or_alone_if_padding_may_change_their_bytes(module, given, shapes):
    served = opened(module(), shapes=(1, 2, 4), **given)
    served.warm_up()
    assert served.shapes == shapes
    if "state" not in given:
        served.module.rows.clear()
        assert run(served, 3, x=[(1, 2), (3, 4), (5, 6)]) is None
        assert served.module.rows == ([4] if shapes == (4,) else [1, 1, 1])
        assert served.columns.outputs["y"][:3].tolist() == [3, 7, 11]


def test_a_model_without_states_has_no_sessions_to_count_to_forget_or_to_move():
    served = opened(Alike(), {"x": LINE})
    served.forget(1)
    assert served.sessions == 0
    served._away = True  # as if its weights were on a device with memory of its own
    assert served.sleep() == served.wake() == 6 * 4
    assert run(served, 2, x=[(1, 2), (3,)]) is None
    assert served.columns.outputs["y"][:2].tolist() == [3, 3]


def test_a_module_with_other_names_is_called_in_the_specs_order_and_by_name_after_an_own_function():
    class Others(nn.Module):
        def forward(self, a, b, c):
            return a.sum(1) + 10 * b + 100 * c[:, 1]

    padded = opened(Others(), {"line": LINE, "pair": PAIR}, collate="pad")

    def by_name(rows):
        given = {"c": [row["pair"] for row in rows], "a": [row["line"] for row in rows]}
        lengths = torch.tensor([len(line) for line in given["a"]])
        return {key: torch.stack(value) for key, value in given.items()} | {"b": lengths}

    for served in (padded, opened(Others(), {"line": LINE, "pair": PAIR}, collate=by_name)):
        assert run(served, 2, pair=[(0, 1), (0, 2)], line=[(1, 1), (2, 2)]) is None
        assert served.columns.outputs["y"][:2].tolist() == [122, 224]
