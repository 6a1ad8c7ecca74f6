"""A panel's scores: the weighted scores of its members; a row without one of them has no total."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.protocol.errors import RowFailed, SpecMismatch
from jurybox.server.frontend.panels import total
from jurybox.server.frontend.requests import RowsReply

MEMBERS = {"sharp": {"weight": 0.25}, "kind": {"weight": 2.0}}


def answer(scores, failed=None):
    error = RowFailed("some failed", errors=failed) if failed else None
    return np.array(scores), RowsReply({}, 3, None, error)


def voted(*answers):
    reply = total(MEMBERS, answers)
    return reply.outputs, reply.failed


def test_the_total_is_the_weighted_sum():
    scores, errors = voted(answer(np.float32([[4], [8]])), answer(np.float32([1, 2])))
    np.testing.assert_array_equal(scores["score"], np.float32([3, 6]))
    assert errors == {}


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_row_that_failed_with_a_member_has_neither_its_score_nor_a_total(dtype):
    """Integers have no NaN: the value is 0."""
    scores, errors = voted(answer(np.array([4, 0], dtype), {1: "no face"}), answer(np.float32([1, 2])))
    np.testing.assert_array_equal(scores["sharp"], [4, np.nan])
    np.testing.assert_array_equal(scores["score"], [3, np.nan])
    assert errors == {1: "sharp: no face"}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_no_number_makes_no_total(wrong):
    scores, errors = voted(answer(np.float32([4, wrong])), answer(np.float32([1, 2])))
    assert np.isnan(scores["score"][1]) and np.isnan(scores["sharp"][1])
    assert errors == {1: f"sharp: the score is {np.float32(wrong)}"}


def test_a_total_that_overflows_is_none():
    scores, errors = voted(answer(np.float32([1])), answer(np.float32([3e38])))
    assert np.isnan(scores["score"][0]) and errors == {0: "the total is inf"}


def test_the_error_of_a_door_that_cannot_say_single_rows_names_them():
    reply = total(MEMBERS, [answer(np.float32([4, np.nan])), answer(np.float32([1, 2]))])
    assert isinstance(reply.error, RowFailed) and "1 of 2 rows have no total" in str(reply.error)
    assert list(reply.error.errors) == [1] and reply.version == 3


def test_members_that_answer_different_numbers_of_rows_are_no_panel():
    with pytest.raises(SpecMismatch, match="different numbers of rows"):
        voted(answer(np.float32([4, 5])), answer(np.float32([1])))
