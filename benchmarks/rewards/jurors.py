"""The benchmark's juror: a convolutional network of about 10 ms a picture of 512 x 512 on one core."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

SIDE = 512


class Convolutions(nn.Module):
    """uint8 (n, 512, 512, 3) to one number each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (3, 64, 96, 128, 128)
        layers: list[nn.Module] = [nn.AvgPool2d(2)]
        for before, after in pairwise(sizes):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1))

    def forward(self, image: Tensor) -> Tensor:
        """The scores, (n,)."""
        score: Tensor = self.layers(image.permute(0, 3, 1, 2).float() / 255).squeeze(-1)
        return score


def convolutions() -> ServedModel:
    """For [models.NAME]."""
    return ServedModel(
        Convolutions().eval(), {"image": TensorSpec("uint8", (SIDE, SIDE, 3))}, {"score": TensorSpec("float32")}
    )
