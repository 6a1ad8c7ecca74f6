"""A breach of an environment's interface is told in its author's words: the part, what it was, what was expected."""

from __future__ import annotations

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces

from jurybox.training.environments.gymnasium_env import GymEnvs
from jurybox.training.run_folder import audited
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.spaces import ContractBroken
from jurybox.training.trainings.marl import MarlTraining
from jurybox.training.trainings.marl import plan as marl_plan

RIGHT = ({"a": np.zeros(2, np.float32), "b": 1}, 1.0, False, False, {})


class Says(gymnasium.Env):
    observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
    action_space = spaces.Discrete(2)
    begins, steps = (RIGHT[0], {}), RIGHT

    def reset(self, *, seed=None, options=None):
        if isinstance(self.begins, Exception):
            raise self.begins
        return self.begins

    def step(self, action):
        if isinstance(self.steps, Exception):
            raise self.steps
        return self.steps


def said(number, value):
    return tuple(value if place == number else each for place, each in enumerate(RIGHT))


OBSERVED = [
    ({"a": np.zeros(2)}, r"an observation has no 'b': got \['a'\], expected the parts of Dict"),
    (np.zeros(2), "an observation has no 'a': got a ndarray"),
    (None, "an observation has no 'a': got a NoneType"),
    ({"a": np.zeros(3), "b": 0}, r"an observation\['a'\] has the shape \(3,\): expected float32 of shape \(2,\)"),
    ({"a": np.zeros(2), "b": 3}, r"an observation\['b'\] holds 3, expected 0 to 2"),
    ({"a": np.zeros(2), "b": 0.5}, r"an observation\['b'\] holds 0.5: expected int64 of shape \(\)"),
    ({"a": "left", "b": 0}, r"an observation\['a'\] is a str, 'left': expected float32"),
]


@pytest.mark.parametrize(
    ("begins", "told"),
    [
        (RIGHT[0], r"reset returned a dict, .*: expected \(observation, info\)"),
        (np.zeros(2), r"reset returned a ndarray.*Gym's old interface needs a wrapper"),
        ((RIGHT[0], None), r"reset returned a tuple.*info being a dict"),
        (
            ModuleNotFoundError("No module named 'box3d'"),
            "the environment's reset raised ModuleNotFoundError: No module",
        ),
        *(((observation, {}), told) for observation, told in OBSERVED),
    ],
)
def test_a_wrong_reset(monkeypatch, begins, told) -> None:
    monkeypatch.setattr(Says, "begins", begins)
    with pytest.raises(ContractBroken, match=told):
        GymEnvs(1, f"{__name__}:Says", {}, clips=True).begin(0, 0)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (RIGHT[:4], r"step returned 4 values: expected \(observation, reward, terminated, truncated, info\); .*old"),
        (None, "step returned a NoneType, None"),
        (said(1, [1.0]), r"the reward is a list, \[1.0\]: expected one number"),
        (said(1, np.ones(1)), r"the reward is a ndarray, array\(\[1.\]\): expected one number"),
        (said(1, None), "the reward is a NoneType, None: expected one number"),
        (said(2, "yes"), "terminated is a str, 'yes': expected True or False"),
        (said(3, np.array([True])), "truncated is a ndarray"),
        (said(4, None), "the info of a step is a NoneType, None: expected a dict"),
        (ImportError("no driver"), "the environment's step raised ImportError: no driver"),
        *((said(0, observation), told) for observation, told in OBSERVED),
    ],
)
def test_a_wrong_step(monkeypatch, steps, told) -> None:
    envs = GymEnvs(1, f"{__name__}:Says", {}, clips=True)
    envs.begin(0, 0)
    monkeypatch.setattr(Says, "steps", steps)
    with pytest.raises(ContractBroken, match=told):
        envs.step(np.array([1]))


def test_numbers_of_every_kind_are_rewards(monkeypatch) -> None:
    envs = GymEnvs(1, f"{__name__}:Says", {}, clips=True)
    envs.begin(0, 0)
    for reward in (1, 1.0, True, np.float32(1), np.int8(1), np.array(1.0)):
        monkeypatch.setattr(Says, "steps", said(1, reward))
        (result,) = envs.step(np.array([1])).results
        assert result[1:4] == ([1.0], [False], [False])


@pytest.mark.parametrize(
    ("audit", "told"),
    [
        (0.5, r'info\["audit"\] is a float, 0.5: expected numbers by name'),
        ({"other": None}, r"info\[\"audit\"\]\['other'\] is a NoneType, None: expected one number"),
        ({"other": [1.0]}, "is a list"),
    ],
)
def test_a_wrong_audit(audit, told) -> None:
    with pytest.raises(ContractBroken, match=told):
        audited({"audit": audit})
    assert audited({"audit": {"other": np.float32(0.5)}}) == {"audit_other": 0.5} and audited({}) == {}


class Named(pettingzoo.ParallelEnv):
    metadata = {"name": "named"}

    def __init__(self, names):
        self.possible_agents = [7 if name == "seven" else name for name in names]

    def observation_space(self, agent):
        return spaces.Box(-1, 1, (2,))

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, np.zeros(2, np.float32)), {agent: {} for agent in self.agents}

    def step(self, actions):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["seven", "", "a/b", "a+b", "a*", "long" * 20])
def test_an_agents_name_that_can_name_no_file_is_refused_before_the_start(name) -> None:
    settings = MarlTraining(env=f"{__name__}:Named", env_args={"names": ["agent_0", name]})
    with pytest.raises(ConfigError, match="calls an agent a (str|int), .*: expected text of 1 to 60 characters"):
        marl_plan(settings)
