"""The criteria of the panel: each maps an image to a mark between 0 and 1."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from jurybox.server.jurors.scene_statistics import SceneStatistics

# ITU-R BT.601 luma; OpenCV and MATLAB convert to grey with the same weights.
LUMA = (0.299, 0.587, 0.114)
# Four images of 384 x 384. Larger intermediates exceed a CPU's caches and, above the allocator's threshold, are mapped
# anew for every operation, which costs several times as much as the arithmetic.
_SLICE_PIXELS = 4 * 384 * 384


class Pixels(NamedTuple):
    """One batch of images, split once and shared by every criterion.

    Attributes:
        planes: float32 (n, 3, height, width), red, green, blue, 0..255.
        luma: float32 (n, height, width), BT.601 luma, 0..255.
    """

    planes: Tensor
    luma: Tensor


def split(image: Tensor) -> Pixels:
    """Split a batch of images into planes and luma.

    Args:
        image: (n, height, width, 3) RGB. uint8, or floating point on the same 0..255 scale; gradients flow
            to a floating-point image.
    """
    # Permuting bytes before the conversion to float moves a quarter of the memory.
    planes = image.permute(0, 3, 1, 2).contiguous().float()
    red, green, blue = planes.unbind(1)
    luma = (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return Pixels(planes, luma)


def slices(image: Tensor) -> tuple[Tensor, ...]:
    """Check a batch and split it into parts to process one by one: a few images on a CPU, all of them elsewhere.

    Raises:
        ValueError: not (n, height, width, 3) with n above 0, or an integer dtype other than uint8.
    """
    if image.ndim != 4 or image.shape[-1] != 3 or not len(image):
        raise ValueError(
            f"image has shape {tuple(image.shape)}: expected (n, height, width, 3), RGB in the last dimension"
        )
    if image.dtype != torch.uint8 and not image.is_floating_point():
        raise ValueError(f"image has dtype {image.dtype}: expected uint8, or floating point on the same 0..255 scale")
    if image.device.type != "cpu":
        return (image,)
    return torch.split(image, max(1, _SLICE_PIXELS // (image.shape[1] * image.shape[2])))


class Criterion(nn.Module):
    """One criterion, usable alone (:meth:`forward`) or by a panel that splits the images once (:meth:`judge`)."""

    name: ClassVar[str]

    def judge(self, pixels: Pixels) -> Tensor:
        """Compute the marks of a batch, float32 (n,), 0 (bad) to 1 (good)."""
        raise NotImplementedError

    def forward(self, image: Tensor) -> Tensor:
        """Compute the marks of a batch.

        Args:
            image: (n, height, width, 3) RGB, uint8 or floating point on the same 0..255 scale.

        Returns:
            float32 (n,), 0 (bad) to 1 (good). Differentiable with respect to a floating-point image.
        """
        return torch.cat([self.judge(split(rows)) for rows in slices(image)])


def plausible(value: Tensor, low: float, high: float, *, below: float, above: float) -> Tensor:
    """Return a mark in (0, 1] that decreases with the distance of ``value`` from ``[low, high]``.

    It is 1 inside the range and ``1 / (1 + d ** 2)`` outside, d being the distance to the range in units of ``below``
    or ``above``. So it is 0.5 at one unit, and its gradient does not vanish far from the range.
    """
    distance = F.relu(low - value) / below + F.relu(value - high) / above
    return 1 / (1 + distance.square())


def joint(*marks: Tensor) -> Tensor:
    """Return the geometric mean of marks in (0, 1]; a single low mark lowers it."""
    return torch.stack(marks).log().mean(dim=0).exp()


# Converted from the PyPI package brisque 0.2.0 (Apache-2.0); the file's metadata and NOTICE give details.
PUBLISHED = Path(__file__).with_name("brisque_live.safetensors")


class SupportVectorRegressor(nn.Module):
    """Maps features to a BRISQUE score, about 0 (best) to 100 (worst); trained on the LIVE database's DMOS."""

    support_vectors: Tensor
    coefficients: Tensor
    feature_low: Tensor
    feature_high: Tensor
    offset: Tensor

    def __init__(self, path: Path = PUBLISHED) -> None:
        super().__init__()
        with safe_open(path, framework="pt") as file:
            for name in ("support_vectors", "coefficients", "feature_low", "feature_high", "offset"):
                self.register_buffer(name, file.get_tensor(name))
            self.gamma = float(file.metadata()["gamma"])

    def forward(self, features: Tensor) -> Tensor:
        """Map float32 (n, 36) to scores float32 (n,); lower is better. They can exceed 0..100 by some tens."""
        scaled = (features - self.feature_low) * (2 / (self.feature_high - self.feature_low)) - 1
        distance = (scaled.unsqueeze(1) - self.support_vectors).square_().sum(dim=2)
        # Coefficients of +-1024 cancel to a score below 100: in float32 the score would depend on the summation order.
        kernel = torch.exp(distance.double() * -self.gamma)
        return (kernel @ self.coefficients.double()).float() + self.offset


# A logistic curve has a gradient even if the regressor's score is outside 0..100. The mark of a score of 50 is 0.5;
# those of 0 and 100 are 0.97 and 0.03.
_MIDDLE, _SLOPE = 50.0, 15.0


class Naturalness(Criterion):
    """Logistic function of the BRISQUE score: ``1 / (1 + exp((brisque - 50) / 15))``."""

    name = "naturalness"

    def __init__(self) -> None:
        super().__init__()
        self.statistics = SceneStatistics()
        self.regressor = SupportVectorRegressor()

    def brisque(self, pixels: Pixels) -> Tensor:
        """Compute BRISQUE scores, float32 (n,): about 0 (best) to 100 (worst)."""
        score: Tensor = self.regressor(self.statistics(pixels.luma))
        return score

    def judge(self, pixels: Pixels) -> Tensor:
        return torch.sigmoid((_MIDDLE - self.brisque(pixels)) / _SLOPE)


# Black and white points are computed from cells of this many pixels a side, so that noise and specks do not set them.
_CELL = 8
_TAIL = 0.02
# Luma within this many levels of 0 or 255 counts as clipped, in proportion to its nearness.
_CLIP_RAMP = 6.0


class Exposure(Criterion):
    """Geometric mean of five marks of luma (0..1); ``docs/jurors.md`` has the ranges and their sources."""

    name = "exposure"

    def judge(self, pixels: Pixels) -> Tensor:
        luma = pixels.luma
        cells = F.avg_pool2d(luma.unsqueeze(1), min(_CELL, *luma.shape[-2:])).flatten(1) / 255
        tail = max(1, int(cells.shape[1] * _TAIL))
        black = cells.topk(tail, dim=1, largest=False, sorted=False).values.mean(dim=1)
        white = cells.topk(tail, dim=1, largest=True, sorted=False).values.mean(dim=1)
        mean = cells.mean(dim=1)
        # The square root's gradient is infinite at zero; without the constant, a constant image's would be NaN.
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


# A channel within this many levels of 0 or 255 counts as clipped, in proportion to its nearness.
_CHANNEL_CLIP_RAMP = 8.0
# Difference between the largest and smallest channel from which a clipped pixel counts as coloured, not black or white:
# not at all below the first value, fully above the second.
_CHROMA_RAMP = (40.0, 80.0)


class Colour(Criterion):
    """Geometric mean of three marks; ``docs/jurors.md`` has the ranges and their sources."""

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
        crushed = (1 - smallest / _CHANNEL_CLIP_RAMP).clamp(min=0) + (
            (largest - (255 - _CHANNEL_CLIP_RAMP)) / _CHANNEL_CLIP_RAMP
        ).clamp(min=0)
        out_of_gamut = (coloured * crushed).mean(dim=1)

        return joint(
            plausible(colourfulness, 25.0, 90.0, below=8.0, above=30.0),
            plausible(offset / (mean_luma + 8), 0.0, 0.6, below=1.0, above=0.6),
            plausible(out_of_gamut, 0.0, 0.02, below=1.0, above=0.25),
        )


# Detail below the rounding noise of 8-bit luma is not evidence of sharpness.
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
        # Averaging 2 x 2 pixels is an orthogonal Haar step, so the energy it removes is that of the octave's detail.
        detail = ((energy[:-1] - energy[1:]).clamp(min=0) + _NOISE_FLOOR).sqrt()
        ratio = detail[:-1] / detail[1:]
        return joint(*(plausible(step, 0.60, 0.75, below=0.30, above=0.35) for step in (ratio[1], ratio[2])))


# The criteria in the order of the panel's outputs.
CRITERIA: tuple[type[Criterion], ...] = (Naturalness, Exposure, Colour, Sharpness)
