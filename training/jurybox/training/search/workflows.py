"""Workflows: the 120 orders in which the five types of units may have priority.

An order is a tuple of five type numbers (see `tables.UNIT_TYPES`), first the type to be fixed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np
import numpy.typing as npt

from jurybox.training.environments.cage.tables import UNIT_TYPES

Order = tuple[int, ...]

N_TYPES = len(UNIT_TYPES)
ORDERS: tuple[Order, ...] = tuple(permutations(range(N_TYPES)))
ENCODED = N_TYPES * N_TYPES
_PAIRS = tuple(combinations(range(N_TYPES), 2))


def encode(order: Sequence[int]) -> npt.NDArray[np.float32]:
    """One-hot, position by position: float32 (25,), 1 at 5 x position + type."""
    return np.eye(N_TYPES, dtype=np.float32)[list(order)].reshape(-1)


def describe(order: Sequence[int]) -> str:
    """'enterprise > op_server > ...'."""
    return " > ".join(UNIT_TYPES[kind] for kind in order)


def parse(text: str) -> Order:
    """The inverse of `describe`; commas will do as well.

    Raises:
        ValueError: not each type once.
    """
    names = [name.strip() for name in text.replace(">", ",").split(",")]
    if sorted(names) != sorted(UNIT_TYPES):
        raise ValueError(f"expected each of {', '.join(UNIT_TYPES)} once, got {text!r}")
    return tuple(UNIT_TYPES.index(name) for name in names)


def distances(left: npt.ArrayLike, right: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Kendall's distance of orders (n, 5) and (m, 5): share of pairs that are the other way round, float64 (n, m)."""
    mine, other = _signs(np.asarray(left, int)), _signs(np.asarray(right, int))
    share: npt.NDArray[np.float64] = (len(_PAIRS) - mine @ other.T) / (2 * len(_PAIRS))
    return share


def _signs(orders: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Per pair of types which one comes first, -1 or 1: (n, 10)."""
    places = np.argsort(orders, axis=1)
    return np.stack([np.sign(places[:, b] - places[:, a]) for a, b in _PAIRS], axis=1).astype(np.float64)
