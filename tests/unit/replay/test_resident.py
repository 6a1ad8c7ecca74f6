"""A replay in a device's memory; the device is the CPU here, which takes the same path through torch."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jurybox.protocol.errors import Refused
from jurybox.training.replay import Episodes, Field, NotEnoughRows, Replay, Windows
from jurybox.training.replay import cursor as module

EPISODES = Episodes(truncated="truncated")
LINKED = {
    "observation": Field((2,)),
    "reward": Field(),
    "terminated": Field((), "bool"),
    "truncated": Field((), "bool"),
}


def numbered(replay: Replay, first: int, n: int) -> None:
    numbers = np.arange(first, first + n)
    replay.extend(x=np.repeat(numbers[:, None], 3, 1).astype(np.float32), n=numbers)


def test_every_stored_form_is_widened_as_on_the_host(make) -> None:
    rng = np.random.default_rng(0)
    fields = {
        "plain": Field((2, 3), "float64"), "planes": Field((5, 3), stored="bits"), "mask": Field((11,), "bool", "bits"),
        "image": Field((4, 4), stored="uint8", scale=1 / 255), "half": Field((7,), stored="float16"),
        "policy": Field((40,), stored="sparse", nonzero=9), "n": Field((), "int64"),
    }  # fmt: skip
    replay = make(50, fields)
    policy = np.zeros((50, 40), np.float32)
    policy[np.arange(50)[:, None], rng.integers(0, 40, (50, 8))] = rng.random((50, 8))
    replay.extend(
        plain=rng.random((50, 2, 3)), planes=rng.random((50, 5, 3)) < 0.5, mask=rng.random((50, 11)) < 0.5,
        image=rng.random((50, 4, 4)), half=rng.random((50, 7)), policy=policy, n=np.arange(50),
    )  # fmt: skip
    resident = replay.resident("cpu")
    assert resident.refresh() == 50
    host = replay.sample(200)
    there = resident.rows.columns(torch.from_numpy(host.indices), Windows(), resident.taken)
    for name in fields:
        np.testing.assert_array_equal(there[name].numpy(), host[name])
    nothing = resident.rows.columns(torch.from_numpy(host.indices[:0]), Windows(), resident.taken)
    assert {name: tuple(nothing[name].shape) for name in fields} == {
        name: (0, *field.shape) for name, field in fields.items()
    }
    drawn = resident.sample(64)
    assert torch.equal(drawn["n"], drawn["indices"])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.sampled_from(["terminated", "truncated", "cut"])), min_size=2, max_size=9),
    st.sampled_from([
        Windows(n_step=3, gamma=0.9, next=("observation",), stack=3, stacked=("observation",)),
        Windows(n_step=2), Windows(next=("observation",)), Windows(length=4), Windows(length=3, full_length=True),
        Windows(stack=2, stacked=("observation",)), Windows(length=3, before=2, next=("observation",)),
        Windows(length=1, next=("observation",)), Windows(length=2, next=("observation",), full_length=True),
    ]),
    st.sampled_from([13, 200]),
)  # fmt: skip
def test_windows_are_those_of_the_host(episodes, windows: Windows, capacity: int) -> None:
    with Replay.create(f"resident-{capacity}", capacity, LINKED, episodes=EPISODES, seed=3) as replay:
        resident = replay.resident("cpu", seed=4)
        for episode, (length, kind) in enumerate(episodes):
            for step in range(length):
                last = step == length - 1
                replay.add(
                    observation=[episode, step], reward=step + 1.0,
                    terminated=last and kind == "terminated", truncated=last and kind == "truncated",
                )  # fmt: skip
                if step % 3 == 0:  # rows come to the device in the midst of their episodes
                    resident.refresh()
            if kind == "cut":
                replay.end_episode()
        resident.refresh()
        assert resident.missed == 0
        try:
            host = replay.sample(300, windows=windows)
        except NotEnoughRows:
            with pytest.raises(NotEnoughRows):
                resident.sample(20, windows=windows)
            return
        there = resident.rows.columns(torch.from_numpy(host.indices), windows, resident.taken)
        for name in host:
            np.testing.assert_allclose(there[name].numpy(), host[name], rtol=1e-6, err_msg=name)
        for name, mask in host.valid.items():
            np.testing.assert_array_equal(there[f"valid_{name}"].numpy(), mask)
        drawn = {int(i) for i in resident.sample(300, windows=windows)["indices"]}
        assert drawn == set(host.indices.tolist())


def test_a_small_replay_feeds_a_large_device_and_nothing_is_lost(make) -> None:
    replay = make(32, full="block", timeout=20.0)
    resident = replay.resident("cpu", capacity=1000)
    writer = threading.Thread(target=lambda: [numbered(replay, 7 * i, 7) for i in range(100)])
    writer.start()
    deadline = time.monotonic() + 20
    while resident.taken < 700 and time.monotonic() < deadline:
        resident.refresh()
    writer.join()
    rows = resident.sample(700, replace=False)
    assert sorted(rows["n"].tolist()) == list(range(700))
    assert (rows["x"] == rows["n"][:, None]).all()
    assert (resident.missed, len(resident)) == (0, 700)


def test_the_newest_rows_stay_and_overwritten_ones_are_counted(make) -> None:
    replay = make(64)
    resident = replay.resident("cpu", capacity=40)
    numbered(replay, 0, 100)
    assert resident.refresh() == 64
    assert resident.missed == 36
    assert sorted(resident.sample(40, replace=False)["n"].tolist()) == list(range(60, 100))


def test_an_unfinished_row_is_returned_when_it_is_complete(make) -> None:
    replay = make()
    resident = replay.resident("cpu")
    numbered(replay, 0, 3)
    with replay.reserve(1) as row:
        numbered(replay, 4, 2)
        assert resident.refresh() == 5
        row["x"][:], row["n"][:] = 3, 3
    assert resident.refresh() == 1
    rows = resident.sample(6, replace=False)
    assert sorted(rows["n"].tolist()) == list(range(6))


def test_a_row_that_never_gets_whole_is_given_up(make, monkeypatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT", 0.05)
    replay = make(8, full="drop_newest")
    replay.parts[0].ring.reserve_run(1)  # its process has ended
    numbered(replay, 0, 5)
    resident = replay.resident("cpu")
    assert resident.refresh() == 5
    assert len(replay) > 0  # its slot, and those after it, wait for it
    time.sleep(0.1)
    resident.refresh()
    assert (len(replay), resident.missed) == (0, 1)
    numbered(replay, 5, 7)
    assert resident.refresh() == 7


def test_priorities_live_on_the_device(make) -> None:
    replay = make(prioritized=True, alpha=1.0)
    resident = replay.resident("cpu", capacity=50, seed=1)
    numbered(replay, 0, 80)
    resident.refresh()
    resident.update_priorities(torch.arange(30, 80), torch.where(torch.arange(30, 80) == 55, 50.0, 1.0))
    rows = resident.sample(2000, beta=1.0)
    share = (rows["n"] == 55).float().mean().item()
    assert share == pytest.approx(50 / 99, abs=0.02)
    assert rows["weights"][rows["n"] == 55].allclose(torch.tensor(1 / 50), rtol=1e-4)
    assert rows["weights"].max() == 1
    # Rows that were overwritten do not block others.
    resident.update_priorities(torch.tensor([5]), torch.tensor([1e6]))
    assert ((resident.sample(2000)["n"] == 55).float().mean().item()) == pytest.approx(50 / 99, abs=0.02)
    numbered(replay, 80, 1)  # a new row gets the highest so far, of rows that were still there
    resident.refresh()
    assert (resident.sample(2000)["n"] == 80).float().mean().item() == pytest.approx(50 / 148, abs=0.04)
    uniform = resident.sample(50, uniform=True, replace=False)
    assert len(set(uniform["n"].tolist())) == 50


def test_priorities_and_windows_go_together_while_episodes_still_run(make) -> None:
    """The newest rows of running streams fit no window; where a stratum of the draw holds them alone, others come."""
    replay = make(1000, LINKED, episodes=EPISODES, prioritized=True)
    streams = replay.streams(8)
    row = {"observation": np.zeros((8, 2)), "reward": np.zeros(8), "terminated": np.zeros(8, bool)}
    for _ in range(100):
        streams.add(**row, truncated=np.zeros(8, bool))
    resident = replay.resident("cpu")
    resident.refresh()
    drawn = resident.sample(256, windows=Windows(n_step=3, next="observation"))
    assert int(drawn["indices"].min()) >= 0 and int(drawn["indices"].max()) < 800 - 8 * 3


def test_a_seed_gives_the_same_draws(make) -> None:
    replay = make()
    numbered(replay, 0, 100)
    draws = []
    for _ in range(2):
        resident = replay.resident("cpu", seed=9)
        resident.refresh()
        draws.append(resident.sample(50)["n"])
    assert torch.equal(*draws)


def test_unsupported_use_is_an_error(make) -> None:
    with pytest.raises(Refused, match="anchor"):
        make(anchor=5).resident("cpu")
    resident = make().resident("cpu")
    with pytest.raises(NotEnoughRows, match="refresh"):
        resident.sample(3)
    with pytest.raises(Refused, match="prioritized=True"):
        resident.update_priorities(torch.tensor([0]), torch.tensor([1.0]))
