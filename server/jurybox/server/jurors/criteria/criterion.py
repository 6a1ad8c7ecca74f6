"""What the panel's criteria have in common: an image in, a mark between 0 and 1 out."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from jurybox.server.jurors.criteria.pixels import Pixels, slices, split


class Criterion(nn.Module):
    """One criterion, usable alone (:meth:`forward`) or by a panel that splits the images once (:meth:`judge`)."""

    name: ClassVar[str]

    def judge(self, pixels: Pixels) -> Tensor:
        """Marks of a batch, float32 (n,), 0 (bad) to 1 (good)."""
        raise NotImplementedError

    def forward(self, image: Tensor) -> Tensor:
        """Marks of a batch.

        Args:
            image: (n, height, width, 3) RGB, uint8 or floating point on the same 0..255 scale.

        Returns:
            float32 (n,), 0 (bad) to 1 (good). Differentiable in a floating-point image.
        """
        return torch.cat([self.judge(split(rows)) for rows in slices(image)])
