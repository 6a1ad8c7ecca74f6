"""An algorithm of one's own, in one file outside the package: `jurybox train gym --algorithm module:Class`.

The file is the one that docs/your_algorithm.md shows.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from jurybox.server.inproc import InprocServer
from jurybox.training import policies
from jurybox.training.algorithms.base import AlgorithmUnusable
from jurybox.training.cli import train as train_command
from jurybox.training.run_folder import read_metrics
from jurybox.training.runtime.plan import ConfigError, load
from jurybox.training.trainings.gym import GymTraining, train

PAGE = Path(__file__).parents[3] / "docs" / "your_algorithm.md"
SMALL = {"steps": 64, "batch_size": 8, "hidden": (8,), "learning_starts": 10, "buffer_size": 500}
PARTS = {"env": "tests.unit.gym_training.test_raw_observations:Sampled", "env_args": {"space": "a pair"}}
BROKEN = """
from jurybox.training.algorithms.base import Algorithm, OffPolicySettings, OnPolicySettings
from jurybox.training.algorithms.dqn import DQN
from tests.no_such_package import anything
"""
OTHERS = """
from pydantic import Field
from jurybox.training.algorithms.base import Algorithm, OnPolicySettings
from jurybox.training.algorithms.dqn import DQN
from jurybox.training.algorithms.ppo import PPO


class Half(Algorithm):
    pass


class Steps(DQN):
    class Settings(DQN.Settings):
        steps: int = 3


class Wide(DQN):
    outputs = property(lambda self: {"values": (7,)})


class Two(DQN):
    outputs = property(lambda self: {"values": (2,), "more": (2,)})


class Far(DQN):
    def explore(self, outputs, rng, progress):
        return outputs["values"].argmax(1) + 2, {}


class Floating(DQN):
    def explore(self, outputs, rng, progress):
        return outputs["values"][:, 0], {}


class More(DQN):
    def explore(self, outputs, rng, progress):
        return outputs["values"].argmax(1), {"surprise": outputs["values"][:, 0]}


class Elsewhere(DQN):
    chooses = property(lambda self: ("logits", "best"))


class Unpublished(DQN):
    def setup(self, seed, device):
        super().setup(seed, device)
        del self.acting


class Tells(DQN):
    def update(self, batch, progress):
        return {"loss": 1.0}


class Rollouts(DQN):
    class Settings(OnPolicySettings):
        pass


class Plain(DQN):
    class Settings:
        learning_rate = 0.001


class Spread(PPO):
    def values(self, observation, memory=None):
        return super().values(observation)[:1]


NUMBER = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the files, which is the current one."""
    shown = re.search(r"```python\n(# soft_q\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    for name, text in {"soft_q": shown[1], "broken_q": BROKEN, "other_q": OTHERS}.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_it_trains_resumes_is_served_and_exported_with_the_environments_own_observation(folder) -> None:
    s = GymTraining.checked({**SMALL, **PARTS, "algorithm": "soft_q:SoftQ", "temperature": 0.5})
    train(s.changed(steps=32, evaluation_episodes=1), folder / "run", serial=True)
    outcome = train(s, folder / "run", serial=True, resume=True)
    assert (outcome.env_steps, outcome.learner_steps) == (64, 54)
    rows = read_metrics(folder / "run" / "metrics.csv")
    assert {"loss", "value"} <= {name for row in rows for name in row}
    assert "temperature" in (folder / "run" / "report.html").read_text()

    found = policies.choose(folder / "run")
    policy = policies.Policy(found)
    observed = {leaf: np.zeros((2, *spec.shape), spec.dtype) for leaf, spec in policy.inputs.items()}
    served = load(found.acts.network)(**json.loads(json.dumps(found.acts.arguments)))
    served.module.load_state_dict(policy.served.module.state_dict())
    with InprocServer({"policy": served}) as server:
        values = server.model("policy").infer(observed)
    assert values.shape == (2, 4)
    (program, *_) = policies.export(policy, folder / "policy.pt2", folder / "run")
    action = torch.export.load(program).module()(*map(torch.from_numpy, observed.values()))
    assert action.tolist() == (2 + values.argmax(1)).tolist()
    with pytest.raises(policies.PolicyError, match="names 'soft_q:SoftQ', .*: --trust allows it"):
        policies.Policy(policies.choose(folder / "policy.safetensors"))


def test_its_settings_are_flags_with_defaults_and_meanings() -> None:
    gym = ["gym", "--algorithm", "soft_q:SoftQ"]
    shown = CliRunner().invoke(train_command, [*gym, "--help"], terminal_width=80).output
    assert re.search(r"--temperature NUMBER +Weight of the policy's entropy\.\s+\[default:\s0\.1\]", shown), shown
    assert "--clip-range" not in shown
    told = CliRunner().invoke(train_command, [*gym, "--temperature", "-1"]).output
    assert "temperature: Input should be greater than 0" in told, told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithm": "no_such_q:SoftQ"}, "cannot be imported: No module named 'no_such_q', neither in this folder"),
        ({"algorithm": "broken_q:SoftQ"}, "'broken_q:SoftQ' cannot be imported: No module named 'tests.no_such_pack"),
        ({"algorithm": "soft_q:SoftP"}, "has no 'SoftP'; did you mean 'SoftQ'"),
        ({"algorithm": "soft_q:Values"}, "is the class Values: expected a subclass of .*base.Algorithm"),
        ({"algorithm": "other_q:NUMBER"}, "is a int: expected a subclass of"),
        ({"algorithm": "other_q:Half"}, "does not define chooses, explore, network, outputs, setup, update"),
        ({"algorithm": "other_q:Steps"}, "has steps, which every training has: rename it"),
        (
            {"algorithm": "other_q:Rollouts"},
            "no subclass of OffPolicySettings, which an algorithm with on_policy",
        ),
        ({"algorithm": "other_q:Plain"}, "other_q:Plain.Settings is no subclass of OffPolicySettings"),
        ({"algorithm": "other_q:Wide"}, "'values' of the network is float32 of shape .2, 2. .*floats of shape .2, 7."),
        ({"algorithm": "other_q:Two"}, "returns 1 tensors, and `outputs` names values, more"),
        ({"algorithm": "other_q:Far"}, "Far.explore chooses is .2, 2., expected 0 to 1"),
        (
            {"algorithm": "other_q:Floating"},
            "explore chooses is float32 .*, expected whole numbers of shape .2,.",
        ),
        ({"algorithm": "other_q:More"}, r"returns the columns \['surprise'\], and `columns` names \[\]"),
        ({"algorithm": "other_q:Elsewhere"}, "names 'logits', expected one of"),
        ({"algorithm": "soft_q:SoftQ", "clip_range": 0.1}, "clip_range: soft_q:SoftQ does not use it"),
        ({"algorithm": "soft_q:SoftQ", "temprature": 0.1}, "did you mean 'temperature'"),
        ({"algorithm": "soft_q:SoftQ", "env": "Pendulum-v1"}, "cannot act in Pendulum-v1 .*: take sac"),
    ],
)
def test_what_is_wrong_with_one_is_said_before_the_start(folder, changes, told) -> None:
    with pytest.raises(ConfigError, match=told):
        train(GymTraining.checked(changes), folder / "run", serial=True)
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [("Unpublished", "setup has not set `acting`"), ("Tells", "update returned a dict, expected base.Update")],
)
def test_what_is_wrong_with_its_learning_is_said_at_its_first_update(folder, algorithm, told) -> None:
    with pytest.raises(AlgorithmUnusable, match=told):
        train(GymTraining.checked({**SMALL, "algorithm": f"other_q:{algorithm}"}), folder / "run", serial=True)


def test_values_that_are_not_one_for_each_observation_are_refused_where_they_would_be_spread(folder) -> None:
    settings = GymTraining.checked({"algorithm": "other_q:Spread", "steps": 64, "n_steps": 32, "hidden": (8,)})
    with pytest.raises(AlgorithmUnusable, match=r"Spread.values returned the shape \(1,\), expected \("):
        train(settings, folder / "run", serial=True)


def test_a_server_that_allows_our_factories_to_anyone_imports_no_module_of_theirs() -> None:
    from jurybox.training.algorithms import served_networks

    with pytest.raises(AlgorithmUnusable, match="'soft_q:SoftQ' is none of ppo, dqn, iqn, td3, sac"):
        served_networks.gym_policy("soft_q:SoftQ", {}, {})
    assert "soft_q" not in sys.modules
