"""Rows that go from one replay to another: all of them, as they are, with their episodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurybox.protocol.errors import SpecMismatch
from jurybox.training.replay import Episodes, Field, Replay, Windows
from jurybox.training.replay.cursor import ENDED
from jurybox.training.replay.transfer import Exporter, Importer

EPISODES = Episodes(truncated="truncated")
LINKED = {
    "observation": Field((2,)),
    "reward": Field(),
    "terminated": Field((), "bool"),
    "truncated": Field((), "bool"),
    "planes": Field((9,), "uint8", stored="bits"),
}
WINDOWS = Windows(n_step=3, gamma=0.9, next=("observation",), stack=3, stacked=("observation",))


def drawn(replay: Replay, rows: int) -> dict[tuple[float, ...], tuple[float, ...]]:
    """What the replay hands out for each of its rows, by the row's own observation."""
    batch = replay.sample(40 * rows, windows=WINDOWS)
    keys = batch["observation"][:, -1]
    names = ("observation", "next_observation", "reward", "discount", "planes")
    return {
        tuple(key): tuple(np.concatenate([np.ravel(batch[name][i]) for name in names]).tolist())
        for i, key in enumerate(keys)
    }


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 6), st.sampled_from(["terminated", "truncated", "cut", "final"])),
        min_size=2, max_size=9,
    ),
    st.integers(1, 7), st.integers(1, 400),
)  # fmt: skip
def test_windows_over_imported_rows_are_those_of_their_own_replay(episodes, every: int, most_bytes: int) -> None:
    with (
        Replay.create("importer-from", 200, LINKED, episodes=EPISODES, seed=3) as there,
        Replay.create("importer-to", 200, LINKED, episodes=EPISODES, prioritized=True, seed=4) as here,
    ):
        exporter, importer, moved, made = Exporter(there, most_bytes), Importer(here, 200), 0, 0
        envs = [there.stream() for _ in range(3)]
        for number, (env, length, kind) in enumerate(episodes):
            for step in range(length):
                last = step == length - 1
                envs[env].add(
                    observation=[number, step], reward=step + 1.0, terminated=last and kind == "terminated",
                    truncated=last and kind == "truncated", planes=np.arange(9) % (step + 2) == 0,
                )  # fmt: skip
                made += 1
                if made % every == 0:
                    while (batch := exporter.batch()) is not None:
                        moved += importer.put(batch)
            if kind == "cut":
                envs[env].end()
            if kind == "final":
                envs[env].end(0, observation=[number, 99])
        while (batch := exporter.batch()) is not None:
            moved += importer.put(batch)
        assert moved == there.added == here.added
        try:
            expected = drawn(there, made)
        except Exception:  # noqa: BLE001 (no row has what the windows ask for: then there is none on the other side)
            with pytest.raises(Exception, match="could be handed out"):
                drawn(here, made)
            return
        assert drawn(here, made) == expected


def test_overwritten_rows_are_counted_and_later_ones_mark_the_gap() -> None:
    with (
        Replay.create("importer-from", 8, LINKED, episodes=EPISODES) as there,
        Replay.create("importer-to", 100, LINKED, episodes=EPISODES) as here,
    ):
        exporter, importer = Exporter(there), Importer(here, 8)
        for step in range(30):
            there.add(
                observation=[0, step], reward=1.0, terminated=step == 29, truncated=False, planes=np.zeros(9, np.uint8)
            )
        assert importer.put(exporter.batch()) == 8 and exporter.new.missed == 22
        stacked = here.sample(64, windows=Windows(stack=2, stacked=("observation",)))
        assert stacked["observation"][:, 0, 1].min() >= 22, "no zeroes in the place of the frame that never came"


def test_rows_of_another_shape_are_refused() -> None:
    with (
        Replay.create("importer-from", 8, {"x": Field((30,))}) as there,
        Replay.create("importer-to", 8, LINKED) as here,
    ):
        there.add(x=np.zeros(30))
        with pytest.raises(SpecMismatch, match="bytes came"):
            Importer(here, 8).put(Exporter(there).batch())


def test_an_episode_that_ends_after_its_last_row_was_moved_ends_in_the_other_replay_too() -> None:
    with (
        Replay.create("importer-from", 20, LINKED, episodes=EPISODES) as there,
        Replay.create("importer-to", 20, LINKED, episodes=EPISODES) as here,
    ):
        exporter, importer, envs = Exporter(there), Importer(here, 20), [there.stream() for _ in range(2)]
        here.add(observation=[9, 9], reward=0.0, terminated=True, truncated=False, planes=np.zeros(9, np.uint8))
        for step in range(3):
            for number, env in enumerate(envs):
                env.add(
                    observation=[number, step], reward=1.0, terminated=False, truncated=False,
                    planes=np.zeros(9, np.uint8),
                )  # fmt: skip
        assert importer.put(exporter.batch()) == 6
        envs[1].end()
        assert importer.put(exporter.batch()) == 0, "no new row: an episode has ended"
        moved = Exporter(here).batch().piece.after[1:]
        np.testing.assert_array_equal(moved, Exporter(there).batch().piece.after)
        assert moved.tolist().count(ENDED) == 1 and moved[-1] == ENDED
