from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from jurybox.training.algorithms.networks import Actor, TwinCritic
from jurybox.training.algorithms.td3 import TD3Learner, TD3Settings
from jurybox.training.algorithms.td3_actor import NumpyActor
from jurybox.training.checkpoints import read_state, write_state

SMALL = TD3Settings(
    hidden_actor=(32, 32), hidden_critic=(32, 32), actor_learning_rate=3e-3, critic_learning_rate=3e-3, reward_scale=1.0
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(seed: int, n: int = 64, observations: int = 5, actions: int = 2) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "observation": torch.randn(n, observations, generator=g) * 3 + 1,
        "action": torch.rand(n, actions, generator=g) * 2 - 1,
        "reward": torch.randn(n, generator=g),
        "discount": torch.full((n,), 0.9) * (torch.rand(n, generator=g) > 0.2),
        "next_observation": torch.randn(n, observations, generator=g) * 3 + 1,
    }


def weights(learner: TD3Learner) -> list[torch.Tensor]:
    return [value.clone() for value in (*learner.actor.parameters(), *learner.critic.parameters())]


def test_it_finds_the_best_action_of_a_one_step_task() -> None:
    """The reward is highest where the action is tanh of a known function of the observation."""
    learner = TD3Learner(2, 1, SMALL, seed=1)
    g = torch.Generator().manual_seed(0)
    for _ in range(1500):
        observation = torch.rand(64, 2, generator=g) * 2 - 1
        action = torch.rand(64, 1, generator=g) * 2 - 1
        best = 0.8 * observation[:, :1]
        learner.update(
            {
                "observation": observation,
                "action": action,
                "reward": -(action - best).square().sum(-1),
                "discount": torch.zeros(64),
                "next_observation": observation,
            }
        )
    observation = torch.rand(200, 2, generator=g) * 2 - 1
    with torch.no_grad():
        error = (learner.acting()(observation) - 0.8 * observation[:, :1]).abs().mean()
    assert error < 0.1


def test_the_target_is_that_of_the_lower_critic_and_of_the_discount() -> None:
    learner = TD3Learner(
        5, 2, TD3Settings(hidden_actor=(8,), hidden_critic=(8,), target_policy_noise=0.0, reward_scale=0.5)
    )
    rows = batch(0)
    with torch.no_grad():
        following = learner.policy.normalised(rows["next_observation"])
        values = learner.target_critic(following, learner.target_actor(following))
        expected = 0.5 * rows["reward"] + rows["discount"] * values.min(0).values
        now = learner.critic(learner.policy.normalised(rows["observation"]), rows["action"])
    update = learner.update(rows)
    assert update.metrics["target"] == pytest.approx(float(expected.mean()), rel=1e-4)
    torch.testing.assert_close(update.priorities, (now - expected).abs().mean(0))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradients_in_closed_form_are_those_of_autograd(weighted: bool) -> None:
    s = TD3Settings(hidden_actor=(16, 8), hidden_critic=(8, 16), pre_tanh_penalty=0.5, policy_delay=2)
    learner = TD3Learner(5, 2, s, seed=1)
    # Networks of the caller's own go through autograd. Actions near their bounds, so that the penalty counts.
    networks = Actor(5, 2, s.hidden_actor), TwinCritic(5, 2, s.hidden_critic)
    with torch.no_grad():
        learner.actor.layers[-1].weight.mul_(100)
    networks[0].load_state_dict(learner.actor.state_dict())
    networks[1].load_state_dict(learner.critic.state_dict())
    reference = TD3Learner(5, 2, s, seed=1, given=networks)
    for target, live in ((learner.target_actor, learner.actor), (reference.target_actor, reference.actor)):
        target.load_state_dict(live.state_dict())
    g = torch.Generator().manual_seed(0)
    for number, n in enumerate((64, 64, 64, 32, 64, 64)):  # another number of rows in between
        rows = {name: value[:n].clamp(-4.9, 4.9) for name, value in batch(number).items()}  # no clipping there
        counts = torch.rand(n, generator=g) if weighted else None
        one, other = learner.update(rows, counts), reference.update(rows, counts)
        assert one.metrics.keys() == other.metrics.keys()
        for name, value in one.metrics.items():
            torch.testing.assert_close(value, other.metrics[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one.priorities, other.priorities, rtol=1e-4, atol=1e-6)
        for (name, p), q in zip(learner.critic.named_parameters(), reference.critic.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    for (name, p), q in zip(learner.actor.named_parameters(), reference.actor.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for p, q in zip(weights(learner), weights(reference), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def test_the_actor_and_the_targets_move_every_second_time_only() -> None:
    learner = TD3Learner(5, 2, SMALL)
    actor = [p.clone() for p in learner.actor.parameters()]
    target = [p.clone() for p in learner.target_critic.parameters()]
    assert "actor_loss" not in learner.update(batch(0)).metrics
    assert all(torch.equal(a, b) for a, b in zip(actor, learner.actor.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(target, learner.target_critic.parameters(), strict=True))
    assert "actor_loss" in learner.update(batch(1)).metrics
    assert not any(torch.equal(a, b) for a, b in zip(actor, learner.actor.parameters(), strict=True))
    for before, now, live in zip(target, learner.target_critic.parameters(), learner.critic.parameters(), strict=True):
        torch.testing.assert_close(now, before + 0.005 * (live - before))


def test_the_actors_step_leaves_the_critics_alone() -> None:
    learner = TD3Learner(
        5, 2, TD3Settings(hidden_actor=(8,), hidden_critic=(8,), policy_delay=1, critic_learning_rate=0.0)
    )
    before = [p.clone() for p in learner.critic.parameters()]
    learner.update(batch(0))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.critic.parameters(), strict=True))


def test_rows_of_weight_nothing_teach_nothing() -> None:
    a, b = TD3Learner(5, 2, SMALL), TD3Learner(5, 2, SMALL)
    rows = batch(0)
    counts = torch.ones(64)
    counts[32:] = 0.0
    spoiled = {**rows, "reward": torch.where(counts > 0, rows["reward"], torch.tensor(1e3))}
    a.update(rows, counts)
    b.update(spoiled, counts)
    for p, q in zip(a.critic.parameters(), b.critic.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_twin_critics_are_two_critics() -> None:
    critic = TwinCritic(3, 2, (16, 8))
    observation, action = torch.randn(10, 3), torch.randn(10, 2)
    values = critic(observation, action)
    assert values.shape == (2, 10)
    assert not torch.allclose(values[0], values[1])
    torch.testing.assert_close(critic.first(observation, action), values[0])
    for which in (0, 1):
        x = torch.cat((observation, action), -1)
        for number, layer in enumerate(critic.layers):
            x = x @ layer.weight[which] + layer.bias[which]
            x = x.relu() if number < 2 else x
        torch.testing.assert_close(values[which], x[:, 0])


def test_a_restored_learner_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = TD3Learner(5, 2, SMALL, seed=3)
    straight.normaliser.update(np.random.default_rng(0).normal(1, 3, (100, 5)))
    straight.refresh_normaliser()
    for number in range(7):
        straight.update(batch(number))
    write_state(tmp_path / "learner.state", straight.state())
    resumed = TD3Learner(5, 2, SMALL, seed=99)
    resumed.restore(read_state(tmp_path / "learner.state"))
    for number in range(7, 20):
        straight.update(batch(number))
        resumed.update(batch(number))
    assert resumed.updates == straight.updates == 20
    for a, b in zip(weights(straight), weights(resumed), strict=True):
        assert torch.equal(a, b)


def test_the_seed_decides_everything() -> None:
    first, same, other = (TD3Learner(5, 2, SMALL, seed=seed) for seed in (1, 1, 2))
    for learner in (first, same, other):
        for number in range(4):
            learner.update(batch(number))
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(same), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights(first)[:1], weights(other)[:1], strict=True))


def test_making_a_learner_leaves_torchs_own_chance_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    TD3Learner(5, 2, SMALL, seed=1)
    assert torch.equal(torch.rand(3), expected)


def test_the_numpy_actor_acts_as_the_torch_one() -> None:
    learner = TD3Learner(18, 4, TD3Settings())
    rows = np.random.default_rng(0).normal(2, 5, (50, 18)).astype(np.float32)
    learner.normaliser.update(rows)
    learner.refresh_normaliser()
    with torch.no_grad():
        expected = learner.acting()(torch.from_numpy(rows)).numpy()
    actor = learner.numpy_actor()
    np.testing.assert_allclose(actor(rows), expected, atol=2e-5)
    np.testing.assert_array_equal(NumpyActor(actor.state)(rows), actor(rows))
    assert list(actor.state) == list(learner.acting().state_dict())
    with pytest.raises(ValueError, match=r"actor\.layers\.0\.weight"):
        NumpyActor({name: value for name, value in actor.state.items() if "layers.0" not in name})


def test_published_state_carries_the_statistics_it_was_trained_with() -> None:
    learner = TD3Learner(5, 2, SMALL)
    rows = np.random.default_rng(0).normal(7, 3, (50, 5))
    learner.normaliser.update(rows)
    before = {name: value.clone() for name, value in learner.acting().state_dict().items()}
    learner.refresh_normaliser()
    now = learner.acting().state_dict()
    torch.testing.assert_close(now["observation_mean"], torch.tensor(rows.mean(0), dtype=torch.float32))
    assert not torch.equal(before["observation_scale"], now["observation_scale"])
    assert torch.equal(before["actor.layers.0.weight"], now["actor.layers.0.weight"])


def test_a_copy_for_acting_stays_as_it_was() -> None:
    learner = TD3Learner(5, 2, SMALL)
    actor, rows = learner.numpy_actor(), np.ones((1, 5), np.float32)
    before = actor(rows).copy()
    for number in range(4):
        learner.update(batch(number))
    np.testing.assert_array_equal(actor(rows), before)
    assert (learner.numpy_actor()(rows) != before).any()
