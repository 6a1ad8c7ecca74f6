"""The network of a photo policy, and that network as a model that the server's engines load.

A server has torch, but not the other packages of trainings. So this module imports no environment, and sizes are
arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jurybox.server.models import ServedModel
from jurybox.training.algorithms.served_networks import served_model
from jurybox.training.algorithms.torch_states import perceptron


class PhotoMoves(nn.Module):
    """The moves of a photo policy, which are the means of its actions, from three perceptrons.

    `turning`, f, only straightens. It sees only the part of the observation that encodes a picture's tilt. The
    straightening is f(that part) - f(that part for the mirrored picture). So a mirrored picture is turned by the same
    angle to the other side, and a picture that equals its mirror image is not turned.

    `light` has the tools that change the amount and the colour of the light. It does not see the view, from which a
    network with few photographs learns which photograph it is instead of how it is lit. `others` sees everything.

    Args:
        leaning: input of the straightening perceptron: indices into the observation, the indices that replace them for
            the mirrored picture, and the signs to multiply those by.
        straighten: index of the straightening action.
        lit: input of the light perceptron: the observation's numbers up to this one.
        lighting: indices of the actions that the light perceptron computes.
        units: units of the hidden layer of the straightening and of the light perceptron.
    """

    def __init__(
        self,
        observation: int,
        action: int,
        hidden: Sequence[int],
        leaning: tuple[Sequence[int], Sequence[int], Sequence[float]],
        straighten: int,
        lit: int,
        lighting: Sequence[int],
        units: int = 32,
    ) -> None:
        super().__init__()
        self._lit = lit
        rest = [number for number in range(action) if number != straighten and number not in lighting]
        self.others = perceptron(observation, hidden, len(rest), activation=nn.Tanh)
        self.light = perceptron(lit, (units,), len(lighting), activation=nn.Tanh)
        self.turning = perceptron(len(leaning[0]), (units,), 1, activation=nn.Tanh)
        for name, numbers in zip(("seen", "mirrored"), leaning[:2], strict=True):
            self.register_buffer(name, torch.tensor(list(numbers)), persistent=False)
        self.register_buffer("signs", torch.tensor(list(leaning[2]), dtype=torch.float32), persistent=False)
        self.register_buffer("places", torch.tensor([*rest, *lighting, straighten]).argsort(), persistent=False)

    seen: Tensor
    mirrored: Tensor
    signs: Tensor
    places: Tensor

    def forward(self, observation: Tensor, dropout: float = 0.0) -> Tensor:
        """Return moves (n, action) for observations (n, observation). `dropout` of hidden units is for training."""
        leans = _forward(self.turning, observation[:, self.seen], dropout)
        other = _forward(self.turning, observation[:, self.mirrored] * self.signs, dropout)
        moves = _forward(self.others, observation, dropout)
        light = _forward(self.light, observation[:, : self._lit], dropout)
        return torch.cat((moves, light, leans - other), dim=1)[:, self.places]


def _forward(layers: nn.Sequential, given: Tensor, dropout: float) -> Tensor:
    for layer in layers:
        given = layer(given)
        if dropout and not isinstance(layer, nn.Linear):
            given = nn.functional.dropout(given, dropout)
    return given


def photo_moves(observation: int, action: int, hidden: Sequence[int], **parts: Any) -> ServedModel:
    """A policy from float32 (observation,) to moves (action,) before clipping to [-1, 1]; see `PhotoMoves`."""
    moves = PhotoMoves(observation, action, hidden, **parts)
    return served_model(moves, (observation,), {"action": (action,)})
