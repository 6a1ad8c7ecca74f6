"""Each algorithm's update is held to its published formulas, written out here once more, on fixed batches.

The reference knows the networks and torch's Adam, and nothing else of the learner. Both make the same few updates; then
all their weights agree. The batches have rows on every side of every bound: ratios beyond both, values clipped and not,
episodes that end in each way.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import START, acting_network, learning, outputs_of, refined, spec_of
from torch import nn
from torch.nn import functional

from jurybox.training.algorithms.base import Progress, Rollout
from jurybox.training.algorithms.networks import (
    ActorCritic,
    Features,
    QuantileValues,
    QValues,
    SeeingCritic,
)
from jurybox.training.algorithms.ppo import PPOSettings

OBSERVATIONS, ACTIONS = 3, 2


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(before)


def agree(learned, expected, tolerance=2e-5) -> None:
    one, two = (list(each.parameters()) if isinstance(each, nn.Module) else list(each) for each in (learned, expected))
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        torch.testing.assert_close(left.detach(), right.detach(), rtol=1e-4, atol=tolerance)


def widened(network: nn.Module, seed: int = 3) -> nn.Module:
    """The network with other weights, drawn from this seed, so large that its outputs differ from row to row."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in network.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return network


def follow(optimiser: torch.optim.Optimizer, loss: torch.Tensor, norm: float | None = None) -> None:
    """A step of Adam by the gradients of its own parameters, whose norm is bounded."""
    parameters = [each for group in optimiser.param_groups for each in group["params"]]
    gradients = torch.autograd.grad(loss, parameters)
    factor = 1.0
    if norm is not None:
        factor = min(1.0, norm / (math.sqrt(sum(float((each**2).sum()) for each in gradients)) + 1e-6))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient * factor
    optimiser.step()


# ---- PPO


def rollout_of(network, *, discrete, masks=False, seed=0, shift=0.7) -> Rollout:
    """Six steps of three environments: one terminates, one is truncated, one goes on."""
    t, n, random = 6, 3, np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    observations = random.normal(size=(t, n, OBSERVATIONS)).astype(np.float32)
    rows = torch.from_numpy(observations.reshape(-1, OBSERVATIONS))
    allowed = random.random((t, n, 4)) < 0.7
    allowed[..., 0] = True
    with torch.no_grad():
        outputs = network(rows)
    if discrete:
        logits = outputs[0].clone()
        if masks:
            logits[~torch.from_numpy(allowed.reshape(-1, 4))] = -torch.inf
        distribution = torch.distributions.Categorical(logits=logits)
        chosen = torch.multinomial(distribution.probs, 1, generator=generator)[:, 0]
        log_probs, actions = distribution.log_prob(chosen), chosen.reshape(t, n).numpy()
    else:
        distribution = torch.distributions.Normal(outputs[0], outputs[1].exp())
        chosen = outputs[0] + outputs[1].exp() * torch.randn(outputs[0].shape, generator=generator)
        log_probs, actions = distribution.log_prob(chosen).sum(1), chosen.reshape(t, n, ACTIONS).numpy()
    terminated, over = np.zeros((t, n), bool), np.zeros((t, n), bool)
    terminated[2, 0] = over[2, 0] = over[3, 1] = True
    moved = random.uniform(-shift, shift, (t, n))  # what the policy has moved since: ratios beyond both bounds
    return Rollout(
        observation=observations,
        action=actions,
        log_prob=(log_probs.reshape(t, n).numpy() + moved).astype(np.float32),
        value=(outputs[-1].reshape(t, n).numpy() + random.uniform(-0.5, 0.5, (t, n))).astype(np.float32),
        reward=random.normal(size=(t, n)).astype(np.float32),
        terminated=terminated,
        ended=over,
        next_value=random.normal(size=(t, n)).astype(np.float32),
        last_value=random.normal(size=n).astype(np.float32),
        mask=allowed if masks else None,
    )


def advantages(rollout: Rollout, s: PPOSettings) -> np.ndarray:
    """Equation 16 of Schulman et al. (2016): sums of the discounted errors until the episode ends."""
    t, n = rollout.reward.shape
    found = np.zeros((t, n))
    for column in range(n):
        for start in range(t):
            weight, total = 1.0, 0.0
            for step in range(start, t):
                if rollout.ended[step, column]:
                    cut = s.bootstrap and not rollout.terminated[step, column]
                    ahead = float(rollout.next_value[step, column]) if cut else 0.0
                else:
                    ahead = float(rollout.last_value[column] if step == t - 1 else rollout.value[step + 1, column])
                total += weight * (rollout.reward[step, column] + s.gamma * ahead - rollout.value[step, column])
                weight *= s.gamma * (s.gae_lambda if s.gae else 1.0)
                if rollout.ended[step, column]:
                    break
            found[start, column] = total
    return found


def expected_ppo(network, rollout: Rollout, s: PPOSettings, discrete: bool, seed: int):
    """The network after an update, the statistics of the returns, and the metrics of the first minibatch."""
    network = copy.deepcopy(network)
    optimiser = torch.optim.Adam(network.parameters(), s.learning_rate, betas=s.betas, eps=s.adam_eps)
    flat = [torch.from_numpy(np.ascontiguousarray(each.reshape(-1, *each.shape[2:])))
            for each in (rollout.observation, rollout.action, rollout.log_prob, rollout.value)]  # fmt: skip
    observations, actions, old_log_probs, old_values = flat
    gains = torch.from_numpy(advantages(rollout, s).reshape(-1)).float()
    returns = gains + old_values
    mean, deviation = 0.0, 1.0
    if s.normalise_returns:
        mean, deviation = float(returns.mean()), float(returns.std(unbiased=False))
        returns = (returns - mean) / deviation
    masks = None if rollout.mask is None else torch.from_numpy(rollout.mask.reshape(len(actions), -1))
    generator, first = torch.Generator().manual_seed(seed), None
    for _ in range(s.n_epochs):
        order = torch.randperm(len(actions), generator=generator)
        for rows in order.split(s.batch_size):
            outputs = network(observations[rows])
            if discrete:
                logits = outputs[0] if masks is None else outputs[0].masked_fill(~masks[rows], -1e30)
                probabilities = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
                log_probs = torch.log(probabilities[torch.arange(len(rows)), actions[rows]])
                entropies = -torch.where(
                    probabilities > 0, probabilities * probabilities.clamp_min(1e-30).log(), 0.0
                ).sum(1)
            else:
                normal = torch.distributions.Normal(outputs[0], outputs[1].exp())
                log_probs, entropies = normal.log_prob(actions[rows]).sum(1), normal.entropy().sum(1)
            ratio, gain = torch.exp(log_probs - old_log_probs[rows]), gains[rows]
            if s.normalize_advantage:
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            low, high = 1 - s.clip_range, 1 + s.clip_range
            # The objective of Schulman et al. (2017), case by case.
            kept = torch.where(gain >= 0, torch.where(ratio > high, high, ratio), torch.where(ratio < low, low, ratio))
            values, old = outputs[-1], old_values[rows]
            errors = (values - returns[rows]) ** 2
            if s.clip_value:
                near = torch.where(values > old + s.clip_range, old + s.clip_range, values)
                near = torch.where(values < old - s.clip_range, old - s.clip_range, near)
                errors = torch.where((near - returns[rows]) ** 2 > errors, (near - returns[rows]) ** 2, errors)
            losses = -(kept * gain).mean(), 0.5 * errors.mean(), entropies.mean()
            if first is None:
                clipped = ((ratio < low) | (ratio > high)).float().mean()
                first = [float(each) for each in (*losses, (ratio - 1 - ratio.log()).mean(), clipped)]
                assert (ratio > high).any() and (ratio < low).any() and (gain[ratio > high] > 0).any(), "weak data"
                assert not s.clip_value or 0 < ((values - old).abs() > s.clip_range).float().mean() < 1, "weak data"
            follow(optimiser, losses[0] + s.vf_coef * losses[1] - s.ent_coef * losses[2], s.max_grad_norm)
    return network, (mean, deviation), first


USUAL = {"learning_rate": 1e-2, "batch_size": 18, "n_epochs": 3, "ent_coef": 0.1, "target_kl": None, "gamma": 0.9}
PPO_CASES = {
    "all switches": ({}, True, False),
    "masks": ({}, True, True),
    "minibatches": ({"batch_size": 7}, True, False),
    "numbers": ({"normalise_returns": False, "clip_value": False, "vf_coef": 1.0}, False, False),
    "no centring": ({"normalize_advantage": False, "max_grad_norm": 0.3}, True, False),
    "no bootstrap, no lambda": (
        {"bootstrap": False, "gae": False, "betas": (0.9, 0.999), "adam_eps": 1e-5},
        True,
        False,
    ),
    "one environment's order": ({"clip_range": 0.1, "gae_lambda": 0.5, "max_grad_norm": 10.0}, True, False),
}


@pytest.mark.parametrize("case", PPO_CASES)
def test_ppos_update_is_that_of_its_formulas(case) -> None:
    changes, discrete, masks = PPO_CASES[case]
    s = PPOSettings(**{**USUAL, **changes})
    if discrete:
        network = widened(ActorCritic(Features(OBSERVATIONS), 4, (8,)))
    else:
        network = widened(acting_network("ppo", OBSERVATIONS, [], False, False, ACTIONS, (8,)))
    rollout = rollout_of(network, discrete=discrete, masks=masks)
    expected, statistics, first = expected_ppo(network, rollout, s, discrete, seed=5)
    learner = refined(s, copy.deepcopy(network), seed=5)
    if s.n_epochs * math.ceil(18 / s.batch_size) == s.n_epochs:  # one minibatch an epoch: the metrics are their means
        once = refined(PPOSettings(**{**USUAL, **changes, "n_epochs": 1}), copy.deepcopy(network), seed=5)
        metrics = once.update(rollout, START).metrics
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
        assert [metrics[name] for name in names] == pytest.approx(first, rel=1e-3, abs=1e-5)
    learner.update(rollout, START)
    agree(learner.acting, expected)
    if s.normalise_returns:
        assert learner.returns[:2] == pytest.approx(statistics, rel=1e-4)
    assert learner.gradient_steps == s.n_epochs * math.ceil(18 / s.batch_size)


def test_ppos_statistics_of_returns_follow_them_with_a_tenth_of_each_rollout() -> None:
    network = widened(ActorCritic(Features(OBSERVATIONS), 4, (8,)))
    learner = refined(PPOSettings(**USUAL), network)
    mean = second = 0.0
    for number in range(12):
        rollout = rollout_of(network, discrete=True, seed=number)
        rollout.reward += np.float32(number)
        returns = advantages(rollout, learner.rules) + rollout.value
        share = max(0.1, 1 / (number + 1))
        mean, second = (
            (1 - share) * old + share * new for old, new in ((mean, returns.mean()), (second, (returns**2).mean()))
        )
        learner.update(rollout, START)
        assert learner.returns[0] == pytest.approx(mean, rel=1e-4)
        assert learner.returns[1] == pytest.approx(math.sqrt(second - mean**2), rel=1e-3)
        values = learner.values(rollout.observation[0])
        plain = network.value(torch.from_numpy(rollout.observation[0])).detach().numpy()
        np.testing.assert_allclose(values, plain * learner.returns[1] + learner.returns[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
def test_ppo_draws_from_the_distribution_that_it_reports(masked) -> None:
    network = widened(ActorCritic(Features(OBSERVATIONS), 4, (8,), masked=masked))
    learner = refined(PPOSettings(), network, masked=masked)
    n = 20_000
    observation = np.tile(np.array([[0.3, -0.2, 0.5]], np.float32), (n, 1))
    masks = np.tile(np.array([[True, False, True, True]]), (n, 1)) if masked else None
    with torch.no_grad():
        odds = network.actor(torch.from_numpy(observation[:1]))[0].exp().numpy()
    if masked:
        odds[1] = 0
    odds = odds / odds.sum()
    outputs = outputs_of(learner, observation, masks)
    actions, columns = learner.explore(outputs, np.random.default_rng(0), START)
    np.testing.assert_allclose(np.bincount(actions, minlength=4) / n, odds, atol=0.015)
    np.testing.assert_allclose(np.exp(columns["log_prob"]), odds[actions], rtol=1e-4)
    assert (learner.greedy(outputs) == odds.argmax()).all()
    np.testing.assert_allclose(learner.in_rewards(outputs["value"]), learner.values(observation), rtol=1e-5)


# ---- from a replay


def batches(count: int, n: int, *, discrete: bool = False, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    found = []
    for number in range(count):
        g = torch.Generator().manual_seed(100 * seed + number)
        discount = torch.where(
            torch.rand(n, generator=g) < 0.3, 0.0, torch.where(torch.rand(n, generator=g) < 0.5, 0.9, 0.81)
        )
        found.append(
            {
                "observation": torch.randn(n, OBSERVATIONS, generator=g),
                "next_observation": torch.randn(n, OBSERVATIONS, generator=g),
                "action": torch.randint(4, (n,), generator=g)
                if discrete
                else 2 * torch.rand(n, ACTIONS, generator=g) - 1,
                "reward": 3 * torch.randn(n, generator=g),
                "discount": discount,
            }
        )
    return found


def value_learner(name, network, **settings):
    spec = spec_of(OBSERVATIONS, (), False, True, 4)
    return learning(name, spec, network, seed=4, learning_rate=1e-2, train_freq=1, **settings)


def updated(learner, batch) -> float:
    """Make an update that is due after as many env steps, and return its loss; the target moves before it."""
    return float(learner.update(batch, Progress(learner.updates + 1, 100)).metrics["loss"])


def test_dqns_update_is_that_of_double_q_learning_with_the_huber_loss() -> None:
    given = widened(QValues(Features(OBSERVATIONS), 4, (8,)))
    learner = value_learner("dqn", given, target_update_interval=4, max_grad_norm=0.5)
    network, target = copy.deepcopy(given), widened(copy.deepcopy(given), 9)
    learner.target.load_state_dict(target.state_dict())
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    for number, batch in enumerate(batches(6, 12, discrete=True), 1):
        if number == 4:
            target.load_state_dict(network.state_dict())
        found = updated(learner, batch)
        rows = torch.arange(12)
        with torch.no_grad():
            best = network(batch["next_observation"]).argmax(1)
            wanted = batch["reward"] + batch["discount"] * target(batch["next_observation"])[rows, best]
        errors = network(batch["observation"])[rows, batch["action"]] - wanted
        huber = torch.where(errors.abs() < 1, 0.5 * errors**2, errors.abs() - 0.5)
        assert (errors.abs() < 1).any() and (errors.abs() > 1).any(), "weak data"
        assert found == pytest.approx(float(huber.mean()), rel=1e-4)
        follow(optimiser, huber.mean(), 0.5)
    agree(learner.acting, network)
    agree(learner.target, target)


def test_iqns_update_is_quantile_regression_between_samples_of_both_networks() -> None:
    given = widened(QuantileValues(Features(OBSERVATIONS), 4, (8, 8)))
    learner = value_learner("iqn", given, target_update_interval=3)
    network, target = copy.deepcopy(given), widened(copy.deepcopy(given), 9)
    learner.target.load_state_dict(target.state_dict())
    optimiser, generator = torch.optim.Adam(network.parameters(), 1e-2), torch.Generator().manual_seed(4)
    spread = (torch.arange(32) + 0.5) / 32
    for number, batch in enumerate(batches(4, 6, discrete=True), 1):
        if number == 3:
            target.load_state_dict(network.state_dict())
        found = updated(learner, batch)
        own_taus, other_taus = (torch.rand(6, 8, generator=generator) for _ in range(2))
        loss = torch.zeros(())
        best = network.quantiles(batch["next_observation"], spread).mean(1).argmax(1)
        own_all, other_all = (
            network.quantiles(batch["observation"], own_taus),
            target.quantiles(batch["next_observation"], other_taus).detach(),
        )
        for row in range(6):
            for i in range(8):
                for j in range(8):
                    wanted = batch["reward"][row] + batch["discount"][row] * other_all[row, j, best[row]]
                    error = wanted - own_all[row, i, batch["action"][row]]
                    huber = 0.5 * error**2 if abs(float(error)) <= 1 else abs(error) - 0.5
                    loss = loss + abs(own_taus[row, i] - (1.0 if error < 0 else 0.0)) * huber / (8 * 6)
        assert found == pytest.approx(float(loss), rel=1e-4)
        follow(optimiser, loss, 10.0)
    agree(learner.acting, network, 5e-5)
    agree(learner.target, target, 5e-5)


def soft(target: nn.Module, live: nn.Module, tau: float) -> None:
    with torch.no_grad():
        for one, two in zip(target.parameters(), live.parameters(), strict=True):
            one.copy_((1 - tau) * one + tau * two)


@pytest.mark.parametrize("weighted", [False, True])
def test_td3s_update_is_that_of_its_paper(weighted) -> None:
    spec = spec_of(OBSERVATIONS, (), False, False, ACTIONS)
    actor = widened(acting_network("td3", OBSERVATIONS, (), False, False, ACTIONS, (8,)))
    critic = widened(SeeingCritic(Features(OBSERVATIONS), ACTIONS, (8,)))
    with torch.no_grad():
        actor.layers[-1].weight.mul_(3.0)  # some actions beyond the bound of the penalty
    learner = learning(
        "td3", spec, copy.deepcopy(actor), copy.deepcopy(critic), seed=6,
        learning_rate=1e-2, critic_learning_rate=2e-2, tau=0.1, policy_delay=2, target_policy_noise=0.4,
        target_noise_clip=0.3, pre_tanh_penalty=0.2, reward_scale=0.5, hidden=(8,),
    )  # fmt: skip
    target_actor, target_critic = copy.deepcopy(actor), copy.deepcopy(critic)
    of_actor, of_critic = torch.optim.Adam(actor.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 2e-2)
    generator = torch.Generator().manual_seed(6)
    for number, batch in enumerate(batches(5, 16), 1):
        weights = torch.linspace(0.2, 1.0, 16) if weighted else None
        given = {**batch, "weights": weights} if weighted else batch
        update = learner.update({name: each.clone() for name, each in given.items()}, START)
        seen, following = batch["observation"], batch["next_observation"]
        noise = torch.empty(16, ACTIONS).normal_(0.0, 0.4, generator=generator)
        assert (noise.abs() > 0.3).any(), "weak data"
        with torch.no_grad():
            next_action = (target_actor(following) + noise.clamp(-0.3, 0.3)).clamp(-1, 1)
            one, two = target_critic(following, next_action)
            assert number > 1 or ((one < two).any() and (two < one).any()), "weak data"
            wanted = 0.5 * batch["reward"] + batch["discount"] * torch.where(one < two, one, two)
        values = critic(seen, batch["action"])
        squares = (values - wanted) ** 2 * (1 if weights is None else weights)
        np.testing.assert_allclose(update.priorities, (values - wanted).abs().mean(0).detach(), rtol=1e-3, atol=1e-4)
        follow(of_critic, squares[0].mean() + squares[1].mean())
        if number % 2 == 0:
            raw = actor.layers(seen)
            penalty = (functional.relu(raw.abs() - 1) ** 2).mean()
            assert penalty > 0, "weak data"
            follow(of_actor, -critic(seen, torch.tanh(raw))[0].mean() + 0.2 * penalty)
            soft(target_actor, actor, 0.1)
            soft(target_critic, critic, 0.1)
    agree(learner.acting, actor, 5e-5)
    agree(learner.critics, critic, 5e-5)
    agree(learner.target_actor, target_actor, 5e-5)
    agree(learner.target_critics, target_critic, 5e-5)


@pytest.mark.parametrize("ent_coef", ["auto_0.5", 0.3])
def test_sacs_update_is_that_of_its_paper(ent_coef) -> None:
    actor = widened(acting_network("sac", OBSERVATIONS, [], False, False, ACTIONS, (8, 8)), 1)
    critic = widened(SeeingCritic(Features(OBSERVATIONS), ACTIONS, (8,)))
    learner = learning(
        "sac", spec_of(OBSERVATIONS, (), False, False, ACTIONS), copy.deepcopy(actor), copy.deepcopy(critic), seed=7,
        learning_rate=1e-2, tau=0.1, target_update_interval=2, ent_coef=ent_coef,
    )  # fmt: skip
    target = widened(copy.deepcopy(critic), 9)
    learner.target.load_state_dict(target.state_dict())
    learns = isinstance(ent_coef, str)
    log_alpha = torch.tensor(math.log(0.5 if learns else 0.3), requires_grad=learns)
    of_actor, of_critic = (torch.optim.Adam(each.parameters(), 1e-2) for each in (actor, critic))
    of_alpha, generator = torch.optim.Adam([log_alpha], 1e-2), torch.Generator().manual_seed(7)

    def drawn(rows):
        mean, log_std = actor(rows)
        noise = torch.empty_like(mean).normal_(generator=generator)
        before = mean + log_std.exp() * noise
        density = torch.distributions.Normal(mean, log_std.exp()).log_prob(before)
        return torch.tanh(before), (density - torch.log(1 - torch.tanh(before) ** 2 + 1e-9)).sum(1)

    for number, batch in enumerate(batches(5, 16), 1):
        update = learner.update(batch, START)
        seen, following = batch["observation"], batch["next_observation"]
        action, density = drawn(seen)
        alpha = float(log_alpha.detach().exp())
        if learns:
            follow(of_alpha, -(log_alpha * (density.detach() - ACTIONS)).mean())
        with torch.no_grad():
            next_action, next_density = drawn(following)
            one, two = target(following, next_action)
            assert number > 1 or ((one < two).any() and (two < one).any()), "weak data"
            wanted = batch["reward"] + batch["discount"] * (torch.where(one < two, one, two) - alpha * next_density)
        first, second = critic(seen, batch["action"])
        expected_loss = 0.5 * ((first - wanted) ** 2).mean() + 0.5 * ((second - wanted) ** 2).mean()
        assert float(update.metrics["critic_loss"]) == pytest.approx(float(expected_loss), rel=1e-3)
        assert float(update.metrics["ent_coef"]) == pytest.approx(alpha, rel=1e-4)
        follow(of_critic, 0.5 * ((first - wanted) ** 2).mean() + 0.5 * ((second - wanted) ** 2).mean())
        one, two = critic(seen, action)
        assert number > 1 or ((one < two).any() and (two < one).any()), "weak data"
        follow(of_actor, (alpha * density - torch.where(one < two, one, two)).mean())
        if number % 2 == 0:
            soft(target, critic, 0.1)
    agree(learner.acting, actor, 5e-5)
    agree(learner.critics, critic, 5e-5)
    agree(learner.target, target, 5e-5)
    assert float(learner.log_temperature) == pytest.approx(float(log_alpha), rel=1e-4)
