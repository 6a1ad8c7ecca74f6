"""What the next batch holds where weights versions, costs and waits meet."""

from __future__ import annotations

from functools import partial

import numpy as np
from tests.records import records

from jurybox.protocol.scoreboard import NORMAL
from jurybox.server.engine.queues import PASSED_OVER, Queue

tickets = partial(records, ("lane", "rows"), begin=0)


def test_batches_are_limited_by_their_cost_again_once_no_ticket_asks_for_a_version():
    queue = Queue(100, costs=lambda waiting: np.full(len(waiting), 5), max_cost=10)
    queue.push(tickets((0, 1), (1, 1), version=7))
    queue.pinned = True
    assert queue.take()["lane"].tolist() == [0, 1] and not queue.pinned
    queue.push(tickets((2, 1), (3, 1), (4, 1)))
    assert queue.take()["lane"].tolist() == [2, 3]
    assert queue.take()["lane"].tolist() == [4]


def test_batches_of_one_weights_version_are_limited_by_their_cost_too_and_lanes_take_turns():
    queue = Queue(100, costs=lambda waiting: np.full(len(waiting), 5), max_cost=10)
    queue.push(tickets((0, 1), (0, 1), (0, 1), (1, 1), (2, 1), version=[7, 7, 7, 7, 8]))
    queue.pinned = True
    found = []
    while len(queue):
        found.append(queue.take()["lane"].tolist())
    assert found == [[0, 1], [0, 0], [2]]


def test_a_queue_whose_tickets_ask_for_versions_says_so_until_the_last_of_them_is_taken():
    queue = Queue(100)
    queue.push(tickets((0, 1), (1, 1), (2, 1), version=[7, 8, 0]))
    queue.pinned = True
    found = []
    while len(queue):
        found.append((queue.take()["lane"].tolist(), queue.pinned))
    assert found == [([0], True), ([1], False), ([2], False)]


def test_a_least_number_of_rows_without_a_longest_wait_holds_nothing_back():
    queue = Queue(8, min_batch=4)
    queue.push(tickets((0, 1), submitted=10**12))
    assert queue.ready_in(0) == 0


def test_a_model_is_passed_over_by_as_many_batches_as_documented_before_its_turn():
    queue, passed = Queue(8), 0
    queue.push(tickets((0, 1), priority=NORMAL))
    while queue.rank == NORMAL:
        queue.skipped += 1
        passed += 1
    assert passed == PASSED_OVER


def test_the_tickets_of_one_of_the_models_that_share_a_queue_are_handed_out():
    queue = Queue(8)
    queue.push(tickets((0, 1), (1, 2), (2, 3), (3, 1), model=[4, 5, 4, 5]))
    assert queue.withdraw(4)["lane"].tolist() == [0, 2]
    assert queue.waiting["lane"].tolist() == [1, 3] and queue.rows == 3
    assert len(queue.withdraw(4)) == 0 and queue.rows == 3
