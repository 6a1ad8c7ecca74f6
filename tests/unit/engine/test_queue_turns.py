"""Which tickets of a queue are in its next batch: batches that are just full, costs, deadlines, turns of lanes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tests.records import records

from jurybox.protocol.scoreboard import NORMAL
from jurybox.server.engine.queues import PASSED_OVER, Queue
from jurybox.server.engine.recovery import Recovery

tickets = partial(records, ("lane", "rows"), begin=0)


def costly(limit, *costs):
    """A queue whose tickets of lane i cost costs[i]."""
    return Queue(100, costs=lambda waiting: np.asarray(costs)[waiting["lane"]], max_cost=limit)


def taken(queue):
    """The lanes of all batches."""
    batches = []
    while len(queue):
        batches.append(queue.take()["lane"].tolist())
    return batches


@pytest.mark.parametrize("version", [0, 7])
def test_a_batch_may_be_just_full(version):
    queue = Queue(max_batch=4)
    queue.push(tickets((0, 2), (1, 2), (2, 1), (3, 3), version=version))
    queue.pinned = version > 0
    assert taken(queue) == [[0, 1], [2, 3]]


def test_a_batch_may_cost_just_as_much_as_one_may():
    queue = costly(10, 5, 5, 5, 5)
    queue.push(tickets((0, 1), (1, 1), (2, 1), (3, 1)))
    assert taken(queue) == [[0, 1], [2, 3]]


def test_lanes_take_turns_where_each_batch_holds_a_single_ticket():
    queue = costly(10, 10, 10, 10)
    queue.push(tickets((2, 1), (0, 1), (1, 1)))
    order = []
    for _ in range(9):
        (lane,) = queue.take()["lane"].tolist()
        order.append(lane)
        queue.push(tickets((lane, 1)))
    assert order == [2, 0, 1] * 3


def test_a_lane_that_was_served_lately_comes_after_one_that_was_not():
    queue = costly(10, 10, 10, 10)
    queue.push(tickets((0, 1), (0, 1), (0, 1), (1, 1)))
    assert queue.take()["lane"].tolist() == [0]
    queue.push(tickets((2, 1)))
    assert taken(queue) == [[1], [2], [0], [0]], "those that wait behind others of their lane are last"


def test_lanes_share_a_batch_by_what_their_tickets_cost():
    queue = costly(16, 8, 1)
    queue.push(tickets(*[(0, 1)] * 2, *[(1, 1)] * 12))
    assert queue.take()["lane"].tolist() == [0] + [1] * 8
    assert queue.take()["lane"].tolist() == [0] + [1] * 4


def test_the_rows_of_a_batch_are_limited_where_its_cost_is_not_reached():
    queue = Queue(4, costs=lambda waiting: np.ones(len(waiting), np.int64), max_cost=100)
    queue.push(tickets((0, 3), (1, 1), (2, 2)))
    assert taken(queue) == [[0, 1], [2]]


def test_costs_count_only_where_a_batch_has_a_limit():
    queue = Queue(4, costs=lambda waiting: np.full(len(waiting), 1000), max_cost=0)
    queue.push(tickets((0, 1), (1, 1), (2, 2)))
    assert taken(queue) == [[0, 1, 2]]


def test_the_first_tickets_of_all_lanes_precede_the_second_of_any_by_their_rows():
    queue = Queue(max_batch=6)
    queue.push(tickets((0, 2), (0, 2), (1, 1), (1, 1), (1, 1), (2, 1)))
    first = queue.take()
    assert sorted(first["sequence"].tolist()) == [0, 2, 3, 5], "lane 0 has had two rows, as lane 1"
    assert sorted(queue.take()["sequence"].tolist()) == [1, 4]


@pytest.mark.parametrize("now", [9, 10, 11])
def test_a_ticket_is_late_after_its_deadline_and_never_without_one(now):
    queue = Queue(8)
    queue.push(tickets((0, 1), (1, 2), (2, 3), (3, 4), deadline=[5, 10, 11, 0]))
    late = [0, 1] if now == 11 else [0]
    assert queue.expired(now)["lane"].tolist() == late
    assert queue.waiting["lane"].tolist() == [lane for lane in range(4) if lane not in late]
    assert queue.rows == queue.waiting["rows"].sum()
    assert queue.expired(now) is None


@pytest.mark.parametrize("now", [9, 10, 11])
def test_a_ticket_of_a_failed_batch_is_late_after_its_deadline_too(now):
    recovery, slot = Recovery(), object()
    recovery.add(slot, [tickets((0, 1), (1, 1), (2, 1), (3, 1), deadline=[5, 10, 11, 0])], 0)
    part, late = recovery.next(slot, now)
    assert late["lane"].tolist() == ([0, 1] if now == 11 else [0])
    assert part.tickets["lane"].tolist() == ([2, 3] if now == 11 else [1, 2, 3])


def test_tickets_of_a_failed_batch_that_are_taken_back_leave_the_others_and_no_empty_parts():
    recovery, slot = Recovery(), object()
    assert len(recovery.remove(slot, "lane", 0)) == 0
    recovery.add(slot, [tickets((0, 1), (1, 1)), tickets((0, 1)), tickets((1, 1))], 3)
    assert recovery.remove(slot, "lane", 0)["lane"].tolist() == [0, 0]
    assert [(part.tickets["lane"].tolist(), part.version) for part in recovery.parts[slot]] == [([1], 3), ([1], 3)]
    assert recovery.remove(slot, "lane", 1)["lane"].tolist() == [1, 1] and recovery.parts == {}


def test_a_queue_without_tickets_has_the_usual_rank_until_it_was_passed_over_too_often():
    queue = Queue(8)
    queue.push(tickets((0, 1), priority=1))
    queue.ranked = True
    assert queue.rank == 1
    queue.drop(0)
    assert queue.rank == NORMAL and len(queue.drop(0)) == 0
    queue.skipped = PASSED_OVER - 1
    assert queue.rank == NORMAL
    queue.skipped = PASSED_OVER
    assert queue.rank == -PASSED_OVER


def test_what_waits_is_kept_as_the_queue_grows_and_is_counted_by_rows_whoever_knows_them():
    queue = Queue(10_000)
    queue.push(tickets(*[(lane, 2) for lane in range(200)]), 400)
    queue.push(tickets(*[(lane, 3) for lane in range(200, 457)]))
    assert queue.rows == 400 + 3 * 257 and queue.waiting["lane"].tolist() == list(range(457))


@pytest.mark.parametrize("version", [0, 7])
def test_a_priority_that_others_go_before_has_its_turn_after_the_same_number_of_batches_again_and_again(version):
    queue = Queue(4)
    queue.push(tickets(*[(0, 4)] * 3, priority=3, version=version))
    turns = []
    for number in range(3 * (PASSED_OVER + 1)):
        queue.push(tickets((1, 4), priority=1, version=version))
        queue.ranked, queue.pinned = True, version > 0
        if queue.take()["priority"].tolist() == [3]:
            turns.append(number)
    assert turns == [PASSED_OVER, 2 * PASSED_OVER + 1, 3 * PASSED_OVER + 2]


def test_of_lanes_that_have_had_as_much_those_precede_that_came_first():
    lanes = np.random.default_rng(0).permutation(1000)
    queue = Queue(500)
    queue.push(tickets(*[(lane, 1) for lane in lanes]))
    assert queue.take()["lane"].tolist() == lanes[:500].tolist()


def test_the_model_of_a_failed_batch_is_that_of_the_part_that_is_computed_next():
    recovery, slot = Recovery(), object()
    recovery.add(slot, [tickets((0, 1), model=3), tickets((1, 1), (1, 1), model=4)], 0)
    assert recovery.model(slot) == 3
    recovery.next(slot, 0)
    assert recovery.model(slot) == 4
