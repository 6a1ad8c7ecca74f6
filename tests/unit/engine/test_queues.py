from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import records

from jurybox import native
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.queues import PASSED_OVER, Queue, fair_choice

tickets = partial(records, ("lane", "rows"), begin=0)


def test_everything_that_waits_goes_into_one_batch_when_it_fits():
    queue = Queue(max_batch=8)
    queue.push(tickets((0, 3), (1, 1)))
    queue.push(tickets((2, 4)))
    assert queue.take()["lane"].tolist() == [0, 1, 2]
    assert len(queue) == queue.rows == 0


def test_one_greedy_client_does_not_hold_up_fifteen_modest_ones():
    queue = Queue(max_batch=16)
    queue.push(tickets(*[(99, 1)] * 200))  # arrived first, with many rows
    queue.push(tickets(*[(lane, 1) for lane in range(15)]))
    batch = queue.take()
    assert set(range(15)) <= set(batch["lane"].tolist())
    assert (batch["lane"] == 99).sum() == 1


def test_a_large_ticket_is_not_starved_by_small_ones():
    queue = Queue(max_batch=8)
    queue.push(tickets(*[(lane, 1) for lane in range(4)]))
    queue.push(tickets((50, 8)))
    served = []
    for step in range(3):
        served.append(queue.take()["lane"].tolist())
        queue.push(tickets(*[(lane, 1) for lane in range(4)]))
    assert [50] in served


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), min_size=1, max_size=60), st.integers(8, 20))
def test_batches_never_exceed_the_limit_and_lose_no_ticket(waiting, limit):
    queue = Queue(max_batch=limit)
    queue.push(tickets(*waiting))
    seen = []
    while len(queue):
        batch = queue.take()
        assert 0 < batch["rows"].sum() <= limit
        seen += batch["sequence"].tolist()
    assert sorted(seen) == list(range(len(waiting)))


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=40),
    st.integers(8, 20),
)
def test_a_lanes_tickets_stay_in_order_for_any_weights_versions(waiting, limit):
    """A session's reset must not overtake the step before it, which pins a weights version."""
    queue = Queue(max_batch=limit)
    records = tickets(*[(lane, rows) for lane, rows, _ in waiting])
    records["version"] = [version for _, _, version in waiting]
    queue.push(records)
    queue.pinned = bool(records["version"].any())
    seen = {}
    while len(queue):
        batch = queue.take()
        assert len(set(batch["version"].tolist())) == 1 and batch["rows"].sum() <= limit
        for lane, sequence in batch[["lane", "sequence"]].tolist():
            seen.setdefault(lane, []).append(sequence)
    assert sorted(sequence for order in seen.values() for sequence in order) == list(range(len(waiting)))
    assert all(order == sorted(order) for order in seen.values())


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), min_size=1, max_size=60))
def test_a_lanes_tickets_stay_in_order(waiting):
    records = tickets(*waiting)
    chosen = fair_choice(records, 16)
    for lane in range(6):
        mine = chosen[records["lane"] == lane]
        assert not (np.diff(mine.astype(int)) > 0).any()  # if one does not fit, none after it is taken


def test_a_batch_is_held_back_only_as_long_as_asked():
    queue = Queue(max_batch=8, min_batch=4, max_wait_ns=1000)
    assert queue.ready_in(0) is None
    queue.push(tickets((0, 1), submitted=100))
    assert queue.ready_in(400) == 700
    assert queue.ready_in(1100) == queue.ready_in(5000) == 0
    queue.push(tickets((1, 3), submitted=500))
    assert queue.ready_in(600) == 0


def test_by_default_nothing_is_held_back():
    queue = Queue(max_batch=8)
    queue.push(tickets((0, 1), submitted=10**12))
    assert queue.ready_in(0) == 0


def test_an_expired_ticket_is_taken_out_and_the_others_stay():
    queue = Queue(max_batch=8)
    queue.push(tickets((0, 1), deadline=50))
    queue.push(tickets((1, 2)))
    assert queue.expired(40) is None
    assert queue.expired(60)["lane"].tolist() == [0]
    assert queue.rows == 2
    assert queue.take()["lane"].tolist() == [1]


def test_a_ticket_that_costs_more_than_a_batch_may_is_a_batch_of_its_own():
    queue = Queue(max_batch=8, costs=lambda waiting: np.where(waiting["lane"] == 1, 100, 1), max_cost=10)
    queue.push(tickets((1, 1), (2, 1), (3, 1)))
    batches = [queue.take()["lane"].tolist() for _ in range(2)]
    assert sorted(batches) == [[1], [2, 3]] and not len(queue)


def test_the_tickets_of_a_lane_that_was_taken_back_are_handed_out():
    queue = Queue(max_batch=8)
    queue.push(tickets((0, 1), (1, 2), (0, 3)))
    assert queue.drop(0)["sequence"].tolist() == [0, 2]
    assert queue.rows == 2
    assert queue.take()["lane"].tolist() == [1]


def test_the_queue_grows_with_many_clients():
    queue = Queue(max_batch=64)
    for first in range(0, 3000, 100):
        queue.push(tickets(*[(lane, 1) for lane in range(first, first + 100)]))
    assert queue.rows == 3000
    assert len(queue) == 3000


def test_a_queue_grows_and_keeps_the_order():
    queue = Queue(max_batch=1000)
    for lane in range(600):
        queue.push(tickets((lane, 1)))
    assert queue.take()["lane"].tolist() == list(range(600))


def test_native_code_reads_and_writes_no_tickets_out_of_bounds():
    few, out = tickets((0, 1), (1, 1), deadline=5), np.zeros(3, TICKET)
    native.copy_tickets(few, out, 1)
    assert out["lane"].tolist() == [0, 0, 1] and out["deadline"].tolist() == [0, 5, 5]
    for at in (2, 3, 4, 2**63):
        with pytest.raises(IndexError, match="do not fit"):
            native.copy_tickets(few, out, at)
    assert native.any_expired(out, 1, 3, 6) and not native.any_expired(out, 0, 1, 6)
    for first, end in ((0, 4), (2, 1), (4, 4)):
        with pytest.raises(IndexError, match="fewer tickets"):
            native.any_expired(out, first, end, 6)


def test_every_batch_is_an_array_of_its_own():
    """A group recognises its batch by the object (groups/group.py)."""
    queue = Queue(8)
    one = np.zeros(1, TICKET)
    one["rows"] = 1
    batches = []
    for _ in range(3):
        queue.push(one)
        batches.append(queue.take())
    assert len({id(batch) for batch in batches}) == 3


def ranked(*lanes_rows_and_priorities, versions=0):
    records = tickets(*[(lane, rows) for lane, rows, _ in lanes_rows_and_priorities])
    records["priority"] = [priority for *_, priority in lanes_rows_and_priorities]
    records["version"] = versions
    return records


@pytest.mark.parametrize("version", [0, 7])
def test_a_higher_priority_is_taken_first_and_the_rest_of_the_batch_is_filled(version):
    queue = Queue(max_batch=4)
    queue.push(ranked((0, 3, 3), (1, 1, 2), (2, 1, 2), (3, 2, 1), versions=version))
    queue.ranked, queue.pinned = True, version > 0
    assert sorted(queue.take()["lane"].tolist()) == [1, 2, 3]
    assert queue.take()["lane"].tolist() == [0]
    assert not len(queue)


@pytest.mark.parametrize("version", [0, 7])
@pytest.mark.parametrize("waiting", [(2,), (3,), (2, 3)])
def test_no_priority_is_passed_over_by_more_batches_than_documented(waiting, version):
    queue = Queue(max_batch=4)
    passed = dict.fromkeys(waiting, 0)
    queue.pinned = version > 0
    for lane, priority in enumerate(waiting):
        queue.push(ranked(*[(lane, 1, priority)] * 200, versions=version))
    most = 0
    for _ in range(60):
        queue.push(ranked((9, 4, 1), versions=version))
        queue.ranked, queue.pinned = True, version > 0
        taken = set(queue.take()["priority"].tolist())
        for priority in waiting:
            passed[priority] = 0 if priority in taken else passed[priority] + 1
        most = max(most, *passed.values())
    assert most == PASSED_OVER if len(waiting) == 1 else PASSED_OVER <= most <= PASSED_OVER + 1


def test_a_priority_that_was_taken_with_all_others_has_no_turns_to_make_up():
    queue = Queue(max_batch=4)
    queue.push(ranked((0, 1, 3)))
    for _ in range(PASSED_OVER):
        queue.push(ranked((9, 4, 1)))
        queue.ranked = True
        assert set(queue.take()["priority"].tolist()) == {1}
    assert queue.take()["priority"].tolist() == [3] and not queue.ranked
    queue.push(ranked((0, 1, 3), (9, 4, 1)))
    queue.ranked = True
    assert set(queue.take()["priority"].tolist()) == {1}


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=40),
    st.lists(st.integers(1, 3), min_size=6, max_size=6),
    st.integers(8, 20),
)
def test_a_lanes_tickets_stay_in_order_for_any_priorities_and_versions(waiting, of_lane, limit):
    queue = Queue(max_batch=limit)
    records = ranked(*[(lane, rows, of_lane[lane]) for lane, rows, _ in waiting])
    records["version"] = [version for *_, version in waiting]
    queue.push(records)
    queue.pinned, queue.ranked = bool(records["version"].any()), bool((records["priority"] != 2).any())
    seen = {}
    while len(queue):
        batch = queue.take()
        assert len(set(batch["version"].tolist())) == 1 and 0 < batch["rows"].sum() <= limit
        for lane, sequence in batch[["lane", "sequence"]].tolist():
            seen.setdefault(lane, []).append(sequence)
    assert sorted(sequence for order in seen.values() for sequence in order) == list(range(len(waiting)))
    assert all(order == sorted(order) for order in seen.values())
