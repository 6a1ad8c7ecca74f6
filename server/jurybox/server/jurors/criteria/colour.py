"""Are the colours believable: colourfulness, colour cast, colours driven out of gamut."""

from __future__ import annotations

import torch
from torch import Tensor

from jurybox.server.jurors.criteria.criterion import Criterion
from jurybox.server.jurors.criteria.pixels import Pixels
from jurybox.server.jurors.criteria.plausible import joint, plausible

# A channel within this many levels of an end counts as clipped, in proportion.
_CLIP_RAMP = 8.0
# Below this difference between largest and smallest channel a clipped pixel is black or white, no colour.
_CHROMA_RAMP = (40.0, 80.0)


class Colour(Criterion):
    """Geometric mean of three marks: see ``docs/jurors.md`` for the ranges and where they come from."""

    name = "colour"

    def judge(self, pixels: Pixels) -> Tensor:
        red, green, blue = pixels.planes.flatten(2).unbind(1)
        mean_luma = pixels.luma.flatten(1).mean(dim=1)

        # D. Hasler, S. Suesstrunk, "Measuring colourfulness in natural images", SPIE 5007, 2003: opponent axes.
        red_green = red - green
        yellow_blue = (red + green).mul_(0.5).sub_(blue)
        red_green_mean, yellow_blue_mean = red_green.mean(dim=1), yellow_blue.mean(dim=1)
        variance = red_green.square().mean(dim=1) + yellow_blue.square().mean(dim=1)
        offset = (red_green_mean.square() + yellow_blue_mean.square() + 1e-6).sqrt()
        variance = (variance - offset.square()).clamp(min=0)
        colourfulness = (variance + 1e-6).sqrt() + 0.3 * offset

        largest = torch.maximum(torch.maximum(red, green), blue)
        smallest = torch.minimum(torch.minimum(red, green), blue)
        start, end = _CHROMA_RAMP
        coloured = (largest - smallest).sub_(start).mul_(1 / (end - start)).clamp_(0, 1)
        crushed = (1 - smallest / _CLIP_RAMP).clamp(min=0) + ((largest - (255 - _CLIP_RAMP)) / _CLIP_RAMP).clamp(min=0)
        out_of_gamut = (coloured * crushed).mean(dim=1)

        return joint(
            plausible(colourfulness, 25.0, 90.0, below=8.0, above=30.0),
            plausible(offset / (mean_luma + 8), 0.0, 0.6, below=1.0, above=0.6),
            plausible(out_of_gamut, 0.0, 0.02, below=1.0, above=0.25),
        )
