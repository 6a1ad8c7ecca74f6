"""The dtype that a model computes in: numbers with a point are cast to it before forward, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.engine.served import Served
from jurybox.server.models import ServedModel

NUMBER = TensorSpec("float32", ())
INPUTS = {"x": TensorSpec("float32", (3,)), "n": TensorSpec("int64", (3,)), "is": TensorSpec("bool", (3,))}
OPEN = {key: TensorSpec(spec.dtype, (-1,), capacity=4) for key, spec in INPUTS.items()}


def dtypes(value):
    if isinstance(value, torch.Tensor):
        return value.dtype
    return [dtypes(each) for each in value] if isinstance(value, list) else type(value)


class Sums(nn.Module):
    """Adds up the first input; notes the dtypes of all."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, **given):
        self.seen.append({key: dtypes(value) for key, value in given.items()})
        x = given["x"]
        return torch.stack([row.sum() for row in x]) if isinstance(x, list) else x.sum(1)


def computed(inputs, compute, collate="pad", rows=2):
    """The dtypes that the module has seen in one batch, and the outputs."""
    sums = Sums()
    model = ServedModel(sums, inputs, {"y": NUMBER}, collate=collate)
    columns = Columns.here(model.spec("m"), 8)
    if columns.spec.open:
        served = OpenServed("m", model, columns, 8, compute=compute)
    else:
        served = Served("m", model, columns.inputs, columns.outputs, 8, compute=compute, columns=columns)
    for name, column in columns.inputs.items():
        column[:] = 1
        if name in columns.input_extents:
            columns.input_extents[name][:] = 3
    ticket = np.zeros(1, TICKET)
    ticket["rows"] = rows
    with torch.inference_mode():
        assert served.run(ticket, rows) is None
    assert columns.outputs["y"][:rows].tolist() == [3.0] * rows
    return sums.seen[-1]


@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16], ids=str)
def test_inputs_with_a_point_are_cast_and_whole_numbers_are_not(compute):
    assert computed(INPUTS, compute) == {"x": compute or torch.float32, "n": torch.int64, "is": torch.bool}


def test_padded_rows_are_cast_and_their_lengths_are_not():
    assert computed(OPEN, torch.bfloat16) == {
        "x": torch.bfloat16,
        "x_lengths": torch.int64,
        "n": torch.int64,
        "n_lengths": torch.int64,
        "is": torch.bool,
        "is_lengths": torch.int64,
    }


def test_rows_in_lists_are_cast_one_by_one():
    assert computed(OPEN | {"text": TensorSpec("bytes", capacity=4)}, torch.bfloat16, collate="list") == {
        "x": [torch.bfloat16] * 2,
        "n": [torch.int64] * 2,
        "is": [torch.bool] * 2,
        "text": [bytes] * 2,
    }


def test_what_a_models_own_function_makes_of_the_rows_is_cast_too():
    def collate(rows):
        return {"x": torch.stack([row["x"] for row in rows]), "ns": [row["n"] for row in rows], "count": len(rows)}

    seen = computed(OPEN, torch.bfloat16, collate=collate)
    assert seen == {"x": torch.bfloat16, "ns": [torch.int64] * 2, "count": int}
