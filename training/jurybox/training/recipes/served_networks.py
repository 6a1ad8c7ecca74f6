"""Policies of the trainings as models that the server's engines load.

A server has torch, but not the other packages of trainings. So this module imports no environment, and sizes are
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms import served
from jurybox.training.algorithms.base import AlgorithmUnusable
from jurybox.training.algorithms.networks import Actor, ActorCritic, Features, Policy
from jurybox.training.algorithms.registry import ALGORITHMS
from jurybox.training.algorithms.td3_actor import CLIP
from jurybox.training.algorithms.torch_states import perceptron
from jurybox.training.spaces import AgentSpec


def _served(
    module: nn.Module, row: Sequence[int], outputs: Mapping[str, tuple[int, ...]], dtype: str = "float32"
) -> ServedModel:
    """Return the served model of a network whose input is "observation".

    Args:
        row: shape of one row of observations.
        outputs: shape of each float32 output by name, without the batch dimension.
        dtype: dtype of the observations.
    """
    given = {"observation": TensorSpec(dtype, tuple(row))}
    return ServedModel(module, given, {name: TensorSpec("float32", shape) for name, shape in outputs.items()})


def hockey_policy(observation: int, action: int, hidden: Sequence[int]) -> ServedModel:
    """A policy from raw observations, float32 (observation,), to actions in [-1, 1], float32 (action,)."""
    policy = Policy(Actor(observation, action, hidden), observation, clip=CLIP)
    return _served(policy, (observation,), {"action": (action,)})


def gym_policy(algorithm: str, settings: Mapping[str, Any], spec: Mapping[str, Any]) -> ServedModel:
    """The policy of a built-in algorithm, see `algorithms.served.policy`; no other code is imported.

    Outputs, all float32: dqn, iqn: values (actions,); td3: action (actions,) in [-1, 1]; sac: mean and log_std
    (actions,) before the tanh; ppo: logits (actions,) or mean and log_std (actions,), and value.

    Raises:
        AlgorithmUnusable: it is an algorithm of one's own: the factory of those is `algorithms.served:policy`.
    """
    if algorithm not in ALGORITHMS:
        raise AlgorithmUnusable(f"{algorithm!r} is none of {', '.join(ALGORITHMS)}")
    return served.policy(algorithm, settings, spec)


def actor_critic(observation: int, actions: int, hidden: Sequence[int]) -> ServedModel:
    """A network from float32 (observation,) to logits (actions,) and a value in the learner's scale."""
    network = ActorCritic(Features(observation), actions, hidden)
    return _served(network, (observation,), {"logits": (actions,), "value": ()})


class _Masked(ActorCritic):
    def __init__(self, inputs: int, actions: int, hidden: Sequence[int]) -> None:
        super().__init__(Features(inputs), actions, hidden)
        self._inputs = inputs

    def forward(self, observation: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.actor(observation[:, : self._inputs])
        return logits.masked_fill(observation[:, self._inputs :] < 0.5, -1e9)


def masked_policy(observation: int, actions: int, hidden: Sequence[int]) -> ServedModel:
    """A policy from float32 (observation + actions,) to logits (actions,).

    The last `actions` inputs are the mask: 1 for an action that may be chosen, 0 otherwise.
    """
    return _served(_Masked(observation, actions, hidden), (observation + actions,), {"logits": (actions,)})


def choosing_policy(
    algorithm: str, shape: Sequence[int], actions: int, hidden: Sequence[int], dtype: str = "uint8", scale: float = 1.0
) -> ServedModel:
    """A policy of "dqn", "iqn" or "ppo" from stacked observations of `shape`; outputs as those of `gym_policy`."""
    return gym_policy(algorithm, {"hidden": hidden}, AgentSpec.stacked(shape, dtype, scale, actions).as_dict())


class PhotoMoves(nn.Module):
    """The moves of a photo policy, which are the means of its actions. One of its two perceptrons only straightens.

    That perceptron f sees only the part of the observation that encodes a picture's tilt. The straightening is f(that
    part) - f(that part for the mirrored picture). So a mirrored picture is turned by the same angle to the other side,
    and a picture that equals its mirror image is not turned.

    Args:
        leaning: input of the straightening perceptron: indices into the observation, the indices that replace them for
            the mirrored picture, and the signs to multiply those by.
        straighten: index of the straightening action. The other perceptron computes the other actions from the whole
            observation.
        units: units of the straightening perceptron's hidden layer.
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
        """Return moves (n, action) for observations (n, observation). `dropout` of hidden units is for training."""
        leans = _forward(self.turning, observation[:, self.seen], dropout)
        other = _forward(self.turning, observation[:, self.mirrored] * self.signs, dropout)
        moves = _forward(self.others, observation, dropout)
        at = self._straighten
        return torch.cat((moves[:, :at], leans - other, moves[:, at:]), dim=1)


def _forward(layers: nn.Sequential, given: Tensor, dropout: float) -> Tensor:
    for layer in layers:
        given = layer(given)
        if dropout and not isinstance(layer, nn.Linear):
            given = nn.functional.dropout(given, dropout)
    return given


def photo_moves(observation: int, action: int, hidden: Sequence[int], **straightening: Any) -> ServedModel:
    """A policy from float32 (observation,) to moves (action,) before clipping to [-1, 1]; see `PhotoMoves`."""
    moves = PhotoMoves(observation, action, hidden, **straightening)
    return _served(moves, (observation,), {"action": (action,)})
