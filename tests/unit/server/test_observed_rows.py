"""What of a robot's observation becomes rows of its model, and what is refused though it looks nearly so."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.gateway.robots.observations import rows_of

PAIR = TensorSpec("float32", (2,))
PICTURE, FRAME = TensorSpec("uint8", (4, 5, 3)), TensorSpec("uint8", (1, 4, 5, 3))


def model(**inputs):
    return ModelSpec("arm", inputs, {"a": PAIR})


def rows(spec, value):
    """The rows of an observation that has one value, for a model that takes it."""
    return rows_of({"x": value}, model(x=spec))


def test_inputs_of_more_than_two_different_sizes_are_refused_with_the_first_two():
    given = {name: np.zeros((n, 2)) for name, n in (("a", 2), ("b", 3), ("c", 4))}
    with pytest.raises(SpecMismatch, match="has 2 rows in 'a' and 3 in 'b'"):
        rows_of(given, model(a=PAIR, b=PAIR, c=PAIR))


def test_an_input_whose_rows_have_an_axis_of_one_may_have_a_batch_axis():
    values = np.arange(8.0).reshape(4, 1, 2)
    found = rows(TensorSpec("float32", (1, 2)), values)
    assert (found.n, found.batched) == (4, True)
    assert [row.tolist() for row in found.values["x"]] == values.tolist()


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        (PAIR, np.zeros(3)),
        (PAIR, 1.0),
        (PAIR, np.zeros((4, 1, 1, 2))),
        (PICTURE, np.zeros(3, np.uint8)),
        (PICTURE, 7),
        (FRAME, np.zeros(60, np.uint8)),
        (FRAME, np.zeros((2, 4, 5, 3), np.uint8)),  # two frames are not two rows of one
        (FRAME, np.zeros((1, 4, 5, 4), np.uint8)),
    ],
)
def test_an_array_of_another_number_of_axes_is_refused_with_its_shape(spec, given):
    with pytest.raises(SpecMismatch) as refused:
        rows(spec, given)
    assert f"expected {spec}, came {np.asarray(given).dtype}{list(np.shape(given))}" in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        (TensorSpec("float32", (4, 5, 3)), np.zeros((3, 4, 5), np.float32)),  # no picture has floats
        (TensorSpec("uint8", (3,)), np.zeros(3)),
        (TensorSpec("uint8", (5, 3)), np.zeros((5, 3))),
        (TensorSpec("uint8", (2, 1, 4, 5, 3)), np.zeros((2, 1, 4, 5, 3))),
        (TensorSpec("uint8", (4, 5, 1)), np.zeros((4, 5, 1))),
        (TensorSpec("uint8", (4, 5, 4)), np.zeros((4, 5, 4))),
    ],
)
def test_what_only_pictures_may_be_is_refused_for_other_inputs(spec, given):
    with pytest.raises(SpecMismatch, match="'x' of the observation: expected"):
        rows(spec, given)
    rows(spec, np.zeros(spec.shape, spec.dtype))


def test_no_frames_at_all_may_come_as_floats():
    found = rows(TensorSpec("uint8", (-1, 4, 5, 3), capacity=120), np.zeros((0, 4, 5, 3)))
    assert [(row.shape, row.dtype) for row in found.values["x"]] == [((0, 4, 5, 3), np.uint8)]


@pytest.mark.parametrize(
    ("dtype", "given"),
    [("float32", [[1.0, 2.0]]), ("float32", [1.0, None]), ("bool", np.array([0, 1])), ("bool", [0, 1])],
)
def test_a_list_is_of_numbers_alone_and_numbers_are_no_truth_values(dtype, given):
    with pytest.raises(SpecMismatch, match="'x' of the observation: expected"):
        rows(TensorSpec(dtype, (2,)), given)


def test_a_number_too_large_for_its_input_is_refused_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SpecMismatch, match="holds numbers that float32 cannot: came float64"):
            rows(PAIR, np.array([1e300, 0.0]))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (["lift"], "expected 3 texts, came a list of 1: a batch axis gives the number of rows"),
        (np.array(["lift"] * 2), "expected 3 texts, came a list of 2"),
        (np.array([b"lift"]), "expected text, came ndarray"),
        (np.array([7]), "expected text, came ndarray"),
        ([["a"], "b", ["c", "d"]], "expected text, came list"),
    ],
)
def test_texts_are_one_for_all_rows_or_one_for_each(text, why):
    spec = model(x=PAIR, text=TensorSpec("bytes", capacity=9))
    with pytest.raises(SpecMismatch, match=f"'text' of the observation: {why}"):
        rows_of({"x": np.zeros((3, 2)), "text": text}, spec)
    for fitting in ("a", np.array(["a"]), ["a", ["a"], "a"], np.array([["a"], ["a"], ["a"]])):
        assert rows_of({"x": np.zeros((3, 2)), "text": fitting}, spec).values["text"] == [b"a"] * 3


def test_a_missing_input_is_told_with_some_of_the_names_that_came():
    given = {f"{i:02}" + "n" * 98: 1 for i in range(30)}
    with pytest.raises(SpecMismatch) as refused:
        rows_of(given, model(x=PAIR))
    told = str(refused.value).partition("came ")[2].split(", ")
    assert [name[:2] for name in told] == [f"{i:02}" for i in range(20)]
    assert {len(name) for name in told} == {80}
