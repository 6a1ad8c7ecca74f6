"""Models of Stable-Baselines3 as trainers: their own loop, resumed without pickles, in any plan."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tests.integration.test_policies import served
from tests.serving import wait_until
from tests.unit.runtime.toys import Rows

from jurybox.client import connect
from jurybox.training.checkpoints import CheckpointError, Checkpoints
from jurybox.training.policies import Policy, choose
from jurybox.training.roles.sb3 import SB3Trainer
from jurybox.training.run_folder import read_metrics
from jurybox.training.runtime.plan import PlanError
from jurybox.training.runtime.run import run
from jurybox.training.spaces import ContractBroken
from jurybox.training.trainings import sb3

HERE = __name__
SMALL = {"net_arch": [8]}


class Parts(gymnasium.Env):
    """An observation of two parts; an episode is eight steps."""

    observation_space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self.seen(), {}

    def seen(self):
        return {"a": self.np_random.uniform(-1, 1, 2).astype(np.float32), "b": int(self.np_random.integers(3))}

    def step(self, action):
        self.left -= 1
        return self.seen(), float(action), self.left == 0, False, {}


def _falling(remaining):
    return 1e-2 * remaining


def ppo(seed, n_steps=16, net_arch=(8,)):
    environments = make_vec_env("CartPole-v1", 2, seed=seed)
    own = {"net_arch": list(net_arch)}
    return PPO(
        "MlpPolicy",
        environments,
        n_steps=n_steps,
        batch_size=16,
        n_epochs=2,
        learning_rate=_falling,
        policy_kwargs=own,
        seed=seed,
        device="cpu",
    )


def dqn(seed):
    return DQN(
        "MultiInputPolicy", DummyVecEnv([Parts]), learning_starts=10, buffer_size=40, batch_size=8, train_freq=4,
        target_update_interval=8, policy_kwargs=dict(SMALL), seed=seed, device="cpu",
    )  # fmt: skip


def sac(seed):
    return SAC(
        "MlpPolicy", make_vec_env("Pendulum-v1", 1, seed=seed), learning_starts=10, buffer_size=40, batch_size=8,
        policy_kwargs=dict(SMALL), seed=seed, device="cpu",
    )  # fmt: skip


def normalised(seed):
    environments = VecNormalize(make_vec_env("CartPole-v1", 2, seed=seed))
    return PPO(
        "MlpPolicy",
        environments,
        n_steps=16,
        batch_size=16,
        n_epochs=1,
        policy_kwargs=dict(SMALL),
        seed=seed,
        device="cpu",
    )


def trained(folder, model, steps, resume=False, step=1, **arguments):
    rows = Rows()
    planned = sb3.plan(f"{HERE}:{model}", steps, arguments, step=step)
    return run(planned, folder, rows, serial=True, resume=resume), rows


def state(folder):
    return Checkpoints(folder / "checkpoints").existing().state("trainer")


def same(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return np.array_equal(one, two)


def test_it_learns_what_the_model_learns_by_itself(tmp_path):
    outcome, _ = trained(tmp_path, "ppo", 128)
    (spec,) = sb3.plan(f"{HERE}:ppo", 128).roles
    seed = Seeds.of(spec)
    alone = ppo(seed)
    alone.set_logger(Logger(None, []))
    alone.learn(128)
    ours, theirs = state(tmp_path)["parameters"]["policy"], alone.policy.state_dict()
    assert all(np.array_equal(ours[name], value.numpy()) for name, value in theirs.items())
    assert outcome.learner_steps == alone.policy.optimizer.state_dict()["state"][0]["step"] == 4 * 2 * 2


class Seeds:
    @staticmethod
    def of(spec):
        """The seed that the role's context derives from the plan's, which is 0."""
        return int(np.random.SeedSequence([0, 0, 1]).generate_state(1, np.uint64)[0] >> 1) % 2**32


@pytest.mark.parametrize(("model", "steps"), [("ppo", 64), ("dqn", 60), ("sac", 30), ("normalised", 64)])
def test_a_checkpoint_has_all_that_the_model_goes_on_with(tmp_path, model, steps):
    trained(tmp_path / "run", model, steps)
    saved = state(tmp_path / "run")
    # Resumed, and stopped before its first step: what is restored is what was saved.
    context = Context(saved)
    role = SB3Trainer(context, globals()[model](3))
    role.restore(saved)
    again = role.save()
    assert same(plain(saved), plain(again))
    role.close()


class Context:
    """As much of a context as restoring needs."""

    name, seed, life = "trainer", 1, 1

    def __init__(self, saved):
        self.own_steps = saved["env_steps"]


def plain(tree):
    if isinstance(tree, dict):
        return {name: plain(each) for name, each in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(each) for each in tree]
    return tree.numpy() if hasattr(tree, "numpy") else tree


def test_a_resumed_run_is_the_same_each_time_and_counts_on(tmp_path):
    found = []
    for name in ("one", "two"):
        trained(tmp_path / name, "dqn", 40)
        outcome, _ = trained(tmp_path / name, "dqn", 80, resume=True)
        assert outcome.env_steps == 80 and outcome.episodes >= 9
        found.append(state(tmp_path / name))
    assert same(*found)


def test_short_rollouts_are_put_together(tmp_path):
    outcome, _ = trained(tmp_path, "dqn", 40, step=20)
    assert (outcome.env_steps, outcome.epochs) == (40, 2)


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    trained(tmp_path, "ppo", 32)
    role = SB3Trainer(Context(state(tmp_path)), ppo(0, net_arch=(16,)))
    with pytest.raises(CheckpointError, match="another network than this model's.*start anew"):
        role.restore(state(tmp_path))
    role.close()


class Counts(Context):
    """Keeps the episodes that are reported."""

    def __init__(self):
        super().__init__({"env_steps": 0})
        self.episodes = []

    def episode(self, **numbers):
        self.episodes.append(numbers)

    def goes_on(self, env_steps):
        return True


def test_cut_episodes_are_counted_apart_and_a_monitors_return_is_the_environments():
    context = Counts()
    role = SB3Trainer(context, ppo(0))
    assert role.moved(np.array([3.0, 4.0]), np.array([True, False]), [{"restarted": True}, {}], 2)
    assert (role.cut, context.episodes) == (1, [])
    role.moved(np.array([1.0, 5.0]), np.array([True, True]), [{}, {"episode": {"r": 70.0, "l": 7}}], 4)
    assert context.episodes == [{"total": 1.0, "length": 1}, {"total": 70.0, "length": 7}]
    role.close()


class Wrong(Parts):
    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, float("nan"), *rest


def wrong(seed):
    return PPO(
        "MultiInputPolicy",
        DummyVecEnv([Wrong]),
        n_steps=8,
        batch_size=8,
        policy_kwargs=dict(SMALL),
        seed=seed,
        device="cpu",
    )


def nothing(seed):
    return object()


def test_what_is_no_model_and_what_is_no_reward_are_refused(tmp_path):
    with pytest.raises(PlanError, match="made a object, expected a model of Stable-Baselines3"):
        sb3.plan(f"{HERE}:nothing", 10)
    with pytest.raises(ContractBroken, match="a reward is nan"):
        trained(tmp_path, "wrong", 16)


PAGE = (Path(__file__).parents[3] / "docs" / "plans.md").read_text()
CARTPOLE = re.search(r"```python\n(# cartpole\.py\n.*?)```", PAGE, re.DOTALL)[1]


@pytest.mark.runs
@pytest.mark.timeout(300)
def test_a_users_model_is_trained_by_the_command_also_killed_and_resumed_and_served(tmp_path, monkeypatch):
    (tmp_path / "cartpole.py").write_text(CARTPOLE)
    options = ["plan", "--plan", "jurybox.training.trainings.sb3:plan", "--set", 'arguments.model = "cartpole:model"']
    options += ["--set", "arguments.steps = 5120", "--out", "run"]
    command = [sys.executable, "-m", "jurybox.training.cli", "train", *options]
    killed = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("step-*")), 120, "a checkpoint")
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    done = subprocess.run([*command, "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["env_steps"] == 5120 and summary["learner_steps"] == 5120 // 64 * 10
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert rows[-1]["env_steps"] == 5120 and "policy_loss" in rows[-1] and "value_loss" in rows[-1]
    assert (tmp_path / "run" / "report.html").exists()
    monkeypatch.chdir(tmp_path)  # where its file is
    monkeypatch.syspath_prepend(tmp_path)
    tmp_path.chmod(0o700)
    rows = np.random.default_rng(0).uniform(-0.1, 0.1, (5, 4)).astype(np.float32)
    wanted = Policy(choose(tmp_path / "run"))(rows).tolist()
    with served(tmp_path / "run", tmp_path) as address, connect(address, timeout=30) as server:
        assert server.model("policy").infer(rows).tolist() == wanted
        url = f"http://{server.status()['server']['http']}/v2/models/policy/infer"
        tensor = {"name": "observation", "shape": [5, 4], "datatype": "FP32", "data": rows.ravel().tolist()}
        with urllib.request.urlopen(url, json.dumps({"inputs": [tensor]}).encode(), timeout=30) as answer:
            assert json.load(answer)["outputs"][0]["data"] == wanted
