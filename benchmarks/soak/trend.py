"""Growth, or noise? A robust slope, and a rule that says when it counts.

The slope is the median of the slopes between all pairs of points (Theil 1950, Sen 1968): a few outliers, such as a
sample taken in the midst of a request, do not move it. Growth counts when the line rises, over the time looked at, by
more than the points scatter around it, and by more than a floor that says what is worth a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

_SIGMA = 1.4826  # from a median absolute deviation to the standard deviation of a normal distribution
_SCATTERS = 3.0
_MOST_POINTS = 400  # of pairs there are half as many squared


@dataclass(frozen=True, slots=True)
class Trend:
    """How a quantity went over some time.

    Attributes:
        typical: its median.
        per_hour: the slope.
        rise: of the line from first point to last.
        noise: standard deviation around the line, robust.
        floor: rises below it are worth no word.
    """

    typical: float
    per_hour: float
    rise: float
    noise: float
    floor: float

    @property
    def grows(self) -> bool:
        return self.rise > max(self.floor, _SCATTERS * self.noise)


def trend(seconds: ArrayLike, values: ArrayLike, floor: float) -> Trend:
    """The trend of a series of points, in order of time. Raises ValueError for fewer than three."""
    x, y = np.asarray(seconds, float), np.asarray(values, float)
    if len(x) < 3:
        raise ValueError(f"a trend needs three points at least, {len(x)} came: run for longer, or sample more often")
    if len(x) > _MOST_POINTS:
        chosen = np.linspace(0, len(x) - 1, _MOST_POINTS).astype(int)
        x, y = x[chosen], y[chosen]
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    slope = float(np.median((y[second] - y[first])[apart > 0] / apart[apart > 0]))
    level = float(np.median(y - slope * x))
    noise = _SIGMA * float(np.median(np.abs(y - slope * x - level)))
    return Trend(float(np.median(y)), slope * 3600, slope * float(x[-1] - x[0]), noise, floor)
