"""A replay in a forked child: a writer and a sampler of its own, and what cannot be shared refuses."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from tests.forking import Child, in_a_child

from jurybox.protocol.errors import Refused
from jurybox.protocol.segment import sweep
from jurybox.training.replay import Episodes, Field, Replay, Windows
from jurybox.training.replay.cursor import Cursor, NewRows

WRITERS = 4


def test_forked_writers_and_their_parent_never_write_one_slot_twice(make) -> None:
    replay = make(64)

    def write(first: int):
        def work() -> int:
            return sum(replay.add(x=np.full(3, n, np.float32), n=n) for n in range(first, first + 3000))

        return work

    children = [Child(write(10_000 * (k + 1))) for k in range(WRITERS)]
    written, batch = write(0)(), replay.batch(32)
    for _ in range(300):
        replay.sample(32, batch)
        assert (batch["x"] == batch["n"][:, None]).all(), "a row was written by two processes"
    written += sum(child.result() for child in children)
    assert written == replay.added == 3000 * (WRITERS + 1)


def test_a_childs_rows_are_no_part_of_its_parents_episode(make) -> None:
    fields = {"n": Field((), "int64"), "reward": Field()}
    replay = make(100, fields, episodes=Episodes())
    mine = replay.stream()
    for n in range(3):
        replay.add(n=n, reward=1.0)
        mine.add(n=100 + n, reward=1.0)

    def child() -> None:
        for n in range(4):
            replay.add(n=1000 + n, reward=1.0)
            mine.add(n=1100 + n, reward=1.0)
        replay.end_episode()
        mine.end()

    in_a_child(child)
    for n in range(3, 6):
        replay.add(n=n, reward=1.0)
        mine.add(n=100 + n, reward=1.0)
    replay.end_episode()
    mine.end()
    batch = replay.sample(500, windows=Windows(next="n", n_step=1))
    # The last row of an episode that left no last observation and did not terminate is not handed out.
    assert set(batch["n"].tolist()) >= {2, 102}
    assert (batch["next_n"] == batch["n"] + 1).all(), "a transition leads from one process's episode into another's"
    starts = replay.sample(500, windows=Windows(stack=2, stacked="n"))
    first = starts["n"][starts.valid["n"][:, 0] == 0][:, 1]
    assert set(first.tolist()) == {0, 100, 1000, 1100}


def test_a_child_draws_other_rows_than_its_parent(make) -> None:
    replay = make(1000, seed=5)
    replay.extend(x=np.zeros((1000, 3), np.float32), n=np.arange(1000))

    def draw() -> list:
        return replay.sample(50)["n"].tolist()

    children = [Child(draw) for _ in range(3)]
    drawn = [tuple(child.result()) for child in children] + [tuple(draw())]
    assert len(set(drawn)) == 4, "two processes draw the same rows"

    def seeded() -> list:
        replay.seed(7)
        return draw()

    assert in_a_child(seeded) == in_a_child(seeded), "with a seed of its own a child's draws are its own to repeat"


def test_a_child_draws_large_samples_though_the_threads_that_copy_are_its_parents(make) -> None:
    replay = make(64, {"x": Field((64, 1024)), "n": Field((), "int64")}, threads=4)
    for n in range(64):
        replay.add(x=np.full((64, 1024), n, np.float32), n=n)
    stop = threading.Event()

    def keep_them_busy() -> None:
        batch = replay.batch(48)
        while not stop.is_set():
            replay.sample(48, batch)

    def draw() -> bool:
        batch = replay.sample(48)
        return bool((batch["x"] == batch["n"][:, None, None]).all())

    thread = threading.Thread(target=keep_them_busy)
    thread.start()
    try:
        assert all(in_a_child(draw) for _ in range(5))
    finally:
        stop.set()
        thread.join()


def test_a_reservation_is_its_makers_alone(make) -> None:
    replay = make(8)
    with replay.reserve(2) as rows:

        def enter() -> None:
            rows["n"][:] = 7

        for work in (enter, rows.commit):
            with pytest.raises(Refused, match="fork"):
                in_a_child(work)
        in_a_child(rows.abandon)  # as leaving the block by an exception does: the slots stay the parent's
        rows["n"][:] = (1, 2)
        rows["x"][:] = 0
    assert sorted(replay.sample(2, replace=False)["n"].tolist()) == [1, 2]


def test_a_child_that_leaves_the_block_leaves_the_replay(make) -> None:
    name = f"forked-{os.getpid()}"
    with Replay.create(name, 8, {"n": Field((), "int64")}) as replay:

        def leave() -> None:
            replay.__exit__(None, None, None)

        in_a_child(leave)
        Replay.attach(name).close()
        replay.add(n=1)


def test_a_child_keeps_the_memory_open_only_for_itself() -> None:
    name = f"forked-{os.getpid()}-kept"
    replay = Replay.create(name, 8, {"n": Field((), "int64")})
    go, going = os.pipe()

    def outlive() -> int:
        os.read(go, 1)  # the parent has closed it
        swept = [at for at in sweep() if name in at]
        replay.add(n=1)
        with_others = Replay.attach(name)
        try:
            return len(with_others) - 10 * len(swept)
        finally:
            with_others.close()
            replay.close()

    child = Child(outlive)
    replay.close()
    os.write(going, b"x")
    try:
        assert child.result() == 1
        assert any(name in at for at in sweep()), "nobody has it open any more"
    finally:
        replay.unlink()
        os.close(go), os.close(going)


def test_cursors_after_a_fork(make) -> None:
    replay = make(20)
    cursor, new = Cursor(replay), NewRows(replay.parts[0])

    def both() -> list:
        return cursor.take()["n"].tolist()

    replay.add(x=np.zeros(3, np.float32), n=5)
    assert in_a_child(both) == [5] == both(), "a cursor is each process's own"
    staging = np.zeros((4, replay.layout.slot.size), np.uint8)
    for work in (lambda: list(new.take(staging)), new.discard, new.ended):
        with pytest.raises(Refused, match="fork"):
            in_a_child(work)
    assert sum(map(len, new.take(staging))) == 1


def test_batches_that_a_thread_of_the_parents_draws_are_refused_in_a_child(make) -> None:
    replay = make()
    replay.extend(x=np.zeros((100, 3), np.float32), n=np.arange(100))
    with replay.prefetch(8) as batches:
        next(batches)

        def ask() -> None:
            next(batches)

        with pytest.raises(Refused, match="fork"):
            in_a_child(ask)
        in_a_child(batches.close)
        next(batches)


def test_a_save_on_a_thread_of_the_parent_is_an_error_in_a_child(make, tmp_path) -> None:
    replay = make()
    replay.extend(x=np.zeros((100, 3), np.float32), n=np.arange(100))
    saving = replay.save_in_background(tmp_path / "all.jbr")
    with pytest.raises(Refused, match="fork"):
        in_a_child(saving.result)
    assert saving.result(60).rows == 100

    def load_and_leave() -> int:
        with Replay.load(tmp_path / "all.jbr", f"loaded-{os.getpid()}") as loaded:
            return len(loaded)

    replay.save(tmp_path / "all.jbr", incremental=True)
    before = (tmp_path / "all.jbr").stat().st_ino

    def save_more() -> None:
        replay.save(tmp_path / "all.jbr", incremental=True)

    in_a_child(save_more)
    assert (tmp_path / "all.jbr").stat().st_ino != before, "a child's first save is a whole one of its own"
    assert in_a_child(load_and_leave) == 100
