"""n-step returns, goals in hindsight and Dict observations of the shared buffer, against Stable-Baselines3's own."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer
from stable_baselines3.her import HerReplayBuffer

from jurybox.protocol.errors import SpecMismatch
from jurybox.training.replay.sb3 import Hindsight, SharedReplayBuffer

ACTION = spaces.Box(-1, 1, (2,))
ARRAY = spaces.Box(-1e4, 1e4, (2,))
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), ARRAY))
N_STEPS, GAMMA = 3, 0.9


def near(achieved, desired, infos):
    assert len(infos) == len(achieved)
    return -np.abs(np.asarray(achieved) - desired).sum(-1)


def rows(space, count, seed=0, lengths=(1, 2, 5, 4)):
    """Transitions of one environment: each has its number in its observation; some episodes are cut."""
    rng, step, episode = np.random.default_rng(seed), 0, 0
    for number in range(count):
        last = step + 1 == lengths[episode % len(lengths)]
        cut = last and episode % 2 == 1
        observation, following = (
            {
                name: np.array([[1000 * place + (number if name == "desired_goal" else at), seed]], np.float32)
                for place, name in enumerate(sorted(GOALS.spaces))
            }
            for at in (number, number + 0.5)
        )
        if space is ARRAY:
            observation, following = observation["achieved_goal"], following["achieved_goal"]
        told = [{"TimeLimit.truncated": cut}]
        yield observation, following, rng.random((1, 2), np.float32), rng.random(1), np.array([last]), told
        step, episode = (0, episode + 1) if last else (step + 1, episode)


def id_of(observation) -> tuple[float, ...]:
    return tuple(np.ravel(observation["achieved_goal"] if isinstance(observation, dict) else observation).tolist())


def table(samples) -> dict:
    """What a buffer says of each transition: number -> everything else."""
    found = {}
    dictionary = isinstance(samples.observations, dict)
    for i in range(len(samples.rewards)):
        now, then = (
            {key: each[i].numpy() for key, each in part.items()} if dictionary else part[i].numpy()
            for part in (samples.observations, samples.next_observations)
        )
        discount = [] if getattr(samples, "discounts", None) is None else samples.discounts[i].tolist()
        numbers = [*samples.actions[i].tolist(), *samples.rewards[i].tolist(), *samples.dones[i].tolist(), *discount]
        flat = np.concatenate([np.ravel(each) for each in (then.values() if dictionary else [then])])
        found[id_of(now)] = np.concatenate((numbers, flat))
    return found


@pytest.mark.parametrize("capacity", [200, 30], ids=["room", "overwritten"])
def test_n_step_returns_are_those_of_stable_baselines3(capacity) -> None:
    original = NStepReplayBuffer(capacity, ARRAY, ACTION, "cpu", 1, n_steps=N_STEPS, gamma=GAMMA)
    shared = SharedReplayBuffer(capacity, ARRAY, ACTION, "cpu", 1, n_steps=N_STEPS, gamma=GAMMA, seed=1)
    for row in rows(ARRAY, 80):
        original.add(*row)
        shared.add(*row)
    theirs = table(original._get_samples(np.arange(original.size())))
    ours = table(shared.sample(3000))
    assert ours.keys() <= theirs.keys() and len(theirs) - len(ours) < N_STEPS + 1
    for number, found in ours.items():
        np.testing.assert_allclose(found, theirs[number], rtol=1e-6)


def test_dict_observations_are_those_of_stable_baselines3_and_may_have_n_steps() -> None:
    original = DictReplayBuffer(100, GOALS, ACTION, "cpu", 1)
    shared = SharedReplayBuffer(100, GOALS, ACTION, "cpu", 1)
    n_step = SharedReplayBuffer(100, GOALS, ACTION, "cpu", 1, n_steps=N_STEPS, gamma=GAMMA)
    arrays = SharedReplayBuffer(100, ARRAY, ACTION, "cpu", 1, n_steps=N_STEPS, gamma=GAMMA)
    for row, flat in zip(rows(GOALS, 60), rows(ARRAY, 60), strict=True):
        for each in (original, shared, n_step):
            each.add(*row)
        arrays.add(*flat)
    theirs, ours = table(original.sample(3000)), table(shared.sample(3000))
    assert ours.keys() == theirs.keys() and len(ours) == 60
    for number, found in ours.items():
        np.testing.assert_array_equal(found, theirs[number])
    of_dicts, of_arrays = table(n_step.sample(3000)), table(arrays.sample(3000))
    assert of_dicts.keys() == of_arrays.keys()
    for number, found in of_dicts.items():  # actions, reward, done, discount; then the parts of what follows
        np.testing.assert_array_equal(found[:5], of_arrays[number][:5])


@pytest.mark.parametrize("strategy", ["future", pytest.param("final", marks=pytest.mark.runs)])
def test_goals_in_hindsight_are_those_of_stable_baselines3(strategy) -> None:
    env = SimpleNamespace(env_method=lambda name, *given, indices: [near(*given)], num_envs=1)
    original = HerReplayBuffer(200, GOALS, ACTION, env, "cpu", 1, goal_selection_strategy=strategy)
    shared = SharedReplayBuffer(200, GOALS, ACTION, "cpu", 1, seed=2, hindsight=Hindsight(near, 8, 4, strategy))
    for row in rows(GOALS, 50):
        original.add(*row)
        shared.add(*row)
    goals, shares = [], []
    for buffer in (original, shared):
        of_each, new = defaultdict(set), 0
        for _ in range(30):
            samples = buffer.sample(100)
            for i in range(100):
                now, then = ({key: each[i].numpy() for key, each in part.items()}
                             for part in (samples.observations, samples.next_observations))  # fmt: skip
                goal, own = tuple(now["desired_goal"].tolist()), now["achieved_goal"][0] + 1000
                of_each[id_of(now)].add(goal)
                assert goal == tuple(then["desired_goal"].tolist())
                if goal[0] != own:
                    new += 1
                    reward = near(then["achieved_goal"][None], now["desired_goal"][None], [{}])
                    assert samples.rewards[i].item() == pytest.approx(reward[0])
        goals.append(of_each)
        shares.append(new)
    assert goals[0] == goals[1], "the same transitions, and the same goals for each"
    assert shares[0] == shares[1] == 30 * 80


class Reach(gymnasium.Env):
    """Go to a goal on a line, in 10 steps."""

    observation_space = spaces.Dict({name: spaces.Box(-5, 5, (1,)) for name in GOALS.spaces})
    action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = np.zeros(1, np.float32), 0
        self.goal = self.np_random.uniform(-3, 3, 1).astype(np.float32)
        return self.seen(), {}

    def step(self, action):
        self.at, self.steps = np.clip(self.at + action, -5, 5).astype(np.float32), self.steps + 1
        reward = float(self.compute_reward(self.at[None], self.goal[None], [{}])[0])
        return self.seen(), reward, False, self.steps == 10, {"TimeLimit.truncated": self.steps == 10}

    def seen(self):
        return {"observation": self.at.copy(), "achieved_goal": self.at.copy(), "desired_goal": self.goal.copy()}

    def compute_reward(self, achieved, desired, infos):
        return -(np.abs(achieved - desired).sum(-1) > 0.3).astype(np.float32)


@pytest.mark.runs
def test_it_is_used_by_stable_baselines3s_own_loops() -> None:
    env = Reach()
    hindsight = {"hindsight": Hindsight(env.compute_reward, max_episode_length=10)}
    SAC("MultiInputPolicy", env, learning_starts=30, batch_size=16, buffer_size=500, device="cpu",
        policy_kwargs={"net_arch": [16]}, replay_buffer_class=SharedReplayBuffer,
        replay_buffer_kwargs=hindsight).learn(60)  # fmt: skip
    DQN("MlpPolicy", "CartPole-v1", learning_starts=30, batch_size=16, buffer_size=500, device="cpu",
        policy_kwargs={"net_arch": [16]}, replay_buffer_class=SharedReplayBuffer,
        replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99}).learn(60)  # fmt: skip


def test_another_process_adds_rows_that_know_their_episodes() -> None:
    made = SharedReplayBuffer(100, ARRAY, ACTION, "cpu", 1, name="sb3-n-step", n_steps=N_STEPS, gamma=GAMMA)
    actor = SharedReplayBuffer(100, ARRAY, ACTION, "cpu", 1, name="sb3-n-step", attach=True)
    for row, other in zip(rows(ARRAY, 24), rows(ARRAY, 24, seed=1), strict=True):
        made.add(*row)
        actor.add(*other)
    seen = table(made.sample(2000))
    assert {number[1] for number in seen} == {0.0, 1.0}
    assert all(found[-1] == number[1] for number, found in seen.items()), "no return goes on in the other's episode"
    SharedReplayBuffer(100, ARRAY, ACTION, "cpu", 1, name="sb3-plain")
    plain = SharedReplayBuffer(100, ARRAY, ACTION, "cpu", 1, name="sb3-plain-2")
    with pytest.raises(SpecMismatch, match="holds over as None"):
        SharedReplayBuffer(100, ARRAY, ACTION, "cpu", 1, name="sb3-plain-2", attach=True, n_steps=2)
    assert plain.size() == 0


@pytest.mark.parametrize(("space", "more", "said"), [
    (ARRAY, {"hindsight": Hindsight(near, 5)}, "expected a Dict with observation, achieved_goal and desired_goal"),
    (GOALS, {"hindsight": Hindsight(near, 5), "n_steps": 2}, "take one of the two"),
    (ARRAY, {"n_steps": 0}, "expected n_steps >= 1"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(space, more, said) -> None:
    with pytest.raises(ValueError, match=said):
        SharedReplayBuffer(100, space, ACTION, "cpu", 1, **more)
    with pytest.raises(ValueError, match="expected 'future' or 'final'"):
        Hindsight(near, 5, goal_selection_strategy="episode")
