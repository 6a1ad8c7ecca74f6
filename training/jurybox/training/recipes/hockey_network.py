"""The hockey policy as a model of the server."""

from __future__ import annotations

from collections.abc import Sequence

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms.networks import Actor, Policy
from jurybox.training.algorithms.td3_settings import CLIP


def policy(observation: int, action: int, hidden: Sequence[int]) -> ServedModel:
    """Raw observations, float32 (observation,), to actions in [-1, 1], float32 (action,)."""
    return ServedModel(
        Policy(Actor(observation, action, hidden), observation, clip=CLIP),
        {"observation": TensorSpec("float32", (observation,))},
        {"action": TensorSpec("float32", (action,))},
    )
