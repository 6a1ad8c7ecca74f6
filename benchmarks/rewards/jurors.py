"""The benchmark's jurors: convolutional networks of 5 to 10 ms a picture, a text or a film on one core."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

SIDE = 512
LONGEST = 2048  # bytes of a text
FRAMES, SMALL = 8, 128  # frames of a film, and their side


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


class Letters(nn.Module):
    """Texts of at most LONGEST bytes, a list of n, to one number each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(256, 64)
        self.layers = nn.Sequential(
            nn.Conv1d(64, 256, 9, stride=2, padding=4), nn.ReLU(), nn.Conv1d(256, 128, 5, stride=4), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 1),
        )  # fmt: skip

    def forward(self, text: list[bytes]) -> Tensor:
        """The scores, (n,)."""
        rows = torch.zeros((len(text), LONGEST), dtype=torch.long)
        for row, one in zip(rows, text, strict=True):
            row[: len(one)] = torch.frombuffer(bytearray(one), dtype=torch.uint8)
        score: Tensor = self.layers(self.letters(rows).transpose(1, 2)).squeeze(-1)
        return score


class Films(nn.Module):
    """uint8 (n, FRAMES, SMALL, SMALL, 3) to one number each, the mean of its frames' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = Convolutions()

    def forward(self, video: Tensor) -> Tensor:
        """The scores, (n,)."""
        found: Tensor = self.frames(video.flatten(0, 1)).view(len(video), -1).mean(1)
        return found


def letters() -> ServedModel:
    """For [models.NAME]."""
    inputs = {"text": TensorSpec("bytes", capacity=LONGEST)}
    return ServedModel(Letters().eval(), inputs, {"score": TensorSpec("float32")})


def films() -> ServedModel:
    """For [models.NAME]."""
    inputs = {"video": TensorSpec("uint8", (FRAMES, SMALL, SMALL, 3))}
    return ServedModel(Films().eval(), inputs, {"score": TensorSpec("float32")})


def convolutions() -> ServedModel:
    """For [models.NAME]."""
    return ServedModel(
        Convolutions().eval(), {"image": TensorSpec("uint8", (SIDE, SIDE, 3))}, {"score": TensorSpec("float32")}
    )
