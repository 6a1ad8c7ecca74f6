"""The buffer inside Stable-Baselines3's own training loops."""

from __future__ import annotations

import gc

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from tests.forking import in_a_child

from jurybox.protocol.errors import SharedMemoryError, SpecMismatch
from jurybox.training.replay import Replay
from jurybox.training.replay.sb3 import SharedReplayBuffer


@pytest.mark.runs
def test_sac_learns_from_a_shared_buffer() -> None:
    env = make_vec_env("Pendulum-v1", 2, seed=0)
    model = SAC(
        "MlpPolicy", env, seed=0, learning_starts=220, batch_size=16, buffer_size=200, device="cpu",
        replay_buffer_class=SharedReplayBuffer, replay_buffer_kwargs={"name": "sac-test", "seed": 1},
        policy_kwargs={"net_arch": [32]},
    )  # fmt: skip
    before = [p.detach().clone() for p in model.critic.parameters()]
    model.learn(240)
    assert model.replay_buffer.replay.added == 240 and model.replay_buffer.full
    assert any((a != b).any() for a, b in zip(before, model.critic.parameters(), strict=True))
    # Another process sees the same transitions.
    other = Replay.attach("sac-test")
    assert len(other) == 200
    other.close()
    del model
    gc.collect()
    with pytest.raises(SharedMemoryError):
        Replay.attach("sac-test")


def test_a_forked_env_worker_that_ends_leaves_the_learners_buffer() -> None:
    space = gym.spaces.Box(-1, 1, (3,))
    made = [SharedReplayBuffer(8, space, space, device="cpu", name="sb3-forked")]

    def end() -> None:
        made.clear()
        gc.collect()

    in_a_child(end)
    Replay.attach("sb3-forked").close()
    end()
    with pytest.raises(SharedMemoryError):
        Replay.attach("sb3-forked")


def test_dqn_and_normalisation_work_like_with_the_original() -> None:
    env = VecNormalize(make_vec_env("CartPole-v1", 1, seed=0))
    model = DQN(
        "MlpPolicy", env, seed=0, learning_starts=50, buffer_size=500, device="cpu",
        replay_buffer_class=SharedReplayBuffer, replay_buffer_kwargs={"stored_observations": "float16"},
    )  # fmt: skip
    model.learn(300)
    assert model.replay_buffer.size() == 300


def test_it_samples_the_same_transitions_as_the_original() -> None:
    rng = np.random.default_rng(0)
    spaces = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(-1, 1, (2,), np.float32)
    original, shared = ReplayBuffer(60, *spaces, "cpu", 3), SharedReplayBuffer(60, *spaces, "cpu", 3)
    for step in range(30):
        row = (
            rng.random((3, 3), np.float32), rng.random((3, 3), np.float32), rng.random((3, 2), np.float32),
            np.arange(3.0) + 3 * step, rng.random(3) < 0.3,
            [{"TimeLimit.truncated": bool(rng.random() < 0.5)} for _ in range(3)],
        )  # fmt: skip
        original.add(*row)
        shared.add(*row)
        assert (shared.pos, shared.full, shared.size()) == (original.pos, original.full, original.size())
    table = {}
    for env in range(3):
        for i in range(20):
            table[float(original.rewards[i, env])] = (
                original.observations[i, env], original.next_observations[i, env], original.actions[i, env],
                original.dones[i, env] * (1 - original.timeouts[i, env]),
            )  # fmt: skip
    samples = shared.sample(200)
    assert [tuple(t.shape) for t in samples[:5]] == [tuple(t.shape) for t in original.sample(200)[:5]]
    seen = set()
    for i in range(200):
        observation, following, action, done = table[samples.rewards[i].item()]
        seen.add(samples.rewards[i].item())
        np.testing.assert_array_equal(samples.observations[i], observation)
        np.testing.assert_array_equal(samples.next_observations[i], following)
        np.testing.assert_array_equal(samples.actions[i], action)
        assert samples.dones[i].item() == done
    assert len(seen) > 45


def test_two_buffers_share_one_replay() -> None:
    spaces = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(4)
    learner = SharedReplayBuffer(60, *spaces, "cpu", 1, name="sb3-shared")
    actor = SharedReplayBuffer(60, *spaces, "cpu", 1, name="sb3-shared", attach=True)
    for i in range(5):
        actor.add(np.full((1, 3), i), np.zeros((1, 3)), np.array([i % 4]), np.array([i]), np.array([False]), [{}])
    assert learner.size() == 5
    samples = learner.sample(20)
    assert (samples.observations[:, :1] == samples.rewards).all()


def test_an_attached_buffer_has_the_size_of_the_replay_and_its_rows() -> None:
    spaces = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,))
    owner = SharedReplayBuffer(60, *spaces, "cpu", 2, name="sb3-sized")
    attached = SharedReplayBuffer(1_000_000, *spaces, "cpu", 2, name="sb3-sized", attach=True)
    assert attached.buffer_size == owner.buffer_size == 30
    for wrong in ((gym.spaces.Box(-1, 1, (4,)), spaces[1]), (spaces[0], gym.spaces.Discrete(2))):
        with pytest.raises(SpecMismatch, match="the replay 'sb3-sized' holds (observation|action) as .*: expected"):
            SharedReplayBuffer(60, *wrong, "cpu", 2, name="sb3-sized", attach=True)


def test_stable_baselines_seed_decides_what_is_drawn() -> None:
    def drawn(seed):
        env = make_vec_env("Pendulum-v1", 1, seed=0)
        given = {"learning_starts": 40, "buffer_size": 100, "device": "cpu", "policy_kwargs": {"net_arch": [4]}}
        model = SAC("MlpPolicy", env, seed=seed, replay_buffer_class=SharedReplayBuffer, **given)
        model.learn(40)
        return model.replay_buffer.sample(30).rewards.numpy()

    assert np.array_equal(drawn(3), drawn(3)) and not np.array_equal(drawn(3), drawn(4))


def test_reset_forgets_all_rows() -> None:
    spaces = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(4)
    buffer = SharedReplayBuffer(10, *spaces, "cpu", 1)
    for i in range(25):
        buffer.add(np.full((1, 3), i), np.zeros((1, 3)), np.array([1]), np.array([i]), np.array([False]), [{}])
    buffer.reset()
    assert buffer.size() == 0
    buffer.add(np.full((1, 3), 9), np.zeros((1, 3)), np.array([1]), np.array([99]), np.array([False]), [{}])
    assert (buffer.sample(10).rewards == 99).all()


def test_unsupported_options_raise() -> None:
    spaces = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Discrete(4)
    with pytest.raises(ValueError, match="stored_observations"):
        SharedReplayBuffer(10, *spaces, optimize_memory_usage=True, handle_timeout_termination=False)
    with pytest.raises(TypeError, match=r"replay\.save"):
        import pickle

        pickle.dumps(SharedReplayBuffer(10, *spaces))
