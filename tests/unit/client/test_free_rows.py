import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurybox.client.free_rows import FreeRows


def test_rows_taken_are_neighbours_and_never_given_twice():
    rows = FreeRows(first=10, rows=8)
    a, b = rows.take(3), rows.take(5)
    assert (a, b) == (10, 13)
    assert rows.take(1) is None
    rows.give(10, 3)
    assert rows.largest == 3
    assert rows.take(4) is None


def test_giving_back_joins_runs_again():
    rows = FreeRows(0, 9)
    firsts = [rows.take(3) for _ in range(3)]
    for first in (firsts[0], firsts[2], firsts[1]):
        rows.give(first, 3)
    assert rows.largest == rows.free == 9


def test_giving_back_twice_is_an_error():
    rows = FreeRows(0, 4)
    rows.take(4)
    rows.give(0, 2)
    with pytest.raises(AssertionError, match="free already"):
        rows.give(1, 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=80))
def test_any_order_of_taking_and_giving_keeps_every_row_accounted_for(steps):
    rows, held = FreeRows(100, 20), []
    for take, n in steps:
        if take:
            if (first := rows.take(n)) is not None:
                held.append((first, n))
        elif held:
            rows.give(*held.pop(n % len(held)))
        taken = [row for first, length in held for row in range(first, first + length)]
        assert len(taken) == len(set(taken))
        assert rows.free == 20 - len(taken)
        assert all(100 <= row < 120 for row in taken)
