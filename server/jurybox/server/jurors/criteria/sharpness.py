"""Has the picture been sharpened too much: detail energy per octave against that of natural scenes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jurybox.server.jurors.criteria.criterion import Criterion
from jurybox.server.jurors.criteria.pixels import Pixels
from jurybox.server.jurors.criteria.plausible import joint, plausible

# Detail below the rounding noise of 8-bit luma says nothing about sharpness.
_NOISE_FLOOR = 0.05


class Sharpness(Criterion):
    """Ratio of detail amplitudes between neighbouring octaves."""

    name = "sharpness"

    def judge(self, pixels: Pixels) -> Tensor:
        luma = pixels.luma
        level = (luma - luma.mean(dim=(1, 2), keepdim=True)).unsqueeze(1)
        energies = [level.square().mean(dim=(1, 2, 3))]
        for _ in range(4):
            level = F.avg_pool2d(level, 2)
            energies.append(level.square().mean(dim=(1, 2, 3)))
        energy = torch.stack(energies)
        # Averaging 2 x 2 pixels is an orthogonal Haar step, so what it loses is the energy of that octave's detail.
        detail = ((energy[:-1] - energy[1:]).clamp(min=0) + _NOISE_FLOOR).sqrt()
        ratio = detail[:-1] / detail[1:]
        return joint(*(plausible(step, 0.60, 0.75, below=0.30, above=0.35) for step in (ratio[1], ratio[2])))
