"""What the soak serves."""

from __future__ import annotations

import torch

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

WIDTH = 64


class Scaled(torch.nn.Module):
    """y = scale * x + 1: small, and every answer can be checked by who asked, given the weights' version."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.scale * observation + 1


def scaled() -> ServedModel:
    spec = {"observation": TensorSpec("float32", (WIDTH,))}
    return ServedModel(Scaled(), spec, {"action": TensorSpec("float32", (WIDTH,))})
