"""Models for `ways`, which cost next to nothing: what is measured is the way to them."""

from __future__ import annotations

import torch

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel


class Doubled(torch.nn.Module):
    """Twice its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute rows of four numbers."""
        return x * 2


class FirstPixel(torch.nn.Module):
    """The first value of each picture."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Compute pictures, uint8 (n, height, width, 3)."""
        return image[:, 0, 0, 0].float()


class Length(torch.nn.Module):
    """The number of bytes of each text."""

    def forward(self, text: list[bytes]) -> torch.Tensor:
        """Compute texts."""
        return torch.tensor([float(len(one)) for one in text])


def vector() -> ServedModel:
    """Input x, float32 (4,); output y, the same."""
    return ServedModel(Doubled(), {"x": TensorSpec("float32", (4,))}, {"y": TensorSpec("float32", (4,))})


def picture() -> ServedModel:
    """Input image, uint8 (224, 224, 3); output score."""
    return ServedModel(FirstPixel(), {"image": TensorSpec("uint8", (224, 224, 3))}, {"score": TensorSpec("float32")})


def length() -> ServedModel:
    """Input text; output score."""
    return ServedModel(Length(), {"text": TensorSpec("bytes", capacity=256)}, {"score": TensorSpec("float32")})
