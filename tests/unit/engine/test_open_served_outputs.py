"""Outputs whose rows differ in size: what is written to the clients' rows, and which rows fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from jurybox.client import ModelFailed
from jurybox.protocol import TensorSpec
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import Code
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.open_served import OpenServed
from jurybox.server.models import RowErrors, ServedModel

NUMBER = TensorSpec("float32", ())
FLOATS = TensorSpec("float32", (-1,), capacity=4)
BYTES = TensorSpec("uint8", (-1,), capacity=4)
TEXT = TensorSpec("bytes", capacity=4)
STALE = 77  # in the rows before they are written


class Gives(nn.Module):
    """Gives what a test says."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def forward(self, x):
        return self.results(x) if callable(self.results) else self.results


def answered(results, rows, tickets=((0, None),), **outputs):
    """The outcome of a batch, and the rows of the model's columns that it was to write."""
    model = ServedModel(Gives(results), {"x": NUMBER}, outputs)
    columns = Columns.here(model.spec("m"), 8)
    for array in (*columns.outputs.values(), *columns.output_extents.values()):
        array[:] = STALE
    records = np.zeros(len(tickets), TICKET)
    records["first"], records["rows"] = [first for first, _ in tickets], [n or rows for _, n in tickets]
    with torch.inference_mode():
        return OpenServed("m", model, columns, 8).run(records, rows), columns


def rows_of(columns, name, rows):
    extents, values = columns.output_extents[name], columns.outputs[name]
    assert (extents[rows:] == STALE).all() and (values[rows:] == values.dtype.type(STALE)).all(), "no other is written"
    shapes = [columns.spec.outputs[name].measured(sizes) for sizes in extents[:rows].tolist()]
    return [values[row, : int(np.prod(shape))].reshape(shape) for row, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("spec", "given", "expected"),
    [
        (FLOATS, [torch.tensor([1.5, 2]), np.ones(1, np.float32), [], (1, 2, 3, 4)], [[1.5, 2], [1], [], [1, 2, 3, 4]]),
        (FLOATS, [torch.tensor([1.5]).half(), torch.tensor([2]).short()], [[1.5], [2]]),
        (BYTES, [[0, 255], [], torch.tensor([7], dtype=torch.uint8)], [[0, 255], [], [7]]),
        (TensorSpec("bool", (-1,), capacity=4), [[True, False], np.array([True])], [[True, False], [True]]),
        (TensorSpec("int16", (-1, 2), capacity=4), [[[1, 2], [3, 4]], [[-5, 6]]], [[[1, 2], [3, 4]], [[-5, 6]]]),
    ],
    ids=["floats", "narrower", "bytes", "bool", "wider"],
)
def test_rows_may_be_tensors_arrays_or_numbers_of_any_size_up_to_the_capacity(spec, given, expected):
    outcome, columns = answered(given, len(given), y=spec)
    assert outcome is None
    assert [row.tolist() for row in rows_of(columns, "y", len(given))] == expected


def test_texts_may_be_str_bytes_or_views_of_bytes():
    given = ["ab", "größ"[:3], b"abcd", bytearray(b"x"), memoryview(b"yz"), "", "\ud800"]
    outcome, columns = answered(given, len(given), y=TEXT)
    assert outcome is None
    expected = [b"ab", "grö".encode(), b"abcd", b"x", b"yz", b"", b"?"]
    found = zip(columns.outputs["y"], columns.output_extents["y"][:7, 0], strict=False)
    assert [text[:size].tobytes() for text, size in found] == expected


@pytest.mark.parametrize(
    ("spec", "good", "bad", "reason"),
    [
        (FLOATS, [1.5], torch.zeros(5), "shape (5,) came, the spec promises float32[-1] up to 4"),
        (FLOATS, [1.5], torch.zeros(1, 2), "shape (1, 2) came, the spec promises float32[-1] up to 4"),
        (FLOATS, [1.5], torch.zeros(1, dtype=torch.float64), "float64"),
        (FLOATS, [1.5], ["one"], "['one'] came, which float32 does not keep"),
        (FLOATS, [1.5], None, "None came, which float32 does not keep"),
        (BYTES, [1], [256], "[256] came, which uint8 does not keep"),
        (BYTES, [1], [0.5], "[0.5] came, which uint8 does not keep"),
        (TEXT, b"a", 5, "a row of bytes came as int, expected bytes or str"),
        (TEXT, b"a", [97], "a row of bytes came as list, expected bytes or str"),
        (TEXT, b"a", "größ", "shape (6,) came, the spec promises bytes up to 4"),
    ],
)
def test_a_row_that_does_not_match_the_spec_fails_alone_with_the_reason(spec, good, bad, reason):
    given = ([good, good, bad, good], torch.arange(4.0))
    outcome, columns = answered(given, 4, tickets=((0, 1), (1, 2), (3, 1)), y=spec, number=NUMBER)
    assert list(outcome.refused) == [1] and not outcome.errors and not outcome.again
    code, said = outcome.refused[1]
    assert code == Code.ROW_FAILED and said.startswith("1 of 2 rows failed; row 1: output 'y': ") and reason in said
    assert list(columns.failures(0, 4)) == [2] and reason in columns.failures(0, 4)[2]
    assert columns.output_extents["y"][:4, 0].tolist() == [1, 1, 0, 1]
    assert len({columns.outputs["y"][row, 0].item() for row in (0, 1, 3)} - {STALE}) == 1
    assert columns.outputs["number"][:4].tolist() == [0, 1, 2, 3]


def test_rows_that_the_model_reports_have_no_size_and_the_others_are_written():
    given = RowErrors({0: "odd", 2: "odd"}, (torch.arange(4.0), [[1], [2], None, [4]], ["a", "b", None, "d"]))
    outcome, columns = answered(given, 4, number=NUMBER, y=FLOATS, text=TEXT)
    assert outcome.refused == {0: (Code.ROW_FAILED, "2 of 4 rows failed; row 0: odd")}
    assert columns.failures(0, 4) == {0: "odd", 2: "odd"}, "and not of what stands in their places"
    assert columns.outputs["number"][:4].tolist() == [0, 1, 2, 3]
    for name in ("y", "text"):
        assert columns.output_extents[name][:4, 0].tolist() == [0, 1, 0, 1]
    assert columns.outputs["y"][[1, 3], 0].tolist() == [2, 4]
    assert columns.outputs["text"][[1, 3], 0].tobytes() == b"bd"


@pytest.mark.parametrize(
    ("given", "came"),
    [([[1], [2]], "2"), (torch.ones(2, 1), "2"), ([[1]] * 4, "4"), (5, "int")],
    ids=["few", "tensor", "many", "none"],
)
def test_another_number_of_rows_fails_the_batch_and_says_what_came(given, came):
    outcome, columns = answered((given, torch.arange(3.0)), 3, y=FLOATS, number=NUMBER)
    ((numbers, error),) = outcome.errors
    assert numbers == [0] and isinstance(error, ModelFailed)
    assert str(error) == f"output 'y': a list of 3 rows was expected, came {came}"
    assert (columns.outputs["y"] == STALE).all() and (columns.outputs["number"] == STALE).all()


def test_a_missing_output_fails_the_batch_and_says_which_came():
    outcome, _ = answered({"number": torch.arange(3.0), "odd": torch.arange(3.0)}, 3, y=FLOATS, number=NUMBER)
    ((_, error),) = outcome.errors
    assert str(error) == "the model gave no output 'y'; it gave number, odd"


def test_rows_of_a_tensor_are_written_as_those_of_a_list():
    outcome, columns = answered(torch.arange(6.0).reshape(3, 2), 3, y=FLOATS)
    assert outcome is None
    assert [row.tolist() for row in rows_of(columns, "y", 3)] == [[0, 1], [2, 3], [4, 5]]
