"""Actions of several choices at once: their distributions are those of torch, and PPO learns them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributions import Bernoulli, Categorical

from jurybox.training.algorithms.base import draw_choices
from jurybox.training.algorithms.networks import chosen_log_prob
from jurybox.training.spaces import ActionSpec, grouped

COUNTS = [(2, 3, 4), (2, 2), (5,), (1, 3)]


def logits_of(counts: tuple[int, ...], n: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).normal(size=(n, sum(counts)))).astype(np.float32)


def each_choice(logits: torch.Tensor, counts: tuple[int, ...]) -> list[Categorical]:
    return [Categorical(logits=part) for part in logits.split(counts, 1)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("with_mask", [False, True])
def test_log_probabilities_and_entropies_are_sums_of_torchs(counts, with_mask) -> None:
    logits = torch.from_numpy(logits_of(counts, 50)).requires_grad_()
    action = torch.stack([torch.randint(count, (50,)) for count in counts], 1)
    mask = None
    allowed = logits
    if with_mask:
        mask = torch.rand(logits.shape) < 0.5
        first = np.cumsum((0, *counts[:-1]))
        for choice in range(len(counts)):  # what was chosen was allowed
            mask[torch.arange(50), int(first[choice]) + action[:, choice]] = True
        allowed = logits.masked_fill(~mask, torch.finfo(torch.float32).min)
    log_prob, entropy = chosen_log_prob(logits, action, counts, mask)
    expected = each_choice(allowed, counts)
    torch.testing.assert_close(log_prob, sum(each.log_prob(action[:, i]) for i, each in enumerate(expected)))
    torch.testing.assert_close(entropy, sum(each.entropy() for each in expected), atol=1e-5, rtol=1e-5)
    (ours,) = torch.autograd.grad((log_prob + entropy).sum(), logits, retain_graph=True)
    theirs = sum((each.log_prob(action[:, i]) + each.entropy()).sum() for i, each in enumerate(expected))
    torch.testing.assert_close(ours, torch.autograd.grad(theirs, logits)[0], atol=1e-5, rtol=1e-4)


def test_bits_are_torchs_bernoulli() -> None:
    logits = torch.from_numpy(logits_of((2, 2, 2), 20))
    bits = torch.randint(2, (20, 3))
    expected = Bernoulli(logits=logits[:, 1::2] - logits[:, ::2])
    log_prob, entropy = chosen_log_prob(logits, bits, (2, 2, 2))
    torch.testing.assert_close(log_prob, expected.log_prob(bits.float()).sum(1))
    torch.testing.assert_close(entropy, expected.entropy().sum(1))


@pytest.mark.parametrize("counts", COUNTS)
def test_draws_have_the_probabilities_that_are_said_of_them(counts) -> None:
    logits = logits_of(counts, 1, seed=1)
    n = 20_000
    action, log_prob = draw_choices(np.repeat(logits, n, 0), counts, np.random.default_rng(0))
    assert action.shape == (n, len(counts)) and log_prob.dtype == np.float32
    expected, _ = chosen_log_prob(torch.from_numpy(np.repeat(logits, n, 0)), torch.from_numpy(action), counts)
    np.testing.assert_allclose(log_prob, expected.numpy(), atol=1e-4)
    for choice, each in enumerate(each_choice(torch.from_numpy(logits), counts)):
        seen = np.bincount(action[:, choice], minlength=counts[choice]) / n
        assert len(seen) == counts[choice]
        np.testing.assert_allclose(seen, each.probs[0].numpy(), atol=0.02)


def test_the_best_of_several_choices_is_the_best_of_each() -> None:
    spec = ActionSpec.choices((2, 3), (0, 0))
    values = np.array([[1, 2, -9, -8, -7], [5, 2, 3, 2, 1]], np.float32)
    assert spec.best(values).tolist() == [[1, 2], [0, 0]]
    assert grouped(values, (2, 3))[0].tolist() == [[1, 2, -np.inf], [-9, -8, -7]]
