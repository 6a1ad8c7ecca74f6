"""Time-outs as callers give them."""

from __future__ import annotations

import math

LONGEST = 1e8  # seconds, about three years; the cap of all time-outs, so that none overflows


def seconds(timeout: float) -> float:
    """Return a time-out clipped to [0, LONGEST].

    Raises:
        ValueError: it is nan: no deadline made of it would ever be over.
    """
    if 0.0 <= timeout <= LONGEST:
        return timeout
    if math.isnan(timeout):
        raise ValueError(f"timeout={timeout!r}: expected seconds")
    return 0.0 if timeout < 0.0 else LONGEST
