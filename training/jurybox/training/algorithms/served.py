"""The policy of any algorithm as a model that the server's engines load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms.base import Algorithm
from jurybox.training.algorithms.registry import make
from jurybox.training.spaces import MASK

__all__ = ["policy", "raw_network"]


def raw_network(algorithm: Algorithm, seed: int = 0) -> nn.Module:
    """Create the acting network of an algorithm for the environment's own observations, one argument an input."""
    algorithm.raw = True
    network: nn.Module = algorithm.seeded(algorithm.network, seed)
    return network


def policy(algorithm: str, settings: Mapping[str, Any], spec: Mapping[str, Any]) -> ServedModel:
    """The acting network of an algorithm, from the environment's own observation to its outputs, all float32.

    Args:
        algorithm, settings, spec: arguments of `algorithms.make`. The module of an algorithm of your own is imported.
    """
    made = make(algorithm, settings, spec)
    given = {leaf.name: TensorSpec(leaf.dtype, leaf.shape) for leaf in made.spec.inputs}
    if made.spec.masked:
        given[MASK] = TensorSpec("bool", (made.spec.action.size,))
    outputs = {name: TensorSpec("float32", shape) for name, shape in made.outputs.items()}
    return ServedModel(raw_network(made), given, outputs)
