"""The networks of built-in algorithms as models that the server's engines load.

A server has torch, but not the other packages of trainings. So this module imports no environment, and sizes are
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms import served
from jurybox.training.algorithms.base import AlgorithmUnusable
from jurybox.training.algorithms.networks import ActorCritic, Features
from jurybox.training.algorithms.registry import ALGORITHMS


def served_model(
    module: nn.Module, row: Sequence[int], outputs: Mapping[str, tuple[int, ...]], dtype: str = "float32"
) -> ServedModel:
    """Return the served model of a network whose input is "observation".

    Args:
        row: shape of one row of observations.
        outputs: shape of each float32 output by name, without the batch dimension.
        dtype: dtype of the observations.
    """
    given = {"observation": TensorSpec(dtype, tuple(row))}
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


def actor_critic(observation: int, actions: int, hidden: Sequence[int]) -> ServedModel:
    """A network from float32 (observation,) to logits (actions,) and a value in the learner's scale."""
    network = ActorCritic(Features(observation), actions, hidden)
    return served_model(network, (observation,), {"logits": (actions,), "value": ()})


class _Masked(ActorCritic):
    def __init__(self, inputs: int, actions: int, hidden: Sequence[int]) -> None:
        super().__init__(Features(inputs), actions, hidden)
        self._inputs = inputs

    def forward(self, observation: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.actor(observation[:, : self._inputs])
        return logits.masked_fill(observation[:, self._inputs :] < 0.5, -1e9)


def masked_policy(observation: int, actions: int, hidden: Sequence[int]) -> ServedModel:
    """A policy from float32 (observation + actions,) to logits (actions,).

    The last `actions` inputs are the mask: 1 for an action that may be chosen, 0 otherwise.
    """
    return served_model(_Masked(observation, actions, hidden), (observation + actions,), {"logits": (actions,)})
