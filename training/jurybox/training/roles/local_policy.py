"""A policy that is computed in the process that acts."""

from __future__ import annotations

import torch

from jurybox.training.algorithms.base import Algorithm, Arrays
from jurybox.training.algorithms.served import raw_network
from jurybox.training.algorithms.torch_states import TorchWeights
from jurybox.training.runtime.role_context import RoleContext


class LocalPolicy:
    """A `PolicyClient` in this process, with the newest published weights."""

    def __init__(self, context: RoleContext, channel: str, algorithm: Algorithm) -> None:
        torch.set_num_threads(context.spec.threads)
        self._network = raw_network(algorithm).requires_grad_(False)
        self._inputs = algorithm.spec.arguments
        self._outputs = tuple(algorithm.outputs)
        self._weights = TorchWeights(context.reader(channel), self._network)
        context.follow(channel, self._weights)

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def updates(self) -> int:
        return int(self._weights.extra.get("updates", 0))

    def outputs(self, observation: Arrays) -> Arrays:
        with torch.inference_mode():
            found = self._network(*(torch.from_numpy(observation[name]) for name in self._inputs))
        each = found if isinstance(found, tuple) else (found,)
        return {name: tensor.numpy() for name, tensor in zip(self._outputs, each, strict=True)}

    def close(self) -> None:
        """Nothing to free."""
