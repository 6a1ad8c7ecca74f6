"""SAC's update compared with numbers computed by hand, and that it resumes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import START, learning, spec_of
from torch import nn

from jurybox.training.algorithms.networks import normal_log_prob, tanh_correction
from jurybox.training.algorithms.sac import SAC, first_temperature


class Fixed(nn.Module):
    """A policy of one mean and deviation, whatever it sees."""

    def __init__(self, mean: float, log_std: float) -> None:
        super().__init__()
        self.mean, self.log_std = nn.Parameter(torch.tensor([mean])), nn.Parameter(torch.tensor([log_std]))

    def forward(self, rows):
        n = len(rows)
        return self.mean.expand(n, 1), self.log_std.expand(n, 1)


class Constant(nn.Module):
    """Two critics that return two constants."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.tensor([first, second]))

    def forward(self, rows, action):
        return self.numbers[:, None].expand(2, len(rows)) + 0.0 * action.sum()


def batch(n: int = 4, reward: float = 2.0, discount: float = 0.5) -> dict[str, torch.Tensor]:
    return {
        "observation": torch.zeros(n, 3),
        "next_observation": torch.zeros(n, 3),
        "action": torch.zeros(n, 1),
        "reward": torch.full((n,), reward),
        "discount": torch.full((n,), discount),
    }


def learner(seed: int = 0, actions: int = 2, networks: tuple = (), **settings) -> SAC:
    given = {"hidden": (16, 16), **settings}
    return learning("sac", spec_of(3, (), False, False, actions), *networks, seed=seed, **given)  # type: ignore[return-value]


def test_the_density_of_a_squashed_action_is_that_of_torchs_transformed_distribution() -> None:
    mean, log_std, u = torch.tensor([0.3]), torch.tensor([-0.5]), torch.tensor([0.9])
    found = normal_log_prob(u, mean, log_std) - tanh_correction(u)
    normal = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(normal, [torch.distributions.TanhTransform()])
    torch.testing.assert_close(found, squashed.log_prob(torch.tanh(u)))


def test_the_correction_stays_finite_where_tanh_is_one() -> None:
    u = torch.tensor([20.0, -20.0], dtype=torch.float64)
    expected = 2 * (math.log(2) - 20)  # log(1 - tanh(u)^2) for large |u|
    torch.testing.assert_close(tanh_correction(u), torch.full((2,), expected, dtype=torch.float64))
    assert torch.isfinite(tanh_correction(torch.tensor([50.0]))).all()


def test_the_target_is_the_smaller_value_less_the_temperature_times_the_log_density() -> None:
    # A deviation of e^-20 makes every draw the mean, 0: its log density is 20 - log(2 pi) / 2, and tanh's part is 0.
    sac = learner(actions=1, networks=(Fixed(0.0, -20.0), Constant(5.0, 3.0)), ent_coef=0.1)
    density = 20 - 0.5 * math.log(2 * math.pi)
    noise = torch.Generator().manual_seed(0)
    drawn = [torch.empty(4, 1).normal_(generator=noise) for _ in range(2)][1]  # the second draw is the next action's
    target = 2.0 + 0.5 * (3.0 - 0.1 * (density - 0.5 * drawn[:, 0] ** 2))
    update = sac.update(batch(), START)
    expected = 0.5 * (((5.0 - target) ** 2).mean() + ((3.0 - target) ** 2).mean())
    torch.testing.assert_close(update.metrics["critic_loss"], expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_bootstrapped_if_the_discount_is_zero() -> None:
    sac = learner(actions=1, networks=(Fixed(0.0, -20.0), Constant(5.0, 3.0)), ent_coef=0.1)
    update = sac.update(batch(discount=0.0), START)
    assert float(update.metrics["critic_loss"]) == pytest.approx(0.5 * (3.0**2 + 1.0**2))
    np.testing.assert_allclose(update.priorities.numpy(), [2.0] * 4)


@pytest.mark.parametrize(("log_std", "grows"), [(-20.0, True), (0.0, False)])
def test_the_temperature_grows_while_the_entropy_is_below_its_target(log_std, grows) -> None:
    # The entropy of a squashed standard normal is some 0.6 nats below log 2: above -1, the target of one action.
    sac = learner(actions=1, networks=(Fixed(0.0, log_std), Constant(0.0, 0.0)), learning_rate=0.01)
    assert sac.target_entropy == -1.0
    update = sac.update(batch(64), START)
    assert float(update.metrics["ent_coef"]) == 1.0, "the update before it changes is with the first one"
    # Adam's first step is the learning rate, in the direction of the gradient.
    assert float(sac.log_temperature.detach()) == pytest.approx(0.01 if grows else -0.01, rel=1e-3)


def test_a_temperature_that_is_given_stays() -> None:
    sac = learner(ent_coef=0.25)
    for _ in range(3):
        sac.update({**batch(8), "action": torch.zeros(8, 2)}, START)
    assert float(sac.log_temperature.detach().exp()) == pytest.approx(0.25)


@pytest.mark.parametrize(("given", "means"), [("auto", (True, 1.0)), ("auto_0.1", (True, 0.1)), (0.2, (False, 0.2))])
def test_ent_coef_is_read_as_stable_baselines3_reads_it(given, means) -> None:
    assert first_temperature(given) == means


@pytest.mark.parametrize("given", ["automatic", "auto_0", 0.0, -1.0, "loud"])
def test_another_ent_coef_is_refused(given) -> None:
    with pytest.raises(ValueError, match="expected a number above 0"):
        first_temperature(given)


def test_targets_move_by_tau_and_only_every_so_many_updates() -> None:
    sac = learner(tau=0.25, target_update_interval=2)
    data = {**batch(8), "action": torch.zeros(8, 2)}
    before = [each.clone() for each in sac.target.parameters()]
    sac.update(data, START)
    assert all(torch.equal(one, other) for one, other in zip(before, sac.target.parameters(), strict=True))
    sac.update(data, START)
    for old, target, live in zip(before, sac.target.parameters(), sac.critics.parameters(), strict=True):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * live)


def test_the_policys_step_leaves_the_critics_alone() -> None:
    sac = learner()
    data = {**batch(8), "action": torch.zeros(8, 2), "observation": torch.randn(8, 3)}
    sac.update(data, START)
    gradients = [each.grad.clone() for each in sac.critics.parameters()]
    values = sac.critics(data["observation"], data["action"])
    loss = 0.5 * (values - values.detach() - 1).square().mean(1).sum()
    assert len(gradients) == len(torch.autograd.grad(loss, list(sac.critics.parameters())))
    assert all(each.grad is not None for each in sac.acting.parameters())
    assert all(each.grad is None for each in sac.target.parameters())


@pytest.mark.runs
def test_it_learns_the_rewarded_action() -> None:
    """A bandit: the nearer the action is to 0.5, the better."""
    sac = learner(learning_rate=0.01, ent_coef=0.01)
    noise = torch.Generator().manual_seed(0)
    for _ in range(150):
        action = torch.rand(64, 2, generator=noise) * 2 - 1
        data = {**batch(64), "action": action, "reward": -(action - 0.5).square().sum(1), "discount": torch.zeros(64)}
        sac.update(data, START)
    mean, _ = sac.acting(torch.zeros(1, 3))
    np.testing.assert_allclose(torch.tanh(mean).detach().numpy(), [[0.5, 0.5]], atol=0.15)


def test_it_continues_from_a_state_as_if_it_had_never_stopped(tmp_path) -> None:
    from jurybox.training.checkpoints import read_state, write_state

    data = {**batch(8), "action": torch.zeros(8, 2), "observation": torch.randn(8, 3)}
    one = learner()
    for _ in range(3):
        one.update(data, START)
    write_state(tmp_path / "sac.state", one.state_dict())
    other = learner(seed=5)
    other.load_state_dict(read_state(tmp_path / "sac.state"))
    first, second = (each.update(data, START).metrics for each in (one, other))
    assert {name: float(value) for name, value in first.items()} == {
        name: float(value) for name, value in second.items()
    }
    assert all(torch.equal(a, b) for a, b in zip(one.acting.parameters(), other.acting.parameters(), strict=True))
