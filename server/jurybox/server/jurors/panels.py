"""Model factories for configurations: the panel and each of its criteria."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from jurybox.processes import keep_freed_memory
from jurybox.protocol import TensorSpec
from jurybox.server.jurors.criteria import CRITERIA, Colour, Criterion, Exposure, Naturalness, Sharpness, slices, split
from jurybox.server.models import ServedModel

_SEED = 20120
# In photographs of everyday scenes, chroma varies about a third as much as luma.
_CHROMA = 0.3


def example_images(rows: int, size: int) -> Tensor:
    """Generate noise with the 1/f amplitude spectrum of natural scenes (D. J. Field, JOSA A 4(12), 1987).

    A constant image is a degenerate case of all the jurors' statistics, so zeros would neither exercise nor check them.
    The same arguments give the same images. They are made one by one, so that a server's start needs no more memory
    than its service.

    Returns:
        uint8 (rows, size, size, 3).
    """
    generator = torch.Generator().manual_seed(_SEED)
    down, across = torch.fft.fftfreq(size), torch.fft.rfftfreq(size)
    frequency = torch.sqrt(down[:, None] ** 2 + across[None, :] ** 2)
    # The texture has mean 0; the brightness is set below.
    amplitude = torch.where(frequency > 0, 1 / frequency.clamp(min=1 / size), 0.0)
    images = torch.empty((rows, size, size, 3), dtype=torch.uint8)
    for image in images:
        noise = torch.randn(3, size, size, generator=generator)
        texture = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(size, size))
        luma, red, blue = texture / texture.std(dim=(-2, -1), keepdim=True)
        chroma = _CHROMA * torch.stack((red, -0.5 * (red + blue), blue))
        image.copy_((118 + 50 * (luma + chroma)).clamp_(0, 255).permute(1, 2, 0))
    return images


class Panel(nn.Module):
    """Weighted mean of the criteria's marks.

    Args:
        weights: a weight for each criterion's name; non-negative, at least one above 0. Only their proportions matter.
            The mark of a criterion with weight 0 is still returned, for monitoring.

    Raises:
        ValueError: the weights' names or values are invalid.
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
        """Compute the marks of a batch.

        Args:
            image: (n, height, width, 3) RGB, uint8 or floating point on the same 0..255 scale.

        Returns:
            ``score`` and then one mark per criterion, float32 (n,) each, 0 (bad) to 1 (good). Differentiable with
            respect to a floating-point image.
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


# Sharpness compares octaves up to the fourth; BRISQUE needs 16 pixels at half resolution.
_SMALLEST_SIZE = 32


def panel(
    size: int = 384,
    naturalness: float = 1.0,
    exposure: float = 1.0,
    colour: float = 1.0,
    sharpness: float = 1.0,
) -> ServedModel:
    """The panel: the weighted mean of the criteria's marks.

    Args:
        size: height and width of an image in pixels, at least 32.
        naturalness: weight of BRISQUE's mark in ``score``. Only the weights' proportions matter.
        exposure: weight of exposure.
        colour: weight of colour.
        sharpness: weight of the mark for not being over-sharpened.

    Returns:
        Input ``image`` uint8 (size, size, 3) RGB; outputs ``score``, then ``naturalness``, ``exposure``, ``colour``
        and ``sharpness``, each float32 (), 0 (bad) to 1 (good).

    Raises:
        ValueError: the size or a weight is out of range.
    """
    weights = {"naturalness": naturalness, "exposure": exposure, "colour": colour, "sharpness": sharpness}
    return served(lambda: Panel(weights), size, ("score", *weights))


def naturalness(size: int = 384) -> ServedModel:
    """BRISQUE alone: input ``image`` uint8 (size, size, 3), output ``score`` float32 (), 0 (bad) to 1 (good)."""
    return served(Naturalness, size, ("score",))


def exposure(size: int = 384) -> ServedModel:
    """Exposure alone: input ``image`` uint8 (size, size, 3), output ``score`` float32 (), 0 (bad) to 1 (good)."""
    return served(Exposure, size, ("score",))


def colour(size: int = 384) -> ServedModel:
    """Colour alone: input ``image`` uint8 (size, size, 3), output ``score`` float32 (), 0 (bad) to 1 (good)."""
    return served(Colour, size, ("score",))


def sharpness(size: int = 384) -> ServedModel:
    """Sharpness alone: input ``image`` uint8 (size, size, 3), output ``score`` float32 (), 0 (bad) to 1 (good)."""
    return served(Sharpness, size, ("score",))


def served(make: Callable[[], nn.Module], size: int, outputs: tuple[str, ...]) -> ServedModel:
    """Return a juror of square images with these outputs. Raises ValueError if the size is too small."""
    if size < _SMALLEST_SIZE:
        raise ValueError(f"size is {size}: expected at least {_SMALLEST_SIZE} pixels, 384 by default")
    keep_freed_memory()
    return ServedModel(
        module=make().eval(),
        inputs={"image": TensorSpec("uint8", (size, size, 3))},
        outputs={name: TensorSpec("float32") for name in outputs},
        example=lambda rows: {"image": example_images(rows, size)},
    )
