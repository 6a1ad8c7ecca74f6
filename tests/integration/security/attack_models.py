"""A model whose error messages are hard to encode once they are cut."""

from __future__ import annotations

import torch

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

VECTOR = {"observation": TensorSpec("float32", (4,))}


class Complaining(torch.nn.Module):
    """Raises a long non-ASCII text shifted by the first value, so that cuts fall inside characters; or nothing."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        mood = observation[:, 0].max().item()
        if mood >= 900:
            raise RuntimeError("x" * int(mood - 900) + "\u00e4\u20ac\U0001f600" * 400)
        return observation + 1


def complaining() -> ServedModel:
    return ServedModel(Complaining(), VECTOR, {"action": TensorSpec("float32", (4,))})
