"""Rows of an output become one tensor: what stands for failed rows, and for rows that differ in size."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jurybox.protocol.errors import Code, Refused
from jurybox.protocol.spec import BYTES, TensorSpec
from jurybox.server.gateway.inference.requests import output_of, row_errors

FAILED = {1: "it is dark"}


def test_failed_rows_of_numbers_are_nan_or_zero_and_the_others_stay():
    for dtype, nothing in (("float32", np.nan), ("int32", 0)):
        made = output_of("y", TensorSpec(dtype, (2,)), np.array([[1, 2], [3, 4], [5, 6]], dtype), FAILED)
        np.testing.assert_array_equal(made.array, [[1, 2], [nothing, nothing], [5, 6]])
        assert (made.shape, made.parameters) == ((3, 2), {})
        rows = np.array([[1, 2]], dtype)
        assert output_of("y", TensorSpec(dtype, (2,)), rows, {}).array is rows


def test_a_failed_row_of_text_is_empty():
    made = output_of("y", TensorSpec(BYTES, capacity=4), [b"a", b"b", b"c"], FAILED)
    assert (made.datatype, made.shape, made.array) == ("BYTES", (3,), [b"a", b"", b"c"])


VARIABLE = TensorSpec("float32", (-1, 2), capacity=8)


def rows(*lengths):
    return [np.full((length, 2), length, np.float32) for length in lengths]


def test_rows_of_one_size_are_stacked_and_failed_ones_have_that_size():
    made = output_of("y", VARIABLE, rows(3, 7, 3), FAILED)
    assert made.shape == (3, 3, 2) and np.isnan(made.array[1]).all() and (made.array[[0, 2]] == 3).all()
    made = output_of("y", VARIABLE, rows(3, 3), {}, extents=True)
    assert made.shape == (2, 3, 2) and made.parameters == {}
    assert output_of("y", VARIABLE, rows(3, 7), {0: "a", 1: "b"}).shape == (2, 0, 2)


def test_rows_of_several_sizes_need_the_request_to_ask_for_their_extents():
    with pytest.raises(Refused, match=r"rows of output 'y' differ in size \(\(1, 2\), \(3, 2\)\)") as caught:
        output_of("y", VARIABLE, rows(3, 1, 3), {})
    assert caught.value.code == Code.UNSUPPORTED
    made = output_of("y", VARIABLE, rows(3, 1), {}, extents=True)
    np.testing.assert_array_equal(made.array, [3] * 6 + [1] * 2)
    assert made.parameters["extents"] == "3;1"
    made = output_of("y", VARIABLE, rows(3, 7, 3), FAILED, extents=True)
    np.testing.assert_array_equal(made.array, [3] * 12)
    assert made.parameters["extents"] == "3;0;3"


def test_the_reasons_of_failed_rows_are_told_by_row():
    assert json.loads(row_errors(FAILED)["row_errors"]) == {"1": "it is dark"}
