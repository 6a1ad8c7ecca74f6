"""Actions that are a Dict or a Tuple: one distribution of all their parts; everybody who acts answers the structure."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from jurybox.training import policies
from jurybox.training.algorithms.base import AlgorithmUnusable, Progress
from jurybox.training.algorithms.registry import make, tried
from jurybox.training.environments.gymnasium_env import Actions, EnvironmentUnusable
from jurybox.training.spaces import AgentSpec, Leaf, as_action
from jurybox.training.trainings.gym import GymTraining, train

HERE = f"{__name__}:"
ROBOT = spaces.Dict(
    {
        "arm": spaces.Dict({"grip": spaces.Discrete(3, start=5), "joints": spaces.Box(-2.0, 4.0, (2, 2))}),
        "lamps": spaces.MultiBinary(2),
        "speeds": spaces.Tuple([spaces.MultiDiscrete([2, 4], start=[1, 0]), spaces.Box(0, 9, (1,), np.int32)]),
    }
)
CHOICES = spaces.Tuple([spaces.Discrete(3), spaces.Dict({"b": spaces.MultiDiscrete([2, 2])})])
NUMBERS = spaces.Dict({"left": spaces.Box(-1.0, 3.0, (2,)), "right": spaces.Box(0.0, 1.0, ())})
SPACES = {"robot": ROBOT, "choices": CHOICES, "numbers": NUMBERS}


class Told(gymnasium.Env):
    """Asserts what it is told, and pays for the grip, or whatever comes first, that it shows."""

    def __init__(self, space: str = "robot", masks: bool = False) -> None:
        self.action_space, self.observation_space, self.masks = SPACES[space], spaces.Discrete(3), masks

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.shown = 0, int(self.np_random.integers(3))
        return self.shown, self.info()

    def info(self):
        mask = np.ones(Actions(self.action_space).spec.size, np.bool_)
        mask[(self.shown + 1) % 3] = False
        return {"action_mask": mask} if self.masks else {}

    def step(self, action):
        assert self.action_space.contains(action), action
        first = action["arm"]["grip"] - 5 if self.action_space is ROBOT else 0
        if self.action_space is CHOICES:
            first = action[0]
        if self.masks:
            assert first != (self.shown + 1) % 3
        self.steps += 1
        paid = float(first == self.shown)
        self.shown = int(self.np_random.integers(3))
        return self.shown, paid, False, self.steps == 8, self.info()


def spec_of(space, **more) -> AgentSpec:
    return AgentSpec((Leaf("observation", (3,), "float32"),), Actions(space).spec, **more)


def test_all_choices_come_before_all_numbers_and_the_structure_is_the_environments() -> None:
    actions = Actions(ROBOT)
    spec = actions.spec
    assert spec.mixed and not spec.chosen and (spec.shape, spec.dtype) == ((5 + 5,), "float32")
    assert (spec.counts, spec.starts, spec.size) == ((3, 2, 2, 2, 4), (5, 0, 0, 1, 0), 13)
    assert [part.name for part in spec.parts] == ["arm.grip", "arm.joints", "lamps", "speeds.0", "speeds.1"]
    flat = np.array([2, 1, 0, 1, 3, -9, -2, 0.5, 4, 6.6], np.float32)
    found = actions.clipped(flat)
    assert ROBOT.contains(found)
    assert found["arm"]["grip"] == 7 and found["arm"]["joints"].tolist() == [[-2, -2], [0.5, 4]]
    assert found["lamps"].tolist() == [1, 0] and found["speeds"][0].tolist() == [2, 3]
    assert found["speeds"][1].tolist() == [7]
    scaled = actions.chosen(np.array([0, 0, 0, 0, 0, -1, 1, 0, 0, 1], np.float32))
    assert scaled["arm"]["joints"].tolist() == [[-2, 4], [1, 1]] and scaled["speeds"][1].tolist() == [9]
    assert AgentSpec.of(json.loads(json.dumps(spec_of(ROBOT).as_dict()))) == spec_of(ROBOT)


def test_what_is_of_one_kind_alone_is_that_kind() -> None:
    assert Actions(CHOICES).spec.chosen and Actions(CHOICES).spec.counts == (3, 2, 2)
    numbers = Actions(NUMBERS)
    assert not numbers.spec.counts and numbers.spec.size == 3
    assert numbers.chosen(np.array([1, -1, 0]))["left"].tolist() == [3, -1]
    assert NUMBERS.contains(numbers.chosen(np.array([1, -1, 0])))


@pytest.mark.parametrize("space", [ROBOT, CHOICES, NUMBERS])
def test_samples_are_of_the_space(space) -> None:
    actions, rng = Actions(space), np.random.default_rng(0)
    mask = np.ones((50, actions.spec.size), np.bool_)
    mask[:, 0] = False
    for found in (actions.spec.sample(rng, 50), actions.spec.sample(rng, 50, mask if actions.spec.counts else None)):
        assert found.shape == (50, *actions.spec.shape) and found.dtype == actions.spec.dtype
        assert all(space.contains(actions.chosen(each)) for each in found)
    assert not actions.spec.counts or (found[:, 0] != 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_the_density_is_the_product_of_the_parts(masked) -> None:
    ppo = make("ppo", {"hidden": [8]}, spec_of(ROBOT, masked=masked).as_dict())
    network, rng = tried(ppo, np.zeros((2, 3), np.float32)), np.random.default_rng(1)
    seen = torch.randn(6, 3)
    mask = torch.ones(6, 13, dtype=torch.bool)
    mask[:, 1] = False
    more = (mask,) if masked else ()
    with torch.no_grad():
        network.log_std.copy_(torch.linspace(-1, 0.5, 5))
        logits, mean, log_std, value = network(seen, *more)
    outputs = {"logits": logits, "mean": mean, "log_std": log_std, "value": value}
    drawn, columns = ppo.explore({name: each.numpy() for name, each in outputs.items()}, rng, Progress(0, 1))
    action = torch.from_numpy(drawn)
    parts = logits.split((3, 2, 2, 2, 4), 1)
    choices = [torch.distributions.Categorical(logits=each) for each in parts]
    normal = torch.distributions.Normal(mean, log_std.exp())
    expected = sum(each.log_prob(action[:, place]) for place, each in enumerate(choices))
    expected = expected + normal.log_prob(action[:, 5:]).sum(1)
    entropy = sum(each.entropy() for each in choices) + normal.entropy().sum(1)
    found = network.scores(seen, action, *more)
    assert torch.allclose(found[0], expected, atol=1e-4) and torch.allclose(found[1], entropy, atol=1e-4)
    assert np.allclose(columns["log_prob"], expected.detach(), atol=1e-4)
    assert not masked or (drawn[:, 0] != 1).all()
    greedy = ppo.greedy({name: each.numpy() for name, each in outputs.items()})
    assert greedy[:, 0].tolist() == parts[0].argmax(1).tolist() and np.array_equal(greedy[:, 5:], mean.numpy())


@pytest.mark.parametrize(("algorithm", "space", "said"), [
    ("dqn", ROBOT, "several choices at once: take ppo"), ("sac", ROBOT, "several choices and numbers: take ppo"),
    ("td3", CHOICES, "several choices: take ppo"), ("dqn", NUMBERS, "these are numbers"),
])  # fmt: skip
def test_other_algorithms_say_what_they_cannot_choose(algorithm, space, said) -> None:
    with pytest.raises(AlgorithmUnusable, match=said):
        make(algorithm, {}, spec_of(space).as_dict())


def test_what_cannot_be_chosen_is_a_sentence() -> None:
    with pytest.raises(EnvironmentUnusable, match="the action space is Text"):
        Actions(spaces.Dict({"word": spaces.Text(3)}))
    with pytest.raises(EnvironmentUnusable, match="is empty"):
        Actions(spaces.Tuple([]))
    with pytest.raises(EnvironmentUnusable, match="would have the same name"):
        Actions(spaces.Dict({"a.b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}))


@pytest.mark.parametrize(
    ("algorithm", "space", "masks"),
    [
        pytest.param("ppo", "robot", False, marks=pytest.mark.runs),
        ("ppo", "robot", True),
        pytest.param("ppo", "choices", False, marks=pytest.mark.runs),
        pytest.param("sac", "numbers", False, marks=pytest.mark.runs),
    ],
)
def test_a_policy_is_trained_played_and_exported_in_the_environments_own_structure(
    tmp_path, algorithm, space, masks
) -> None:
    own = {"n_steps": 64, "batch_size": 64, "learning_rate": 0.01} if algorithm == "ppo" else {"learning_starts": 32}
    learns = (algorithm, space, masks) == ("ppo", "robot", False)
    steps = 1280 if learns else 64
    settings = GymTraining(
        env=HERE + "Told", env_args={"space": space, "masks": masks}, algorithm=algorithm, steps=steps, hidden=(16,),
        evaluation_episodes=4, evaluate_every=0, action_masks=masks, **own,
    )  # fmt: skip
    outcome = train(settings, tmp_path, serial=True)
    assert not learns or outcome.evaluation["eval_return"] > 6.0, "of 8; 2.7 at random"
    policy = policies.Policy(policies.choose(tmp_path))
    assert len(policies.play(policy, 2)) == 2  # it asserts that its space contains each action
    files = policies.export(policy, tmp_path / "robot.pt2", tmp_path)
    program = torch.export.load(files[0]).module()
    given = [torch.tensor([0, 1, 2])] + ([torch.ones(3, policy.inputs["action_mask"].shape[0]).bool()] if masks else [])
    answers = dict(zip(policy.found.acts.tensors, program(*given), strict=True))
    assert list(answers) == [part.name for part in Actions(SPACES[space]).spec.parts]
    for row in range(3):
        action = as_action({name: each[row].numpy() for name, each in answers.items()}, SPACES[space])
        assert SPACES[space].contains(action), action
    card = files[2].read_text()
    assert all(f"`{name}`" in card for name in answers)
    config = policies.served_config(policy, tmp_path / "served", tmp_path, {}).read_text()
    assert all(f"{json.dumps(name)} = {{dtype" in config for name in answers)


@pytest.mark.runs
def test_a_recurrent_policy_answers_the_structure_and_then_what_it_remembers(tmp_path) -> None:
    settings = GymTraining(
        env=HERE + "Told", steps=128, hidden=(16,), recurrent="lstm", hidden_size=8, n_steps=64, batch_size=64,
        evaluation_episodes=4, evaluate_every=0,
    )  # fmt: skip
    train(settings, tmp_path, serial=True)
    policy = policies.Policy(policies.choose(tmp_path))
    assert len(policies.play(policy, 2)) == 2  # it asserts that its space contains each action
    program = torch.export.load(policies.export(policy, tmp_path / "robot.pt2", tmp_path)[0]).module()
    policy.begin(3)
    memory, names = torch.zeros(3, 32), [part.name for part in Actions(ROBOT).spec.parts]
    for shown in ([0, 1, 2], [2, 2, 1]):
        *answers, memory = program(torch.tensor(shown), memory)
        played = policy(np.array(shown))
        assert list(played) == names
        for name, answer in zip(names, answers, strict=True):
            np.testing.assert_array_equal(played[name], answer.numpy())
    assert memory.shape == (3, 32) and memory.any()
