"""Distributions of actions: drawn in NumPy by what acts, computed in torch by what learns."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from jurybox.training.algorithms.base import Array, Floats, torch

__all__ = ["draw_categorical", "draw_normal", "log_softmax", "masked", "normal_log_prob", "tanh_correction"]

HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)


def log_softmax(logits: Array) -> npt.NDArray[np.float64]:
    """Return the log-probabilities for logits, both (n, actions)."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    found: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found


def draw_categorical(logits: Array, rng: np.random.Generator) -> tuple[Array, Floats]:
    """Draw one of the actions for each row of logits (n, actions); returns them and their log-probabilities, (n,)."""
    log_probs = log_softmax(logits)
    # The argmax of log-probabilities plus Gumbel noise is a sample from the distribution.
    action = (log_probs + rng.gumbel(size=log_probs.shape)).argmax(1)
    return action, log_probs[np.arange(len(action)), action].astype(np.float32)


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


def normal_log_prob(x: torch.Tensor, mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """Logarithm of a normal distribution's density at `x`, element by element."""
    return -0.5 * ((x - mean) * torch.exp(-log_std)).square() - log_std - HALF_LOG_2_PI


def tanh_correction(u: torch.Tensor) -> torch.Tensor:
    """log(1 - tanh(u)^2), element by element, without a difference of nearly equal numbers."""
    return 2.0 * (math.log(2.0) - u - torch.nn.functional.softplus(-2.0 * u))
