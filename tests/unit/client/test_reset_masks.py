"""What a caller may give as the rows that begin a new episode."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.client import SpecMismatch
from jurybox.client.session_book import resets


@pytest.mark.parametrize(
    "given",
    [
        [True, False, True],
        (1, 0, 1),
        np.array([True, False, True]),
        np.array([1, 0, 1], np.uint8),
        np.array([1, 0, 1], np.int8),
        np.array([1, 0, 1], np.float16),
        np.array([1.0, 0.0, 1.0]),
    ],
)
def test_flags_are_bools_or_small_numbers_that_are_zero_or_one(given):
    if isinstance(given, tuple):
        given = np.array(given, np.uint8)
    begin = resets(given, 3)
    assert begin.dtype == np.bool_ and begin.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.array([0, 1, 1]), "reset is int64: expected one bool for each row, not the numbers of sessions"),
        (np.array([0, 1, 1], np.int16), "reset is int16"),
        (np.array([0, 1, 1], np.uint32), "reset is uint32"),
        (np.array(["1", "0", "1"]), "not the numbers of sessions"),
        (np.array([1, 0, 1], np.complex64), "reset is complex64"),
        (np.array([2, 0, 1], np.uint8), "reset is uint8 with other values than 0 and 1"),
        (np.array([-1, 0, 1], np.int8), "reset is int8 with other values than 0 and 1"),
        (np.array([0.5, 0, 1]), "reset is float64 with other values than 0 and 1"),
        (np.array([np.nan, 0, 1]), "with other values than 0 and 1"),
        ([True, False], r"reset has shape \(2,\): expected one bool for each of 3 rows"),
        ([[True], [False], [True]], r"reset has shape \(3, 1\)"),
        (True, r"reset has shape \(\)"),
        (np.array([1, 0], np.uint8), r"reset has shape \(2,\)"),
    ],
)
def test_what_could_be_something_else_is_refused(given, said):
    with pytest.raises(SpecMismatch, match=said):
        resets(given, 3)
