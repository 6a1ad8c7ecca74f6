"""The 36 natural-scene statistics of BRISQUE, batched.

A. Mittal, A. K. Moorthy, A. C. Bovik, "No-Reference Image Quality Assessment in the Spatial Domain", IEEE
Transactions on Image Processing 21(12), 2012. Locally normalised luminance (MSCN) of an undistorted photograph
follows a generalised Gaussian, the products of neighbours an asymmetric one; distortions change their shape.

The details follow the convention that the published regressor was trained with (the C++ release of the paper's
authors): replicated borders, bicubic halving without a low-pass filter, strictly positive and strictly negative
samples counted separately, products beyond the border counted as zeros.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_RADIUS = 3
_SIGMA = 7 / 6
# The paper's C, on a 0..255 scale; it prevents a division by zero in flat regions.
_STABILISER = 1.0
# OpenCV's bicubic kernel (a = -0.75) halfway between two samples, which is the position of every output of halving.
_HALVING = (19 / 32, -3 / 32)
# float32 leaves about 3e-5 of rounding noise in the MSCN of a flat region; its sign must not be counted.
_DEAD_ZONE = 1e-4
_SHAPES = (0.2, 10.0)
_TABLE_SIZE = 16384


class SceneStatistics(nn.Module):
    """Shapes and scales of MSCN coefficients and of products of neighbouring coefficients, at two scales."""

    shape_of_ratio: Tensor

    def __init__(self) -> None:
        super().__init__()
        offsets = range(_RADIUS + 1)
        rings = [math.exp(-0.5 * (offset / _SIGMA) ** 2) for offset in offsets]
        total = rings[0] + 2 * sum(rings[1:])
        self._taps = tuple(weight / total for weight in rings)
        self._ratios = (float(moment_ratio(_SHAPES[0])), float(moment_ratio(_SHAPES[1])))
        self.register_buffer("shape_of_ratio", _inverse_table(self._ratios), persistent=False)

    def forward(self, luma: Tensor) -> Tensor:
        """Compute the features of a batch.

        Args:
            luma: float32 (n, height, width), 0..255; height and width at least 16.

        Returns:
            float32 (n, 36): at full and then at half resolution the shape and variance of the MSCN coefficients,
            and for the horizontal, vertical, main- and secondary-diagonal products shape, mean, left and right
            variance. Finite for every finite input, including constant images.

        Raises:
            ValueError: the images are smaller than 16 x 16.
        """
        if min(luma.shape[-2:]) < 16:
            raise ValueError(f"image of {luma.shape[-2]} x {luma.shape[-1]} pixels: expected at least 16 x 16")
        # Small magnitudes keep the variance, a difference of two squares, accurate in float32.
        centred = luma - 128.0
        moments = torch.stack((*self._moments(centred), *self._moments(halve(centred))), dim=-1)
        shape, mean, left, right = self._fit(moments.view(5, -1, 2, 5))
        # Per scale: shape and variance of the MSCN coefficients, and all parameters of each of the four products.
        mscn = torch.stack((shape[..., 0], (left[..., 0] + right[..., 0]) / 2), dim=-1)
        products = torch.stack((shape, mean, left, right), dim=-1)[..., 1:, :]
        return torch.cat((mscn, products.flatten(-2)), dim=-1).flatten(1)

    def _moments(self, luma: Tensor) -> list[Tensor]:
        """Compute moments of the MSCN coefficients and of their four products, (5, n) each."""
        mscn = self._normalise(luma)
        total = mscn[0].numel()
        pairs = (
            (mscn[:, :, :-1], mscn[:, :, 1:]),
            (mscn[:, :-1], mscn[:, 1:]),
            (mscn[:, :-1, :-1], mscn[:, 1:, 1:]),
            (mscn[:, 1:, :-1], mscn[:, :-1, 1:]),
        )
        return [_moments(mscn, total), *(_moments(one * other, total) for one, other in pairs)]

    def _normalise(self, luma: Tensor) -> Tensor:
        padded = F.pad(luma.unsqueeze(1), (_RADIUS,) * 4, mode="replicate").squeeze(1)
        mean = self._blur(padded)
        variance = self._blur(padded * padded) - mean * mean
        # abs, as in the reference: rounding can make the variance of a flat region slightly negative. The small
        # constant keeps the gradient of the square root finite there.
        deviation = variance.abs().add_(1e-8).sqrt()
        return F.hardshrink((luma - mean) / (deviation + _STABILISER), _DEAD_ZONE)

    def _blur(self, padded: Tensor) -> Tensor:
        # Shifted sums: a convolution with one channel is many times slower on a CPU.
        for dim in (-2, -1):
            size = padded.shape[dim] - 2 * _RADIUS
            blurred = padded.narrow(dim, _RADIUS, size) * self._taps[0]
            for offset in range(1, _RADIUS + 1):
                blurred.add_(padded.narrow(dim, _RADIUS - offset, size), alpha=self._taps[offset])
                blurred.add_(padded.narrow(dim, _RADIUS + offset, size), alpha=self._taps[offset])
            padded = blurred
        return padded

    def _fit(self, moments: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fit asymmetric generalised Gaussians by moments (N.-E. Lasmar, Y. Stitou, Y. Berthoumieu, ICIP 2009).

        Args:
            moments: float32 (5, ...), see :func:`_moments`.

        Returns:
            Shape, mean, left and right variance, each (...).
        """
        absolute, square, signed_square, nonzero, surplus = moments.unbind(0)
        tiny = 1e-9
        left = (square - signed_square).clamp(min=0) / (nonzero - surplus + tiny)
        right = (square + signed_square).clamp(min=0) / (nonzero + surplus + tiny)
        left_deviation, right_deviation = (left + tiny).sqrt(), (right + tiny).sqrt()
        asymmetry = left_deviation / right_deviation
        ratio = absolute.square() / (square + tiny)
        ratio = ratio * (asymmetry**3 + 1) * (asymmetry + 1) / (asymmetry.square() + 1).square()
        ratio = ratio.clamp(*self._ratios)
        # The AGGD's mean is the difference of its deviations times the root of the ratio that gave the shape.
        mean = (right_deviation - left_deviation) * ratio.sqrt()
        return self._shape(ratio), mean, left, right

    def _shape(self, ratio: Tensor) -> Tensor:
        low, high = self._ratios
        position = (ratio - low) * ((_TABLE_SIZE - 1) / (high - low))
        index = position.detach().to(torch.int64).clamp(0, _TABLE_SIZE - 2)
        below, above = self.shape_of_ratio[index], self.shape_of_ratio[index + 1]
        return below + (above - below) * (position - index)


def _moments(samples: Tensor, total: int) -> Tensor:
    """Compute means of magnitude, square and signed square, the share of nonzeros and the surplus of positives.

    Args:
        samples: (n, ...).
        total: the divisor of all of them: the number of samples, including those beyond the border.

    Returns:
        (5, n).
    """
    samples = samples.flatten(1)
    magnitude = samples.abs()
    signs = samples.detach().sign()
    sums = (
        magnitude.sum(-1),
        (samples * samples).sum(-1),
        (magnitude * samples).sum(-1),
        signs.square().sum(-1),
        signs.sum(-1),
    )
    return torch.stack(sums) / total


def moment_ratio(shape: float | Tensor) -> Tensor:
    """Return the squared mean magnitude of a generalised Gaussian over its mean square.

    For shape a it is gamma(2/a)^2 / (gamma(1/a) gamma(3/a)).
    """
    inverse = 1 / torch.as_tensor(shape, dtype=torch.float64)
    return (2 * torch.lgamma(2 * inverse) - torch.lgamma(inverse) - torch.lgamma(3 * inverse)).exp()


def _inverse_table(ratios: tuple[float, float]) -> Tensor:
    """Tabulate shapes at evenly spaced moment ratios: inverting a ratio is then one look-up and an interpolation."""
    shapes = torch.linspace(*_SHAPES, 4 * _TABLE_SIZE, dtype=torch.float64)
    known = moment_ratio(shapes)
    wanted = torch.linspace(*ratios, _TABLE_SIZE, dtype=torch.float64)
    above = torch.searchsorted(known, wanted).clamp(1, len(known) - 1)
    share = (wanted - known[above - 1]) / (known[above] - known[above - 1])
    return torch.lerp(shapes[above - 1], shapes[above], share).float()


def halve(plane: Tensor) -> Tensor:
    """Halve the resolution like OpenCV's ``INTER_CUBIC``, (n, h, w) to (n, h // 2, w // 2); drop an odd last line."""
    near, far = _HALVING
    height, width = plane.shape[-2] // 2, plane.shape[-1] // 2
    padded = F.pad(plane[:, : 2 * height, : 2 * width].unsqueeze(1), (1, 1, 1, 1), mode="replicate").squeeze(1)
    for dim, size in ((-2, height), (-1, width)):
        lines = torch.unflatten(padded, dim, (size + 1, 2))
        first, second = lines.unbind(dim)
        inner = second.narrow(dim, 0, size) + first.narrow(dim, 1, size)
        outer = first.narrow(dim, 0, size) + second.narrow(dim, 1, size)
        padded = inner.mul_(near).add_(outer, alpha=far)
    return padded
