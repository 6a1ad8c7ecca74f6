"""The networks of built-in algorithms as models that the server's engines load.

A server has torch, but not the other packages of trainings. So this module imports no environment, and sizes are
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms import served
from jurybox.training.algorithms.base import AlgorithmUnusable
from jurybox.training.algorithms.registry import ALGORITHMS


def served_model(module: nn.Module, row: Sequence[int], outputs: Mapping[str, tuple[int, ...]]) -> ServedModel:
    """Return the served model of a network whose input is "observation", float32.

    Args:
        row: shape of one row of observations.
        outputs: shape of each float32 output by name, without the batch dimension.
    """
    given = {"observation": TensorSpec("float32", tuple(row))}
    return ServedModel(module, given, {name: TensorSpec("float32", shape) for name, shape in outputs.items()})


def gym_policy(algorithm: str, settings: Mapping[str, Any], spec: Mapping[str, Any]) -> ServedModel:
    """The policy of a built-in algorithm, see `algorithms.served.policy`; no other code is imported.

    Outputs, all float32: dqn, iqn: values (actions,); td3: action (actions,) in [-1, 1]; sac: mean and log_std
    (actions,) before the tanh; ppo: logits (actions,) or mean and log_std (actions,), and value.

    Raises:
        AlgorithmUnusable: it is an algorithm of one's own: the factory of those is `algorithms.served:policy`.
    """
    if algorithm not in ALGORITHMS:
        raise AlgorithmUnusable(f"{algorithm!r} is none of {', '.join(ALGORITHMS)}")
    return served.policy(algorithm, settings, spec)
