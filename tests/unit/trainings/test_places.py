"""A factory that asks for its place in the run is told it, in each training; no two environments have the same."""

from __future__ import annotations

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium import spaces

from jurybox.training.environments.gymnasium_env import make_environment
from jurybox.training.environments.making import EnvironmentPlace, EnvironmentUnusable, wanted
from jurybox.training.environments.pettingzoo_env import make_world
from jurybox.training.trainings import gym, marl
from jurybox.training.trainings.marl_run import train as train_marl

HERE = f"{__name__}:"
MADE: list[tuple[int, int]] = []


class Counted(gymnasium.Env):
    """Notes where it is made."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, worker_index: int, *, vector_index: int = 7) -> None:
        MADE.append((worker_index, vector_index))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._steps += 1
        return np.zeros(1, np.float32), 1.0, self._steps == 4, False, {}


class CountedWorld(pettingzoo.ParallelEnv):
    """The same for two agents."""

    metadata, render_mode = {"name": "counted"}, None
    possible_agents = ["a", "b"]

    def __init__(self, worker_index: int, vector_index: int) -> None:
        MADE.append((worker_index, vector_index))

    def observation_space(self, agent):
        return Counted.observation_space

    def action_space(self, agent):
        return Counted.action_space

    def reset(self, seed=None, options=None):
        self.agents, self._steps = list(self.possible_agents), 0
        return self._all(np.zeros(1, np.float32)), self._all({})

    def step(self, actions):
        self._steps += 1
        found = (np.zeros(1, np.float32), 1.0, self._steps == 4, False, {})
        told = [self._all(each) for each in found]
        if self._steps == 4:
            self.agents = []
        return tuple(told)

    def _all(self, value):
        return dict.fromkeys(self.possible_agents, value)


@pytest.fixture(autouse=True)
def made():
    MADE.clear()
    return MADE


def test_each_environment_of_a_gym_run_has_a_place_of_its_own(tmp_path) -> None:
    settings = gym.GymTraining(
        env=HERE + "Counted", workers=2, envs=4, steps=64, n_steps=8, batch_size=8, hidden=(4,), evaluation_episodes=2
    )
    gym.train(settings, tmp_path, serial=True)
    assert set(MADE) == {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)}
    assert len(MADE) == len(set(MADE)), "the look at the spaces and the check have one environment, too"


def test_each_world_of_a_marl_run_has_a_place_of_its_own(tmp_path) -> None:
    settings = marl.MarlTraining(
        env=HERE + "CountedWorld", envs=2, steps=40, ppo={"n_steps": 8}, hidden=(4,), evaluation_episodes=2
    ).model_copy(update={"log_dir": tmp_path})
    train_marl(settings, serial=True)
    assert set(MADE) == {(0, 0), (1, 0), (2, 0), (3, 0)} and len(MADE) == 4


def test_only_names_in_the_signature_are_passed_and_the_users_arguments_come_first() -> None:
    place = EnvironmentPlace(3, 1)
    for signature, told in (
        (lambda: 0, {}),
        (lambda **rest: 0, {}),
        (lambda vector_index, **rest: 0, {"vector_index": 1}),
        (lambda worker_index, /: 0, {}),
    ):
        assert wanted(signature, place.keywords) == told
    make_environment(HERE + "Counted", {"vector_index": 9}, place=place)
    make_world(HERE + "CountedWorld", {}, place)
    assert MADE == [(3, 9), (3, 1)]


@pytest.mark.parametrize(("kwargs", "told"), [({}, (2, 5)), ({"vector_index": 8}, (2, 8))])
def test_a_registered_environment_is_told_what_its_registration_leaves_open(kwargs, told) -> None:
    for entry in (Counted, HERE + "Counted"):
        name = f"Counted{len(gymnasium.registry)}-v0"
        gymnasium.register(name, entry, kwargs=kwargs)
        try:
            make_environment(name, {}, place=EnvironmentPlace(2, 5)).close()
        finally:
            del gymnasium.registry[name]
    assert len(MADE) == 2 and set(MADE) == {told}


@pytest.mark.parametrize("make", [make_environment, lambda name: make_world(name, {})], ids=["gymnasium", "pettingzoo"])
def test_both_kinds_say_the_same_of_a_module_that_is_not_there(make) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"'no_such_place:Grid' cannot be made: .*nor on PYTHONPATH"):
        make("no_such_place:Grid")
