"""Settings that change over a run: a number, or a name and numbers, as in RL Baselines3 Zoo."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator

__all__ = ["AnySchedule", "NoiseSchedule", "Schedule", "ShareSchedule", "at", "is_schedule"]

_SHAPES = ("lin", "cos")
_EXPECTED = 'expected a number, "lin_0.001" (to 0), "lin_0.001_0.0001" or "cos_..." of the same forms'


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[str, float, float] | None:
    """Return the shape, the first and the last number of a schedule; None: it is none."""
    shape, *numbers = text.split("_")
    try:
        found = [float(number) for number in numbers]
    except ValueError:
        return None
    if shape not in _SHAPES or len(found) not in (1, 2) or not all(map(math.isfinite, found)):
        return None
    return shape, found[0], found[1] if len(found) == 2 else 0.0


def is_schedule(value: object) -> bool:
    """Return whether a setting's value changes over a run."""
    return isinstance(value, str) and _parsed(value) is not None


def at(schedule: float | str, remaining: float) -> float:
    """Return the number of a schedule.

    Args:
        schedule: a number; "lin_FIRST_LAST", which falls or rises evenly; or "cos_FIRST_LAST", half of a cosine, which
            is flat at both ends. LAST is 0 if it is left out.
        remaining: the fraction of the run that remains, from 1 to 0.

    Raises:
        ValueError: it is none.

    Example:
        >>> at("lin_0.4_0.2", 0.5)
        0.3
    """
    if not isinstance(schedule, str):
        return float(schedule)
    parsed = _parsed(schedule)
    if parsed is None:
        raise ValueError(f"{schedule!r}: {_EXPECTED}")
    shape, first, last = parsed
    weight = remaining if shape == "lin" else 0.5 - 0.5 * math.cos(math.pi * remaining)
    return last + (first - last) * weight


@dataclass(frozen=True, slots=True)
class _Between:
    """Checks a setting: the numbers of a schedule have to be in bounds, and a plain number may be text."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    def __call__(self, value: float | str) -> float | str:
        given = value
        if isinstance(value, str) and not is_schedule(value):
            try:
                given = float(value)
            except ValueError:
                raise ValueError(f"{value!r}: {_EXPECTED}") from None
        first, last = at(given, 1.0), at(given, 0.0)
        lower, upper = sorted((first, last))
        if not (self.least <= lower and self.above < upper <= self.most and math.isfinite(upper)):
            raise ValueError(f"{value!r}: {self._expected()}")
        return given

    def _expected(self) -> str:
        if self.above > -math.inf:
            return f"expected a number above {self.above:g}; one end of a schedule may be {self.least:g}"
        if self.least == -math.inf:
            return "expected finite numbers"
        return f"expected numbers from {self.least:g}" + (f" to {self.most:g}" if self.most < math.inf else " on")


AnySchedule = Annotated[float | str, AfterValidator(_Between())]
"""Of any finite numbers."""
Schedule = Annotated[float | str, AfterValidator(_Between(least=0.0, above=0.0))]
"""Of numbers above 0; one end may be 0."""
NoiseSchedule = Annotated[float | str, AfterValidator(_Between(least=0.0))]
"""Of numbers from 0 on."""
ShareSchedule = Annotated[float | str, AfterValidator(_Between(least=0.0, most=1.0))]
"""Of numbers from 0 to 1."""
