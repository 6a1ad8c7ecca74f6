"""Networks of the deterministic actor-critic: the actor, what is published of it, two critics that compute as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class Actor(nn.Module):
    """Normalised observation (n, observation) to action (n, action) in [-1, 1]; float32."""

    def __init__(self, observation_size: int, action_size: int, hidden: Sequence[int] = (256, 256)) -> None:
        super().__init__()
        sizes = (observation_size, *hidden, action_size)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        # A first policy that does little: saturated tanh units would learn slowly.
        with torch.no_grad():
            last = self.layers[-1]
            assert isinstance(last, nn.Linear)
            last.weight.mul_(0.1)
            last.bias.zero_()

    def forward(self, observation: Tensor) -> Tensor:
        return torch.tanh(self.before_tanh(observation))

    def before_tanh(self, observation: Tensor) -> Tensor:
        x = observation
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        out: Tensor = self.layers[-1](x)
        return out


class Policy(nn.Module):
    """Raw observation (n, observation) to action (n, action): an actor and the statistics that it was trained with.

    The statistics are buffers, so they are published, served and pinned with the weights that they belong to, and
    change in the same moment.

    Args:
        actor: shared, not copied.
        clip: bound of normalised observations.
    """

    observation_mean: Tensor
    observation_scale: Tensor

    def __init__(self, actor: Actor, observation_size: int, *, clip: float) -> None:
        super().__init__()
        self.actor = actor
        self.clip = clip
        self.register_buffer("observation_mean", torch.zeros(observation_size))
        self.register_buffer("observation_scale", torch.ones(observation_size))

    def normalised(self, observation: Tensor) -> Tensor:
        x = torch.sub(observation, self.observation_mean)
        return x.mul_(self.observation_scale).clamp_(-self.clip, self.clip)

    def forward(self, observation: Tensor) -> Tensor:
        out: Tensor = self.actor(self.normalised(observation))
        return out


class TwinLinear(nn.Module):
    """Two linear layers side by side: one batched product instead of two small ones (2, n, in) -> (2, n, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)

    def first(self, x: Tensor) -> Tensor:
        """Of the first layer alone, (n, in) -> (n, out)."""
        return torch.addmm(self.bias[0], x, self.weight[0])


class TwinCritic(nn.Module):
    """Two values of an observation and an action, (n, observation), (n, action) -> (2, n)."""

    def __init__(self, observation_size: int, action_size: int, hidden: Sequence[int] = (256, 256)) -> None:
        super().__init__()
        sizes = (observation_size + action_size, *hidden, 1)
        self.layers = nn.ModuleList(TwinLinear(a, b) for a, b in pairwise(sizes))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        x = torch.cat((observation, action), -1).expand(2, -1, -1)
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        values: Tensor = self.layers[-1](x)
        return values.squeeze(-1)

    def first(self, observation: Tensor, action: Tensor) -> Tensor:
        """The first critic's values alone, (n,): what the actor climbs."""
        x = torch.cat((observation, action), -1)
        for layer in self.layers[:-1]:
            assert isinstance(layer, TwinLinear)
            x = functional.relu(layer.first(x))
        last = self.layers[-1]
        assert isinstance(last, TwinLinear)
        return last.first(x).squeeze(-1)
