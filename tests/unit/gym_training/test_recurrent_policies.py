"""Recurrent policies in `train gym`: what is remembered in rows, evaluations and exports, and what is refused."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from jurybox.training import policies
from jurybox.training.algorithms.registry import make
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.roles.players import players
from jurybox.training.run_folder import read_metrics
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.spaces import MEMORY
from jurybox.training.trainings.gym import GymTraining, algorithm_of, plan, spaces_of, train


class Recall(gymnasium.Env):
    """The first of four observations shows which action the last step rewards; episodes of odd seeds are shorter."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def __init__(self, length: int = 4, named: str = "") -> None:
        self.length = length
        if named:
            self.observation_space = spaces.Dict({named: spaces.Box(-1, 1, (1,))})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.t = int(self.np_random.integers(2)), 0
        self.steps = self.length - (seed or 0) % 2
        return np.float32([2 * self.cue - 1]), {}

    def step(self, action):
        self.t += 1
        over = self.t == self.steps
        return np.zeros(1, np.float32), float(over and action == self.cue), over, False, {}


WORLD = f"{__name__}:Recall"
SMALL = {
    "env": WORLD,
    "recurrent": "lstm",
    "hidden_size": 8,
    "hidden": (8,),
    "n_steps": 16,
    "envs": 2,
    "batch_size": 16,
    "n_epochs": 2,
    "evaluation_episodes": 2,
    "evaluate_every": 0,
}


def settings(**changes) -> GymTraining:
    return GymTraining.checked({**SMALL, **changes})


def recalls(num_envs: int, mode: str) -> VectorEnv:
    return SyncVectorEnv([Recall for _ in range(num_envs)], autoreset_mode=AutoresetMode(mode))


SIDE_BY_SIDE = [
    {"env": f"{__name__}:recalls", "env_args": {"mode": each.value}, "vector": True} for each in AutoresetMode
]


@pytest.mark.parametrize("cell", ["lstm", pytest.param("gru", marks=pytest.mark.runs)])
@pytest.mark.parametrize("world", [{}, *(each for each in SIDE_BY_SIDE if each["env_args"]["mode"] != "NextStep")])
def test_each_row_has_what_was_remembered_before_its_step_and_nothing_where_an_episode_begins(
    tmp_path, monkeypatch, cell, world
) -> None:
    from jurybox.training.roles.learner import OnPolicyLearner

    seen = []
    taken = OnPolicyLearner._take_rows

    def watched(self):
        taken(self)
        network = {name: value.clone() for name, value in self.algorithm.acting.state_dict().items()}
        seen.append((network, {name: column.copy() for name, column in self._held.items()}))

    monkeypatch.setattr(OnPolicyLearner, "_take_rows", watched)
    s = settings(recurrent=cell, steps=96, checkpoint_every=1000, **world)
    train(s, tmp_path / "run", serial=True)
    made = make(**algorithm_of(s, spaces_of(s)[1]))
    network, checked, carried = made.network(), 0, {}
    for weights, rows in seen[:3]:
        network.load_state_dict(weights)
        assert len(rows["t"]) == 32
        order = np.lexsort((rows["t"], rows["environment"]))
        for row in order:
            environment, t = int(rows["environment"][row]), int(rows["t"][row])
            after, last = carried.get(environment, (None, None))
            if last is None or t != last + 1:
                assert not rows[MEMORY][row].any(), "an episode begins"
            else:
                np.testing.assert_allclose(rows[MEMORY][row], after, rtol=1e-4, atol=1e-6)
                checked += bool(after.any())
            with torch.inference_mode():
                given = torch.from_numpy(rows["observation"][row][None]), torch.from_numpy(rows[MEMORY][row][None])
                carried[environment] = network(*given)[-1].numpy()[0], t
    assert checked > 30, "weak data"


def test_a_step_that_would_be_remembered_in_the_next_episode_is_refused(tmp_path) -> None:
    (world,) = (each for each in SIDE_BY_SIDE if each["env_args"]["mode"] == "NextStep")
    with pytest.raises(ConfigError, match=r"would remember the episode before: expected autoreset_mode SAME_STEP or"):
        train(settings(steps=96, **world), tmp_path / "run", serial=True)


@pytest.mark.runs
def test_it_learns_what_only_the_first_observation_shows(tmp_path) -> None:
    changes = {"n_steps": 64, "envs": 4, "batch_size": 64, "n_epochs": 4, "learning_rate": 1e-2, "gamma": 0.9}
    returns = {}
    for name, more in {"recurrent": {}, "not": {"recurrent": None, "hidden_size": 256}}.items():
        values = {**SMALL, **changes, "steps": 5120, "evaluation_episodes": 20, **more}
        if name == "not":
            del values["recurrent"], values["hidden_size"]
        returns[name] = train(GymTraining.checked(values), tmp_path / name, serial=True).evaluation["eval_return"]
    assert returns["recurrent"] == 1.0 and returns["not"] < 0.9


def loaded(folder, **changes) -> policies.Policy:
    train(settings(steps=64, **changes), folder, serial=True)
    return policies.Policy(policies.choose(folder))


class Told:
    """Hides an exported program behind a policy's call."""

    def __init__(self, program, numbers) -> None:
        self.program, self.memory = program, torch.zeros(1, numbers)

    def __call__(self, observation):
        action, self.memory = self.program(torch.from_numpy(observation), self.memory)
        return action.numpy()


@pytest.mark.parametrize("cell", ["lstm", pytest.param("gru", marks=pytest.mark.runs)])
def test_an_exported_policy_remembers_as_the_played_one_and_each_episode_begins_with_nothing(tmp_path, cell) -> None:
    policy = loaded(tmp_path / "run", recurrent=cell, hidden_size=6)
    with torch.no_grad():  # so large that what it remembers decides
        for number, parameter in enumerate(policy.served.module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    paths = policies.export(policy, tmp_path / "policy.pt2", tmp_path / "run")
    program = torch.export.load(paths[0]).module()
    assert "`memory` float32 (n, " in paths[2].read_text() and "zeros where an episode begins" in paths[2].read_text()
    random = np.random.default_rng(0)
    seen = random.normal(size=(12, 1, 1)).astype(np.float32)
    numbers = {"lstm": 24, "gru": 12}[cell]
    alone, exported = [], Told(program, numbers)
    policy.begin()
    for each in seen:
        alone.append(int(policy(each)[0]))
        assert alone[-1] == int(exported(each)[0])
    assert 0 < sum(alone) < 12 and alone[6:] != alone[:6], "weak data"
    policy.begin(3)  # three environments, of which the second one begins anew after six steps
    rows = []
    for step in range(12):
        if step == 6:
            policy.begin(3, ended=np.array([False, True, False]))
        rows.append(policy(np.concatenate((seen[step], seen[step % 6], seen[step])))[:, None])
    rows = np.concatenate(rows, 1)
    assert rows[0].tolist() == rows[2].tolist() == alone
    assert rows[1].tolist() == 2 * alone[:6]
    played = policies.play(policy, 4, seed=3)
    assert [each.total for each in played] == [policies.play(policy, 1, seed=3 + n)[0].total for n in range(4)]


def test_a_policy_that_remembers_says_so_where_no_episode_was_begun(tmp_path) -> None:
    policy = loaded(tmp_path / "run")
    with pytest.raises(policies.PolicyError, match=r"call begin\(1\) before the first step .* it has not been called"):
        policy(np.zeros((1, 1), np.float32))
    policy.begin(2)
    with pytest.raises(policies.PolicyError, match=r"call begin\(3\) .* that was for 2"):
        policy(np.zeros((3, 1), np.float32))


def test_what_does_not_go_with_it_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="hidden_size.*recurrent is none"):
        GymTraining.read(None, {"hidden_size": 64})
    with pytest.raises(ConfigError, match="compile is set .*not compiled"):
        GymTraining.read(None, {**SMALL, "compile": "auto"})
    with pytest.raises(ConfigError, match="recurrent.*lstm.*gru"):
        settings(recurrent="rnn")
    with pytest.raises(ConfigError, match="sequence_length: ppo does not use it"):
        settings(sequence_length=4)
    with pytest.raises(ConfigError, match="lstm_hidden_size is called hidden_size here"):
        GymTraining.checked({"lstm_hidden_size": 64})
    with pytest.raises(ConfigError, match="a part 'memory', the name of what the policy remembers"):
        plan(settings(env_args={"named": MEMORY}))
    s = settings()
    both = {"a": "policy", "b": "policy"}
    with pytest.raises(ConfigError, match="plays in environments of one agent, and these have 2"):
        players(None, both, {"policy": algorithm_of(s, spaces_of(s)[1])}, rows=1)


def test_its_evaluations_are_those_of_its_checkpoint_played_again(tmp_path) -> None:
    """Side by side, with episodes of different lengths: each environment forgets where its own episode begins."""
    s = settings(steps=64, evaluation_episodes=7, evaluate_every=32)
    train(s, tmp_path / "run", serial=True)
    best = Checkpoints(tmp_path / "run" / "checkpoints").best()
    seeds = np.random.default_rng((1_000_003, s.seed)).integers(2**31, size=7).tolist()
    policy = policies.Policy(policies.choose(tmp_path / "run"))
    totals = [policies.play(policy, 1, seed=seed)[0].total for seed in seeds]
    assert best["numbers"]["return"] == pytest.approx(np.mean(totals))
    assert any("policy_loss" in row for row in read_metrics(tmp_path / "run" / "metrics.csv"))
