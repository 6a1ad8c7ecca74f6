"""What a configuration names: the panel and its criteria one by one, ready to serve."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.allocator import keep_freed_memory
from jurybox.server.jurors.criteria import Colour, Exposure, Naturalness, Sharpness
from jurybox.server.jurors.example import example_images
from jurybox.server.jurors.weighing import Panel
from jurybox.server.models import ServedModel

# Sharpness compares octaves up to the fourth, BRISQUE wants 16 pixels at half resolution.
_SMALLEST_SIZE = 32


def panel(
    size: int = 384,
    naturalness: float = 1.0,
    exposure: float = 1.0,
    colour: float = 1.0,
    sharpness: float = 1.0,
) -> ServedModel:
    """The whole panel, ready to serve.

    Args:
        size: height and width of an image in pixels, at least 32.
        naturalness: weight of BRISQUE's mark in ``score``; the others likewise. Only proportions count.
        exposure: weight of light.
        colour: weight of colour.
        sharpness: weight of not being over-sharpened.

    Returns:
        Input ``image`` uint8 (size, size, 3) RGB; outputs ``score``, then ``naturalness``, ``exposure``, ``colour``
        and ``sharpness``, each float32 (), 0 (bad) to 1 (good).

    Raises:
        ValueError: for a size or weight out of range, with what was expected.
    """
    weights = {"naturalness": naturalness, "exposure": exposure, "colour": colour, "sharpness": sharpness}
    return _served(lambda: Panel(weights), size, ("score", *weights))


def naturalness(size: int = 384) -> ServedModel:
    """BRISQUE alone: input ``image`` uint8 (size, size, 3), output ``score`` float32 (), 0 (bad) to 1 (good)."""
    return _served(Naturalness, size, ("score",))


def exposure(size: int = 384) -> ServedModel:
    """Exposure alone: input ``image`` uint8 (size, size, 3), output ``score`` float32 (), 0 (bad) to 1 (good)."""
    return _served(Exposure, size, ("score",))


def colour(size: int = 384) -> ServedModel:
    """Colour alone: input ``image`` uint8 (size, size, 3), output ``score`` float32 (), 0 (bad) to 1 (good)."""
    return _served(Colour, size, ("score",))


def sharpness(size: int = 384) -> ServedModel:
    """Sharpness alone: input ``image`` uint8 (size, size, 3), output ``score`` float32 (), 0 (bad) to 1 (good)."""
    return _served(Sharpness, size, ("score",))


def _served(make: Callable[[], nn.Module], size: int, outputs: tuple[str, ...]) -> ServedModel:
    if size < _SMALLEST_SIZE:
        raise ValueError(f"size is {size}: expected at least {_SMALLEST_SIZE} pixels, 384 by default")
    keep_freed_memory()
    return ServedModel(
        module=make().eval(),
        inputs={"image": TensorSpec("uint8", (size, size, 3))},
        outputs={name: TensorSpec("float32") for name in outputs},
        example=lambda rows: {"image": example_images(rows, size)},
    )
