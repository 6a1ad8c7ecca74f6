"""A policy over discrete actions and a value function that share nothing, as two multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ActorCritic(nn.Module):
    """Logits and value of observations.

    Args:
        inputs: features of an observation.
        actions: how many there are.
        hidden: widths of the hidden layers of both networks.
    """

    def __init__(self, inputs: int, actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        # Small last layers: the first policy is nearly uniform, the first values nearly 0 (Andrychowicz et al. 2021,
        # "What matters for on-policy deep actor-critic methods?").
        self.actor = _perceptron(inputs, hidden, actions, last=0.01)
        self.critic = _perceptron(inputs, hidden, 1, last=1.0)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """From float32 (n, inputs) to logits (n, actions) and values (n,)."""
        return self.actor(observation), self.critic(observation).squeeze(-1)


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits with those of actions that a bool mask excludes at the lowest; normalised to log-probabilities."""
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    return torch.log_softmax(logits, dim=-1)


def _perceptron(inputs: int, hidden: Sequence[int], outputs: int, last: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_linear(inputs, width, 2**0.5), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, _linear(inputs, outputs, last))


def _linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
