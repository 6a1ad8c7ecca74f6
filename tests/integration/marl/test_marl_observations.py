"""`train marl` with observations of several parts, bytes, masks of actions, and actions that are numbers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv

from jurybox.training.environments.gymnasium_env import EnvironmentUnusable
from jurybox.training.environments.pettingzoo_env import AgentView
from jurybox.training.policies import Policy, choose, play
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.spaces import ContractBroken
from jurybox.training.trainings.marl import MarlTraining, plan
from jurybox.training.trainings.marl_run import train

PARTS = spaces.Dict(
    {
        "goal": spaces.Discrete(3, start=1),
        "arm": spaces.Dict({"place": spaces.Box(-9, 9, (2,), np.float64)}),
        "bytes": spaces.Box(0, 255, (5, 4), np.uint8),
    }
)
MASKED = spaces.Dict({"observation": spaces.Box(0, 1, (2,), np.float32), "action_mask": spaces.MultiBinary(4)})


class Various(ParallelEnv):
    """`parts` is rewarded for the action that its goal names, `masked` for any that its mask allows.

    `moves` acts by two numbers, and is rewarded if both are large.
    """

    metadata: ClassVar = {"name": "various", "render_modes": []}
    render_mode = None

    def __init__(self, agents=("parts", "masked", "moves"), forbids=0):
        self.possible_agents, self.agents, self.forbids = list(agents), [], forbids
        self.rng = np.random.default_rng(0)

    def observation_space(self, agent):
        return {"parts": PARTS, "masked": MASKED, "moves": spaces.Tuple([spaces.Box(-1, 1, (1,))])}[agent]

    def action_space(self, agent):
        return {"parts": spaces.Discrete(3), "masked": spaces.Discrete(4), "moves": spaces.Box(-2, 2, (2,))}[agent]

    def reset(self, seed=None, options=None):
        self.rng, self.now, self.agents = np.random.default_rng(seed), 0, list(self.possible_agents)
        return self._observations(), {agent: {} for agent in self.agents}

    def step(self, actions):
        rewards = {}
        for agent, action in actions.items():
            assert self.action_space(agent).contains(np.asarray(action)[()]), (agent, action)
            if agent == "masked":
                assert self.mask[action], "an action that the mask forbids"
            good = {"parts": action == self.goal - 1, "masked": True, "moves": np.min(action) > 0.5}[agent]
            rewards[agent] = float(good)
        self.now += 1
        agents, over = self.agents, self.now == 8
        found = self._observations()
        if over:
            self.agents = []
        flags = dict.fromkeys(agents, False), dict.fromkeys(agents, over)
        return found, rewards, *flags, {agent: {} for agent in agents}

    def _observations(self):
        rng = self.rng
        self.goal, self.mask = int(rng.integers(1, 4)), rng.permutation(4) > self.forbids
        place, picture = rng.uniform(-9, 9, 2), rng.integers(256, size=(5, 4), dtype=np.uint8)
        found = {
            "parts": {"goal": self.goal, "arm": {"place": place}, "bytes": picture},
            "masked": {"observation": np.ones(2, np.float32), "action_mask": self.mask.astype(np.int8)},
            "moves": (np.ones(1, np.float32),),
        }
        return {agent: found[agent] for agent in self.agents}

    def close(self):
        pass


VARIOUS = f"{__name__}:Various"
SMALL = {"env": VARIOUS, "hidden": (16,), "evaluation_episodes": 1, "batch_size": 32, "checkpoint_every": 0}


def trained(out, steps):
    small = {**SMALL, "ppo": {"n_steps": 64, "n_epochs": 5}, "learning_rate": 0.02, "n_stack": 1}
    train(MarlTraining(**small, steps=steps, log_dir=out), serial=True)
    return out


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("various"), 64)


@pytest.mark.runs
def test_policies_learn_from_the_parts_as_the_world_gives_them_and_in_numbers(tmp_path):
    learned = trained(tmp_path, 960)
    for name in ("parts", "masked", "moves"):
        returns = [each.total for each in play(Policy(choose(learned, name=name)), 3)]
        assert np.mean(returns) >= 6, f"{name}: it learned from the goal, among eight random actions 2.7"


@pytest.mark.parametrize("name", ["parts", "masked"])
def test_policies_take_the_parts_as_the_world_gives_them(begun, name):
    policy = Policy(choose(begun, name=name))
    inputs = {part: (spec.dtype, spec.shape) for part, spec in policy.inputs.items()}
    if name == "masked":
        assert inputs == {"observation": ("float32", (2,)), "action_mask": ("bool", (4,))}
        asked = {"observation": np.ones((50, 2), np.float32), "action_mask": np.eye(4, dtype=np.bool_)[[2] * 50]}
        assert set(policy(asked).tolist()) == {2}
    else:
        assert inputs == {"goal": ("int64", ()), "arm.place": ("float64", (2,)), "bytes": ("uint8", (5, 4))}
    episodes = play(policy, 3)
    assert [each.length for each in episodes] == [8, 8, 8]


def test_actions_that_are_numbers_are_played_in_their_unit(begun):
    policy = Policy(choose(begun, name="moves"))
    assert list(policy.inputs) == ["0"] and policy.found.acts.choose == "clip"
    assert play(policy, 1, changes={"others": "random"})[0].length == 8


def test_agents_of_a_replay_get_masks_and_parts_too(tmp_path):
    small = {**SMALL, "env_args": {"agents": ["parts", "masked"], "forbids": 2}, "n_stack": 2, "log_dir": tmp_path}
    outcome = train(MarlTraining(**small, algorithm="dqn", steps=200, learning_starts=50), serial=True)
    assert outcome.learner_steps > 0
    inputs = Policy(choose(tmp_path, name="parts")).inputs
    assert {part: spec.shape for part, spec in inputs.items()} == {
        "goal": (2,),
        "arm.place": (2, 2),
        "bytes": (2, 5, 4),
    }
    with pytest.raises(ConfigError, match="dqn cannot act for moves: .*numbers"):
        plan(MarlTraining(**SMALL, algorithm="dqn"))


def test_what_a_world_does_wrong_is_told_with_the_agents_name(tmp_path):
    view = AgentView("a", MASKED, spaces.Discrete(4), 1)
    seen = {"observation": np.ones(2, np.float32), "action_mask": np.zeros(4, np.int8)}
    with pytest.raises(ContractBroken, match="allows no action"):
        view.add(seen)
    view.add(seen, ended=True)
    with pytest.raises(ContractBroken, match=r"an observation of a has no 'observation'"):
        view.add({"action_mask": seen["action_mask"]})
    with pytest.raises(EnvironmentUnusable, match="a: .*n_stack = 2 makes four dimensions"):
        AgentView("a", spaces.Box(0, 255, (64, 64, 3), np.uint8), spaces.Discrete(2), 2)
    with pytest.raises(EnvironmentUnusable, match="a: .*Text"):
        AgentView("a", spaces.Text(3), spaces.Discrete(2), 1)
