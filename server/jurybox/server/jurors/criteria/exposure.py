"""Is the light right: clipping, black and white point, brightness and contrast."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from jurybox.server.jurors.criteria.criterion import Criterion
from jurybox.server.jurors.criteria.pixels import Pixels
from jurybox.server.jurors.criteria.plausible import joint, plausible

# Black and white point are taken of cells of this many pixels a side, so that noise and specks do not set them.
_CELL = 8
_TAIL = 0.02
# Luma within this many levels of an end counts as clipped, in proportion.
_CLIP_RAMP = 6.0


class Exposure(Criterion):
    """Geometric mean of five marks over luma (0..1): see ``docs/jurors.md`` for the ranges and where they come from."""

    name = "exposure"

    def judge(self, pixels: Pixels) -> Tensor:
        luma = pixels.luma
        cells = F.avg_pool2d(luma.unsqueeze(1), min(_CELL, *luma.shape[-2:])).flatten(1) / 255
        tail = max(1, int(cells.shape[1] * _TAIL))
        black = cells.topk(tail, dim=1, largest=False, sorted=False).values.mean(dim=1)
        white = cells.topk(tail, dim=1, largest=True, sorted=False).values.mean(dim=1)
        mean = cells.mean(dim=1)
        # The root's gradient is infinite at zero: a constant image must not make the gradient NaN.
        contrast = (cells.var(dim=1, correction=0) + 1e-6).sqrt()
        flat = luma.flatten(1)
        clipped = (_CLIP_RAMP - flat).clamp(min=0).mean(dim=1) + (flat - (255 - _CLIP_RAMP)).clamp(min=0).mean(dim=1)
        return joint(
            plausible(black, 0.0, 0.10, below=1.0, above=0.15),
            plausible(white, 0.80, 1.0, below=0.30, above=1.0),
            plausible(mean, 0.30, 0.60, below=0.25, above=0.25),
            plausible(contrast, 0.16, 0.32, below=0.08, above=0.08),
            plausible(clipped / _CLIP_RAMP, 0.0, 0.02, below=1.0, above=0.25),
        )
