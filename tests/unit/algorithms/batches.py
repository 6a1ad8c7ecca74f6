"""Batches of a replay, made up."""

from __future__ import annotations

import torch


def batch(seed: int, n: int = 64, observations: int = 5, actions: int = 2) -> dict[str, torch.Tensor]:
    """Transitions of numbers; one in five is the last of its episode."""
    g = torch.Generator().manual_seed(seed)
    return {
        "observation": torch.randn(n, observations, generator=g) * 3 + 1,
        "action": torch.rand(n, actions, generator=g) * 2 - 1,
        "reward": torch.randn(n, generator=g),
        "discount": torch.full((n,), 0.9) * (torch.rand(n, generator=g) > 0.2),
        "next_observation": torch.randn(n, observations, generator=g) * 3 + 1,
    }
