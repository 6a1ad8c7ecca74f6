"""The policy of any algorithm as a model that the server's engines load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms.networks import features_of
from jurybox.training.algorithms.registry import make

__all__ = ["policy"]


def policy(algorithm: str, settings: Mapping[str, Any], spec: Mapping[str, Any]) -> ServedModel:
    """The acting network of an algorithm, from the environment's own observation to its outputs, all float32.

    Args:
        algorithm, settings, spec: arguments of `algorithms.make`. The module of an algorithm of your own is imported.
    """
    made = make(algorithm, settings, spec)
    network = made.seeded(made.network, 0)
    for each in features_of(network):
        each.raw = True
    given = {leaf.name: TensorSpec(leaf.dtype, leaf.shape) for leaf in made.spec.inputs}
    return ServedModel(network, given, {name: TensorSpec("float32", shape) for name, shape in made.outputs.items()})
