"""The networks that act, of the built-in algorithms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jurybox.training.algorithms.base import Algorithm
from jurybox.training.algorithms.registry import make
from jurybox.training.spaces import ActionSpec, AgentSpec, Leaf


def spec_of(numbers: int, pictures: Sequence[Sequence[int]], normalize: bool, discrete: bool, size: int) -> AgentSpec:
    """Return a specification of so many numbers, and of pictures (channels, height, width)."""
    leaves = [Leaf("numbers", (numbers,), "float32")] if numbers else []
    leaves += [Leaf(f"picture {n}", tuple(shape), "uint8", "picture", 1 / 255) for n, shape in enumerate(pictures)]
    bounds = () if discrete else (-1.0,) * size, () if discrete else (1.0,) * size
    return AgentSpec(tuple(leaves), ActionSpec(discrete, size, 0, *bounds), normalize)


def algorithm(name: str, spec: AgentSpec, **settings) -> Algorithm:
    """Return the algorithm of that name."""
    assert all(map(math.isfinite, spec.action.low))
    return make(name, settings, spec.as_dict())


def acting_network(name, numbers, pictures, normalize, discrete, size, hidden, seed=0):
    """Return the network of that algorithm that acts."""
    made = algorithm(name, spec_of(numbers, pictures, normalize, discrete, size), hidden=hidden)
    return made.seeded(made.network, seed)
