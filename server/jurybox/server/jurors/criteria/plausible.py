"""The one shape that all hand-made terms share: full marks inside a range, a smooth fall outside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def plausible(value: Tensor, low: float, high: float, *, below: float, above: float) -> Tensor:
    """How far ``value`` lies outside ``[low, high]``, as a mark in (0, 1].

    1 inside the range and ``1 / (1 + d ** 2)`` outside, d being the distance to the range in units of ``below``
    or ``above``: half marks at one unit, and, unlike a bell curve, a gradient that still leads back from far away.
    """
    distance = F.relu(low - value) / below + F.relu(value - high) / above
    return 1 / (1 + distance.square())


def joint(*marks: Tensor) -> Tensor:
    """Geometric mean of marks in (0, 1]: one fault cannot be bought off by the absence of others."""
    return torch.stack(marks).log().mean(dim=0).exp()
