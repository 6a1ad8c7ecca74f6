from __future__ import annotations

import gc
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.descriptors import open_files

from jurybox.protocol.errors import Busy, Refused, SharedMemoryError, SpecMismatch, Timeout
from jurybox.training.replay import Episodes, Field, NotEnoughRows, Replay


def rows(replay: Replay, name: str = "n") -> list:
    return sorted(replay.sample(len(replay), replace=False)[name].tolist())


def test_a_full_ring_keeps_the_newest_rows(make) -> None:
    replay = make(5)
    for i in range(12):
        assert replay.add(x=np.full(3, i, np.float32), n=i) == 1
    assert rows(replay) == [7, 8, 9, 10, 11]
    assert (len(replay), replay.capacity, replay.added, replay.counters.overwritten) == (5, 5, 12, 7)


def test_an_extend_longer_than_the_ring_leaves_its_end(make) -> None:
    replay = make(4)
    assert replay.extend(x=np.zeros((11, 3), np.float32), n=np.arange(11)) == 11
    assert rows(replay) == [7, 8, 9, 10]


def test_fields_may_come_in_any_order_and_kind(make) -> None:
    replay = make(10, {"x": Field((2, 3)), "r": Field((), "float64"), "d": Field((), "bool")})
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    replay.add(d=True, x=x, r=1)
    replay.add(d=np.bool_(True), x=torch.arange(6.0).reshape(2, 3), r=np.float32(1))
    replay.add(d=0 == 0, x=x.tolist(), r=torch.tensor(1.0))
    replay.add(d=True, x=x.astype(np.float64), r=np.array(1.0))
    batch = replay.sample(4, replace=False)
    assert (batch["x"] == x).all() and (batch["r"] == 1).all() and batch["d"].all()


def test_strided_rows_need_no_copy_of_theirs(make) -> None:
    replay = make(10, {"x": Field((4, 3)), "b": Field((4, 3), "float32", stored="bits")})
    big = np.random.default_rng(0).integers(0, 2, (3, 8, 5, 3)).astype(np.float32)
    views = [
        big[0, ::2, 1],
        big[1, ::-2, 4],
        big[2, 4:, 0],
        np.asfortranarray(big[0, :4, 0]),
        big.T[:, :, 1, 2][:, :4].T,
    ]
    for view in views:
        replay.add(x=view, b=view)
    got = replay.sample(5, replace=False)
    order = np.argsort(got.indices)
    np.testing.assert_array_equal(got["x"][order], np.stack(views))
    np.testing.assert_array_equal(got["b"][order], np.stack(views))
    replay.extend(x=big[:, ::2, 2], b=torch.from_numpy(big).permute(0, 1, 2, 3)[:, ::2, 2])
    got = replay.sample(8, replace=False)
    np.testing.assert_array_equal(got["x"][np.argsort(got.indices)][5:], big[:, ::2, 2])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
def test_rows_of_any_strides_are_stored_in_order(make, dtype: str) -> None:
    shape = (3, 4, 5)
    replay = make(200, {"x": Field(shape, dtype)})
    random = np.random.default_rng(0)
    views = []
    for order in itertools.permutations(range(3)):
        sizes = np.array(shape)[list(order)]
        for step in itertools.product((1, 2, -1), repeat=3):
            big = random.integers(0, 100, sizes * np.abs(step)).astype(dtype)
            view = big[tuple(slice(None, None, each) for each in step)]
            views.append(view.transpose(np.argsort(order)))
    for view in views:
        replay.add(x=view)
    got = replay.sample(len(views), replace=False)
    np.testing.assert_array_equal(got["x"][np.argsort(got.indices)], np.stack(views))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": np.zeros(3, np.float32)}, "'n' is missing"),
        ({"x": np.zeros(3, np.float32), "n": 1, "z": 1}, "no field 'z'"),
        ({"x": np.zeros(4, np.float32), "n": 1}, r"expected float32\(3\), came float32\(4,\)"),
        ({"x": np.zeros((2, 3), np.float32), "n": 1}, "use extend"),
        ({"x": np.zeros(3, np.float32), "n": np.float32(1.5)}, "convert it first"),
        ({"x": np.zeros(3, np.complex64), "n": 1}, "convert it first"),
    ],
)
def test_the_error_for_a_row_that_does_not_fit_has_the_reason(make, fields: dict, message: str) -> None:
    replay = make()
    with pytest.raises(SpecMismatch, match=message):
        replay.add(**fields)
    assert len(replay) == 0


def end_with(stream, value):
    stream.add(x=0)
    stream.end(x=value)


WRITERS = {
    "add": lambda replay, value: replay.add(x=value),
    "extend": lambda replay, value: replay.extend(x=[0, value]),
    "stream": lambda replay, value: replay.stream().add(x=value),
    "streams": lambda replay, value: replay.streams(2).add(x=[0, value]),
    "stream's extend": lambda replay, value: replay.stream().extend(x=[0, value]),
    "anchor": lambda replay, value: replay.anchor.add(x=value),
    "last observation": lambda replay, value: end_with(replay.stream(), value),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *[("uint8", value) for value in (256, -1, 1.5, np.int64(256), np.float64(1.5), None, "7", 10**30)],
        *[("int64", value) for value in (1.5, 2**63, float("nan"), np.uint64(2**63))],
        *[("int8", value) for value in (np.int64(300), np.int16(-129))],
        *[("bool", value) for value in (2, float("nan"), 0.5, None)],
        *[("float32", value) for value in (1e39, -1e39, None, np.float64(1e39), "1")],
        *[("float64", value) for value in (None, 10**400)],
    ],
)
def test_a_number_that_the_dtype_cannot_hold_is_refused_by_every_writer(make, writer, dtype, value) -> None:
    replay = make(5, {"x": Field((), dtype)}, episodes=Episodes(), anchor=5)
    with pytest.raises(SpecMismatch, match=rf"field 'x': expected {dtype}\("):
        WRITERS[writer](replay, value)
    assert len(replay) <= 1


def test_numbers_that_the_dtype_can_hold_are_taken_whatever_their_own(make) -> None:
    taken = {"uint8": [255, 2.0, True, np.uint16(7)], "bool": [1, 0.0, np.bool_(1)], "int8": [np.int64(-128)]}
    taken |= {"float32": [0.1, 3, True, float("inf"), float("nan"), np.float64(0.1)], "float64": [1e39, 2**70]}
    for dtype, values in taken.items():
        replay = make(9, {"x": Field((), dtype)})
        for value in values:
            replay.add(x=value)
        replay.extend(x=np.array([float(each) for each in values]).tolist())
        got = replay.sample(2 * len(values) if 2 * len(values) < 9 else 9, replace=False)
        order = np.argsort(got.indices)
        expected = np.array([*values, *values])[-9:].astype(dtype)
        np.testing.assert_array_equal(got["x"][order], expected)


def test_rows_of_one_extend_must_agree_on_their_number(make) -> None:
    with pytest.raises(SpecMismatch, match="same number"):
        make().extend(x=np.zeros((4, 3), np.float32), n=np.zeros(3, np.int64))


def test_too_many_nonzeros_are_refused_by_name(make) -> None:
    replay = make(4, {"p": Field((20,), "float32", stored="sparse", nonzero=2)})
    with pytest.raises(SpecMismatch, match=r"'p'.*at most 2"):
        replay.add(p=np.ones(20, np.float32))
    with pytest.raises(NotEnoughRows):
        replay.sample(1)
    replay.add(p=np.eye(20, dtype=np.float32)[3])
    assert replay.sample(1)["p"].argmax() == 3


def test_a_full_ring_counts_dropped_rows(make) -> None:
    replay = make(4, full="drop_newest")
    assert replay.extend(x=np.zeros((6, 3), np.float32), n=np.arange(6)) == 4
    assert replay.add(x=np.zeros(3, np.float32), n=9) == 0
    assert (rows(replay), replay.counters.dropped) == ([0, 1, 2, 3], 3)
    assert replay.discard(2) == 2
    assert replay.add(x=np.zeros(3, np.float32), n=7) == 1
    assert rows(replay) == [2, 3, 7]


def test_a_full_ring_that_blocks_waits_for_room(make) -> None:
    replay = make(4, full="block", timeout=0.05)
    replay.extend(x=np.zeros((4, 3), np.float32), n=np.arange(4))
    with pytest.raises(Timeout, match="0 of 1 rows"):
        replay.add(x=np.zeros(3, np.float32), n=4)
    patient = Replay.attach(replay.name, timeout=30)
    writer = threading.Thread(
        target=lambda: patient.extend(x=np.zeros((3, 3), np.float32), n=np.arange(4, 7)), daemon=True
    )
    writer.start()
    assert replay.discard(3) == 3
    writer.join(20)
    assert rows(replay) == [3, 4, 5, 6]
    patient.close()


def test_reserved_rows_are_written_in_place(make) -> None:
    replay = make(10, {"x": Field((3,)), "b": Field((9,), "float32", stored="bits"), "n": Field((), "int64")})
    for start in range(0, 30, 4):
        with replay.reserve(4) as reserved:
            reserved["x"][:] = np.arange(start, start + 4, dtype=np.float32)[:, None]
            reserved["n"] = np.arange(start, start + 4)
            reserved["b"][:] = np.packbits(np.ones((4, 9), np.uint8), axis=1, bitorder="little")
            assert all(n < start for n in replay.sample(20)["n"]) if start else True
    batch = replay.sample(10, replace=False)
    assert (batch["x"] == batch["n"][:, None]).all() and (batch["b"] == 1).all()
    assert {28, 29, 30, 31} <= set(batch["n"].tolist())


def test_reserved_rows_cast_nothing_silently(make) -> None:
    replay = make(10, {"x": Field((3,)), "u": Field((), "uint8")})
    with replay.reserve(2) as rows:
        rows["x"][:], rows["u"] = 1, np.array([7, 8], np.uint8)
        rows["x"] += np.float32(1)
        for name, values in (("x", np.ones(3)), ("x", 1e39), ("u", np.array([300, 1])), ("u", 1.5), ("u", 256)):
            for write in (lambda: rows.__setitem__(name, values), lambda: rows[name].__setitem__(0, values)):  # noqa: B023
                with pytest.raises(SpecMismatch, match=f"field '{name}', as it is stored: expected"):
                    write()
        kept = rows["x"]
    with pytest.raises(Refused, match="field 'x'.*these rows were released"):
        kept[0] = np.zeros(3, np.float32)  # readers see them
    assert (replay.sample(5)["x"] == 2).all() and set(replay.sample(9)["u"].tolist()) <= {7, 8}


def test_a_reservation_that_fails_leaves_no_row(make) -> None:
    replay = make(4)
    with pytest.raises(ZeroDivisionError), replay.reserve(2):
        raise ZeroDivisionError
    with pytest.raises(NotEnoughRows):
        replay.sample(1)
    assert replay.added == 0


def test_the_anchor_is_kept_for_good(make) -> None:
    replay = make(20, anchor=4)
    assert replay.anchor.extend(x=np.zeros((6, 3), np.float32), n=np.arange(100, 106)) == 4
    for i in range(50):
        replay.add(x=np.zeros(3, np.float32), n=i)
    batch = replay.sample(40, anchor_ratio=0.25)
    assert (batch["n"] >= 100).sum() == 10
    assert set(batch["n"][batch["n"] >= 100]) <= {100, 101, 102, 103}
    assert batch["n"][batch["n"] < 100].min() >= 30
    with pytest.raises(Refused, match="no anchor"):
        _ = make().anchor


def test_another_attacher_sees_the_same_rows(make) -> None:
    replay = make()
    other = Replay.attach(replay.name, populate=True)
    other.add(x=np.ones(3, np.float32), n=5)
    assert rows(replay) == [5]
    other.close()
    with pytest.raises(SharedMemoryError, match="owner may be"):
        Replay.attach("nobody-made-this")


def test_a_name_in_use_is_refused(make) -> None:
    with pytest.raises(SharedMemoryError, match="exists"):
        Replay.create(make().name, 3, {"x": Field()})


@pytest.mark.parametrize("name", ["", "a/b", "a*", "n" * 101])
def test_a_name_that_is_none_is_refused(name) -> None:
    for use in (lambda: Replay.create(name, 5, {"x": Field(())}), lambda: Replay.attach(name)):
        with pytest.raises(ValueError, match="names no replay: expected 1 to 100 characters without '/' and"):
            use()


def test_the_longest_name_is_taken() -> None:
    with Replay.create("n" * 100, 5, {"x": Field(())}) as replay:
        replay.add(x=1.0)
        other = Replay.attach("n" * 100)
        assert len(other) == 1
        other.close()


def test_a_replay_may_be_closed_before_it_is_unlinked(make) -> None:
    replay = make()
    replay.close()
    replay.unlink()
    replay.unlink()
    with pytest.raises(SharedMemoryError):
        Replay.attach(replay.name)


def whole_tickets(replay: Replay) -> set[int]:
    part = replay.parts[0]
    words = part.sequences
    tickets = words[(words > 0) & (words % 2 == 0)] // 2 - 1
    return {int(ticket) for ticket in tickets if ticket >= part.ring.tail}


@pytest.mark.parametrize("full", ["block", "drop_newest"])
def test_a_ring_without_overwriting_never_overwrites_after_a_killed_writer(make, full: str) -> None:
    replay = make(8, full=full, timeout=0.01)
    replay.parts[0].sequences[5] = 1  # a writer of long ago was killed in this slot
    added = 0
    for n in range(60):
        before, now = whole_tickets(replay), added
        try:
            added += replay.add(x=np.zeros(3, np.float32), n=n)
        except Timeout:
            assert full == "block"
        assert before <= whole_tickets(replay), "a row was overwritten that nobody had taken"
        if added == now:
            replay.discard(1)
    assert added > 20 and replay.counters.retried > 2


def test_rows_of_one_call_keep_their_order_if_a_slot_is_in_use(make) -> None:
    replay = make(8)
    replay.parts[0].sequences[3] = 1
    replay.extend(x=np.zeros((6, 3), np.float32), n=np.arange(6))
    batch = replay.sample(6, replace=False)
    assert batch["n"][np.argsort(batch.indices)].tolist() == list(range(6))


def test_a_replay_without_a_free_slot_raises_an_error(make) -> None:
    replay = make(4)
    replay.parts[0].sequences[:] = 1
    for add in (
        lambda: replay.add(x=np.zeros(3, np.float32), n=1),
        lambda: replay.extend(x=np.zeros((9, 3), np.float32), n=np.arange(9)),
    ):
        with pytest.raises(Busy, match="make the replay anew"):
            add()
    assert replay.added == 0


def test_a_replay_that_is_dropped_without_a_word_leaves_no_descriptor(make) -> None:
    replay = make(4)
    before = open_files()
    for _ in range(20):
        Replay.attach(replay.name)
    gc.collect()
    assert open_files() <= before


def files_of(name: str) -> int:
    """How many descriptors of this process are of a replay's memory."""
    there = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    return sum(name in str(fd.readlink()) for fd in there)


def test_a_with_block_closes_the_replay_and_removes_the_name_of_its_own(make) -> None:
    made = make()
    with Replay.attach(made.name) as attached:
        attached.add(x=np.zeros(3), n=1)
        within = files_of(made.name)
    assert files_of(made.name) < within
    with made:
        assert len(made) == 1, "who only attached has not removed it"
    with pytest.raises(SharedMemoryError):
        Replay.attach(made.name)
