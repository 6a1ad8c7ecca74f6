"""`jurybox check env` says what a training would stumble over."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from pettingzoo.utils.conversions import parallel_to_aec
from typer.testing import CliRunner

from jurybox.studies.treasure import TreasureHunt
from jurybox.training.check_command import check as command
from jurybox.training.trainings.environment_check import Checked, check

HERE = f"{__name__}:"
RESTS = threading.Event()


class World(gymnasium.Env):
    """Ends after ten steps; what it does wrong is said by its argument."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self._kept = wrong, np.zeros(2, np.float32)
        if wrong == "spaces":
            self.action_space = spaces.Text(3)
        if wrong == "constructor":
            raise ValueError("no licence")

    def _observation(self):
        if self.wrong == "same memory":
            return self._kept
        if self.wrong == "outside":
            return np.ones(3, np.float32)
        if self.wrong == "beyond" and self._steps:
            return np.full(2, 7, np.float32)
        if self.wrong == "float64" and self._steps:
            return self.np_random.uniform(-1, 1, 2)
        source = np.random.default_rng() if self.wrong == "seeds" else self.np_random
        return source.uniform(-1, 1, 2).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        if self.wrong == "reset":
            return self._observation()
        return self._observation(), {}

    def episode_state(self):
        if self.wrong == "state":
            return {"steps": self}
        return {"steps": self._steps, "random": self.np_random.bit_generator.state}

    def restore_episode(self, state):
        self._steps = state["steps"]
        if self.wrong != "restores":
            self.np_random.bit_generator.state = state["random"]

    def step(self, action):
        self._steps += 1
        if self.wrong == "raises" and self._steps == 3:
            raise RuntimeError("the simulator is gone")
        if self.wrong == "exits":
            raise SystemExit(0)
        if self.wrong == "dtype":
            torch.set_default_dtype(torch.float64)
        if self.wrong == "folder":
            os.chdir("/")
        if self.wrong == "thread" and self._steps == 1:
            threading.Thread(target=RESTS.wait, args=(30,), name="of the world", daemon=True).start()
        reward = [1.0] if self.wrong == "reward" else np.nan if self.wrong == "not finite" else 1.0
        return self._observation(), reward, self._steps == 10 and self.wrong != "endless", False, {}


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ("constructor", "wrong", "no licence"),
        ("state", "wrong", "it raised SpecMismatch: .*'steps'"),
        ("restores", "wrong", "an episode goes on otherwise after restore_episode"),
        ("spaces", "wrong", "the action space is Text"),
        ("reset", "wrong", r"expected \(observation, info\)"),
        ("outside", "wrong", "an observation"),
        ("reward", "wrong", "the reward is .*: expected one number"),
        ("not finite", "wrong", "not finite as float32"),
        ("raises", "wrong", r"it raised RuntimeError: the simulator is gone \(test_check_env.py:"),
        ("exits", "wrong", "it raised SystemExit"),
        ("endless", "note", "no episode ended within 200 steps"),
        ("seeds", "note", "two episodes with one seed"),
        ("beyond", "note", r"an observation holds 7.0, which is not in Box\(-1.0, 1.0, \(2,\), float32\)"),
        ("float64", "note", "an observation is float64, the space says float32"),
        ("same memory", "note", "the same memory at every step"),
        ("dtype", "note", "torch's default dtype"),
        ("folder", "note", "the working directory"),
        ("thread", "note", "threads running: of the world"),
    ],
)
def test_each_fault_is_named_and_leaves_nothing_behind(wrong, kind, said) -> None:
    here, dtype = Path.cwd(), torch.get_default_dtype()
    try:
        found = check(HERE + "World", {"wrong": wrong}, steps=200)
    finally:
        RESTS.set()
        RESTS.clear()
    assert any(re.search(said, text) for each, text in ours(found) if each == kind), found.remarks
    assert found.passed == (kind == "note")
    assert (Path.cwd(), torch.get_default_dtype()) == (here, dtype)


def ours(found: Checked) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in found.remarks if not text.startswith("Gymnasium's checker")]


def test_an_environment_without_faults_passes_and_is_described() -> None:
    found = check(HERE + "World", steps=200)
    assert found.passed and found.facts["algorithms"] == "ppo, dqn, iqn"
    assert found.facts["observation"].startswith("observation float32 [2]")
    assert "20 episodes of 10 steps" in found.facts["played"]
    assert not ours(found)


def test_what_gymnasiums_checker_says_is_passed_on() -> None:
    assert any("Gymnasium's checker" in text for _, text in check("Pendulum-v1", steps=10).remarks)


@pytest.mark.parametrize(("env", "status"), [("CartPole-v1", 0), ("NoSuch-v0", 1)])
def test_the_commands_status_says_whether_a_training_can_use_it(env, status) -> None:
    ran = CliRunner().invoke(command, ["env", env, "--steps", "50"])
    assert ran.exit_code == status, ran.output
    assert ("a training can use it" if status == 0 else "it cannot be used") in ran.output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("jurybox.studies.treasure:TreasureHunt", "PettingZoo's worlds are for `jurybox train marl`"),
        (f"{HERE}turns", "PettingZoo's worlds are for `jurybox train marl`"),
        (f"{HERE}vector", "vector environments are for `jurybox train gym --vector`"),
    ],
)
def test_what_another_training_takes_is_pointed_to_it(name, said) -> None:
    result = CliRunner().invoke(command, ["env", name])
    assert result.exit_code == 1 and said in " ".join(result.output.split()), result.output


def turns():
    return parallel_to_aec(TreasureHunt())


def vector():
    return gymnasium.make_vec("CartPole-v1", num_envs=2)


def test_arguments_that_an_environment_does_not_take_are_named_by_the_commands_option() -> None:
    result = CliRunner().invoke(command, ["env", f"{HERE}World", "--set", "licence=3"])
    assert result.exit_code == 1 and "of `jurybox check env` --set NAME=VALUE" in " ".join(result.output.split())
