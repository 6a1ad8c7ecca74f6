"""DQN (Mnih et al., Nature 518, 2015) and IQN (Dabney et al., 2018, arXiv:1806.06923).

Both with double Q-learning (van Hasselt et al., 2016, arXiv:1509.06461) and n-step returns. They differ in their
networks and in `ValueLearner.loss`.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from jurybox.training.algorithms.torch_states import Part, as_tensors, perceptron, restore_states, states_of

__all__ = ["DQN", "IQN", "QNetwork", "QuantileNetwork", "ValueSettings"]


@dataclass(frozen=True, slots=True)
class ValueSettings:
    """Settings that DQN and IQN share.

    Attributes:
        learning_rate: of Adam (epsilon 0.01 / batch_size is the paper's for DQN; Adam's own is used here).
        gamma: the discount of one step.
        n_steps: steps of a return before it is bootstrapped.
        target_update_interval: learner steps between two copies of the network to the target network; 0: the owner
            of the learner calls `move_target`.
        hidden: units of the hidden layers.
        max_grad_norm: gradients are scaled down to it.
    """

    learning_rate: float = 0.00025
    gamma: float = 0.95
    n_steps: int = 3
    target_update_interval: int = 200
    hidden: tuple[int, ...] = (128, 128)
    max_grad_norm: float = 10.0


class ValueNetwork(nn.Module):
    """A network with action values for a greedy policy."""

    def values(self, seen: torch.Tensor) -> torch.Tensor:
        """Action values: (n, actions). What the network gives, unless it gives more."""
        out: torch.Tensor = self(seen)
        return out


class QNetwork(ValueNetwork):
    """Action values from stacked observations of any dtype: (n, stack, ...) -> (n, actions).

    Args:
        scale: what observations are multiplied by.
    """

    def __init__(self, inputs: int, actions: int, hidden: tuple[int, ...] = (128, 128), scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.layers = perceptron(inputs, hidden, actions)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Action values, float32 (n, actions)."""
        values: torch.Tensor = self.layers(as_floats(seen, self.scale))
        return values


def as_floats(seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Stacked observations as rows of float32, times `scale`."""
    floats = seen.flatten(1).float()
    return floats if scale == 1.0 else floats * scale


class ValueLearner(ABC):
    """A network, its target network and their optimiser.

    Args:
        network: the network; the target network is a copy of it.
        device: where both are.
        seed: of the loss's random numbers.

    Attributes:
        network: the one that learns.
        steps: updates made.
    """

    def __init__(
        self, network: ValueNetwork, settings: ValueSettings, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self.settings = settings
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.network = network.to(self.device)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.optimiser = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate)
        self._parts: dict[str, Part] = {
            "network": self.network, "target": self.target, "optimiser": self.optimiser, "random": self.generator,
        }  # fmt: skip
        self.steps = 0

    def update(self, batch: Mapping[str, npt.NDArray[Any]]) -> float:
        """Make one optimiser step; return its loss.

        Args:
            batch: "observation" and "next_observation" (n, ...), "action" (n,), "reward" (n,) of n-step returns, and
                "discount" (n,): the factor of the next observation's value, 0 after a termination.
        """
        return float(self.learn({name: torch.from_numpy(array).to(self.device) for name, array in batch.items()}))

    def learn(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`update` with tensors on the device; the loss stays there until it is read."""
        loss = self.loss(batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.max_grad_norm)
        self.optimiser.step()
        self.steps += 1
        interval = self.settings.target_update_interval
        if interval and self.steps % interval == 0:
            self.target.load_state_dict(self.network.state_dict())
        return loss.detach()

    def move_target(self, tau: float = 1.0) -> None:
        """Move the target network towards the network by the share `tau`; 1 copies it."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.network.parameters()), tau)

    @abstractmethod
    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch, as a tensor with gradients."""

    def adopt(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Load published weights into both networks."""
        tensors = as_tensors(state)
        self.network.load_state_dict(tensors)
        self.target.load_state_dict(tensors)

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs: arrays, numbers, nested."""
        return {**states_of(self._parts), "steps": self.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        restore_states(self._parts, state)
        self.steps = int(state["steps"])


class DQN(ValueLearner):
    """Double DQN with the Huber loss."""

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The Huber loss of a batch, as a tensor with gradients; `batch` as in `update`."""
        values = self.network(batch["observation"]).gather(1, batch["action"].long()[:, None])[:, 0]
        with torch.no_grad():
            best = self.network(batch["next_observation"]).argmax(1, keepdim=True)
            ahead = self.target(batch["next_observation"]).gather(1, best)[:, 0]
            wanted = batch["reward"] + batch["discount"] * ahead
        return nn.functional.smooth_l1_loss(values, wanted)


# IQN, implicit quantile networks: instead of the mean of a return the network gives its value at any quantile tau,
# through an embedding of tau by cosines (section 3.1 and eq. 4 there); it learns by quantile regression with the Huber
# loss between samples of its own quantiles and of the target's (eq. 2 and 3).


COSINES = 64  # n in the paper
QUANTILES = 8  # N and N' there
POLICY_QUANTILES = 32  # K there


class QuantileNetwork(ValueNetwork):
    """Returns' quantiles from stacked observations of any dtype: (n, stack, ...) -> (n, taus, actions).

    A policy compares `values`: means over fixed, evenly spread quantiles, without random numbers.

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
        """Action values, (n, actions): means over evenly spread quantiles."""
        mean: torch.Tensor = self(seen, self.spread).mean(1)
        return mean


class IQN(ValueLearner):
    """Quantile regression on sampled quantiles, which the learner's generator draws."""

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The quantile Huber loss of a batch, as a tensor with gradients; `batch` as in `update`."""
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
        own, taus: (n, N): predicted values, and their quantile levels.
        wanted: (n, N'): samples of the target distribution.
    """
    errors = wanted[:, None, :] - own[:, :, None]
    huber = nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    asymmetric = (taus[:, :, None] - (errors.detach() < 0).float()).abs()
    return (asymmetric * huber).mean(2).sum(1).mean()
