"""Which rows of a lane are free, also if calls are nested in the taking of rows."""

from __future__ import annotations

import gc
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from tests.moments import Moment

from jurybox.client import row_allocator
from jurybox.client.row_allocator import RowAllocator, version_of, whole


def rows(run):
    return set(range(run.first, run.first + run.rows))


def test_rows_are_free_when_nobody_holds_them_and_no_ticket_has_them():
    lane = RowAllocator(100, 8)
    a, b = lane.take(3), lane.take(4)
    assert rows(a) | rows(b) <= set(range(100, 108)) and not rows(a) & rows(b)
    assert lane.take(2) is None and lane.free == lane.largest == 1
    lane.lent[7] = SimpleNamespace(first=a.first, rows=3)
    lane.give(a)
    lane.give(a)
    assert lane.free == 1 and lane.is_lent(a.first + 2, 1), "an engine may still write to them"
    del lane.lent[7]
    assert lane.free == 4
    del b
    gc.collect()
    assert lane.free == lane.largest == 8


def test_whatever_is_free_can_be_taken_and_nothing_else():
    """Beside a plain list of rows: runs and tickets come and go, and tickets lie within runs, across them and alone."""
    chance = random.Random(4)
    for _ in range(300):
        lane, runs = RowAllocator(5, 12), []
        for number in range(12):
            first = chance.randrange(5, 17)
            what = chance.choice(["take", "take", "give", "lend", "settle"])
            if what == "give" and runs:
                lane.give(runs.pop(chance.randrange(len(runs))))
            elif what == "lend":
                lane.lent[number] = SimpleNamespace(first=first, rows=chance.randint(1, 17 - first))
            elif what == "settle" and lane.lent:
                del lane.lent[chance.choice(list(lane.lent))]
            used = set().union(*map(rows, [*runs, *lane.lent.values()]))
            gaps = [len(gap) for gap in "".join(" " if row in used else "x" for row in range(5, 17)).split()]
            assert (lane.free, lane.largest) == (sum(gaps), max(gaps, default=0))
            lent, near = set().union(*map(rows, lane.lent.values())), range(first, first + chance.randint(1, 3))
            assert lane.is_lent(near.start, len(near)) == bool(lent & set(near))
            if what == "take":
                n = chance.randint(1, 6)
                run = lane.take(n)
                assert (run is not None) == (n <= max(gaps, default=0))
                if run is not None:
                    assert run.rows == n and rows(run) <= set(range(5, 17)) - used
                    runs.append(run)


@pytest.mark.parametrize("version", [-1, 1 << 64, 0.5, "new"])
def test_versions_that_no_weights_can_have_are_refused(version):
    with pytest.raises(ValueError, match="version=.*: expected a whole number from 0 to 18446744073709551615"):
        version_of(version)
    assert version_of((1 << 64) - 1) == (1 << 64) - 1 and version_of(np.int64(3)) == 3 and version_of(None) == 0


@pytest.mark.parametrize("n", [0, -1, -(2**40), 1.5, "1", None])
def test_counts_that_are_no_whole_numbers_above_zero_are_refused(n):
    lane = RowAllocator(0, 8)
    with pytest.raises(ValueError, match="expected a whole number of at least 1"):
        lane.take(n)
    assert lane.free == 8
    with pytest.raises(ValueError, match=r"row=.*: expected a whole number from 0 to 7"):
        whole(n if n != 0 else 8, "row", 0, 7)
    assert (whole(0, "row", 0, 7), whole(7, "row", 0, 7), whole(np.int64(1), "rows", 1)) == (0, 7, 1)


def test_version_0_means_the_newest_and_the_warning_shows_the_line_that_gave_it():
    with pytest.warns(DeprecationWarning, match="version=0 means the newest weights for now") as said:
        assert version_of(0) == version_of(np.int64(0)) == 0
    assert [warning.filename for warning in said] == [__file__, __file__]


def test_a_forked_child_forgets_its_parents_rows():
    lane = RowAllocator(0, 4)
    run = lane.take(2)
    lane.lent[1] = SimpleNamespace(first=2, rows=2)
    assert lane.free == 0
    lane.forget()
    assert lane.free == 4 and not lane.is_lent(0, 4)
    lane.give(run)
    assert lane.free == 4


@pytest.mark.parametrize("keeps", [True, False])
def test_a_nested_call_never_gets_rows_of_the_one_that_it_is_nested_in(keeps):
    """At every instruction of the allocator: as a destructor that takes rows, and keeps them or gives them back."""
    for number in itertools.count():
        lane, nested = RowAllocator(0, 16), []
        earlier = [lane.take(2) for _ in range(3)]
        lane.give(earlier[1])

        def take(lane=lane, nested=nested):
            run = lane.take(2)
            lane.lent[1] = SimpleNamespace(first=run.first, rows=2)
            if keeps:
                nested.append(run)
            else:
                lane.give(run)

        with Moment((row_allocator.__file__,), number, take, anywhere=True) as moment:
            mine = lane.take(2)
        if not moment.fell:
            break
        others = [earlier[0], earlier[2], *nested, lane.lent[1]]
        assert not any(rows(mine) & rows(other) for other in others), number
        assert len(set().union(rows(mine), *map(rows, others))) == 8
    assert number > 30


def test_ctrl_c_in_any_place_loses_no_rows():
    def interrupt():
        raise KeyboardInterrupt

    lane = RowAllocator(0, 16)
    for number in itertools.count():
        with Moment((row_allocator.__file__,), number, interrupt) as moment:
            try:
                mine = lane.take(2)
                lane.give(mine)
            except KeyboardInterrupt:
                pass
        mine = None
        assert lane.free == 16
        if not moment.fell:
            break
    assert number > 10
