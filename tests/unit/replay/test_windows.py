"""Windows against a plain list of episodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurybox.protocol.errors import SpecMismatch
from jurybox.training.replay import Episodes, Field, NotEnoughRows, Replay, Windows

FIELDS = {
    "observation": Field((2,)),
    "reward": Field(),
    "terminated": Field((), "bool"),
    "truncated": Field((), "bool"),
}
EPISODES = Episodes(truncated="truncated")


def observation(episode: int, step: int) -> np.ndarray:
    return np.array([episode, step], np.float32)


def play(replay: Replay, lengths: list[int], kinds: list[str], stream=None) -> None:
    """Episode e, step s: observation (e, s), reward s + 1; one that is cut leaves no last observation."""
    writer = stream or replay.stream()
    for episode, (length, kind) in enumerate(zip(lengths, kinds, strict=True)):
        for step in range(length):
            last = step == length - 1
            writer.add(
                observation=observation(episode, step),
                reward=step + 1.0,
                terminated=last and kind == "terminated",
                truncated=last and kind == "truncated",
            )
        if kind == "truncated":
            writer.end(observation=observation(episode, length))
        elif kind == "cut":
            writer.end()


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.sampled_from(["terminated", "truncated"])), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_windows_agree_with_a_list_of_episodes(episodes, n_step: int, stack: int) -> None:
    lengths, kinds = [length for length, _ in episodes], [kind for _, kind in episodes]
    gamma = 0.9
    with Replay.create(f"windows-{n_step}-{stack}", 200, FIELDS, episodes=EPISODES, seed=3) as replay:
        play(replay, lengths, kinds)
        windows = Windows(n_step=n_step, gamma=gamma, next=("observation",), stack=stack, stacked=("observation",))
        batch = replay.sample(300, windows=windows)
        seen = set()
        for i in range(300):
            episode, step = batch["observation"][i, -1].astype(int)
            seen.add((episode, step))
            length = lengths[episode]
            steps = min(n_step, length - step)
            over = step + steps == length and kinds[episode] == "terminated"
            assert batch["reward"][i] == pytest.approx(sum(gamma**k * (step + k + 1) for k in range(steps)), rel=1e-5)
            assert batch["discount"][i] == pytest.approx(0.0 if over else gamma**steps, rel=1e-5)
            for frame in range(stack):
                at = step - (stack - 1) + frame
                assert batch.valid["observation"][i, frame] == (at >= 0)
                np.testing.assert_array_equal(
                    batch["observation"][i, frame], observation(episode, at) if at >= 0 else 0
                )
            if not over:
                for frame in range(stack):
                    at = step + steps - (stack - 1) + frame
                    np.testing.assert_array_equal(
                        batch["next_observation"][i, frame], observation(episode, at) if at >= 0 else 0
                    )
        if sum(lengths) < 20:
            assert seen == {(e, s) for e, length in enumerate(lengths) for s in range(length)}


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("options", [{}, {"prioritized": True}])
def test_last_observations_are_never_drawn_themselves(make, options, on) -> None:
    replay = make(100, FIELDS, episodes=EPISODES, **options)
    play(replay, [1] * 20, ["truncated"] * 20)  # half of the rows are last observations
    source = replay if on == "host" else replay.resident("cpu", seed=1)
    if on == "device":
        source.refresh()
    ways = [{}, {"uniform": True}, {"windows": Windows(n_step=1, next="observation")}]
    for batch in (source.sample(64, **way) for way in ways):
        assert all(step == 0 for _, step in np.asarray(batch["observation"]).tolist())
        assert np.all(np.asarray(batch["reward"]) == 1)
    once = source.sample(20, replace=False, uniform=True)
    assert sorted(episode for episode, _ in np.asarray(once["observation"]).tolist()) == list(range(20))
    with pytest.raises(NotEnoughRows):
        source.sample(21, replace=False, uniform=True)


def test_last_observations_have_no_priority(make) -> None:
    replay = make(100, FIELDS, episodes=EPISODES, prioritized=True, alpha=1.0)
    play(replay, [1] * 20, ["truncated"] * 20)
    batch = replay.sample(200)
    replay.update_priorities(batch.indices, np.full(200, 1e-6))
    before = replay.counters.redrawn
    replay.sample(64)
    assert replay.counters.redrawn == before == 0


def test_sequences_end_with_their_episode(make) -> None:
    replay = make(100, FIELDS, episodes=EPISODES)
    play(replay, [3, 8, 5], ["terminated", "truncated", "terminated"])
    batch = replay.sample(200, windows=Windows(length=4))
    for rows, valid in zip(batch["observation"], batch.valid["sequence"], strict=True):
        episode, step = rows[0].astype(int)
        length = [3, 8, 5][episode]
        assert valid.sum() == min(4, length - step)
        for k in range(4):
            np.testing.assert_array_equal(rows[k], observation(episode, step + k) if valid[k] else 0)
    whole = replay.sample(200, windows=Windows(length=4, full_length=True))
    assert whole.valid["sequence"].all()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.sampled_from(["terminated", "truncated", "cut"])), min_size=1, max_size=8
    ).filter(lambda episodes: episodes != [(1, "cut")] * len(episodes)),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_sequences_with_rows_before_and_what_followed_agree_with_a_list_of_episodes(episodes, length, before) -> None:
    lengths, kinds = [each for each, _ in episodes], [kind for _, kind in episodes]
    with Replay.create(f"sequences-{length}-{before}", 200, FIELDS, episodes=EPISODES, seed=3) as replay:
        play(replay, lengths, kinds)
        batch = replay.sample(300, windows=Windows(length=length, before=before, next="observation"))
        assert batch["observation"].shape == (300, before + length + 1, 2)
        assert batch["reward"].shape == batch.valid["sequence"].shape == (300, before + length)
        seen = set()
        for rows, rewards, valid in zip(batch["observation"], batch["reward"], batch.valid["sequence"], strict=True):
            episode, first = rows[before].astype(int) - [0, before]
            seen.add((episode, first + before))
            rows_of, kind = lengths[episode], kinds[episode]
            last = rows_of if kind == "truncated" else rows_of - 1  # of the observations that there are
            for k in range(before + length + 1):
                there = 0 <= first + k <= last
                np.testing.assert_array_equal(rows[k], observation(episode, first + k) if there else 0)
            for k in range(before + length):
                made = 0 <= first + k < (rows_of - 1 if kind == "cut" else rows_of)
                assert valid[k] == made and rewards[k] == (first + k + 1 if made else 0)
        if sum(lengths) < 20:
            drawn = {(e, s) for e, n in enumerate(lengths) for s in range(n - (kinds[e] == "cut"))}
            assert seen == drawn


def test_a_sequence_waits_for_what_follows_it(make) -> None:
    replay = make(100, FIELDS, episodes=EPISODES)
    for step in range(4):
        replay.add(observation=observation(0, step), reward=0.0, terminated=False, truncated=False)
    windows = Windows(length=3, before=1, next="observation")
    assert set(replay.sample(50, windows=windows)["observation"][:, 1, 1].tolist()) == {0}
    replay.add(observation=observation(0, 4), reward=0.0, terminated=True, truncated=False)
    assert set(replay.sample(200, windows=windows)["observation"][:, 1, 1].tolist()) == {0, 1, 2, 3, 4}


def test_rows_before_a_sequence_that_are_overwritten_keep_it_from_being_drawn(make) -> None:
    replay = make(16, FIELDS, episodes=EPISODES)
    play(replay, [100], ["terminated"])  # the ring holds steps 84 .. 99
    batch = replay.sample(500, windows=Windows(length=2, before=3, next="observation"))
    assert batch["observation"][:, 0, 1].min() == 84 and batch["observation"][:, 3, 1].min() == 87


def test_nothing_crosses_the_write_position(make) -> None:
    replay = make(16, FIELDS, episodes=EPISODES)
    play(replay, [100], ["terminated"])  # the ring holds steps 84 .. 99
    batch = replay.sample(500, windows=Windows(stack=4, stacked="observation", next="observation"))
    steps = batch["observation"][:, :, 1]
    assert (np.diff(steps, axis=1) == 1).all()
    assert steps.min() == 84 and batch.valid["observation"].all()


def test_envs_side_by_side_keep_their_episodes_apart(make) -> None:
    replay = make(100, FIELDS, episodes=EPISODES)
    envs = replay.streams(3)
    for step in range(10):
        envs.add(
            observation=np.array([[env, step] for env in range(3)], np.float32),
            reward=np.ones(3, np.float32),
            terminated=np.array([step == 4, False, step == 9]),
            truncated=np.zeros(3, bool),
        )
    batch = replay.sample(300, windows=Windows(next="observation", n_step=1))
    same = batch["discount"] > 0
    np.testing.assert_array_equal(batch["next_observation"][same][:, 0], batch["observation"][same][:, 0])
    np.testing.assert_array_equal(batch["next_observation"][same][:, 1], batch["observation"][same][:, 1] + 1)
    assert not ((batch["observation"][:, 0] == 1) & (batch["observation"][:, 1] == 9)).any()  # no next row yet
    assert (batch["observation"][~same][:, 1] == np.where(batch["observation"][~same][:, 0] == 0, 4, 9)).all()


def test_a_cut_episode_without_its_last_observation_lends_no_last_row(make) -> None:
    replay = make(100, FIELDS, episodes=Episodes())
    for step in range(5):
        replay.add(observation=observation(0, step), reward=0.0, terminated=False, truncated=False)
    windows = Windows(next="observation")
    replay.end_episode()
    assert replay.sample(100, windows=windows)["observation"][:, 1].max() == 3
    assert replay.sample(100, windows=Windows(n_step=2))["observation"][:, 1].max() == 4


def test_a_row_of_a_running_episode_alone_is_not_drawn(make) -> None:
    replay = make(100, FIELDS, episodes=EPISODES)
    replay.add(observation=observation(0, 0), reward=0.0, terminated=False, truncated=False)
    with pytest.raises(NotEnoughRows, match="as far as the windows ask"):
        replay.sample(1, windows=Windows(next="observation"))


def test_windows_need_episodes(make) -> None:
    with pytest.raises(SpecMismatch, match="does not know its episodes"):
        make().sample(1, windows=Windows(length=3))
    with pytest.raises(SpecMismatch, match="no field 'z'"):
        make(10, FIELDS, episodes=EPISODES).sample(1, windows=Windows(next="z"))
    with pytest.raises(ValueError, match="cannot be combined"):
        Windows(length=3, n_step=2)
    with pytest.raises(ValueError, match="before=2 goes with length=k"):
        Windows(before=2)
    alone = make(10, {"observation": Field((2,))}, episodes=Episodes())
    with pytest.raises(SpecMismatch, match="expected one that marks its transitions"):
        alone.sample(1, windows=Windows(length=3, next="observation"))


def test_an_anchor_without_usable_rows_is_an_error_with_a_remedy(make) -> None:
    replay = make(40, FIELDS, episodes=EPISODES, anchor=8)
    play(replay, [6, 6], ["terminated", "terminated"])
    running = replay.anchor
    for step in range(2):
        running.add(observation=observation(9, step), reward=0.0, terminated=False, truncated=False)
    with pytest.raises(NotEnoughRows, match=r"the anchor holds 2 rows, .* anchor_ratio=0 to sample the others alone"):
        replay.sample(8, windows=Windows(n_step=3))
    batch = replay.sample(8, windows=Windows(n_step=3), anchor_ratio=0)
    assert (batch["observation"][:, 0] < 2).all()
    with pytest.raises(NotEnoughRows, match="the anchor cannot give 5 different rows: .* a smaller anchor_ratio"):
        replay.sample(10, anchor_ratio=0.5, replace=False)
    running.add(observation=observation(9, 2), reward=0.0, terminated=True, truncated=False)
    assert (replay.sample(8, windows=Windows(n_step=3))["observation"][:, 0] == 9).sum() == 2
