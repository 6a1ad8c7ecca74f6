"""IQN: implicit quantile networks (Dabney et al., 2018, arXiv:1806.06923), with double Q-learning and n-step returns.

Instead of the mean of a return the network gives its value at any quantile tau, through an embedding of tau by cosines
(section 3.1 and eq. 4 there); it learns by quantile regression with the Huber loss between samples of its own quantiles
and of the target's (eq. 2 and 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from jurybox.training.algorithms.dqn import ValueLearner, ValueNetwork, as_floats, perceptron

COSINES = 64  # n in the paper
QUANTILES = 8  # N and N' there
POLICY_QUANTILES = 32  # K there


class QuantileNetwork(ValueNetwork):
    """Returns' quantiles from stacked observations of any dtype: (n, stack, ...) -> (n, taus, actions).

    A policy compares `values`: means over fixed, evenly spread quantiles, so that it draws nothing.

    Args:
        scale: what observations are multiplied by.
    """

    cosines: torch.Tensor
    spread: torch.Tensor

    def __init__(self, inputs: int, actions: int, hidden: tuple[int, ...] = (128, 128), scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.seen = perceptron(inputs, hidden[:-1], hidden[-1])
        self.embedding = nn.Linear(COSINES, hidden[-1])
        self.head = perceptron(hidden[-1], hidden[-1:], actions)
        self.register_buffer("cosines", math.pi * torch.arange(COSINES, dtype=torch.float32), persistent=False)
        spread = (torch.arange(POLICY_QUANTILES, dtype=torch.float32) + 0.5) / POLICY_QUANTILES
        self.register_buffer("spread", spread, persistent=False)

    def forward(self, seen: torch.Tensor, taus: torch.Tensor) -> torch.Tensor:
        """`taus` are (n, taus), or (taus,) for all rows alike; 0 to 1."""
        features = torch.relu(self.seen(as_floats(seen, self.scale)))
        embedded = torch.relu(self.embedding(torch.cos(taus[..., None] * self.cosines)))
        values: torch.Tensor = self.head(features[:, None, :] * embedded)
        return values

    def values(self, seen: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self(seen, self.spread).mean(1)
        return mean


class IQN(ValueLearner):
    """Quantile regression on samples of the quantiles; the learner's generator draws them."""

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        n = len(batch["reward"])
        taus = torch.rand(n, QUANTILES, device=self.device, generator=self.generator)
        chosen = batch["action"].long()[:, None, None].expand(n, QUANTILES, 1)
        own = self.network(batch["observation"], taus).gather(2, chosen)[:, :, 0]
        with torch.no_grad():
            best = self.network.values(batch["next_observation"]).argmax(1)
            others = torch.rand(n, QUANTILES, device=self.device, generator=self.generator)
            ahead = self.target(batch["next_observation"], others)
            ahead = ahead.gather(2, best[:, None, None].expand(n, QUANTILES, 1))[:, :, 0]
            wanted = batch["reward"][:, None] + batch["discount"][:, None] * ahead
        return quantile_loss(own, taus, wanted)


def quantile_loss(own: torch.Tensor, taus: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The quantile Huber loss: sums over own quantiles, means over wanted ones and rows.

    Args:
        own, taus: (n, N): values, and the quantiles that they are meant to be.
        wanted: (n, N'): samples of what they should be quantiles of.
    """
    errors = wanted[:, None, :] - own[:, :, None]
    huber = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    asymmetric = (taus[:, :, None] - (errors.detach() < 0).float()).abs()
    return (asymmetric * huber).mean(2).sum(1).mean()
