"""Recurrent policies of algorithms that learn from a replay, in `train gym`: their rows, what they learn, what not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.unit.gym_training.test_recurrent_policies import Recall

from jurybox.training import policies
from jurybox.training.algorithms.base import AlgorithmUnusable
from jurybox.training.algorithms.registry import make
from jurybox.training.replay import Episodes, Replay, Windows
from jurybox.training.roles.learner import OffPolicyLearner
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.spaces import MEMORY
from jurybox.training.trainings.gym import GymTraining, algorithm_of, fields, plan, spaces_of, train


class Aim(Recall):
    """The same with an action from -1 to 1, whose share on the cue's side is the reward; episodes are truncated."""

    action_space = spaces.Box(-1, 1, (1,))

    def step(self, action):
        self.t += 1
        over, right = self.t == self.steps, float(action[0]) * (2 * self.cue - 1)
        return np.zeros(1, np.float32), right if over else 0.0, False, over, {}


SMALL = {
    "recurrent": "lstm",
    "hidden_size": 8,
    "hidden": (8,),
    "envs": 2,
    "batch_size": 16,
    "sequence_length": 4,
    "burn_in": 2,
    "learning_starts": 30,
    "buffer_size": 1000,
    "evaluation_episodes": 2,
    "evaluate_every": 0,
}
WORLDS_OF = "tests.unit.gym_training.gym_worlds"
OF_MEMORY = ("recurrent", "hidden_size", "sequence_length", "burn_in")
WORLDS = {"dqn": "Recall", "iqn": "Recall", "td3": "Aim", "sac": "Aim"}


def settings(algorithm: str, **changes) -> GymTraining:
    world = {"env": f"{__name__}:{WORLDS[algorithm]}", "algorithm": algorithm}
    return GymTraining.checked({**SMALL, **world, **changes})


@pytest.mark.parametrize(("algorithm", "cell"), [("dqn", "lstm"), pytest.param("sac", "gru", marks=pytest.mark.runs)])
def test_stored_rows_have_what_was_remembered_before_their_step_also_of_random_ones(
    tmp_path, monkeypatch, algorithm, cell
) -> None:
    found = []
    step = OffPolicyLearner.step

    def watched(self):
        step(self)
        found[:] = [self.replay.sample(400, windows=Windows(length=3, next="observation")), self.weights()]

    monkeypatch.setattr(OffPolicyLearner, "step", watched)
    s = settings(algorithm, recurrent=cell, steps=120, learning_rate=1e-9)  # the first weights act all the time
    train(s, tmp_path / "run", serial=True)
    rows, weights = found
    network = make(**algorithm_of(s, spaces_of(s)[1])).network()
    network.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    begins = rows["observation"][:, 0, 0] != 0  # only the first observation shows the cue
    assert begins.any() and (rows[MEMORY][:, 0].any(1) == ~begins).all()
    with torch.inference_mode():
        for number in range(2):
            after = network(*(torch.from_numpy(rows[name][:, number]) for name in ("observation", MEMORY)))[-1].numpy()
            goes_on = rows.valid["sequence"][:, number + 1] == 1
            np.testing.assert_allclose(after[goes_on], rows[MEMORY][goes_on, number + 1], rtol=1e-3, atol=1e-5)
    assert (goes_on & (rows["observation"][:, 1, 0] == 0)).sum() > 30, "weak data"


@pytest.mark.runs
@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("dqn", {"steps": 600, "exploration_fraction": 0.5, "target_update_interval": 50}),
        ("sac", {"steps": 1500, "ent_coef": 0.03, "tau": 0.05}),
        ("iqn", {"steps": 1500, "exploration_fraction": 0.5, "target_update_interval": 100}),
        ("td3", {"steps": 2000, "tau": 0.05}),
    ],
)
def test_it_learns_what_only_the_first_observation_shows(tmp_path, algorithm, more) -> None:
    quick = {
        "batch_size": 64, "learning_rate": 3e-3, "gamma": 0.9, "hidden_size": 16, "hidden": (16, 16), "train_freq": 2,
        "evaluation_episodes": 20, "learning_starts": 200, "buffer_size": 5000, **more,
    }  # fmt: skip
    values = settings(algorithm, **quick).model_dump(exclude_unset=True)
    without = {name: value for name, value in values.items() if name not in OF_MEMORY}
    remembers, forgets = (
        train(GymTraining.checked(given), tmp_path / name, serial=True).evaluation["eval_return"]
        for name, given in (("remembers", values), ("forgets", without))
    )
    assert remembers > 0.85 > forgets, (remembers, forgets)


@pytest.mark.parametrize("algorithm", ["dqn", pytest.param("sac", marks=pytest.mark.runs)])
def test_an_exported_policy_remembers_as_the_played_one(tmp_path, algorithm) -> None:
    train(settings(algorithm, steps=80), tmp_path / "run", serial=True)
    policy = policies.Policy(policies.choose(tmp_path / "run"))
    with torch.no_grad():  # so large that what it remembers decides
        for number, parameter in enumerate(policy.served.module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    program = torch.export.load(policies.export(policy, tmp_path / "policy.pt2", tmp_path / "run")[0]).module()
    memory, same = torch.zeros(2, *policy.served.state[MEMORY].shape), np.zeros((2, 1), np.float32)
    policy.begin(2)
    acted = []
    for _ in range(4):
        acted.append(np.asarray(policy(same)))
        action, memory = program(torch.from_numpy(same), memory)
        np.testing.assert_allclose(acted[-1], action.numpy(), rtol=1e-4, atol=1e-5)
    assert memory.any() and (WORLDS[algorithm] == "Recall" or not np.allclose(acted[0], acted[-1])), "weak data"
    played = policies.play(policy, 3, seed=3)
    assert [each.total for each in played] == [policies.play(policy, 1, seed=3 + n)[0].total for n in range(3)]


@pytest.mark.parametrize(
    "world",
    [
        {"env": f"{WORLDS_OF}:Corridor", "action_masks": True},
        {"env": f"{WORLDS_OF}:Mixed", "env_args": {"picture": True}, "normalize_observations": True},
    ],
    ids=["masks", "pictures"],
)
def test_windows_have_the_masks_and_pictures_of_each_step(tmp_path, world) -> None:
    outcome = train(settings("dqn", steps=100, normalize_rewards=True, **world), tmp_path / "run", serial=True)
    assert outcome.learner_steps > 5


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_steps=3 with recurrent=lstm: expected n_steps = 1, since each step"):
        settings("sac", n_steps=3)
    with pytest.raises(ConfigError, match="batch_size=3 with sequence_length=4: expected the transitions of a seq"):
        settings("dqn", batch_size=3)
    with pytest.raises(ConfigError, match=r"burn_in=2, sequence_length=4 and envs=2: expected 15 rows or more, .* low"):
        settings("td3", buffer_size=14)
    settings("td3", buffer_size=15)
    with pytest.raises(ConfigError, match=r"burn_in.*recurrent is none"):
        GymTraining.read(None, {"algorithm": "dqn", "burn_in": 4})
    with pytest.raises(ConfigError, match=r"compile is set .*not compiled"):
        GymTraining.read(None, {**SMALL, "env": "CartPole-v1", "algorithm": "dqn", "compile": "auto"})
    with pytest.raises(ConfigError, match="a part 'memory', the name of what the policy remembers"):
        plan(settings("iqn", env_args={"named": MEMORY}))


def test_windows_of_a_prioritized_replay_are_refused() -> None:
    s = settings("dqn")
    seen, spec = spaces_of(s)
    columns = fields(make(**algorithm_of(s, spec)), seen)
    with Replay.create("remembered", 100, columns, episodes=Episodes(), prioritized=True) as replay:
        context = SimpleNamespace(
            plan=plan(s), number=2, life=1, spec=SimpleNamespace(threads=1), replay=lambda name: replay, alive=None,
            stops=None,
        )  # fmt: skip
        with pytest.raises(AlgorithmUnusable, match="dqn remembers, .* and a replay that is not prioritized"):
            OffPolicyLearner(context, replay="policy", algorithm=algorithm_of(s, spec), envs=2, first=1)
    assert np.float32(1e-40) * np.float32(1) > 0, "a learner that did not begin leaves the caller's thread as it was"
