"""Masks of actions: a forbidden action is never chosen, wherever actions are chosen, and none is learned from."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import algorithm, learning
from tests.unit.gym_training.gym_worlds import Corridor

from jurybox.training import policies
from jurybox.training.algorithms.base import Progress
from jurybox.training.algorithms.ppo import PPO
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.spaces import ActionSpec, AgentSpec, ContractBroken, Leaf, action_mask
from jurybox.training.trainings.gym import GymTraining, train

CORRIDOR = "tests.unit.gym_training.gym_worlds:Corridor"
REPLAYED = {"buffer_size": 500, "learning_starts": 20, "batch_size": 16, "target_update_interval": 32, "train_freq": 1}
SMALL = {"ppo": {"n_steps": 32, "batch_size": 32, "n_epochs": 4}, "dqn": REPLAYED, "iqn": REPLAYED}
LOWEST = np.finfo(np.float32).min


def settings(name: str, how: str = "info", several: bool = False, **changes) -> GymTraining:
    given = {"env": CORRIDOR, "env_args": {"how": how, "several": several}, "action_masks": True, "algorithm": name}
    small = {"steps": 160, "hidden": (16,), "evaluation_episodes": 4, "evaluate_every": 80, "learning_rate": 0.003}
    return GymTraining.checked({**given, **small, **SMALL.get(name, {}), **changes})


@pytest.mark.parametrize(
    ("name", "how", "several"),
    [
        *(pytest.param(name, "info", False, marks=[pytest.mark.runs] * (name != "dqn")) for name in SMALL),
        pytest.param("dqn", "method", False, marks=pytest.mark.runs),
        ("ppo", "method", True),
    ],
)
def test_a_forbidden_action_is_never_taken(tmp_path, monkeypatch, name, how, several) -> None:
    monkeypatch.setattr(Corridor, "forbidden", 0)
    outcome = train(settings(name, how, several, envs=2), tmp_path, serial=True)
    assert Corridor.forbidden == 0 and outcome.env_steps >= 128
    assert outcome.evaluation["eval_return"] == 8.0, "every episode goes on to its end"
    policy = policies.Policy(policies.choose(tmp_path))
    assert [each.total for each in policies.play(policy, 3)] == [8.0] * 3 and Corridor.forbidden == 0


@pytest.mark.parametrize("several", [False, True])
def test_ppo_learns_from_the_masks_that_it_acted_with(tmp_path, monkeypatch, several) -> None:
    given, update = [], PPO.update
    monkeypatch.setattr(PPO, "update", lambda self, rollout, at: (given.append(rollout), update(self, rollout, at))[1])
    train(settings("ppo", several=several, n_epochs=1, batch_size=64, envs=2), tmp_path, serial=True)
    assert len(given) == 2
    for rollout in given:
        mask, action = rollout.mask, rollout.action
        assert mask.shape == (*rollout.reward.shape, 9 if several else 6)
        choices = [(mask[..., :6], action[..., 0]), (mask[..., 6:], action[..., 1])] if several else [(mask, action)]
        for of, chosen in choices:
            assert np.take_along_axis(of, chosen[..., None], -1).all() and not of.all(-1).any()
        expected = np.log(0.5) if several else 0.0  # one of the first choice's actions is allowed, two of the second's
        np.testing.assert_allclose(rollout.log_prob, expected, atol=0.05)


@pytest.mark.parametrize("name", ["ppo", pytest.param("dqn", marks=pytest.mark.runs)])
def test_without_the_mask_the_same_training_has_not_learned_it(tmp_path, monkeypatch, name) -> None:
    monkeypatch.setattr(Corridor, "forbidden", 0)
    outcome = train(settings(name, action_masks=False), tmp_path, serial=True)
    assert Corridor.forbidden > 20 and outcome.evaluation["eval_return"] < 4.0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithm": "td3", "env": "Pendulum-v1"}, "it has no masks of actions"),
        ({"algorithm": "ppo", "env": "Pendulum-v1"}, "these are numbers"),
        ({"env": f"{__name__}:Told"}, "has a part 'action_mask'.*return it in info instead"),
    ],
)
def test_masks_that_cannot_be_are_refused_before_the_start(tmp_path, changes, told) -> None:
    s = GymTraining.checked({"env": CORRIDOR, "action_masks": True, **changes})
    with pytest.raises(ConfigError, match=told):
        train(s, tmp_path / "run", serial=True)
    assert not (tmp_path / "run").exists()


class Told(Corridor):
    """Has its mask in the observation, as PettingZoo's environments do."""

    def __init__(self) -> None:
        from gymnasium import spaces

        super().__init__()
        self.observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(6), "place": spaces.Discrete(8)})


def test_an_environment_without_masks_ends_the_run_with_a_sentence(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"action_masks = true expects info.'action_mask'. of reset and step, or"):
        train(settings("ppo", "nowhere"), tmp_path, serial=True)


@pytest.mark.parametrize(
    ("given", "counts", "told"),
    [
        ([True, True], (), r"info\['action_mask'\] has the shape \(2,\)"),
        ([0.5, 0, 1], (), "expected bool"),
        ([0, 2, 1], (), "holds 2: expected bool"),
        ([0, 0, 0], (), "allows no action: expected one or more"),
        ([0, 1, 0], (2, 1), "allows no action of one of the choices"),
    ],
)
def test_a_mask_that_is_none_names_what_was_expected(given, counts, told) -> None:
    with pytest.raises(ContractBroken, match=told):
        action_mask(None, {"action_mask": given}, 3, counts)


def spec(**changes) -> AgentSpec:
    return AgentSpec((Leaf("observation", (4,), "float32"),), ActionSpec(True, 3), masked=True, **changes)


def masks(n: int, seed: int = 0) -> np.ndarray:
    mask = np.random.default_rng(seed).random((n, 3)) < 0.5
    mask[np.arange(n), np.arange(n) % 3] = True
    return mask


@pytest.mark.parametrize("name", SMALL)
def test_what_explores_draws_from_all_allowed_actions_and_no_other(name) -> None:
    made = algorithm(name, spec(), hidden=(8,))
    network, mask = made.seeded(made.network, 0), masks(3000)
    with torch.inference_mode():
        found = network(torch.zeros(3000, 4), torch.from_numpy(mask))
    outputs = {n: t.numpy() for n, t in zip(made.outputs, found if isinstance(found, tuple) else (found,), strict=True)}
    chosen, _ = made.explore(outputs, np.random.default_rng(0), Progress(0, 100))  # at first DQN's are all random
    assert mask[np.arange(3000), chosen].all() and mask[np.arange(3000), made.greedy(outputs)].all()
    for allowed in ([True, True, False], [True, True, True]):
        rows = (mask == allowed).all(1)
        shares = np.bincount(chosen[rows], minlength=3)[: sum(allowed)] / rows.sum()
        assert rows.sum() > 100 and shares == pytest.approx(1 / sum(allowed), abs=0.15)


@pytest.mark.parametrize("ended", [False, True])
def test_dqns_target_is_the_best_of_what_is_allowed_next(ended) -> None:
    dqn = learning("dqn", spec(), hidden=(8,), seed=3)
    dqn.move_target(1.0)
    rng = np.random.default_rng(1)
    seen, after = (torch.from_numpy(rng.normal(size=(30, 4)).astype(np.float32)) for _ in range(2))
    mask, following = torch.from_numpy(masks(30)), torch.from_numpy(masks(30, 5))
    if ended:
        following = torch.zeros_like(following)  # as after an end, where it does not matter
    action = mask.float().argmax(1)
    batch = {
        "observation": seen, "next_observation": after, "action": action, "action_mask": mask,
        "next_action_mask": following, "reward": torch.ones(30), "discount": torch.full((30,), 0.0 if ended else 0.9),
    }  # fmt: skip
    free = copy.deepcopy(dqn.acting)
    free.masked = False
    with torch.no_grad():
        best = free(after).masked_fill(~following, -torch.inf).amax(1) if not ended else torch.zeros(30)
        expected = torch.nn.functional.smooth_l1_loss(
            free(seen).gather(1, action[:, None])[:, 0], 1.0 + batch["discount"] * best
        )
    torch.testing.assert_close(dqn.loss(batch).detach(), expected)


@pytest.mark.parametrize("name", SMALL)
def test_the_network_gives_forbidden_actions_the_lowest_number(name) -> None:
    made = algorithm(name, spec(), hidden=(8,))
    mask = masks(6)
    found = made.seeded(made.network, 0)(torch.randn(6, 4), torch.from_numpy(mask))
    values = (found[0] if isinstance(found, tuple) else found).detach().numpy()
    assert (values[~mask] == LOWEST).all() and (values[mask] > -100).all()
