"""What an input over the Open Inference Protocol may be, as bytes and as plain values; all else is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jurybox.protocol.errors import Error, SpecMismatch
from jurybox.protocol.spec import TensorSpec
from jurybox.server.gateway.inference.tensors import InputData, RawData, TypedData, checked_shape, rows_of

FIXED, OPEN = TensorSpec("float32", (2, 3)), TensorSpec("uint8", (-1, 2), capacity=8)
TEXT, NUMBER = TensorSpec("bytes", capacity=4), TensorSpec("int32")


@pytest.mark.parametrize(
    ("spec", "datatype", "shape"),
    [(FIXED, "FP32", (1, 2, 3)), (OPEN, "UINT8", (3, 4, 2)), (OPEN, "UINT8", (3, 0, 2)), (TEXT, "BYTES", (5,))],
)
def test_a_shape_has_the_rows_first(spec, datatype, shape):
    assert checked_shape("x", datatype, list(shape), spec) == shape


@pytest.mark.parametrize(
    ("spec", "shape", "why"),
    [
        (FIXED, [2, 3], r"expected shape \[n, 2, 3\], came \[2, 3\]: the rows come first, 1 for a single one"),
        (FIXED, [0, 2, 3], "came"),
        (FIXED, [-1, 2, 3], "came"),
        (FIXED, [1, 2], r"came \[1, 2\]$"),
        (FIXED, [1.0, 2, 3], "came"),
        (FIXED, [True, 2, 3], "came"),
        (FIXED, [], "came"),
        (NUMBER, [], "the rows come first"),
        (OPEN, [], r"expected shape \[n, -1, 2\] with at most 8 elements in a row, came"),
        (OPEN, [1, 5, 2], "with at most 8 elements in a row, came"),
        (OPEN, [1, 2, 3], "came"),
        (OPEN, [0, 4, 2], "came"),
        (OPEN, [1, -1, 2], "came"),
        (OPEN, [1, 2.0, 2], "came"),
        (OPEN, [True, 2, 2], "came"),
        (OPEN, [65537, 1, 2], "65537 rows came, expected at most 65536"),
        (TEXT, [1, 1], r"expected shape \[n\], came \[1, 1\]"),
        (TEXT, [0], "came"),
        (TEXT, [], "came"),
        (TEXT, ["1"], "came"),
    ],
)
def test_a_shape_that_no_rows_have_is_refused_with_both(spec, shape, why):
    datatype = {"float32": "FP32", "uint8": "UINT8", "bytes": "BYTES", "int32": "INT32"}[spec.dtype]
    with pytest.raises(SpecMismatch, match=f"input 'x': .*{why}"):
        checked_shape("x", datatype, shape, spec)


def test_a_datatype_is_the_models():
    with pytest.raises(SpecMismatch, match="expected datatype FP32, came 'FP64'$"):
        checked_shape("x", "FP64", [1, 2, 3], FIXED)
    with pytest.raises(SpecMismatch, match="came 'BYTES'; this input takes numbers, not strings"):
        checked_shape("x", "BYTES", [1, 2, 3], FIXED)


def test_rows_of_different_sizes_come_flat_with_their_sizes_as_text():
    flat = np.arange(10, dtype=np.uint8)
    rows = rows_of("x", "UINT8", [10], OPEN, "4;0;1", RawData("x", flat.tobytes()))
    assert [row.tolist() for row in rows] == [[[0, 1], [2, 3], [4, 5], [6, 7]], [], [[8, 9]]]
    with pytest.raises(SpecMismatch, match=r"its extents say 10 elements, shape \[9\] came"):
        rows_of("x", "UINT8", [9], OPEN, "4;0;1", RawData("x", flat.tobytes()))
    with pytest.raises(SpecMismatch, match="expected datatype UINT8"):
        rows_of("x", "INT8", [10], OPEN, "4;0;1", RawData("x", flat.tobytes()))
    for spec in (FIXED, TEXT):
        with pytest.raises(SpecMismatch, match="extents are for rows that differ in size"):
            rows_of("x", "FP32", [6], spec, "4", RawData("x", b""))


def test_bytes_are_as_many_as_the_shape_says():
    rows = rows_of("x", "FP32", [1, 2, 3], FIXED, None, RawData("x", np.arange(6, dtype=np.float32).tobytes()))
    assert rows.tolist() == [[[0, 1, 2], [3, 4, 5]]]
    with pytest.raises(SpecMismatch, match="expected 24 bytes for shape .1, 2, 3., came 23"):
        rows_of("x", "FP32", [1, 2, 3], FIXED, None, RawData("x", bytes(23)))
    assert rows_of("x", "BYTES", [2], TEXT, None, RawData("x", b"\1\0\0\0a\0\0\0\0")) == [b"a", b""]
    for spec, shape, datatype in ((FIXED, [1, 2, 3], "FP32"), (TEXT, [1], "BYTES")):
        with pytest.raises(Error, match="input 'x' came without data"):
            rows_of("x", datatype, shape, spec, None, InputData("x"))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("float32", [1, 2.5, -0.0]),
        ("float16", [65504.0, -65504.0]),
        ("float32", [1e-50, 0.0]),
        ("int8", [-128, 127]),
        ("uint8", [0, 255]),
        ("int64", [-(2**63), 2**63 - 1]),
        ("uint64", [0, 2**64 - 1]),
        ("bool", [True, False]),
    ],
)
def test_plain_values_become_what_their_dtype_holds(dtype, values):
    found = TypedData("x", values).elements((len(values),), TensorSpec(dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.array(values, dtype))


@pytest.mark.parametrize(
    ("dtype", "values", "why"),
    [
        ("int8", [0, 128], "the value 128 does not fit INT8"),
        ("int8", [0, -129], "the value -129 does not fit INT8"),
        ("uint8", [-1, 0], "the value -1 does not fit UINT8"),
        ("uint64", [0, -1], "fit UINT64"),
        ("int64", [2**63, 0], "a value does not fit INT64"),
        ("float16", [0.0, 65536.0], "the value 65536.0 does not fit FP16"),
        ("float32", [0.0, 1e39], "the value 1e.39 does not fit FP32"),
        ("float32", [10**400, 0], "a value does not fit FP32"),
        ("int32", [1.0, 2], "expected values of INT32, came '1.0'"),
        ("int32", [True, 2], "expected values of INT32, came 'True'"),
        ("bool", [1, True], "expected values of BOOL, came '1'"),
        ("float32", ["1", 2.0], "expected values of FP32, came '1'"),
        ("float32", [None, 2.0], "expected values of FP32, came 'None'"),
        ("float32", [1.0], "expected 2 values for shape .2., 1 came"),
        ("float32", [1.0] * 3, "expected 2 values for shape .2., 3 came"),
        ("float32", [[1.0], [2.0]], "expected values of FP32, came a list"),
    ],
)
def test_plain_values_that_a_dtype_does_not_hold_are_refused(dtype, values, why):
    with pytest.raises(SpecMismatch, match=why):
        TypedData("x", values).elements((2,), TensorSpec(dtype))


def test_nested_values_have_the_shape_that_was_declared():
    nested = [[[1, 2, 3], [4, 5, 6]]]
    assert TypedData("x", nested).elements((1, 2, 3), FIXED).tolist() == nested
    assert TypedData("x", [1, 2, 3, 4, 5, 6]).elements((1, 2, 3), FIXED).tolist() == nested
    for wrong in ([[1, 2, 3], [4, 5, 6]], [[[1, 2], [3, 4], [5, 6]]], [[[1, 2, 3], 4]], [[[1, 2, 3], [4, 5, 6, 7]]]):
        with pytest.raises(SpecMismatch, match="the nesting of data does not match shape"):
            TypedData("x", wrong).elements((1, 2, 3), FIXED)


def test_a_number_too_large_for_a_float_is_not_taken_for_infinity():
    """JSON's 1e999 is read as infinity; the names that some writers use are meant."""
    large = json.loads("[1e999, 1]")
    with pytest.raises(SpecMismatch, match="a number that is too large for a float does not fit FP32"):
        TypedData("x", large).elements((2,), TensorSpec("float32"))
    meant = (math.inf, -math.inf, math.nan)
    found = TypedData("x", meant).elements((3,), TensorSpec("float32"))
    np.testing.assert_array_equal(found, np.array(meant, np.float32))


def test_texts_are_utf_8_or_bytes_within_the_inputs_capacity():
    assert rows_of("x", "BYTES", [3], TEXT, None, TypedData("x", ["\u00e9\u00e9", b"\xff", ""])) == [
        "\u00e9\u00e9".encode(), b"\xff", b"",
    ]  # fmt: skip
    for values, why in (
        (["a", "b" * 5], "row 1: 5 bytes came, expected at most 4"),
        (["a", 1], "came '1'"),
        (["a"], "1 came"),
    ):
        with pytest.raises(SpecMismatch, match=why):
            TypedData("x", values).strings(2, TEXT)
