"""Rows of every kind, from a caller's inputs to a lane's memory and from there to its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jurybox.client.row_codec import OpenRows, PlainRows, codec_of, shaped
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.arena import SESSION, Columns
from jurybox.protocol.errors import Refused, SpecMismatch

NUMBER, PAIR = TensorSpec("float32"), TensorSpec("float32", (2,))
RAGGED, TEXT = TensorSpec("float32", (-1, 2), capacity=6), TensorSpec("bytes", capacity=4)
PLAIN = ModelSpec("m", {"x": PAIR, "k": NUMBER}, {"y": PAIR, "z": NUMBER})
ONE = ModelSpec("m", {"x": PAIR}, {"y": PAIR})
SCALAR = ModelSpec("m", {"k": NUMBER}, {"y": NUMBER})
OPEN = ModelSpec("m", {"x": RAGGED, "t": TEXT, "k": NUMBER}, {"y": RAGGED, "t": TEXT, "z": NUMBER})
STATEFUL = ModelSpec("m", {"k": NUMBER}, {"y": NUMBER}, state={"total": NUMBER})


def test_only_rows_of_variable_sizes_or_of_sessions_need_the_slower_codec() -> None:
    kinds = {"plain": PLAIN, "open": OPEN, "stateful": STATEFUL}
    assert [type(codec_of(spec)) for spec in kinds.values()] == [PlainRows, OpenRows, OpenRows]
    assert codec_of(PLAIN).only == "y"


def test_checked_rows_are_written_to_the_lanes_rows_that_were_taken() -> None:
    codec, columns = codec_of(PLAIN), Columns.here(PLAIN, 6)
    x, k = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4, dtype=np.float32)
    given, n = codec.checked({"x": x, "k": k})
    assert n == 4 and given["x"] is x
    codec.put(columns, given, 1, 2, 3)
    assert columns.inputs["x"].tolist() == [[0, 0]] * 3 + [[2, 3], [4, 5], [0, 0]]
    assert columns.inputs["k"].tolist() == [0, 0, 0, 1, 2, 0]
    one, n = codec.one({"x": x[3], "k": k[3]})
    assert n == 1 and (one["x"].shape, one["k"].shape) == ((1, 2), (1,))
    codec.put(columns, one, 0, 1, 5)
    assert columns.inputs["x"][5].tolist() == [6, 7] and columns.inputs["k"][5] == 3


@pytest.mark.parametrize("spec", [PLAIN, OPEN])
def test_rows_must_be_as_many_in_each_input(spec: ModelSpec) -> None:
    more: dict[str, Any] = {"x": np.zeros((2, 2), np.float32), "k": np.zeros(3, np.float32)}
    if spec is OPEN:
        more = {"x": [np.zeros((1, 2), np.float32)] * 2, "t": ["a", "b"], "k": np.zeros(3, np.float32)}
    with pytest.raises(SpecMismatch, match=r"expected float32 of shape \(n\), came|numbers of rows: x 2, t 2, k 3"):
        codec_of(spec).checked(more)


@pytest.mark.parametrize("spec", [SCALAR, STATEFUL])
def test_a_number_alone_is_no_row(spec: ModelSpec) -> None:
    with pytest.raises(SpecMismatch, match=r"expected float32 of shape \(n\), came float32 of shape \(\)"):
        codec_of(spec).checked(np.float32(1))
    assert codec_of(spec).checked(np.ones(1, np.float32))[1] == 1


def test_what_a_shape_should_be_is_told_in_the_callers_form() -> None:
    with pytest.raises(
        SpecMismatch, match=r"'x' of 'm': expected float32 of shape \(n, 2\), came float32 of shape \(1, 3\)$"
    ):
        codec_of(ONE).checked(np.zeros((1, 3), np.float32))


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"x": 1}, r"^'m' takes inputs \['k', 'x'\], \['x'\] came$"),
        ({"x": 1, "xx": 1}, r"\['x', 'xx'\] came; there are: k$"),
        ({"x": 1, "kk": 1}, r"\['kk', 'x'\] came.*'k'"),
        ({"x": 1, "k": 1, "xx": 1}, r"\['k', 'x', 'xx'\] came.*'x'"),
    ],
)
def test_names_that_are_not_the_models_are_refused_with_those_that_may_have_been_meant(
    inputs: dict[str, Any], told: str
) -> None:
    with pytest.raises(SpecMismatch, match=told):
        codec_of(PLAIN).checked(inputs)


def test_outputs_are_copies_of_the_lanes_rows() -> None:
    codec, columns = codec_of(PLAIN), Columns.here(PLAIN, 5)
    columns.outputs["y"][:] = np.arange(10).reshape(5, 2)
    columns.outputs["z"][:] = np.arange(5)
    taken = codec.take(columns, 1, 2)
    columns.outputs["y"][:] = 9
    assert taken["y"].tolist() == [[2, 3], [4, 5]] and taken["z"].tolist() == [1, 2]
    assert shaped(taken) is taken and shaped({"y": taken["y"]}) is taken["y"]
    whole = codec.room(5)
    assert (whole["y"].shape, whole["z"].shape, whole["y"].dtype) == ((5, 2), (5,), np.float32)
    for rows in whole.values():
        rows[:] = 0
    codec.take_into(columns, 1, 2, whole, 3)
    assert whole["y"].tolist() == [[0, 0]] * 3 + [[9, 9]] * 2 and whole["z"].tolist() == [0, 0, 0, 1, 2]
    codec.place(whole, 1, 2, taken)
    assert whole["y"].tolist() == [[0, 0], [2, 3], [4, 5], [9, 9], [9, 9]]
    alone = codec_of(ONE).room(3)
    alone["y"][:] = 0
    codec_of(ONE).place(alone, 1, 2, taken["y"])
    assert alone["y"].tolist() == [[0, 0], [2, 3], [4, 5]]


def open_rows() -> tuple[Any, Columns]:
    codec, columns = codec_of(OPEN), Columns.here(OPEN, 6)
    rows = [np.arange(2 * n, dtype=np.float32).reshape(n, 2) + 10 * n for n in (1, 2, 3)]
    given, n = codec.checked({"x": rows, "t": ["ab", b"c", memoryview(b"defg")], "k": np.arange(3, dtype=np.float32)})
    assert n == 3
    return given, columns


def test_rows_of_any_size_are_written_with_their_sizes() -> None:
    given, columns = open_rows()
    codec_of(OPEN).put(columns, given, 1, 2, 3)
    assert columns.inputs["x"][3, :4].tolist() == [20, 21, 22, 23] and columns.inputs["x"][4, 0] == 30
    assert columns.input_extents["x"].tolist() == [[0]] * 3 + [[2], [3], [0]]
    assert columns.input_extents["t"].tolist() == [[0]] * 3 + [[1], [4], [0]]
    assert bytes(columns.inputs["t"][4]) == b"defg" and columns.inputs["k"].tolist() == [0, 0, 0, 1, 2, 0]
    one, n = codec_of(OPEN).one({"x": np.ones((1, 2), np.float32), "t": "z", "k": np.float32(8)})
    assert n == 1
    codec_of(OPEN).put(columns, one, 0, 1, 0)
    assert columns.inputs["x"][0, :2].tolist() == [1, 1] and columns.input_extents["t"][0] == 1
    assert columns.inputs["k"][0] == 8


def test_records_of_sessions_go_with_their_rows() -> None:
    codec, columns = codec_of(STATEFUL), Columns.here(STATEFUL, 4)
    records = np.zeros(3, SESSION)
    records["slot"] = 5, 6, 7
    codec.put(columns, {"k": np.arange(3, dtype=np.float32), "": records}, 1, 2, 2)
    assert columns.sessions is not None
    assert columns.sessions["slot"].tolist() == [0, 0, 6, 7] and columns.inputs["k"].tolist() == [0, 0, 1, 2]


def test_outputs_of_any_size_are_copies_in_their_own_shapes() -> None:
    codec, columns = codec_of(OPEN), Columns.here(OPEN, 5)
    columns.outputs["y"][:] = np.arange(30).reshape(5, 6)
    columns.output_extents["y"][:, 0], columns.output_extents["t"][:, 0] = (9, 3, 0, 9, 9), (9, 4, 2, 9, 9)
    columns.outputs["t"][:] = np.frombuffer(b"abcd", np.uint8)
    columns.outputs["z"][:] = range(5)
    taken = codec.take(columns, 1, 2)
    columns.outputs["y"][:] = 0
    assert [rows.tolist() for rows in taken["y"]] == [[[6, 7], [8, 9], [10, 11]], []] and taken["y"][1].shape == (0, 2)
    assert taken["t"] == [b"abcd", b"ab"] and taken["z"].tolist() == [1, 2]
    whole = codec.room(5)
    assert whole["y"] == [None] * 5 and whole["t"] == [None] * 5 and whole["z"].shape == (5,)
    codec.take_into(columns, 1, 2, whole, 1)
    assert whole["t"] == [None, b"abcd", b"ab", None, None] and whole["z"][1:3].tolist() == [1, 2]


@pytest.mark.parametrize("size", [4, -1, 1 << 62])
def test_a_size_that_an_output_cannot_have_is_refused(size: int) -> None:
    """Another process may have overwritten it."""
    codec, columns = codec_of(OPEN), Columns.here(OPEN, 1)
    columns.output_extents["y"][0] = size
    with pytest.raises(Refused, match=rf"output 'y' of 'm' came with sizes \[{size}\]"):
        codec.take(columns, 0, 1)
    square = ModelSpec("m", {"x": PAIR}, {"y": TensorSpec("uint8", (-1, -1), capacity=4)})
    columns = Columns.here(square, 1)
    columns.output_extents["y"][0] = -2, -2
    with pytest.raises(Refused, match="came with sizes"):
        codec_of(square).take(columns, 0, 1)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("x", np.float32(1), "expected a list of arrays, one for each row, came float32"),
        ("t", "text", "expected a list of bytes or str, one for each row, came str; for a single row"),
        ("t", b"text", "came bytes"),
        ("t", bytearray(b"text"), "came bytearray"),
        ("t", {"a": 1}, "came dict"),
        ("t", [5, "b"], "input 't' of 'm', row 0: expected bytes or str, came int"),
        ("t", ["a", "12345"], r"row 1: expected bytes up to 4, came shape \(5,\) \(5 elements\)"),
        ("x", [np.zeros((1, 2), np.float32), np.zeros((4, 2), np.float32)], r"row 1: .* came shape \(4, 2\)"),
        ("x", [np.zeros((1, 2)), np.zeros((1, 2))], "row 0.*float64"),
        ("k", np.zeros(2), "input 'k' of 'm': expected float32"),
    ],
)
def test_a_row_that_the_model_cannot_take_is_refused_by_its_number(name: str, value: Any, told: str) -> None:
    fitting: dict[str, Any] = {"x": [np.zeros((1, 2), np.float32)] * 2, "t": ["a", "b"], "k": np.zeros(2, np.float32)}
    assert codec_of(OPEN).checked(fitting)[1] == 2
    with pytest.raises(SpecMismatch, match=told):
        codec_of(OPEN).checked(fitting | {name: value})


def test_a_row_alone_has_the_number_0_in_its_error() -> None:
    with pytest.raises(SpecMismatch, match="input 't' of 'm', row 0: expected bytes or str, came int"):
        codec_of(OPEN).one({"x": np.ones((1, 2), np.float32), "t": 5, "k": np.float32(8)})
