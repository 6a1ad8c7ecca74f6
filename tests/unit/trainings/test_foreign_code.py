"""What an environment does to its process: it exits, changes the folder, or leaves threads and processes behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.serving import START

from jurybox.training.roles import evaluation
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.runtime.turns import RoleExited
from jurybox.training.spaces import ContractBroken
from jurybox.training.trainings.gym import GymTraining, train

SMALL = {"n_steps": 8, "batch_size": 4, "n_epochs": 1, "hidden": (8,), "steps": 16, "evaluation_episodes": 1}


class Foreign(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)

    def __init__(self, exits="", goes=""):
        self.exits, self.goes = exits, goes
        self.act("init")

    def act(self, where):
        if self.exits == where:
            sys.exit(0)
        if self.goes:
            os.chdir(self.goes)

    def reset(self, *, seed=None, options=None):
        self.act("reset")
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.act("step")
        self.t += 1
        return np.zeros(2, np.float32), 0.0, False, self.t == 4, {}


def settings(**arguments) -> GymTraining:
    return GymTraining.checked({**SMALL, "env": f"{__name__}:Foreign", "env_args": arguments})


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_that_exits_ends_a_serial_run_with_an_error(tmp_path, where) -> None:
    with pytest.raises(RoleExited, match=r"actor-0 called sys.exit\(0\): expected an exception"):
        train(settings(exits=where).changed(check_steps=0), tmp_path / "run", serial=True)


def test_an_environment_that_exits_where_it_is_made_cannot_be_made(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be made with .*SystemExit: 0"):
        train(settings(exits="init"), tmp_path / "run", serial=True)


def test_an_evaluation_does_not_wait_for_an_episode_that_does_not_end(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "_ENDLESS", 50)
    monkeypatch.setattr(Foreign, "step", lambda self, action: (np.zeros(2, np.float32), 0.0, False, False, {}))
    with pytest.raises(ContractBroken, match="has not ended after 50 steps: set max_episode_steps"):
        train(settings(), tmp_path / "endless", serial=True)
    bounded = settings().changed(max_episode_steps=60)  # longer, and wanted
    assert train(bounded, tmp_path / "bounded", serial=True).evaluation["eval_length"] == 60


def test_an_environment_that_changes_the_folder_does_not_move_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    train(settings(goes=str(tmp_path / "elsewhere")), Path("run"), serial=True)
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "run" / "checkpoints" / "best").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


class Double(Foreign):
    """Computes in torch's default dtype, which it changes."""

    def __init__(self):
        super().__init__()
        torch.set_default_dtype(torch.float64)

    def act(self, where):
        assert where == "init" or torch.zeros(1).dtype == torch.float64


def test_an_environment_has_torchs_defaults_for_itself_in_a_serial_run(tmp_path) -> None:
    s = settings().changed(env=f"{__name__}:Double", env_args={})
    try:
        assert train(s, tmp_path / "run", serial=True).learner_steps == 2
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


_LEAVES = """
import multiprocessing, sys, threading, time
from jurybox.training.trainings.training import until_interrupted

def work(console, resources):
    if "thread" in sys.argv:
        threading.Thread(target=time.sleep, args=(3600,)).start()
    if "child" in sys.argv:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,)).start()
    if "fails" in sys.argv:
        raise RuntimeError("told to")
    return "done"

until_interrupted(work, None, message="stopping")
"""


@pytest.mark.parametrize(
    ("what", "status"), [(["thread", "child"], 0), pytest.param(["thread", "fails"], 1, marks=pytest.mark.runs)]
)
def test_what_an_environment_left_does_not_keep_the_process(what, status) -> None:
    # To files, not pipes: the child holds them open.
    with Path(os.devnull).open("w") as nowhere:
        done = subprocess.run([sys.executable, "-c", _LEAVES, *what], stdout=nowhere, stderr=nowhere, timeout=START)
    assert done.returncode == status
