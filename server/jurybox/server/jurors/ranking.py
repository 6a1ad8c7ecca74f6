"""A juror trained from rankings, and the jury, which combines it with the panel's criteria.

``docs/photo.md`` describes how it was trained, on which photographs, and how often it ranks held-out ones correctly.
``python -m benchmarks.photo_ranking train``, in the repository, created the weights next to this file.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jurybox.server.jurors.criteria import CRITERIA
from jurybox.server.jurors.panels import Panel, served
from jurybox.server.models import ServedModel

WEIGHTS = Path(__file__).with_name("ranked.safetensors")
_SIDE = 384
_AT_ONCE = 4  # images processed at once; more exceed a CPU's caches
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_BINS = 8  # bins per right angle
_BANDS = 4
_SLANTS = 30  # bins of one degree around the vertical, and as many around the horizontal
_LIGHT = 2 * (6 + 3 + _BANDS) + len(_QUANTILES)
SLANTS = slice(7 * 7 + 7 + 7 + 3 + 3 + 6 + 10 + 8 + 3 * _BANDS + _LIGHT, None)
STATISTICS = SLANTS.start + 2 * _SLANTS
_BLACK = 1e-3  # added to linear light: the levels below it are rounded too coarsely for ratios
_FARTHEST = 4.0  # the distance at which the score is 0
_PER_DEGREE = 0.04  # score subtracted per degree of tilt


class Ranker(nn.Module):
    """A small network that predicts, from statistics of an image, its distance from the undamaged photograph."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Mean and standard deviation of the statistics of the training images; set by the training.
        self.register_buffer("mean", torch.zeros(STATISTICS))
        self.register_buffer("deviation", torch.ones(STATISTICS))
        self.far = nn.Sequential(
            nn.Linear(STATISTICS, 96), nn.SiLU(), nn.Dropout(0.3), nn.Linear(96, 48), nn.SiLU(), nn.Linear(48, 1)
        )
        self.slant = nn.Sequential(nn.Linear(2 * _SLANTS, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))

    def distance(self, found: Tensor) -> Tensor:
        """Predict the distance, float32 (n,), from statistics (n, STATISTICS).

        It is the mean of log(1 + CIEDE2000) and log(1 + root-mean-square error in percent): 0 for an unedited
        photograph.
        """
        far: Tensor = self.far(self._scaled(found)).squeeze(1)
        return far

    def tilt(self, found: Tensor) -> Tensor:
        """Predict the tilt, float32 (n,), in degrees counter-clockwise. Mirroring an image exactly negates it."""
        slants = self._scaled(found)[:, SLANTS]
        mirrored = slants.reshape(-1, 2, _SLANTS).flip(2).flatten(1)
        tilts: Tensor = self.slant(slants) - self.slant(mirrored)
        return tilts.squeeze(1)

    def rank(self, found: Tensor) -> Tensor:
        """Compute ``score``, float32 (n,), from statistics (n, STATISTICS)."""
        score = 1.0 - self.distance(found) / _FARTHEST - _PER_DEGREE * self.tilt(found).abs()
        return F.softplus(score, beta=20.0)  # positive, and unlike clamping it keeps the order of low scores

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Compute ``score``, float32 (n,), of images (n, 384, 384, 3) RGB, uint8 or floating point, 0..255."""
        return {"score": torch.cat([self.rank(statistics(part)) for part in torch.split(image, _AT_ONCE)])}

    def _scaled(self, found: Tensor) -> Tensor:
        return ((found - self.mean) / self.deviation).clamp(-4, 4)


def statistics(image: Tensor) -> Tensor:
    """Compute the ranker's inputs, float32 (n, STATISTICS), of images as in `Ranker.forward`.

    - quantiles, mean and standard deviation of red, green, blue, luma, the minimum and maximum of the three channels,
      and chroma, at 48 x 48 pixels; the shares of clipped values at either end;
    - the colour cast of all pixels, and of the less colourful half (the grey-world assumption, restricted to pixels
      that are likely to be neutral);
    - log amplitudes of the details of six octaves, noise, and the ratio of the steps between blocks of 8 pixels to all
      steps (JPEG);
    - the directions of edges, modulo a right angle, in eight bins;
    - mean colours of four horizontal bands from top to bottom, which show where the sky is;
    - the light in stops, see `_stops`;
    - the directions of clear edges within 15 degrees of the vertical and of the horizontal, in bins of one degree.
    """
    planes = image.permute(0, 3, 1, 2)
    pixels = planes.to(torch.float32, memory_format=torch.contiguous_format) / 255.0
    small = _halved(_halved(pixels))
    smallest, luma = _halved(small), _luma(pixels)
    return torch.cat(
        (
            _colours(smallest),
            _clipped(pixels),
            _details(luma),
            _directions(_luma(small)[:, 0]),
            F.adaptive_avg_pool2d(small, (_BANDS, 1)).flatten(1),
            _stops(smallest),
            _slants(luma),
        ),
        dim=1,
    )


# Sums of shifted planes, and numpy's sort: on a CPU several times as fast as torch's pooling and its sort.


def _luma(pixels: Tensor) -> Tensor:
    red, green, blue = pixels.unbind(1)
    return torch.add(torch.add(0.299 * red, green, alpha=0.587), blue, alpha=0.114).unsqueeze(1)


def _halved(planes: Tensor) -> Tensor:
    """Means of 2 x 2 pixels; an odd last line is dropped."""
    height, width = planes.shape[-2] // 2 * 2, planes.shape[-1] // 2 * 2
    rows = planes[..., 0:height:2, :width] + planes[..., 1:height:2, :width]
    return (rows[..., ::2] + rows[..., 1::2]) * 0.25


def _blurred(planes: Tensor, size: int) -> Tensor:
    """Means of `size` x `size` pixels, at every place where they are all within."""
    for dim in (-2, -1):
        length = planes.shape[dim] - size + 1
        planes = sum((planes.narrow(dim, at, length) for at in range(1, size)), planes.narrow(dim, 0, length))
    return planes / size**2


def _ordered(values: Tensor) -> Tensor:
    """Sort the last dimension."""
    if values.requires_grad or not values.is_cpu:
        return values.sort(dim=-1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def _colours(small: Tensor) -> Tensor:
    luma = _luma(small)
    least, most = small.amin(1, keepdim=True), small.amax(1, keepdim=True)
    planes = torch.cat((small, luma, least, most, most - least), dim=1).flatten(2)
    ordered = _ordered(planes)
    places = [round(share * (ordered.shape[2] - 1)) for share in _QUANTILES]
    casts = small.flatten(2) - luma.flatten(2)
    neutral = planes[:, 6] <= ordered[:, 6, ordered.shape[2] // 2].unsqueeze(1)
    share = neutral.float().mean(1, keepdim=True)
    cast = (casts * neutral.unsqueeze(1)).mean(2) / share
    parts = (ordered[:, :, places].flatten(1), planes.mean(2), planes.std(2), casts.mean(2), cast)
    return torch.cat(parts, dim=1)


def _stops(small: Tensor) -> Tensor:
    """Compute the light of encoded pictures (n, 3, height, width), 0..1, in stops of linear light, (n, _LIGHT).

    A cast adds the same to all ratios, and an exposure the same to all levels, which encoded values do not show:

    - red over blue, and red and blue over green, of the mean (the grey-world assumption), the mean of sixth powers
      (shades of grey: Finlayson and Trezzi, 2004), the brightest part that is not clipped (the white patch), the dark
      part, the least coloured quarter, edges (grey edges: van de Weijer et al., 2007), three quantiles of all pixels,
      and four horizontal bands;
    - quantiles of luminance.
    """
    linear = torch.where(small <= 0.04045, small / 12.92, ((small + 0.055) / 1.055) ** 2.4) + _BLACK
    pixels = linear.flatten(2)
    luminance = (pixels * pixels.new_tensor((0.2126, 0.7152, 0.0722)).view(1, 3, 1)).sum(1, keepdim=True)
    order = _ordered(luminance)
    count = order.shape[2]
    most = small.flatten(2).amax(1, keepdim=True)
    whole = (most < 0.985).float()
    ratios = _ratios(pixels)
    ranked = _ordered(ratios)
    coloured = torch.hypot(*(ratios - ranked[:, :, (count - 1) // 2, None]).unbind(1)).unsqueeze(1)
    parts = [
        pixels.mean(2),
        (pixels * pixels * pixels).square().mean(2).pow(1 / 6),
        _mean_of(pixels, whole * (luminance >= order[:, :, round(0.9 * count), None])),
        _mean_of(pixels, (luminance <= order[:, :, count // 4, None]).float()),
        _mean_of(pixels, (coloured <= coloured.kthvalue(count // 4 + 1, 2, keepdim=True).values).float()),
        linear.diff(dim=2).abs().mean((2, 3)) + linear.diff(dim=3).abs().mean((2, 3)) + _BLACK / 10,
    ]
    bands = F.adaptive_avg_pool2d(linear, (_BANDS, 1)).flatten(2)
    spread = ranked[:, :, [round(share * (count - 1)) for share in (0.1, 0.5, 0.9)]]
    levels = order[:, 0, [round(share * (count - 1)) for share in _QUANTILES]].log2()
    found = torch.cat((_ratios(torch.stack(parts, dim=2)), spread, _ratios(bands)), dim=2)
    return torch.cat((found.flatten(1), levels), dim=1)


def _ratios(colours: Tensor) -> Tensor:
    """Stops of red over blue, and of red and blue over green, (n, 2, k), of linear colours (n, 3, k)."""
    red, green, blue = colours.log2().unbind(1)
    return torch.stack((red - blue, 0.5 * (red + blue) - green), dim=1)


def _mean_of(pixels: Tensor, chosen: Tensor) -> Tensor:
    return ((pixels * chosen).sum(2) + 1e-3) / (chosen.sum(2) + 1e-3)


def _clipped(pixels: Tensor) -> Tensor:
    flat = pixels[..., ::3, ::3].flatten(2)
    shares = torch.cat(((flat < 0.012).float().mean(2), (flat > 0.988).float().mean(2)), dim=1)
    return (shares + 1e-3).log()


def _details(luma: Tensor) -> Tensor:
    found, energies = [], [luma.square().mean((1, 2, 3))]
    level = luma
    for _ in range(6):
        level = _halved(level)
        energies.append(level.square().mean((1, 2, 3)))
    # Averaging 2 x 2 pixels is an orthogonal Haar step, so the energy it removes is that of the octave's detail.
    found = [0.5 * ((finer - coarser).clamp(min=0) + 1e-6).log() for finer, coarser in pairwise(energies)]
    rows = luma[:, 0, ::4]  # every fourth row is enough to estimate the noise
    bent = (rows[..., 2:] - 2 * rows[..., 1:-1] + rows[..., :-2]).abs().flatten(1)[:, ::4]
    ordered = _ordered(bent)
    found += [(ordered[:, round(share * (bent.shape[1] - 1))] + 1e-3).log() for share in (0.2, 0.5, 0.9)]
    steps = (rows[..., 1:] - rows[..., :-1]).abs()
    found.append(((steps[..., 7::8].mean((1, 2)) + 1e-3) / (steps.mean((1, 2)) + 1e-3)).log())
    return torch.stack(found, dim=1)


def _directions(luma: Tensor) -> Tensor:
    right = luma[:, 1:-1, 2:] - luma[:, 1:-1, :-2]
    down = luma[:, 2:, 1:-1] - luma[:, :-2, 1:-1]
    strength = torch.hypot(right, down).flatten(1)
    # The vertical is in the middle of a bin, so that a small tilt to either side has the same effect.
    angle = torch.atan2(down, right).flatten(1) * (4 * _BINS / (2 * math.pi)) + 0.5
    bins = angle.floor().long() % _BINS
    shares = strength.new_zeros((len(luma), _BINS)).scatter_add_(1, bins, strength)
    return shares / (strength.sum(1, keepdim=True) + 1e-3)


def _slants(luma: Tensor) -> Tensor:
    smooth = _halved(luma)
    for _ in range(3):
        smooth = _blurred(smooth, 3)
    right = smooth[..., 1:-1, 2:] - smooth[..., 1:-1, :-2]
    down = smooth[..., 2:, 1:-1] - smooth[..., :-2, 1:-1]
    # The structure tensor: the main direction of each neighbourhood, and how strongly its gradients agree on it.
    products = torch.cat((right * right, down * down, right * down), dim=1)
    across, along, both = _blurred(_blurred(products, 5), 5)[..., ::2, ::2].flatten(2).unbind(1)
    total = across + along
    agreed = torch.sqrt((across - along) ** 2 + 4 * both**2) / (total + 1e-7)
    weights = total.sqrt() * agreed**4
    degrees = torch.rad2deg(0.5 * torch.atan2(2 * both, across - along))
    shares = weights.new_zeros((len(luma), 2, _SLANTS + 2))
    for number, turned in enumerate((degrees, degrees - 90 * torch.sign(degrees))):
        bins = (turned + (_SLANTS / 2 + 1)).floor().long().clamp(0, _SLANTS + 1)
        shares[:, number].scatter_add_(1, bins, weights)
    shares = shares[..., 1:-1] / (weights.sum(1)[:, None, None] + 1e-3)
    return (shares + 2e-3).log().flatten(1)


class Jury(nn.Module):
    """Weighted mean of the ranked juror's mark and the panel's."""

    def __init__(self, share: float, weights: str | None = None) -> None:
        super().__init__()
        self.ranker, self.share = _trained(weights), share
        self.panel = Panel({criterion.name: 1.0 for criterion in CRITERIA})

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        marks = self.panel(image)
        ranked = self.ranker(image)["score"]
        score = self.share * ranked + (1.0 - self.share) * marks.pop("score")
        return {"score": score, "ranked": ranked, **marks}


def _trained(weights: str | None) -> Ranker:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    made, path = Ranker(), WEIGHTS if weights is None else Path(weights)
    try:
        made.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"no weights of the ranked juror in {path.absolute()}: expected a file that 'photo_ranking train' wrote "
            f"with this release ({error})"
        ) from error
    return made


def ranked(trained: bool = True, weights: str | None = None) -> ServedModel:
    """The ranked juror alone.

    Args:
        trained: False creates random weights, for training.
        weights: a file written by ``photo_ranking train``; None: the weights that ship with Jurybox.

    Returns:
        Input ``image`` uint8 (384, 384, 3) RGB; output ``score`` float32 (), 0 (bad) to 1 (good).

    Raises:
        ValueError: the file was not found, or its weights do not match.
    """
    return served(lambda: _trained(weights) if trained else Ranker(), _SIDE, ("score",))


def jury(share: float = 0.9, weights: str | None = None) -> ServedModel:
    """The ranked juror and the panel together.

    Args:
        share: share of the ranked juror's mark in ``score``, 0 to 1; the rest is the panel's.
        weights: weights of the ranked juror, as in `ranked`.

    Returns:
        Input ``image`` uint8 (384, 384, 3) RGB; outputs ``score``, ``ranked`` and the panel's ``naturalness``,
        ``exposure``, ``colour`` and ``sharpness``, each float32 (), 0 (bad) to 1 (good).

    Raises:
        ValueError: the share is out of range; the weights, as in `ranked`.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share}: expected 0 to 1")
    outputs = ("score", "ranked", *(criterion.name for criterion in CRITERIA))
    return served(lambda: Jury(share, weights), _SIDE, outputs)
