from __future__ import annotations

import gc
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jurybox.protocol.errors import SpecMismatch
from jurybox.training.replay import Episodes, Field, NotEnoughRows, Replay, Windows


def filled(make, n: int = 100, capacity: int = 100, **options) -> Replay:
    replay = make(capacity, **options)
    replay.extend(x=np.repeat(np.arange(n, dtype=np.float32)[:, None], 3, 1), n=np.arange(n))
    return replay


def test_uniform_draws_are_uniform(make) -> None:
    replay = filled(make, 60, 50)
    counts = np.zeros(60)
    for _ in range(100):
        np.add.at(counts, replay.sample(1000)["n"], 1)
    assert (counts[:10] == 0).all()
    expected = 2000
    chi2 = ((counts[10:] - expected) ** 2 / expected).sum()
    assert chi2 < 85.4  # 49 degrees of freedom: one in a thousand


def test_every_column_is_of_the_same_row(make) -> None:
    batch = filled(make).sample(500)
    assert (batch["x"] == batch["n"][:, None]).all()
    assert (batch.indices == batch["n"]).all()


def test_without_replacement_no_row_is_sampled_twice(make) -> None:
    replay = filled(make, 90)
    for n in (1, 45, 90):
        assert len(set(replay.sample(n, replace=False)["n"].tolist())) == n
    with pytest.raises(NotEnoughRows, match="cannot give 91 different rows"):
        replay.sample(91, replace=False)


def test_one_row_is_given_as_often_as_asked_for_unless_they_are_to_differ(make) -> None:
    replay = filled(make, 1)
    assert replay.sample(10)["n"].tolist() == [0] * 10
    with pytest.raises(NotEnoughRows, match="cannot give 10 different rows"):
        replay.sample(10, replace=False)


def test_the_same_seed_samples_the_same_with_any_number_of_threads(make) -> None:
    fields = {"x": Field((5000,)), "n": Field((), "int64")}
    drawn = []
    for threads in (1, 2, 3):
        replay = make(64, fields, seed=7, threads=threads)
        replay.extend(x=np.zeros((64, 5000), np.float32), n=np.arange(64))
        drawn.append([replay.sample(100)["n"].tolist() for _ in range(3)])
        replay.seed(7)
        assert replay.sample(100)["n"].tolist() == drawn[-1][0]
    assert drawn[0] == drawn[1] == drawn[2]
    assert drawn[0][0] != drawn[0][1]


def test_a_batch_is_filled_again_without_allocation(make) -> None:
    replay = make(256, {"x": Field((1000,)), "n": Field((), "int64")}, threads=2)
    replay.extend(x=np.zeros((256, 1000), np.float32), n=np.arange(256))
    batch = replay.batch(256)
    where = batch["x"].ctypes.data
    replay.sample(256, batch)
    tracemalloc.start()
    for _ in range(50):
        assert replay.sample(256, batch) is batch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch["x"].ctypes.data == where
    assert peak < 4096


def test_an_empty_replay_raises_an_error(make) -> None:
    with pytest.raises(NotEnoughRows, match="is empty"):
        make().sample(1)


def test_a_larger_sample_than_the_batch_is_refused(make) -> None:
    replay = filled(make)
    with pytest.raises(IndexError, match="shorter"):
        replay.sample(11, replay.batch(10))


def test_a_batch_outlives_the_replay_that_made_it(make) -> None:
    replay = filled(make)
    attached = Replay.attach(replay.name)
    batches = [attached.batch(10) for _ in range(20)]
    attached.close()
    del attached
    gc.collect()
    overwritten = [np.full(size, 0x7FFFFFFF, np.int64) for size in range(8, 40) for _ in range(20)]
    for batch in batches:
        assert (replay.sample(10, out=batch)["x"] == batch["n"][:, None]).all()
    del overwritten


@pytest.mark.parametrize(
    "fields",
    [
        {"x": Field((2,)), "n": Field((), "int64")},
        {"x": Field((3,), "int32"), "n": Field((), "int64")},
        {"x": Field((3,), stored="float16"), "n": Field((), "int64")},
        {"n": Field((), "int64"), "x": Field((3,))},
    ],
)
def test_a_batch_of_other_fields_is_refused(make, fields) -> None:
    batch = make(100, fields).batch(10)
    with pytest.raises(SpecMismatch, match="expected a batch for rows of x"):
        filled(make).sample(10, out=batch)


def test_a_batch_for_other_episodes_is_refused(make) -> None:
    fields = {"x": Field((3,)), "n": Field((), "int64"), "end": Field((), "bool"), "cut": Field((), "bool")}
    with_ends = make(100, fields, episodes=Episodes(terminated="end"))
    others = make(100, fields, episodes=Episodes(terminated="end", truncated="cut")), make(100, fields)
    for replay in (with_ends, *others):
        replay.extend(x=np.zeros((9, 3)), n=np.arange(9), end=np.zeros(9, bool), cut=np.zeros(9, bool))
    batch = with_ends.batch(4, Windows(stack=2, stacked=("x",)))
    for replay in others:
        with pytest.raises(SpecMismatch, match="expected a batch for"):
            replay.sample(4, out=batch)
    assert (with_ends.sample(4, out=batch)["n"] < 9).all()


def test_a_batch_without_an_anchor_is_refused_by_a_replay_with_one(make) -> None:
    replay = make(anchor=10)
    replay.anchor.add(x=np.zeros(3), n=1)
    with pytest.raises(SpecMismatch, match="with an anchor"):
        replay.sample(4, out=make().batch(4))


def test_tensors_share_the_batch(make) -> None:
    batch = filled(make).sample(4)
    batch.torch()["x"].fill_(5.0)
    assert (batch["x"] == 5).all()


def of_large_rows(make) -> Replay:
    replay = make(64, {"x": Field((1250,)), "n": Field((), "int64")})  # a batch of 64 takes 320 kB
    replay.extend(x=np.repeat(np.arange(64, dtype=np.float32)[:, None], 1250, 1), n=np.arange(64))
    return replay


def test_a_new_batch_reuses_the_memory_of_a_released_one(make) -> None:
    replay = of_large_rows(make)
    where = replay.sample(64)["x"].ctypes.data
    for _ in range(5):
        other = np.ones((64, 1250), np.float32)  # would have got memory that was returned to the allocator
        assert replay.sample(64)["x"].ctypes.data == where
        del other


@pytest.mark.parametrize("held", ["array", "view", "tensor", "memoryview", "half"])
def test_a_batch_that_is_held_in_any_way_is_never_written_again(make, held: str) -> None:
    replay = of_large_rows(make)
    batch = replay.sample(64)
    before = batch["x"].copy()
    match held:
        case "array":
            kept = batch["x"]
        case "view":
            kept = batch["x"][3:, ::2].T
            before = before[3:, ::2].T
        case "tensor":
            torch = pytest.importorskip("torch")
            kept = torch.from_numpy(batch["x"])
        case "memoryview":
            kept = memoryview(batch["x"])
        case _:
            kept = np.split(batch["x"], 2)[1]
            before = before[32:]
    del batch
    gc.collect()
    for _ in range(20):
        replay.sample(64)
    assert (np.asarray(kept) == before).all()


def test_batches_of_many_threads_never_share_memory(make) -> None:
    replay = of_large_rows(make)

    def draw(_: int) -> bool:
        good = True
        for _ in range(100):
            batch = replay.sample(64)
            good &= bool((batch["x"] == batch["n"][:, None]).all())
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(draw, range(4)))
