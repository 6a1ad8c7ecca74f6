"""Images for warm-up and self-test that look to the jurors like photographs."""

from __future__ import annotations

import torch
from torch import Tensor

_SEED = 20120
# Chroma varies about a third as much as luma in photographs of everyday scenes.
_CHROMA = 0.3


def example_images(rows: int, size: int) -> Tensor:
    """Coloured noise with the 1/f amplitude spectrum of natural scenes (D. J. Field, JOSA A 4(12), 1987).

    A constant image is the degenerate case of every statistic that the jurors take, so zeros would neither exercise
    nor check them. The same call gives the same images.

    Returns:
        uint8 (rows, size, size, 3).
    """
    generator = torch.Generator().manual_seed(_SEED)
    noise = torch.randn(rows, 3, size, size, generator=generator)
    down, across = torch.fft.fftfreq(size), torch.fft.rfftfreq(size)
    frequency = torch.sqrt(down[:, None] ** 2 + across[None, :] ** 2)
    # The mean belongs to the brightness set below, not to the texture.
    amplitude = torch.where(frequency > 0, 1 / frequency.clamp(min=1 / size), 0.0)
    texture = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(size, size))
    texture = texture / texture.std(dim=(-2, -1), keepdim=True)
    luma = texture[:, :1]
    chroma = _CHROMA * torch.cat((texture[:, 1:2], -0.5 * (texture[:, 1:2] + texture[:, 2:3]), texture[:, 2:3]), dim=1)
    image: Tensor = 118 + 50 * (luma + chroma)
    return image.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
