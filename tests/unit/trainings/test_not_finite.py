"""What is not finite as float32 ends a training with a sentence, in all of them, and is never published or the best."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import gymnasium
import numpy as np
import pettingzoo
import pytest
import torch
from gymnasium import spaces
from tests.integration.marl.test_marl_training import SMALL as MARL
from tests.unit.runtime import toys
from tests.unit.studies.hockey.hockey_runs import settings as hockey_settings
from tests.unit.studies.photo.test_photo_resume import SMALL as PHOTO
from tests.unit.studies.photo.test_photo_resume import trained as train_photo
from tests.unit.studies.workflow.test_rollouts import ORDER, Always

from jurybox.protocol.errors import Refused
from jurybox.studies.hockey import HockeyGame
from jurybox.studies.hockey import train as hockey
from jurybox.studies.workflow.cage import CageVectorEnv
from jurybox.studies.workflow.rollouts import play
from jurybox.training.algorithms.registry import ALGORITHMS
from jurybox.training.checkpoints import Checkpoints, read_state
from jurybox.training.roles.learner import OnPolicyLearner
from jurybox.training.runtime.role_context import Diverged
from jurybox.training.runtime.run import run
from jurybox.training.spaces import ContractBroken
from jurybox.training.trainings import gym, marl

WRONG = [float("nan"), float("inf"), 1e39]


def serially(plan, folder):
    run(plan, folder, toys.Rows(), serial=True)


class Wrong(gymnasium.Env):
    """Its fifth step gives a wrong reward or observation."""

    action_space = spaces.Discrete(2)

    def __init__(self, part="reward", value="nan", dtype="float64"):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.dtype(dtype).type)
        self.part, self.value, self.dtype = part, float(value), dtype

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.see("nothing"), {}

    def see(self, wrong):
        value = self.value if wrong == "observation" else 0.5
        with np.errstate(over="ignore"):
            return np.array([0.0, value]).astype(self.dtype)

    def step(self, action):
        self.t += 1
        wrong = self.part if self.t == 5 else "nothing"
        return self.see(wrong), self.value if wrong == "reward" else 1.0, False, self.t == 10, {}


class WrongWorld(pettingzoo.ParallelEnv):
    """The same for two agents."""

    metadata = {"name": "wrong"}

    def __init__(self, **given):
        self.possible_agents = ["a", "b"]
        self.one = Wrong(**given)

    def observation_space(self, agent):
        return self.one.observation_space

    def action_space(self, agent):
        return self.one.action_space

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        seen, _ = self.one.reset()
        return dict.fromkeys(self.agents, seen), {agent: {} for agent in self.agents}

    def step(self, actions):
        told = self.one.step(0)
        found = [dict.fromkeys(self.agents, each) for each in told[:4]]
        infos = {agent: {} for agent in self.agents}
        self.agents = [] if told[3] else self.agents
        return (*found, infos)


def small_gym(algorithm, **more):
    own = {"n_steps": 8, "n_epochs": 1} if algorithm == "ppo" else {"learning_starts": 4, "buffer_size": 100}
    small = {"steps": 60, "batch_size": 4, "hidden": (8,), "evaluation_episodes": 1, "evaluate_every": 10}
    return gym.GymTraining.checked({**small, **own, "algorithm": algorithm, **more})


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize(
    ("part", "dtype", "told"),
    [
        ("reward", "float64", "the reward is"),
        ("observation", "float32", "an observation holds"),
        ("observation", "float64", "an observation holds"),
    ],
)
def test_a_gym_environments_reward_or_observation(tmp_path, part, dtype, told, value) -> None:
    env = {"env": f"{__name__}:Wrong", "env_args": {"part": part, "value": str(value), "dtype": dtype}}
    with pytest.raises(ContractBroken, match=f"{told} .*(nan|inf|1e.39), which is not finite as float32"):
        serially(gym.plan(small_gym("ppo", **env)), tmp_path)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize(
    ("part", "told"), [("reward", "the reward of a is"), ("observation", "observation of a holds")]
)
@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_a_world_of_several_agents(tmp_path, algorithm, part, told, value) -> None:
    dtype = "float64" if algorithm == "dqn" else "float32"
    small = {name: MARL[name] for name in ("steps", "hidden", "evaluation_episodes", "log_every")}
    small |= {"batch_size": 8, "learning_starts": 20} if algorithm == "dqn" else {"ppo": {"n_steps": 20}}
    world = (f"{__name__}:WrongWorld", {"part": part, "value": str(value), "dtype": dtype})
    with pytest.raises(ValueError, match=f"{told} .*not finite as float32"):
        serially(marl.plan(marl.MarlTraining(**small, algorithm=algorithm, env=world[0], env_args=world[1])), tmp_path)


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("part", ["reward", "observation"])
def test_a_game_of_hockey(tmp_path, monkeypatch, part, value) -> None:
    step = HockeyGame.step

    def wrong(self, actions):
        turn = step(self, actions)
        if part == "reward":
            turn.infos[0]["reward_puck_direction"] = value
        else:
            turn = turn._replace(observations=np.full_like(turn.observations, np.nan if value != value else np.inf))
        return turn

    monkeypatch.setattr(HockeyGame, "step", wrong)
    with pytest.raises(ContractBroken, match=f"{'the reward' if part == 'reward' else 'an observation'} is"):
        serially(hockey.plan(hockey_settings(steps=400), tmp_path), tmp_path)


@pytest.mark.parametrize("value", WRONG)
def test_a_network_to_defend(value) -> None:
    class Paid(CageVectorEnv):
        def step(self, actions):
            observation, rewards, *rest = super().step(actions)
            return observation, rewards * value, *rest

    with pytest.raises(ContractBroken, match="a reward is"):
        play(Paid(2, episode_length=5, autoreset_mode="Disabled"), Always(143), ORDER, steps=5, weight=1.0)


def test_a_photo_editor(tmp_path, monkeypatch) -> None:
    from jurybox.studies.photo.environment.photo_edit import PhotoEdit

    step = PhotoEdit.step

    def paid(self, action):
        observation, _, *rest = step(self, action)
        return observation, float("nan"), *rest

    monkeypatch.setattr(PhotoEdit, "step", paid)
    with pytest.raises(ContractBroken, match="a reward is nan"):
        train_photo(tmp_path, PHOTO)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_weights_of_a_learner_that_diverged_are_not_published_and_never_the_best(tmp_path, algorithm) -> None:
    numbers = {"env": "Pendulum-v1", "max_episode_steps": 10} if algorithm in ("td3", "sac") else {}
    with pytest.raises((Diverged, Refused), match="learner has diverged|holds NaN or infinity"):
        serially(gym.plan(small_gym(algorithm, learning_rate=1e20, **numbers).changed(steps=2000)), tmp_path)
    for place in (tmp_path / "checkpoints").glob("*/weights-policy.state"):
        assert all(np.isfinite(each).all() for each in read_state(place)["state"].values())


def test_a_loss_that_is_not_finite_ends_a_plan_of_ones_own(tmp_path, monkeypatch) -> None:
    step = toys.Summer.step

    def diverges(self):
        step(self)
        if self.context.own_steps == 20:
            self.context.metrics(some_loss=float("inf"))

    monkeypatch.setattr(toys.Summer, "step", diverges)
    with pytest.raises(Diverged, match="some_loss is inf: learner has diverged. Lower its learning_rate"):
        serially(toys.plan(steps=200), tmp_path)


def test_weights_that_are_not_finite_end_a_plan_of_ones_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(toys.Summer, "publication", lambda self: ({"w": self.w + (np.nan if self.w[0] else 0)}, None))
    with pytest.raises(Refused, match="^learner published nothing on 'policy': tensor 'w' holds NaN or infinity"):
        serially(toys.plan(steps=200), tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").best() is None


@pytest.mark.parametrize("serial", [True, pytest.param(False, marks=pytest.mark.runs)])
def test_weights_that_are_not_finite_are_told_with_their_learner(tmp_path, serial) -> None:
    """Of two learners with the same network."""
    small = {name: MARL[name] for name in ("hidden", "evaluation_episodes", "log_every")}
    planned = marl.plan(marl.MarlTraining(**small, steps=40, ppo={"n_steps": 20}))
    roles = [
        replace(each, make=f"{__name__}:SpoiltLearner") if each.name == "learner-agent_1" else each
        for each in planned.roles
    ]
    planned = replace(planned, roles=tuple(roles), timeouts=replace(planned.timeouts, failures=1))
    said = r"learner-agent_1 published nothing on 'agent_1': tensor '[\w.]+' holds NaN or infinity"
    if serial:
        with pytest.raises(Refused, match=said):
            serially(planned, tmp_path)
    else:
        assert re.search(said, run(planned, tmp_path, toys.Rows()).text)


class SpoiltLearner(OnPolicyLearner):
    """Its weights are not finite after its first step."""

    def step(self):
        super().step()
        with torch.no_grad():
            next(self.algorithm.acting.parameters()).fill_(np.nan)


def test_losses_of_a_search_are_checked(monkeypatch) -> None:
    from jurybox.studies.workflow.trainer import WorkflowTrainer
    from jurybox.training.algorithms.base import Update

    learner = SimpleNamespace(update=lambda rollout, progress: Update({"value_loss": float("nan")}))
    it = SimpleNamespace(updates=0, episodes=0, settings=SimpleNamespace(total_episodes=1), learner=learner)
    with pytest.raises(Diverged, match="value_loss is nan"):
        WorkflowTrainer._learn(it, SimpleNamespace(valid=np.ones(1, bool)))
