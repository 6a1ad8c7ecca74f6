"""The panel: every criterion's mark and their weighted mean, from one pass over the pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from jurybox.server.jurors.criteria import CRITERIA, Criterion
from jurybox.server.jurors.criteria.pixels import slices, split


class Panel(nn.Module):
    """Weighted mean of the criteria's marks.

    Args:
        weights: one weight for every criterion's name, none negative, not all zero. Only their proportions count. A
            criterion of weight 0 is still marked, for whoever wants to watch it.
    """

    weights: Tensor

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        names = [criterion.name for criterion in CRITERIA]
        if sorted(weights) != sorted(names):
            raise ValueError(f"weights are for {', '.join(weights)}: expected one each for {', '.join(names)}")
        faulty = [name for name in names if not (math.isfinite(weights[name]) and weights[name] >= 0)]
        if faulty or not any(weights.values()):
            given = ", ".join(f"{name}={weights[name]}" for name in names)
            raise ValueError(f"weights are {given}: expected finite numbers, none negative, at least one above 0")
        self.criteria = nn.ModuleList(criterion() for criterion in CRITERIA)
        values = torch.tensor([weights[name] for name in names], dtype=torch.float32)
        self.register_buffer("weights", values / values.sum())

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Marks of a batch.

        Args:
            image: (n, height, width, 3) RGB, uint8 or floating point on the same 0..255 scale.

        Returns:
            ``score`` and then one mark per criterion, float32 (n,) each, 0 (bad) to 1 (good). Differentiable in a
            floating-point image.
        """
        parts = [self._marks(rows) for rows in slices(image)]
        marks = {
            criterion.name: torch.cat(columns)
            for criterion, columns in zip(CRITERIA, zip(*parts, strict=True), strict=True)
        }
        score = torch.stack(tuple(marks.values()), dim=-1) @ self.weights
        return {"score": score, **marks}

    def _marks(self, image: Tensor) -> list[Tensor]:
        pixels = split(image)
        marks = []
        for criterion in self.criteria:
            assert isinstance(criterion, Criterion)
            marks.append(criterion.judge(pixels))
        return marks
