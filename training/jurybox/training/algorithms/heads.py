"""Distributions of actions: drawn in NumPy by what acts, computed in torch by what learns."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from jurybox.training.algorithms.base import Array, Floats, torch
from jurybox.training.spaces import grouped, places

__all__ = [
    "chosen_log_prob", "draw_categorical", "draw_choices", "draw_normal", "log_softmax", "masked", "normal_log_prob",
    "side_by_side", "tanh_correction",
]  # fmt: skip

HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Return the log-probabilities for logits, both (..., actions)."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    found: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def draw_categorical(logits: Array, rng: np.random.Generator) -> tuple[Array, Floats]:
    """Draw one of the actions for each row of logits (n, actions); returns them and their log-probabilities, (n,)."""
    log_probs = log_softmax(logits)
    # The argmax of log-probabilities plus Gumbel noise is a sample from the distribution.
    action = (log_probs + rng.gumbel(size=log_probs.shape)).argmax(1)
    return action, log_probs[np.arange(len(action)), action].astype(np.float32)


def draw_choices(logits: Array, counts: tuple[int, ...], rng: np.random.Generator) -> tuple[Array, Floats]:
    """Draw several choices for each row of logits (n, sum of counts), which lie side by side.

    Returns:
        int64 (n, choices), and the sums of their log-probabilities, (n,).
    """
    log_probs = log_softmax(grouped(logits, counts))
    action = (log_probs + rng.gumbel(size=log_probs.shape)).argmax(-1)
    chosen = np.take_along_axis(log_probs, action[..., None], -1)[..., 0]
    return action, chosen.sum(-1).astype(np.float32)


def draw_normal(mean: Array, log_std: Array, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Draw numbers (n, size) from normal distributions; returns them and the logarithms of their densities, (n,)."""
    noise = rng.standard_normal(mean.shape)
    drawn = (mean + np.exp(log_std) * noise).astype(np.float32)
    density = -0.5 * ((drawn - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    return drawn, density.sum(1).astype(np.float32)


def masked(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Log-probabilities of logits; masked actions get the lowest."""
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    return torch.log_softmax(logits, dim=-1)


def side_by_side(logits: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """Logits (n, sum of counts) as (n, choices, most), the lowest number where a choice has fewer actions."""
    none = logits.new_full((logits.shape[0], 1), torch.finfo(logits.dtype).min)
    found: torch.Tensor = torch.cat((logits, none), 1)[:, torch.from_numpy(places(counts)).to(logits.device)]
    return found


def chosen_log_prob(
    logits: torch.Tensor, action: torch.Tensor, counts: tuple[int, ...], mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of actions, and entropies, (n,) each; of several choices the sums.

    Args:
        logits: (n, actions).
        action: int64 (n,), or (n, choices).
        counts: actions of each of several choices; empty: there is one.
        mask: bool (n, actions), of the actions that may be chosen.
    """
    if not counts:
        log_probs = masked(logits, mask)
        entropy = -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum(-1)
        return log_probs.gather(1, action[:, None]).squeeze(1), entropy
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    log_probs = torch.log_softmax(side_by_side(logits, counts), dim=-1)
    entropy = -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum((-2, -1))
    return log_probs.gather(2, action[..., None]).squeeze(2).sum(-1), entropy


def normal_log_prob(x: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """Logarithm of a normal distribution's density at `x`, element by element."""
    return -0.5 * ((x - mean) * torch.exp(-log_std)).square() - log_std - HALF_LOG_2_PI


def tanh_correction(u: torch.Tensor) -> torch.Tensor:
    """log(1 - tanh(u)^2), element by element, without a difference of nearly equal numbers."""
    return 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
