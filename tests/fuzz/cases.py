"""How many random cases a differential test compares: a few in the suite, many in ``make fuzz``."""

from __future__ import annotations

import pytest

PIECE = 2_500  # cases of a seed; a seed is run again alone with `-k long-7`


def cases(short: int, long: int) -> pytest.MarkDecorator:
    """Parametrize `count` and `seed`: the suite's cases, and as many as `long` in pieces with a seed each."""
    marks = [pytest.mark.slow, pytest.mark.timeout(3000)]
    pieces = [pytest.param(PIECE, seed, id=f"long-{seed}", marks=marks) for seed in range(1, long // PIECE + 1)]
    return pytest.mark.parametrize(("count", "seed"), [pytest.param(short, 0, id="short"), *pieces])
