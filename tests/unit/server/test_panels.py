"""A panel's scores: the weighted scores of its members; a row without one of them has no total."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jurybox.protocol.errors import RowFailed, SpecMismatch
from jurybox.server.gateway.inference.inference import InferRequest, InferResponse, OpenInference, Output
from jurybox.server.gateway.inference.tensors import request_parameters

MEMBERS = {"sharp": {"weight": 0.25}, "kind": {"weight": 2.0}}


def answer(scores, failed=None):
    array = np.array(scores)
    parameters = {"row_errors": json.dumps(failed)} if failed else {}
    return InferResponse("m", "3", "", [Output("score", "FP32", array.shape, array, {}, ())], parameters)


def voted(*answers, row_errors=True):
    parameters = {"row_errors": row_errors}
    inference = OpenInference.__new__(OpenInference)  # its votes need no lane
    request = InferRequest("panel", "", "", [], [], parameters)
    response = inference._voted(request, MEMBERS, answers, ["score", *MEMBERS], request_parameters(parameters))
    return {made.name: made.array for made in response.outputs}, json.loads(response.parameters.get("row_errors", "{}"))


def test_the_total_is_the_weighted_sum():
    scores, errors = voted(answer(np.float32([[4], [8]])), answer(np.float32([1, 2])))
    np.testing.assert_array_equal(scores["score"], np.float32([3, 6]))
    assert errors == {}


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_row_that_failed_with_a_member_has_neither_its_score_nor_a_total(dtype):
    """Integers have no NaN: the value is 0."""
    scores, errors = voted(answer(np.array([4, 0], dtype), {"1": "no face"}), answer(np.float32([1, 2])))
    np.testing.assert_array_equal(scores["sharp"], [4, np.nan])
    np.testing.assert_array_equal(scores["score"], [3, np.nan])
    assert errors == {"1": "sharp: no face"}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_no_number_makes_no_total(wrong):
    scores, errors = voted(answer(np.float32([4, wrong])), answer(np.float32([1, 2])))
    assert np.isnan(scores["score"][1]) and np.isnan(scores["sharp"][1])
    assert errors == {"1": f"sharp: the score is {np.float32(wrong)}"}


def test_a_total_that_overflows_is_none():
    scores, errors = voted(answer(np.float32([1])), answer(np.float32([3e38])))
    assert np.isnan(scores["score"][0]) and errors == {"0": "the total is inf"}


def test_without_row_errors_the_request_fails_with_its_rows():
    with pytest.raises(RowFailed, match="1 of 2 rows have no total") as failed:
        voted(answer(np.float32([4, np.nan])), answer(np.float32([1, 2])), row_errors=False)
    assert list(failed.value.errors) == [1]


def test_members_that_answer_different_numbers_of_rows_are_no_panel():
    with pytest.raises(SpecMismatch, match="different numbers of rows"):
        voted(answer(np.float32([4, 5])), answer(np.float32([1])))
