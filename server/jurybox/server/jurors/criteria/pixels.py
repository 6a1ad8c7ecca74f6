"""From rows of interleaved RGB to the planes that the jurors measure."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# ITU-R BT.601 luma, the weights of OpenCV's and MATLAB's conversion to grey.
LUMA = (0.299, 0.587, 0.114)
# Four images of 384 x 384: larger intermediates leave a CPU's caches and, past the allocator's limit, are mapped
# anew for every operation, which costs several times the arithmetic.
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
    # Reordering bytes before widening them moves a quarter of the memory.
    planes = image.permute(0, 3, 1, 2).contiguous().float()
    red, green, blue = planes.unbind(1)
    luma = (red * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return Pixels(planes, luma)


def slices(image: Tensor) -> tuple[Tensor, ...]:
    """Check a batch and cut it into the pieces to work on: a few rows at a time on a CPU, all at once elsewhere.

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
