"""An algorithm of one's own, in one file outside the package: `jurybox train gym --algorithm module:Class`.

The file is the one that docs/your_algorithm.md shows.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.runtime.toys import Rows
from typer.testing import CliRunner

from jurybox.server.inproc import InprocServer
from jurybox.training import policies
from jurybox.training.algorithms.base import AlgorithmUnusable
from jurybox.training.cli import train as train_command
from jurybox.training.run_folder import read_metrics
from jurybox.training.runtime.plan import ConfigError, End, load
from jurybox.training.runtime.run import run
from jurybox.training.trainings.gym import GymTraining, plan, train

PAGE = Path(__file__).parents[3] / "docs" / "your_algorithm.md"
SMALL = {"steps": 64, "batch_size": 8, "hidden": (8,), "learning_starts": 10, "buffer_size": 500}
PARTS = {"env": "tests.unit.gym_training.test_raw_observations:Sampled", "env_args": {"space": "a pair"}}
BROKEN = """
from jurybox.training.algorithms.base import Algorithm, OffPolicySettings, OnPolicySettings
from jurybox.training.algorithms.dqn import DQN
from tests.no_such_package import anything
"""
OTHERS = """
import numpy as np
from pydantic import Field
from jurybox.training.algorithms.base import Algorithm, OnPolicySettings
from jurybox.training.algorithms.dqn import DQN
from jurybox.training.algorithms.ppo import PPO
from jurybox.training.algorithms.td3 import TD3


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


class Unnamed(DQN):
    def update(self, batch, progress):
        found = super().update(batch, progress)
        return found._replace(metrics={**found.metrics, "td_error": 1.0})


class UnnamedOnPolicy(PPO):
    def update(self, batch, progress):
        found = super().update(batch, progress)
        return found._replace(metrics={**found.metrics, "surprise": 1.0})


class UnnamedExploration(DQN):
    def exploration(self, progress):
        return {"epsilon": 0.1, "warmth": 1.0}


class UnnamedLater(DQN):
    def exploration(self, progress):
        return {"epsilon": 0.1, **({"warmth": 1.0} if progress.env_steps > 20 else {})}


class Rollouts(DQN):
    class Settings(OnPolicySettings):
        pass


class Plain(DQN):
    class Settings:
        learning_rate = 0.001


class Spread(PPO):
    def values(self, observation, memory=None):
        return super().values(observation)[:1]


class Chooses(DQN):
    class Settings(DQN.Settings):
        wrong: str = "beyond"

    def explore(self, outputs, rng, progress):
        action, columns = super().explore(outputs, rng, progress)
        if progress.env_steps > 20:
            action = {
                "beyond": action + 2,
                "below": action - 2,
                "floats": action / 2,
                "one": action[:1],
                "forbidden": (action + 1) % self.spec.action.size,
            }[self.settings.wrong]
        return action, columns


class Acts(TD3):
    class Settings(TD3.Settings):
        wrong: str = "beyond"

    def explore(self, outputs, rng, progress):
        action, columns = super().explore(outputs, rng, progress)
        if progress.env_steps > 20:
            action = {
                "beyond": action * 0 + 1.5,
                "nan": action * np.nan,
                "whole": action.astype(int),
                "flat": action[:, 0],
            }[self.settings.wrong]
        return action, columns


class Several(PPO):
    def explore(self, outputs, rng, progress):
        action, columns = super().explore(outputs, rng, progress)
        return (action + 1) % self.spec.action.counts if progress.env_steps > 20 else action, columns


class Clips(PPO):
    def explore(self, outputs, rng, progress):
        action, columns = super().explore(outputs, rng, progress)
        return action * (np.inf if progress.env_steps > 20 else 1.0), columns


class Evaluated(DQN):
    asked = 0

    def greedy(self, outputs):
        Evaluated.asked += 1
        return super().greedy(outputs) + (2 if Evaluated.asked > 5 else 0)


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
        ({"algorithm": "other_q:UnnamedExploration"}, "exploration returned the metric 'warmth', and `metrics` of "),
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
    [
        ("Unpublished", "setup has not set `acting`"),
        ("Tells", "update returned a dict, expected base.Update"),
        (
            "Unnamed",
            r"Unnamed.update returned the metric 'td_error', and `metrics` of Unnamed is \('loss', 'epsilon'\): ",
        ),
        ("UnnamedLater", "UnnamedLater.exploration returned the metric 'warmth'"),
    ],
)
def test_what_is_wrong_with_its_learning_is_said_at_its_first_update(folder, algorithm, told) -> None:
    with pytest.raises(AlgorithmUnusable, match=told):
        train(GymTraining.checked({**SMALL, "algorithm": f"other_q:{algorithm}"}), folder / "run", serial=True)


def test_a_metric_of_a_rollouts_update_that_is_not_named_is_refused(folder) -> None:
    settings = GymTraining.checked({"algorithm": "other_q:UnnamedOnPolicy", "steps": 64, "n_steps": 32, "hidden": (8,)})
    with pytest.raises(AlgorithmUnusable, match="UnnamedOnPolicy.update returned the metric 'surprise'"):
        train(settings, folder / "run", serial=True)


MASKED = {"env": "tests.unit.gym_training.gym_worlds:Corridor", "action_masks": True}
ROLLED = {"n_steps": 32, "hidden": (8,), "batch_size": 8}


@pytest.mark.parametrize(
    ("algorithm", "changes", "told"),
    [
        ("Chooses", {"wrong": "beyond"}, r"what Chooses.explore chooses is \[[23]\], expected 0 to 1"),
        ("Chooses", {"wrong": "below"}, r"what Chooses.explore chooses is \[-[12]\], expected 0 to 1"),
        (
            "Chooses",
            {"wrong": "floats"},
            r"is float64 of shape \(1,\) for 1 observations, expected whole numbers",
        ),
        ("Chooses", {"wrong": "one", "envs": 2}, r"of shape \(1,\) for 2 observations, expected .* of shape \(2,\)"),
        ("Chooses", {"wrong": "forbidden", **MASKED}, r"chooses is \[\d\], and the mask allows \[\d\] alone"),
        (
            "Acts",
            {"wrong": "beyond", "env": "Pendulum-v1"},
            r"is \[1.5\], expected numbers in \[-1, 1\], which",
        ),
        ("Acts", {"wrong": "nan", "env": "Pendulum-v1"}, r"is \[nan\], expected numbers in \[-1, 1\]"),
        ("Acts", {"wrong": "whole", "env": "Pendulum-v1"}, "is int64 of shape .*, expected floats of shape"),
        ("Acts", {"wrong": "flat", "env": "Pendulum-v1"}, r"of shape \(1,\) for 1 observations, expected .* \(1, 1\)"),
        (
            "Several",
            {**ROLLED, **MASKED, "env_args": {"several": True}},
            r"what Several.explore chooses is \[.*\], and the mask allows \[\d\] alone",
        ),
        (
            "Clips",
            {**ROLLED, "env": "Pendulum-v1"},
            r"chooses is \[-?inf\], expected numbers that are f",
        ),
    ],
)
def test_each_action_is_checked_before_the_environment_gets_it(folder, algorithm, changes, told) -> None:
    small = SMALL if "n_steps" not in changes else {}
    settings = GymTraining.checked({**small, "steps": 64, "algorithm": f"other_q:{algorithm}", **changes})
    with pytest.raises(AlgorithmUnusable, match=told):
        train(settings, folder / "run", serial=True)


def test_an_evaluations_actions_are_checked_too(folder) -> None:
    settings = GymTraining.checked({**SMALL, "algorithm": "other_q:Evaluated"})
    with pytest.raises(AlgorithmUnusable, match="what Evaluated.greedy chooses is .*, expected 0 to 1"):
        train(settings, folder / "run", serial=True)


@pytest.mark.runs
def test_a_process_says_what_is_wrong_with_an_action(folder) -> None:
    settings = GymTraining.checked({**SMALL, "algorithm": "other_q:Chooses"})
    planned = replace(plan(settings), timeouts=replace(plan(settings).timeouts, failures=1, back_off=(0.0,)))
    outcome = run(planned, folder / "run", Rows())
    assert outcome.end is End.FAILED and "what Chooses.explore chooses is" in outcome.text


def test_values_that_are_not_one_for_each_observation_are_refused_where_they_would_be_spread(folder) -> None:
    settings = GymTraining.checked({"algorithm": "other_q:Spread", "steps": 64, "n_steps": 32, "hidden": (8,)})
    with pytest.raises(AlgorithmUnusable, match=r"Spread.values returned the shape \(1,\), expected \("):
        train(settings, folder / "run", serial=True)


def test_a_server_that_allows_our_factories_to_anyone_imports_no_module_of_theirs() -> None:
    from jurybox.training.algorithms import served_networks

    with pytest.raises(AlgorithmUnusable, match="'soft_q:SoftQ' is none of ppo, dqn, iqn, td3, sac"):
        served_networks.gym_policy("soft_q:SoftQ", {}, {})
    assert "soft_q" not in sys.modules
