"""A policy of Stable-Baselines3 that a plan trained is played, exported and served as its model predicts."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import stable_baselines3
import torch
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize
from tests.unit.runtime.toys import Rows

from jurybox.training import policies
from jurybox.training.roles.sb3_policy import ActingPolicy, CannotAct
from jurybox.training.runtime.run import run
from jurybox.training.spaces import as_action, named
from jurybox.training.trainings import sb3

HERE = __name__
OBSERVATIONS = {
    "numbers": spaces.Box(-3, 3, (3,), np.float64),
    "category": spaces.Discrete(3),
    "categories": spaces.MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(4),
    "bytes": spaces.Box(0, 255, (5,), np.uint8),
    "picture": spaces.Box(0, 255, (40, 44, 3), np.uint8),
    "channels": spaces.Box(0, 255, (1, 40, 44), np.uint8),
    "parts": spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(-1, 1, (2,))}),
}
ACTIONS = {
    "one": spaces.Discrete(3),
    "several": spaces.MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(3),
    "box": spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([1.0, 5.0], np.float32)),
    "high": spaces.Box(-1, np.array([[1.0, 2.0]], np.float32), (1, 2)),
}


class World(gymnasium.Env):
    """Draws observations; an episode is four steps, whose return counts right shapes of actions."""

    def __init__(self, observation="numbers", action="one", render_mode=None):
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self.observation_space.seed(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 4
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.sample(), float(self.action_space.contains(action)), self.left == 0, False, {}


gymnasium.register("JuryboxWorld-v0", f"{HERE}:World")


def model(seed, kind="PPO", observation="numbers", action="one", normalize=False, stack=0, processes=False, **more):
    told = {"observation": observation, "action": action}
    make = SubprocVecEnv if processes else DummyVecEnv
    n, how = 2 if kind in ("PPO", "A2C") else 1, {"start_method": "fork"} if processes else None
    env = make_vec_env("JuryboxWorld-v0", n, env_kwargs=told, vec_env_cls=make, vec_env_kwargs=how)
    if normalize:
        env = VecNormalize(env)
    if stack:
        env = VecFrameStack(env, stack)
    on = {"n_steps": 8} if kind in ("PPO", "A2C") else {"learning_starts": 4, "buffer_size": 50}
    batch = {"A2C": {}, "PPO": {"batch_size": 8, "n_epochs": 1}}.get(kind, {"batch_size": 8})
    first = "Cnn" if observation in ("picture", "channels") else "MultiInput" if observation == "parts" else "Mlp"
    own = {"net_arch": [8]}
    return getattr(stable_baselines3, kind)(
        f"{first}Policy", env, policy_kwargs=own, seed=seed, device="cpu", **on, **batch, **more
    )


def trained(folder, steps=32, **arguments):
    run(sb3.plan(f"{HERE}:model", steps, arguments), folder, Rows(), serial=True)
    return policies.Policy(policies.choose(folder))


def predicted(policy, arguments, observations):
    """What the model itself predicts with the policy's weights."""
    made = model(0, **arguments)
    state = policy.served.module.state_dict()
    made.policy.load_state_dict({name[7:]: each for name, each in state.items() if name.startswith("policy.")})
    wrapper = made.get_vec_normalize_env()
    if wrapper is not None:
        wrapper.obs_rms.mean, wrapper.obs_rms.var = state["mean_0"].numpy(), state["var_0"].numpy()
        observations = [wrapper.normalize_obs(each) for each in observations]
    found = [made.predict(each, deterministic=True)[0] for each in observations]
    made.env.close()
    return found


ON_POLICY = [("PPO", each, action) for each, action in zip(OBSERVATIONS, [*ACTIONS] * 2, strict=False)]
OFF_POLICY = [("SAC", "numbers", "box"), ("TD3", "parts", "high"), ("DQN", "parts", "one")]
# Whose policies are of the same classes.
MORE = [("A2C", "numbers", "box"), ("DDPG", "numbers", "box"), ("DQN", "bytes", "one")]
# Whose observations and actions others in the list have.
MORE += [("PPO", "bytes", "high"), ("PPO", "channels", "several"), ("PPO", "parts", "bits")]
ON_POLICY = [each for each in ON_POLICY if each not in MORE]


@pytest.mark.parametrize(
    ("kind", "observation", "action"),
    [*ON_POLICY, *OFF_POLICY, *(pytest.param(*each, marks=pytest.mark.runs) for each in MORE)],
)
def test_it_acts_as_its_model_predicts_here_and_exported(tmp_path, kind, observation, action):
    arguments = {"kind": kind, "observation": observation, "action": action}
    policy = trained(tmp_path / "run", **arguments)
    space = OBSERVATIONS[observation]
    given = [space.sample() for _ in range(20)]
    wanted = predicted(policy, arguments, given)
    program = torch.export.load(policies.export(policy, tmp_path / "it.pt2", tmp_path / "run")[0]).module()
    for each, expected in zip(given, wanted, strict=True):
        found = as_action(policy.act(each), ACTIONS[action])
        assert np.shape(found) == np.shape(expected)
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
        parts = named(each)
        rows = [torch.from_numpy(np.asarray(parts[name], spec.dtype))[None] for name, spec in policy.inputs.items()]
        acted = as_action(program(*rows)[0].numpy(), ACTIONS[action])
        np.testing.assert_allclose(acted, expected, atol=1e-6, rtol=0)
    (episode,) = policies.play(policy, 1)
    assert (episode.length, episode.total) == (4, 4.0)


@pytest.mark.parametrize("processes", [False, True])
def test_statistics_of_observations_are_part_of_the_weights(tmp_path, processes):
    arguments = {"normalize": True, "processes": processes}
    policy = trained(tmp_path, 64, **arguments)
    state = policy.served.module.state_dict()
    assert state["count_0"] > 60 and not np.allclose(state["mean_0"], 0)
    given = [OBSERVATIONS["numbers"].sample() for _ in range(20)]
    logits = policy.served.module(torch.from_numpy(np.stack(given)))
    made = model(0, **{**arguments, "processes": False})
    made.policy.load_state_dict({name[7:]: each for name, each in state.items() if name.startswith("policy.")})
    rms = made.get_vec_normalize_env().obs_rms
    rms.mean, rms.var = state["mean_0"].numpy(), state["var_0"].numpy()
    seen = made.get_vec_normalize_env().normalize_obs(np.stack(given))
    wanted = made.policy.get_distribution(torch.from_numpy(seen).float()).distribution.logits
    np.testing.assert_allclose(logits.detach().log_softmax(-1), wanted.detach(), atol=1e-6)


def test_who_takes_over_from_a_killed_trainer_goes_on_with_its_statistics():
    one, other = model(0, normalize=True), model(1, normalize=True)
    one.learn(32)
    published = ActingPolicy(one)
    published.remember_statistics()
    taken = ActingPolicy(other)
    taken.load_state_dict(published.state_dict())
    taken.tell_statistics()
    for name in ("mean", "var", "count"):
        ours, theirs = (getattr(each.get_vec_normalize_env().obs_rms, name) for each in (other, one))
        np.testing.assert_array_equal(ours, theirs)


def test_what_cannot_be_played_is_trained_and_said(tmp_path):
    planned = sb3.plan(f"{HERE}:model", 32, {"stack": 2})
    assert planned.policy is None
    run(planned, tmp_path, Rows(), serial=True)
    said = (tmp_path / "logs" / "run.log").read_text()
    assert "cannot be played, served or exported: VecFrameStack is between environment and model" in said
    with pytest.raises(policies.PolicyError, match="no policy in"):
        policies.choose(tmp_path)


def test_an_exported_file_names_its_function_and_is_not_trusted(tmp_path):
    policy = trained(tmp_path / "run")
    weights = policies.export(policy, tmp_path / "it.pt2", tmp_path / "run")[1]
    with pytest.raises(policies.PolicyError, match="not code of Jurybox's policies.*--trust"):
        policies.Policy(policies.choose(weights))
    again = policies.Policy(policies.choose(weights), trust=True)
    given = OBSERVATIONS["numbers"].sample()
    assert again.act(given) == policy.act(given)


def in_processes_only(seed):
    env = SubprocVecEnv([World], start_method="fork")
    return stable_baselines3.PPO("MlpPolicy", env, n_steps=8, batch_size=8, seed=seed, device="cpu")


def alone(seed):
    return stable_baselines3.PPO("MlpPolicy", DummyVecEnv([World]), n_steps=8, batch_size=8, seed=seed, device="cpu")


def test_an_environment_that_is_not_registered_is_the_models_first():
    made = sb3.played(f"{HERE}:alone")
    assert isinstance(made.unwrapped, World)
    with pytest.raises(ValueError, match="in processes and not registered: gymnasium.register"):
        sb3.played(f"{HERE}:in_processes_only")


class Contrary(stable_baselines3.ppo.MlpPolicy):
    def _predict(self, observation, deterministic=False):
        return 2 - super()._predict(observation, deterministic)


def test_a_policy_that_chooses_in_its_own_way_is_not_taken_for_another():
    made = stable_baselines3.PPO(Contrary, DummyVecEnv([World]), n_steps=8, batch_size=8, device="cpu")
    with pytest.raises(CannotAct, match="Contrary chooses actions in its own way .*_predict"):
        ActingPolicy(made)
