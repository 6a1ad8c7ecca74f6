"""A model's parameter becomes a row of its input, if the input's dtype holds the value."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.parameters import parameter_row, parameter_rows
from jurybox.protocol.spec import TensorSpec

TEXT = TensorSpec("bytes", capacity=4)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("bool", True),
        ("float32", 1),
        ("float32", 0.5),
        ("float16", 65504.0),
        ("int8", -128),
        ("int8", 127),
        ("uint64", 2**64 - 1),
    ],
)
def test_a_value_is_a_row_of_its_inputs_dtype(dtype, value):
    row = parameter_row("p", TensorSpec(dtype), value)
    assert (row.dtype, row.shape, row) == (np.dtype(dtype), (), value)
    rows = parameter_rows("p", TensorSpec(dtype), value, 3)
    assert (rows.dtype, rows.tolist()) == (np.dtype(dtype), [row.item()] * 3)


@pytest.mark.parametrize(
    ("dtype", "value", "why"),
    [
        ("bool", 1, "expected true or false, came 1"),
        ("float32", True, "expected a number, came True"),
        ("float32", "1", "expected a number, came '1'"),
        ("float32", [1.0], "expected a number, came a list"),
        ("float16", 65536, "expected a finite number that float16 holds, came 65536"),
        ("float32", 1e39, "expected a finite number that float32 holds"),
        ("float32", float("inf"), "expected a finite number"),
        ("float32", float("nan"), "expected a finite number"),
        ("float64", 10**400, "expected a finite number that float64 holds"),
        ("int8", 128, "expected a whole number from -128 to 127, came 128"),
        ("int8", -129, "expected a whole number from -128 to 127, came -129"),
        ("int8", 1.0, "expected a whole number"),
        ("int8", True, "expected a whole number"),
    ],
)
def test_a_value_that_the_input_does_not_hold_is_refused_by_its_name(dtype, value, why):
    with pytest.raises(SpecMismatch, match=f"parameter 'p': {why}"):
        parameter_row("p", TensorSpec(dtype), value)


def test_text_is_utf_8_within_the_inputs_capacity():
    assert parameter_row("p", TEXT, "\u00e9\u00e9") == "\u00e9\u00e9".encode()
    assert parameter_rows("p", TEXT, "ab", 2) == [b"ab", b"ab"]
    for value, why in (
        ("\u00e9\u00e9a", "has 5 bytes, the model takes at most 4"),
        (b"ab", "expected text, came a bytes"),
        ("\ud800", "text that UTF-8 can carry"),
    ):
        with pytest.raises(SpecMismatch, match=why):
            parameter_row("p", TEXT, value)
