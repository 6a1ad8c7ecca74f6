"""Waiting for clients that are about to return: only for them, and only while it pays."""

import numpy as np
import pytest
from tests.unit.engine.worlds import BATCH, DeviceWorld

from jurybox.native import ArrivalTracker, BatchCost
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.batches import QUICK


def tickets(*lanes):
    records = np.zeros(len(lanes), TICKET)
    records["lane"] = lanes
    return records


def test_a_client_that_came_back_at_once_is_expected_again():
    tracker = ArrivalTracker(8)
    tracker.answered(tickets(1), 0)
    assert tracker.away == 0  # never quick so far
    tracker.came(tickets(1), 50_000, QUICK * BATCH)
    tracker.answered(tickets(1), 150_000)
    assert tracker.away == 1
    tracker.came(tickets(1), 200_000, QUICK * BATCH)
    assert tracker.away == 0


def test_a_client_that_thinks_long_is_not_waited_for():
    tracker = ArrivalTracker(8)
    tracker.answered(tickets(1), 0)
    tracker.came(tickets(1), 50 * BATCH, QUICK * BATCH)
    tracker.answered(tickets(1), 51 * BATCH)
    assert tracker.away == 0


def test_clients_that_stay_away_are_not_expected_until_they_are_quick_again():
    tracker = ArrivalTracker(8)
    tracker.came(tickets(1, 2), 0, QUICK * BATCH)
    tracker.answered(tickets(1, 2), 10)
    tracker.answered(tickets(3), 20)
    tracker.stays_away()
    assert tracker.away == 0
    tracker.came(tickets(1), 50 * BATCH, QUICK * BATCH)
    tracker.answered(tickets(1), 51 * BATCH)
    assert tracker.away == 0


def test_a_client_is_overdue_when_it_has_had_a_whole_batch_to_return():
    tracker = ArrivalTracker(8)
    tracker.came(tickets(1, 2, 3), 0, QUICK * BATCH)
    tracker.answered(tickets(1, 1), 10)
    assert (tracker.away, tracker.overdue) == (1, 0)
    tracker.answered(tickets(2, 3), 20)
    assert (tracker.away, tracker.overdue) == (3, 1)
    tracker.came(tickets(2), 30, QUICK * BATCH)
    assert (tracker.away, tracker.overdue) == (2, 1)
    tracker.stays_away()  # only 1 has had its time
    assert (tracker.away, tracker.overdue) == (1, 0)
    tracker.answered(tickets(2), 40)
    assert (tracker.away, tracker.overdue) == (2, 1)


def test_the_fixed_cost_of_a_batch_is_distinguished_from_that_of_its_rows():
    rng = np.random.default_rng(0)
    shared, by_row = BatchCost(), BatchCost()
    for rows in rng.integers(1, 17, 400).tolist():
        shared.observe(rows, int(80_000 + 2_000 * rows + rng.normal(0, 3000)))
        by_row.observe(rows, int(700_000 * rows + rng.normal(0, 30_000)))
    assert 70_000 < shared.fixed < 90_000
    assert by_row.fixed < 100_000  # of 700,000 a row
    for _ in range(3000):
        shared.observe(16, 112_000)
    assert 70_000 < shared.fixed < 90_000  # a single size gives no new information
    assert shared.possible == 112_000  # all that it can be


def test_a_lone_client_is_never_kept_waiting(world):
    lone = world([5_000])
    lone.run(50)
    assert lone.pauses == []


@pytest.mark.parametrize("clients", [3, 5])
def test_clients_that_return_during_the_next_batch_are_not_waited_for(world, clients):
    few = world([60_000 + 10_000 * i for i in range(clients)])  # a batch takes 100,000
    began = few.now
    few.run(100)
    # The engine is never idle, and two batches serve all.
    assert sum(few.sizes) / (few.now - began) > 0.95 * clients / (2 * BATCH)


def test_two_halves_of_a_crowd_in_closed_loop_take_turns(world):
    clients = world([20_000 + 7_000 * i for i in range(16)])
    clients.run(60)
    assert 7 <= np.mean(clients.sizes[-20:]) <= 10  # one half computes while the other's clients run


@pytest.mark.parametrize("turns", [100, 3000])
def test_batches_do_not_wait_if_batching_saves_nothing(world, turns):
    clients = world([200_000] * 4, fixed=0, by_row=700_000)
    clients.run(turns)
    busy = sum(clients.sizes) * 700_000
    assert busy > 0.9 * clients.now  # clients prepare while the engine computes for others


def test_clients_that_think_long_are_served_as_they_come(world):
    thinkers = world([3_000_000 + 170_000 * i for i in range(8)])
    thinkers.run(200)
    assert sum(thinkers.pauses) * 1e9 < 0.02 * thinkers.now


@pytest.mark.parametrize(("fixed", "by_row"), [(2_000_000, 100_000), (5_000_000, 1_000_000), (10_000_000, 100_000)])
@pytest.mark.parametrize("clients", [2, 3, 8, 32])
def test_where_the_fixed_cost_is_large_all_prompt_clients_are_in_one_batch(world, clients, fixed, by_row):
    crowd = world([100_000 + 5_000 * i for i in range(clients)], fixed=fixed, by_row=by_row)
    crowd.run(40)
    began, computed = crowd.now, sum(crowd.sizes)
    crowd.run(40)
    possible = clients / (fixed + by_row * clients)
    assert (sum(crowd.sizes) - computed) / (crowd.now - began) > 0.93 * possible
    assert set(crowd.sizes[-20:]) == {clients}


def test_two_halves_become_one_batch_though_its_cost_once_seemed_to_be_that_of_its_rows(world):
    """Of equal batches in turn none shows the fixed cost: the wrong estimate would last."""
    crowd = world([100_000] * 8, fixed=4_000_000)
    for client in range(4):
        crowd.asks[client] += 2_000_000
    for rows in [1, 2, 3, 4, 5, 6, 7, 8] * 60:
        crowd.engine.slots[0].cost.observe(rows, 1_000_000 * rows)  # as on a busy machine
    crowd.run(20)
    assert set(crowd.sizes[-10:]) == {4}
    crowd.run(200)
    assert set(crowd.sizes[-10:]) == {8}


@pytest.mark.parametrize(("fixed", "by_row"), [(2_000_000, 100_000), (5_000_000, 1_000_000), (10_000_000, 100_000)])
@pytest.mark.parametrize("clients", [2, 3, 8, 32])
def test_a_batch_under_way_on_a_device_is_waited_for_where_its_clients_return_at_once(world, clients, fixed, by_row):
    crowd = world([100_000 + 5_000 * i for i in range(clients)], DeviceWorld, fixed=fixed, by_row=by_row)
    crowd.run(10_000)
    began, computed = crowd.now, sum(crowd.sizes)
    crowd.run(10_000)
    possible = clients / (fixed + by_row * clients)
    assert set(crowd.sizes[-5:]) == {clients}
    assert (sum(crowd.sizes) - computed) / (crowd.now - began) > 0.88 * possible


def test_a_batch_under_way_on_a_device_is_not_waited_for_where_its_clients_think_long(world):
    crowd = world([3_000_000 + 200_000 * i for i in range(8)], DeviceWorld, fixed=4_000_000)
    crowd.run(2_000)
    began, batches = crowd.now, len(crowd.sizes)
    crowd.run(2_000)
    assert (len(crowd.sizes) - batches) * crowd.fixed > 0.95 * (crowd.now - began), "the device is never idle"


def test_rows_that_take_long_to_copy_to_a_device_are_copied_while_it_computes(world, monkeypatch):
    monkeypatch.setattr("jurybox.server.engine.core.COPIED", 1e-6)
    crowd = world([100_000 + 5_000 * i for i in range(4)], DeviceWorld, fixed=2_000_000, by_row=100_000)
    crowd.run(4_000)
    assert max(crowd.sizes[-5:]) < 4, "one half is copied while the other is computed"


def test_a_client_that_is_not_prompt_any_more_costs_one_wait(world):
    crowd = world([100_000] * 8, fixed=4_000_000)
    crowd.run(40)
    crowd.think[0] = 10**12  # it never returns
    began, before = crowd.now, len(crowd.sizes)
    crowd.run(40)
    sizes = crowd.sizes[before:]
    assert sizes[0] == 8 and set(sizes[1:]) == {7} and len(sizes) > 15
    assert crowd.now - began <= len(sizes) * (4_000_000 + 100_000) + 1_000_000  # a quarter of the fixed cost, once


def test_with_a_second_model_a_costly_batch_waits_for_no_more_than_half_of_its_clients(world):
    crowd = world([100_000 + 5_000 * i for i in range(8)], fixed=4_000_000)
    crowd.run(80)
    assert set(crowd.sizes[-20:]) == {8}
    crowd.serve_another_model()
    crowd.run(40)
    assert max(crowd.sizes[-20:]) < 8


def test_clients_that_think_for_a_good_part_of_a_large_batch_are_not_waited_for(world):
    crowd = world([3_000_000] * 8, fixed=4_000_000)
    crowd.run(60)
    assert sum(crowd.pauses) * 1e9 < 0.3 * crowd.now


@pytest.mark.parametrize(("clients", "fixed"), [(12, BATCH), (12, 4_000_000), (6, 4_000_000)])
def test_a_batch_that_is_full_waits_for_nobody(world, clients, fixed):
    crowd = world([100_000 + 7_000 * i for i in range(clients)], fixed=fixed, by_row=10_000, most=4)
    queue, pause, full = crowd.engine.slots[0].queue, crowd.engine._pause, []

    def noted(seconds, more):
        full.append(queue.rows >= 4)
        pause(seconds, more)

    crowd.engine._pause = noted
    crowd.run(400)
    assert max(crowd.sizes) == 4 and True not in full
