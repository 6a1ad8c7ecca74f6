"""Policies of the trainings as models of the server: what its engines load.

A server has torch, and nothing of what trainings need beside: no environment is imported here, and sizes are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms.dqn import QNetwork, QuantileNetwork, as_floats
from jurybox.training.algorithms.networks import GaussianMean, acting_network, outputs_of
from jurybox.training.algorithms.ppo import ActorCritic
from jurybox.training.algorithms.td3 import Actor, Policy
from jurybox.training.algorithms.td3_actor import CLIP
from jurybox.training.algorithms.torch_states import perceptron


def _served(
    module: nn.Module, row: Sequence[int], outputs: Mapping[str, tuple[int, ...]], dtype: str = "float32"
) -> ServedModel:
    """A network of rows of observations of that shape; shapes of its float32 outputs by name."""
    given = {"observation": TensorSpec(dtype, tuple(row))}
    return ServedModel(module, given, {name: TensorSpec("float32", shape) for name, shape in outputs.items()})


def hockey_policy(observation: int, action: int, hidden: Sequence[int]) -> ServedModel:
    """Raw observations, float32 (observation,), to actions in [-1, 1], float32 (action,)."""
    policy = Policy(Actor(observation, action, hidden), observation, clip=CLIP)
    return _served(policy, (observation,), {"action": (action,)})


def gym_policy(dtype: str, size: int, bounds: Sequence[Sequence[float]] | None = None, **network: Any) -> ServedModel:
    """Rows of observations (`environments.gymnasium_env` says how they look), to what the algorithm's network gives.

    dqn: values (actions,); td3: action (actions,) in [-1, 1]; sac: mean and log_std (actions,) before the tanh; ppo:
    logits (actions,) or mean and log_std (actions,), and value. All float32. With `bounds` (the lower and the upper
    ones) of actions that are numbers: action (actions,) in [-1, 1] without exploration, whatever the algorithm.

    Args:
        dtype, size: of a row. network: arguments of `acting_network`.
    """
    actions, explores = network["actions"], network["discrete"] or bounds is None
    made = acting_network(**network, explores=explores)
    if not explores:
        if isinstance(made, GaussianMean):
            made.bounds.copy_(torch.tensor(bounds))
        return _served(made, (size,), {"action": (actions,)}, dtype)
    names = outputs_of(network["algorithm"], network["discrete"])
    return _served(made, (size,), {name: () if name == "value" else (actions,) for name in names}, dtype)


class _Named(ActorCritic):
    """The network with named outputs; its weights keep the names that the learner publishes."""

    def forward(self, observation: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": self.actor(observation), "value": self.critic(observation).squeeze(-1)}


def actor_critic(observation: int, actions: int, hidden: Sequence[int]) -> ServedModel:
    """Float32 (observation,) to logits (actions,) and a value in the learner's scale."""
    return _served(_Named(observation, actions, hidden), (observation,), {"logits": (actions,), "value": ()})


class _Masked(ActorCritic):
    def __init__(self, inputs: int, actions: int, hidden: Sequence[int]) -> None:
        super().__init__(inputs, actions, hidden)
        self._inputs = inputs

    def forward(self, observation: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.actor(observation[:, : self._inputs])
        return logits.masked_fill(observation[:, self._inputs :] < 0.5, -1e9)


def masked_policy(observation: int, actions: int, hidden: Sequence[int]) -> ServedModel:
    """Float32 (observation + actions,), the last of them 1 for each action that may be chosen, to logits (actions,)."""
    return _served(_Masked(observation, actions, hidden), (observation + actions,), {"logits": (actions,)})


class _Quantiles(QuantileNetwork):
    def forward(self, seen: Tensor, taus: Tensor | None = None) -> Tensor:
        return super().forward(seen, self.spread if taus is None else taus).mean(1)


class _Logits(ActorCritic):
    def __init__(self, inputs: int, actions: int, hidden: Sequence[int], scale: float) -> None:
        super().__init__(inputs, actions, hidden)
        self._scale = scale

    def forward(self, observation: Tensor) -> Tensor:  # type: ignore[override]
        return self.actor(as_floats(observation, self._scale))  # type: ignore[no-any-return]


def choosing_policy(
    algorithm: str, shape: Sequence[int], actions: int, hidden: Sequence[int], dtype: str = "uint8", scale: float = 1.0
) -> ServedModel:
    """Stacked observations of `shape` to what a policy of "dqn", "iqn" or "ppo" chooses by, float32 (actions,).

    Values of actions, or for "ppo" logits.
    """
    inputs, widths = math.prod(shape), tuple(hidden)
    networks: dict[str, Callable[[], nn.Module]] = {
        "dqn": lambda: QNetwork(inputs, actions, widths, scale),
        "iqn": lambda: _Quantiles(inputs, actions, widths, scale),
        "ppo": lambda: _Logits(inputs, actions, widths, scale),
    }
    return _served(networks[algorithm](), shape, {"logits" if algorithm == "ppo" else "values": (actions,)}, dtype)


class _Mean(nn.Module):
    def __init__(self, observation: int, action: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.layers = perceptron(observation, hidden, action, activation=nn.Tanh)

    def forward(self, observation: Tensor) -> Tensor:
        mean: Tensor = self.layers(observation)
        return mean


class PhotoMoves(nn.Module):
    """A photo policy's moves, the means of its actions: two perceptrons, of which one straightens and nothing else.

    That one sees only what tells how a picture leans. It gives f(what is seen) less f(the same of the mirrored
    picture), so a mirrored picture is turned just as far to the other side, and what looks the same in the mirror not
    at all.

    Args:
        leaning: what it sees: numbers of the observation, those that take their places where the picture is mirrored,
            and the signs that they then get.
        straighten: which action that is. The other perceptron gives the others, from the whole observation.
        units: of the hidden layer that straightens.
    """

    def __init__(
        self,
        observation: int,
        action: int,
        hidden: Sequence[int],
        leaning: tuple[Sequence[int], Sequence[int], Sequence[float]],
        straighten: int,
        units: int = 32,
    ) -> None:
        super().__init__()
        self._straighten = straighten
        self.others = perceptron(observation, hidden, action - 1, activation=nn.Tanh)
        self.turning = perceptron(len(leaning[0]), (units,), 1, activation=nn.Tanh)
        for name, numbers in zip(("seen", "mirrored"), leaning[:2], strict=True):
            self.register_buffer(name, torch.tensor(list(numbers)), persistent=False)
        self.register_buffer("signs", torch.tensor(list(leaning[2]), dtype=torch.float32), persistent=False)

    seen: Tensor
    mirrored: Tensor
    signs: Tensor

    def forward(self, observation: Tensor, dropout: float = 0.0) -> Tensor:
        """Moves (n, action) of observations (n, observation); `dropout` of hidden units is for who trains it."""
        leans = _through(self.turning, observation[:, self.seen], dropout)
        other = _through(self.turning, observation[:, self.mirrored] * self.signs, dropout)
        moves = _through(self.others, observation, dropout)
        at = self._straighten
        return torch.cat((moves[:, :at], leans - other, moves[:, at:]), dim=1)


def _through(layers: nn.Sequential, given: Tensor, dropout: float) -> Tensor:
    for layer in layers:
        given = layer(given)
        if dropout and not isinstance(layer, nn.Linear):
            given = nn.functional.dropout(given, dropout)
    return given


def photo_moves(observation: int, action: int, hidden: Sequence[int], **straightening: Any) -> ServedModel:
    """Float32 (observation,) to moves (action,) before they are clipped to [-1, 1]; see `PhotoMoves`."""
    moves = PhotoMoves(observation, action, hidden, **straightening)
    return _served(moves, (observation,), {"action": (action,)})


def gaussian_mean(observation: int, action: int, hidden: Sequence[int]) -> ServedModel:
    """Float32 (observation,) to actions (action,) before they are clipped to [-1, 1]."""
    return _served(_Mean(observation, action, hidden), (observation,), {"action": (action,)})
