"""PPO: its advantages, its options, that it learns, and that it resumes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import START, outputs_of, refined

from jurybox.training.algorithms import ppo
from jurybox.training.algorithms.base import Rollout
from jurybox.training.algorithms.networks import ActorCritic, Features
from jurybox.training.algorithms.ppo import PPO, PPOSettings, advantages_of

SETTINGS = PPOSettings(batch_size=64, hidden=(16,))


def rollout(t: int = 3, n: int = 1, **changed) -> Rollout:
    def zeros(dtype):
        return np.zeros((t, n), dtype)

    parts = {
        "observation": np.zeros((t, n, 2), np.float32),
        "action": zeros(np.int64),
        "log_prob": zeros(np.float32),
        "value": zeros(np.float32),
        "reward": np.ones((t, n), np.float32),
        "terminated": zeros(bool),
        "ended": zeros(bool),
        "next_value": zeros(np.float32),
        "last_value": np.zeros(n, np.float32),
    }
    return Rollout(**{**parts, **changed})


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def test_generalised_advantages_are_the_discounted_sum_of_errors() -> None:
    settings = replace(SETTINGS, gamma=0.5, gae_lambda=0.5)
    given = rollout(value=column(1, 2, 3), last_value=np.array([4.0], np.float32))
    errors = [1 + 0.5 * 2 - 1, 1 + 0.5 * 3 - 2, 1 + 0.5 * 4 - 3]
    expected = [errors[0] + 0.25 * (errors[1] + 0.25 * errors[2]), errors[1] + 0.25 * errors[2], errors[2]]
    np.testing.assert_allclose(advantages_of(given, settings)[:, 0], expected)


@pytest.mark.parametrize("changes", [{}, {"gae": False}, {"bootstrap": False}])
def test_one_long_column_counts_as_each_of_several_does(changes) -> None:
    random = np.random.default_rng(0)
    over = random.random((50, 2)) < 0.2
    numbers = {name: random.normal(size=(50, 2)).astype(np.float32) for name in ("value", "reward", "next_value")}
    last = random.normal(size=2).astype(np.float32)
    both = rollout(50, 2, ended=over, terminated=over & (random.random((50, 2)) < 0.5), last_value=last, **numbers)
    settings = replace(SETTINGS, **changes)
    parts = {"value", "reward", "next_value", "ended", "terminated"}
    for column in (0, 1):
        alone = {name: getattr(both, name)[:, column : column + 1] for name in parts}
        one = rollout(50, 1, last_value=last[column : column + 1], **alone)
        np.testing.assert_allclose(
            advantages_of(one, settings)[:, 0], advantages_of(both, settings)[:, column], rtol=1e-4, atol=1e-5
        )


def test_without_gae_an_advantage_is_the_discounted_return_less_the_value() -> None:
    settings = replace(SETTINGS, gamma=0.5, gae=False)
    given = rollout(value=column(1, 1, 1), ended=np.array([[False], [False], [True]]))
    np.testing.assert_allclose(advantages_of(given, settings)[:, 0], [0.75, 0.5, 0.0])


@pytest.mark.parametrize(
    ("terminated", "bootstrap", "last"), [(False, True, 6.0), (True, True, 1.0), (False, False, 1.0)]
)
def test_only_a_truncated_episode_counts_the_value_of_its_last_state(terminated, bootstrap, last) -> None:
    settings = replace(SETTINGS, gamma=0.5, bootstrap=bootstrap)
    given = rollout(
        ended=np.array([[True], [False], [True]]),
        terminated=np.array([[True], [False], [terminated]]),
        next_value=column(100, 0, 10),
    )
    found = advantages_of(given, settings)[:, 0]
    assert found[2] == last and found[0] == 1.0, "nothing leaks over the end of an episode"


def played(learner: PPO, random: np.random.Generator, masks=None) -> Rollout:
    """A bandit with two states: the right action is 1 in the first, 3 in the second."""
    t, n = 8, 32
    state = random.integers(0, 2, (t, n))
    observations = np.eye(2, dtype=np.float32)[state]
    outputs = [outputs_of(learner, row, None if masks is None else masks[0]) for row in observations]
    parts = [learner.explore(each, random, START) for each in outputs]
    actions = np.stack([part[0] for part in parts])
    return rollout(
        t,
        n,
        observation=observations,
        action=actions,
        log_prob=np.stack([part[1]["log_prob"] for part in parts]),
        value=np.stack([learner.in_rewards(each["value"]) for each in outputs]),
        reward=10.0 * (actions == 1 + 2 * state).astype(np.float32),
        ended=np.ones((t, n), bool),
        terminated=np.ones((t, n), bool),
        mask=masks,
    )


@pytest.mark.parametrize(
    "off",
    [
        {},
        {"target_kl": None},
        *(
            pytest.param({switch: False}, marks=pytest.mark.runs)
            for switch in ("gae", "normalize_advantage", "normalise_returns", "clip_value", "bootstrap")
        ),
    ],
    ids=lambda off: next(iter(off), "default"),
)
def test_it_learns_a_bandit_with_every_switch_thrown(off) -> None:
    random = np.random.default_rng(0)
    learner = refined(replace(SETTINGS, learning_rate=0.03, **off), seed=1)
    for _ in range(10):
        told = learner.update(played(learner, random), START)
    assert learner.greedy(outputs_of(learner, np.eye(2, dtype=np.float32))).tolist() == [1, 3]
    assert told.metrics.keys() == set(PPO.metrics) and learner.gradient_steps > 20


def test_a_masked_action_is_never_chosen_and_learning_stays_finite() -> None:
    random = np.random.default_rng(0)
    learner = refined(SETTINGS, seed=1, masked=True)
    masks = np.ones((8, 32, 5), bool)
    masks[:, :, [0, 4]] = False
    for _ in range(3):
        given = played(learner, random, masks)
        assert set(np.unique(given.action)) <= {1, 2, 3}
        assert all(np.isfinite(value) for value in learner.update(given, START).metrics.values())


def test_an_update_stops_when_the_policy_has_moved_far_enough() -> None:
    random = np.random.default_rng(0)
    steps = {}
    for kl in (None, 1e-4):
        learner = refined(replace(SETTINGS, learning_rate=0.05, target_kl=kl), seed=1)
        learner.update(played(learner, random), START)
        steps[kl] = learner.gradient_steps
    assert steps[None] == SETTINGS.n_epochs * 4 and 0 < steps[1e-4] < steps[None]


def test_a_saved_run_continues_bit_for_bit() -> None:
    first = refined(SETTINGS, seed=1)
    first.update(played(first, np.random.default_rng(0)), START)
    second = refined(SETTINGS, seed=2)
    second.load_state_dict(first.state_dict())
    told = [learner.update(played(learner, np.random.default_rng(5)), START) for learner in (first, second)]
    assert told[0] == told[1]


def test_the_same_seed_makes_the_same_network_independently_of_torchs_generator() -> None:
    import torch

    torch.manual_seed(99)
    left = refined(SETTINGS, seed=4)
    torch.rand(3)
    right = refined(SETTINGS, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(left.acting.parameters(), right.acting.parameters(), strict=True))


def test_a_last_batch_size_of_one_row_leaves_the_network_finite() -> None:
    learner = refined(replace(SETTINGS, batch_size=64), seed=1)
    random = np.random.default_rng(0)
    rows = 65
    learner.update(
        rollout(
            t=rows,
            observation=random.random((rows, 1, 2), np.float32),
            action=random.integers(5, size=(rows, 1)),
            log_prob=np.full((rows, 1), np.log(0.2), np.float32),
            reward=random.random((rows, 1), np.float32),
        ),
        START,
    )
    assert all(bool(each.isfinite().all()) for each in learner.acting.parameters())


def test_steps_that_are_not_valid_change_nothing_whatever_they_hold() -> None:
    settings = PPOSettings(batch_size=8, hidden=(8,), n_epochs=3)
    made = played(refined(settings, actions=3), np.random.default_rng(0))
    keep = np.ones(made.reward.shape, bool)
    keep[2:4, 0] = False
    weights = []
    for garbage in (0.0, 1e6):
        for name in ("observation", "reward", "value", "log_prob"):
            getattr(made, name)[~keep] = garbage
        made.ended[1:4, 0], made.valid = True, keep
        learner = refined(settings, actions=3)
        learner.update(made, START)
        weights.append([each.detach().numpy().copy() for each in learner.acting.parameters()])
        assert learner.returns[1] < 1e3
    assert all(np.array_equal(one, two) for one, two in zip(*weights, strict=True))
    made.valid = np.zeros_like(keep)
    with pytest.raises(ValueError, match="no step of this rollout is valid"):
        learner.update(made, START)


def test_it_values_on_its_device() -> None:
    class Elsewhere(ActorCritic):
        """Accepts what lies on its device alone, as a network on a GPU does; the outputs come back."""

        def forward(self, observation):
            assert observation.device.type == "meta"
            return torch.zeros(len(observation), 3), torch.ones(len(observation))

        def value(self, observation):
            return self(observation)[1]

    learner = refined(PPOSettings(), Elsewhere(Features(2), 3, (8,)), actions=3)
    learner.device = torch.device("meta")
    seen = np.zeros((5, 2), np.float32)
    assert learner.values(seen).tolist() == [1.0] * 5


def test_long_computations_give_signs_of_life(monkeypatch) -> None:
    signs = []
    learner = refined(replace(SETTINGS, n_epochs=3, target_kl=None), actions=3)
    learner.alive = lambda: signs.append(1)
    learner.update(rollout(100, 2), START)
    assert len(signs) == 3 * 4, "one for each minibatch"
    seen = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    together = learner.values(seen)
    signs.clear()
    monkeypatch.setattr(ppo, "_ROWS_AT_ONCE", 30)
    np.testing.assert_allclose(learner.values(seen), together, rtol=1e-5)
    assert len(signs) == 4 and learner.values(seen[:0]).shape == (0,)
