from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from tests.serving import wait_until

from jurybox.protocol.errors import SpecMismatch
from jurybox.training.replay import Field, Replay
from jurybox.training.replay.part import ANCHOR_MARK


def filled(make, n: int = 50, **options) -> Replay:
    replay = make(n, prioritized=True, **options)
    replay.extend(x=np.zeros((n, 3), np.float32), n=np.arange(n))
    return replay


def test_rows_are_drawn_in_proportion_to_their_priority(make) -> None:
    replay = filled(make, 50, alpha=0.5)
    errors = np.arange(1, 51, dtype=np.float32) ** 2  # alpha makes 1 .. 50 of it
    assert replay.update_priorities(np.arange(50), errors) == 50
    counts = np.zeros(50)
    for _ in range(100):
        np.add.at(counts, replay.sample(1000)["n"], 1)
    expected = 100_000 * np.arange(1, 51) / (50 * 51 / 2)
    assert ((counts - expected) ** 2 / expected).sum() < 85.4


def test_weights_undo_the_priorities(make) -> None:
    replay = filled(make, 50, alpha=1.0)
    errors = np.linspace(1, 5, 50, dtype=np.float32)
    replay.update_priorities(np.arange(50), errors)
    batch = replay.sample(500, beta=0.7)
    wanted = errors[batch["n"]] ** -0.7
    np.testing.assert_allclose(batch.weights, wanted / wanted.max(), rtol=1e-4)
    assert (replay.sample(10, uniform=True).weights == 1).all()


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_weights_of_ring_and_anchor_are_on_one_scale(make, ratio) -> None:
    replay = filled(make, 50, anchor=10, alpha=1.0)
    replay.anchor.extend(x=np.zeros((10, 3), np.float32), n=np.arange(100, 110))
    ring, anchor = np.linspace(1, 5, 50, dtype=np.float32), np.linspace(10, 20, 10, dtype=np.float32)
    replay.update_priorities(np.arange(50), ring)
    replay.update_priorities(np.arange(10) + ANCHOR_MARK, anchor)
    batch = replay.sample(400, beta=0.7, anchor_ratio=ratio)
    kept = batch["n"] >= 100
    assert kept.sum() == 400 * ratio
    chances = np.where(
        kept,
        ratio * anchor[np.maximum(batch["n"] - 100, 0)] / anchor.sum(),
        (1 - ratio) * ring[np.minimum(batch["n"], 49)] / ring.sum(),
    )
    wanted = (60 * chances) ** -0.7
    np.testing.assert_allclose(batch.weights, wanted / wanted.max(), rtol=1e-3)


def test_new_rows_get_the_highest_priority_so_far(make) -> None:
    replay = filled(make, 50, alpha=1.0)
    replay.update_priorities(np.arange(50), np.full(50, 1e-3))
    replay.update_priorities(np.array([7]), np.array([100.0]))
    replay.add(x=np.zeros(3, np.float32), n=1000)
    drawn = replay.sample(1000)["n"]
    assert 380 < (drawn == 1000).sum() < 620 and 380 < (drawn == 7).sum() < 620


def test_a_late_priority_is_counted_and_ignored(make) -> None:
    replay = filled(make, 50, alpha=1.0)
    old = replay.sample(50, uniform=True, replace=False)
    replay.extend(x=np.zeros((25, 3), np.float32), n=np.arange(100, 125))
    before = replay.parts[0].leaves.copy()
    assert replay.update_priorities(old.indices, np.full(50, 50.0)) == 25
    assert replay.counters.stale_priorities == 25
    assert (replay.parts[0].leaves[:25] == before[:25]).all()
    assert replay.parts[0].ring.total_priority == replay.parts[0].leaves.sum()


def test_priorities_come_from_any_handle(make) -> None:
    replay = filled(make)
    other = Replay.attach(replay.name)
    batch = replay.sample(20)
    assert other.update_priorities(batch.indices, np.ones(20)) == 20
    other.close()


def test_the_anchor_has_its_own_priorities(make) -> None:
    replay = filled(make, 50, anchor=10, alpha=1.0)
    replay.anchor.extend(x=np.zeros((10, 3), np.float32), n=np.arange(100, 110))
    batch = replay.sample(100, anchor_ratio=0.5)
    assert (batch["n"] >= 100).sum() == 50
    errors = np.where(batch["n"] == 103, 1000.0, 1e-3)
    assert replay.update_priorities(batch.indices, errors) == 100
    again = replay.sample(100, anchor_ratio=0.5)["n"]
    assert (again == 103).sum() == 50


def test_no_row_twice_and_priorities_contradict(make) -> None:
    with pytest.raises(SpecMismatch, match="uniform=True"):
        filled(make).sample(10, replace=False)


@pytest.mark.parametrize("way", ["shared", "resident"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_errors_that_are_not_finite_are_refused_and_change_nothing(make, bad, way) -> None:
    replay = filled(make, 50, alpha=1.0)
    errors = np.ones(50)
    errors[7] = bad
    if way == "resident":
        resident = replay.resident("cpu", seed=1)
        resident.refresh()
        before = resident._priorities.clone()
        with pytest.raises(SpecMismatch, match="expected finite numbers"):
            resident.update_priorities(torch.arange(50), torch.from_numpy(errors))
        assert (resident._priorities == before).all()
        return
    before = replay.parts[0].leaves.copy()
    with pytest.raises(SpecMismatch, match=r"errors\[7\] is .*expected finite numbers"):
        replay.update_priorities(np.arange(50), errors)
    with pytest.raises(SpecMismatch, match=r"errors\[0\] is inf"):  # as float32, which is what is kept
        replay.update_priorities(np.arange(1), [1e39])
    assert (replay.parts[0].leaves == before).all()


@pytest.mark.parametrize("way", ["shared", "resident"])
def test_the_rows_after_an_outlier_do_not_take_all_draws(make, way) -> None:
    replay = filled(make, 1000, alpha=1.0)
    if way == "shared":
        update, sample = replay.update_priorities, replay.sample
    else:
        resident = replay.resident("cpu", capacity=1000, seed=1)
        resident.refresh()
        sample = resident.sample

        def update(rows, errors):
            resident.update_priorities(torch.from_numpy(rows), torch.from_numpy(errors))

    update(np.arange(1000), np.full(1000, 0.1, np.float32))
    update(np.array([3]), np.array([10_000.0], np.float32))
    update(np.array([3]), np.array([0.1], np.float32))  # found to be nothing special
    replay.extend(x=np.zeros((10, 3), np.float32), n=np.arange(1000, 1010))
    if way == "resident":
        resident.refresh()
    share = np.mean(np.asarray(sample(5000)["n"]) >= 1000)
    assert 0.4 < share < 0.6  # 10 rows of 100 times the mean beside 990; 0.999 with the outlier's priority


def test_writers_beyond_the_cores_all_make_progress() -> None:
    fields = {"observation": Field((119, 8, 8)), "policy": Field((4672,))}
    row = {name: np.ones(field.shape, np.float32) for name, field in fields.items()}
    stop, added = threading.Event(), [0] * 8
    with Replay.create(f"writers-{os.getpid()}", 512, fields) as replay:

        def write(number: int) -> None:
            while not stop.is_set():
                added[number] += replay.add(**row)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(len(added))]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(added) > 60_000, 120, "rows of the threads together")
        stop.set()
        for thread in threads:
            thread.join()
    assert min(added) > 0.4 * sum(added) / len(added)
