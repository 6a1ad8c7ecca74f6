"""Networks for any observation: numbers, pictures or both in one row; PPO of actions that are numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import START, acting_network, algorithm, refined, spec_of

from jurybox.training.algorithms.networks import (
    CLIP,
    Features,
    GaussianActorCritic,
    features_of,
)
from jurybox.training.algorithms.ppo import PPOSettings


def test_numbers_come_out_as_they_are_unless_they_are_to_be_normalised() -> None:
    rows = torch.tensor([[1.0, -200.0]])
    assert torch.equal(Features(2)(rows), rows)
    normalising = Features(2, normalise=True)
    normalising.use(np.array([0.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
    assert normalising(rows).tolist() == [[2.0, -CLIP]]


def test_a_row_of_numbers_and_a_picture_is_told_apart_to_the_bit() -> None:
    torch.manual_seed(0)
    features = Features(2, [(3, 40, 36)])
    numbers = np.array([[0.1, -3e30], [7.0, 1.0]], np.float32)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3 * 40 * 36), np.uint8)
    rows = torch.from_numpy(np.concatenate((numbers.view(np.uint8), pixels), 1))
    assert torch.equal(features.raw_numbers(rows), torch.from_numpy(numbers))
    expected = features.pictures[0](torch.from_numpy(pixels).reshape(2, 3, 40, 36).float() / 255)
    found = features(rows)
    assert found.shape == (2, features.size) and torch.equal(found[:, 2:], expected)


@pytest.mark.parametrize(
    ("name", "discrete"), [("dqn", True), ("iqn", True), ("td3", False), ("sac", False), ("ppo", True), ("ppo", False)]
)
@pytest.mark.parametrize("pictures", [[], [(1, 36, 36)]])
def test_outputs_of_a_network_have_its_names_and_depend_on_the_seed(name, discrete, pictures) -> None:
    made = [acting_network(name, 3, pictures, True, discrete, 2, (8,), seed) for seed in (1, 1)]
    rows = torch.zeros(5, 3) if not pictures else torch.zeros(5, 12 + 36 * 36, dtype=torch.uint8)
    one, two = (network(rows) for network in made)
    one, two = ((each,) if isinstance(each, torch.Tensor) else each for each in (one, two))
    outputs = algorithm(name, spec_of(3, pictures, True, discrete, 2)).outputs
    for shape, a, b in zip(outputs.values(), one, two, strict=True):
        assert a.shape == (5, *shape) and torch.equal(a, b)
    assert len(features_of(made[0])) == 1


def test_scores_of_actions_that_are_numbers_are_those_of_torchs_normal() -> None:
    network = acting_network("ppo", 3, [], False, False, 2, (8,))
    assert isinstance(network, GaussianActorCritic)
    with torch.no_grad():
        network.log_std.copy_(torch.tensor([0.5, -1.0]))
    seen, action = torch.randn(6, 3), torch.randn(6, 2)
    log_prob, entropy, value = network.scores(seen, action)
    normal = torch.distributions.Normal(network(seen)[0], network.log_std.exp())
    torch.testing.assert_close(log_prob, normal.log_prob(action).sum(1))
    torch.testing.assert_close(entropy, normal.entropy().sum(1))
    assert torch.equal(value, network.value(seen))


def test_ppo_moves_actions_towards_rewards() -> None:
    network = acting_network("ppo", 1, [], False, False, 1, (8,))
    assert isinstance(network, GaussianActorCritic)
    learner = refined(PPOSettings(learning_rate=0.01, target_kl=None, normalise_returns=False), network)
    from tests.unit.algorithms.test_ppo import rollout

    random = np.random.default_rng(0)
    for _ in range(20):
        seen = np.zeros((64, 1, 1), np.float32)
        mean, log_std, _ = (each.detach().numpy() for each in network(torch.zeros(64, 1)))
        action = (mean + np.exp(log_std) * random.standard_normal((64, 1))).astype(np.float32)
        log_prob = torch.distributions.Normal(torch.from_numpy(mean), torch.from_numpy(np.exp(log_std)))
        learner.update(
            rollout(
                64,
                observation=seen,
                action=action[:, None],
                log_prob=log_prob.log_prob(torch.from_numpy(action)).numpy(),
                reward=-np.abs(action - 1.0),
                ended=np.ones((64, 1), bool),
                terminated=np.ones((64, 1), bool),
            ),
            START,
        )
    assert float(network(torch.zeros(1, 1))[0].detach()) > 0.3
