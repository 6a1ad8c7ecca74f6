"""Every training plays its environments at random before it starts; what is wrong with them is a sentence then."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.unit.trainings.test_places import Counted, CountedWorld

from jurybox.studies.hockey import games
from jurybox.studies.hockey.settings import HockeyTraining
from jurybox.studies.hockey.train import train as train_hockey
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.trainings import gym, marl
from jurybox.training.trainings.marl_run import train as train_marl

HERE = f"{__name__}:"


def spoil(wrong: str, step: int, observation, reward, terminated):
    """What a step returns that is wrong from the third step on."""
    if step >= 3:
        if wrong == "raises":
            raise RuntimeError("the simulator is gone")
        if wrong == "exits":
            raise SystemExit(0)
        if wrong == "shape":
            observation = np.zeros(3, np.float32)
        if wrong == "reward":
            reward = np.nan
        if wrong == "flag":
            terminated = "yes"
        if wrong == "folder":
            os.chdir("/")
    return observation, reward, terminated


class Wrong(Counted):
    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def step(self, action):
        observation, reward, terminated, *rest = super().step(action)
        return *spoil(self.wrong, self._steps, observation, reward, terminated), *rest


class WrongWorld(CountedWorld):
    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def step(self, actions):
        observations, rewards, terminated, *rest = super().step(actions)
        told = {agent: spoil(self.wrong, self._steps, observations[agent], rewards[agent], terminated[agent])
                for agent in observations}  # fmt: skip
        return *({agent: each[part] for agent, each in told.items()} for part in range(3)), *rest


def in_gym(folder, wrong, **more):
    small = {"n_steps": 8, "batch_size": 8, "hidden": (4,), "evaluation_episodes": 1, "steps": 16}
    gym.train(gym.GymTraining(env=HERE + "Wrong", env_args={"wrong": wrong}, **small, **more), folder, serial=True)


def in_marl(folder, wrong, **more):
    small = {"ppo": {"n_steps": 8}, "hidden": (4,), "evaluation_episodes": 1, "steps": 16, "log_dir": folder}
    train_marl(marl.MarlTraining(env=HERE + "WrongWorld", env_args={"wrong": wrong}, **small, **more), serial=True)


@pytest.mark.parametrize("train", [in_gym, in_marl])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("shape", r"an observation.* has the shape \(3,\): expected float32 of shape \(1,\)"),
        ("reward", "the reward.* is nan, which is not finite"),
        ("flag", "terminated.* is a str, 'yes': expected True or False"),
        ("raises", r"it raised RuntimeError: the simulator is gone \(test_checked_before.py:\d+\)"),
        ("exits", "it raised SystemExit: 0"),
    ],
)
def test_what_is_wrong_ends_the_training_before_it_starts(tmp_path, train, wrong, said) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)cannot be trained in: .*{said}.*jurybox check env"):
        train(tmp_path / "run", wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("once", [False, True])
def test_it_is_checked_where_it_is_built(tmp_path, once) -> None:
    with pytest.raises(ConfigError, match="Wrong cannot be trained in: the reward is nan"):
        in_gym(tmp_path, "reward", build_once=once)


def test_a_check_can_be_left_out(tmp_path) -> None:
    with pytest.raises(Exception, match="not finite") as raised:
        in_gym(tmp_path, "reward", check_steps=0)
    assert not isinstance(raised.value, ConfigError) and (tmp_path / "settings.json").exists()


def test_a_check_of_few_steps_sees_no_more_than_those(tmp_path) -> None:
    with pytest.raises(Exception, match="not finite") as raised:
        in_gym(tmp_path, "reward", check_steps=2)
    assert not isinstance(raised.value, ConfigError)


def test_what_the_check_changes_in_the_process_is_set_back(tmp_path) -> None:
    before, seen = Path.cwd(), []
    settings = gym.GymTraining(env=HERE + "Wrong", env_args={"wrong": "folder"}, n_steps=8, batch_size=8)
    with gym.builders(False, 1, tmp_path, serial=True) as built:
        built.check(gym.plan(settings, builders=built), 10)
        seen.append(Path.cwd())
    assert seen == [before]


def test_hockeys_games_are_checked_too(tmp_path, monkeypatch) -> None:
    def step(self, actions):
        raise RuntimeError("the rink has melted")

    monkeypatch.setattr(games.HockeyGames, "step", step)
    with pytest.raises(ConfigError, match=r"it raised RuntimeError: the rink has melted"):
        train_hockey(HockeyTraining(), tmp_path, serial=True)
