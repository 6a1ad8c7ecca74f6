"""A policy that is computed in the process that acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.weights import WeightsLayout
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.algorithms.base import Algorithm, Array, Arrays
from jurybox.training.algorithms.served import raw_network
from jurybox.training.roles.policy_client import NEWEST, PolicyClient
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.spaces import MEMORY

__all__ = ["LocalPolicy", "TorchWeights"]


class TorchWeights:
    """Keeps a module at the newest published version.

    On the CPU the module's tensors come to lie in one of two blocks that the publications are read into in turn: the
    weights are copied once, and a read that fails half-way has touched nothing that the module uses.

    Args:
        reader: of the channel that the module's weights are published on.
        module: with the channel's names, shapes and dtypes in its ``state_dict()``, on any device. Its parameters stay
            the same objects; on the CPU their ``data`` moves.

    Attributes:
        version: of the weights in the module; 0 before the first.
        extra: what was published with them.

    Raises:
        SpecMismatch: the module's tensors differ from the channel's; the message names how.
    """

    def __init__(self, reader: WeightsReader, module: torch.nn.Module) -> None:
        self.version = 0
        self.extra: dict[str, Any] = {}
        self._reader = reader
        tensors = module.state_dict(keep_vars=True)
        if difference := reader.layout.difference(WeightsLayout.of(tensors)):
            raise SpecMismatch(f"the module doesn't fit weights channel {reader.channel.name}: {difference}")
        self._tensors: list[torch.Tensor] = [tensors[name] for name in reader.layout.places]
        self._on_cpu = all(tensor.device.type == "cpu" for tensor in self._tensors)
        self._blocks = [torch.empty(reader.layout.nbytes, dtype=torch.uint8) for _ in range(1 + self._on_cpu)]

    def refresh(self, timeout: float = 1.0) -> bool:
        """Load the newest version into the module if it is newer; returns whether it was.

        Raises:
            Timeout: there is a newer version, and it could not be read whole in time; the module is as it was.
        """
        if not self._reader.newer_than(self.version):
            return False
        block = self._blocks[-1]
        version, extra = self._reader.read_flat(block.numpy(), timeout=timeout)
        with torch.no_grad():
            for tensor, source in zip(self._tensors, self._reader.layout.tensors(block).values(), strict=True):
                if self._on_cpu:
                    tensor.data = source
                else:
                    tensor.copy_(source)
        self._blocks.reverse()
        self.version, self.extra = version, extra
        return True


class LocalPolicy(PolicyClient):
    """A `PolicyClient` in this process, with the newest published weights."""

    def __init__(self, context: RoleContext, channel: str, algorithm: Algorithm) -> None:
        torch.set_num_threads(context.spec.threads)
        self._network = raw_network(algorithm).requires_grad_(False)
        self._inputs = algorithm.spec.arguments
        self._outputs = tuple(algorithm.outputs)
        self._remembers = algorithm.remembers
        self._memories: dict[int, Array] = {}  # by split, (n, numbers)
        self._weights = TorchWeights(context.reader(channel), self._network)
        context.follow(channel, self._weights)

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def updates(self) -> int:
        return int(self._weights.extra.get("updates", 0))

    @property
    def extra(self) -> Mapping[str, Any]:
        return self._weights.extra

    def submit(self, observation: Arrays, who: str = NEWEST, split: int = 0) -> Callable[[], Arrays]:
        if who != NEWEST:
            raise KeyError(f"nobody plays as {who!r}: this process has the newest policy alone")
        return lambda: self._outputs_of(observation, split)

    def begin(self, environment: int, split: int = 0) -> None:
        if split in self._memories:
            self._memories[split][environment] = 0.0

    def memory(self, split: int = 0) -> Array | None:
        return self._memories.get(split)

    def remember(self, memory: Array, split: int = 0) -> None:
        self._memories[split] = np.array(memory, np.float32)

    def _outputs_of(self, observation: Arrays, split: int) -> Arrays:
        given = [observation[name] for name in self._inputs]
        before: Array | None = None
        if self._remembers:
            if split not in self._memories:
                self._memories[split] = np.zeros((len(given[0]), self._remembers), np.float32)
            before = self._memories[split]
            given.append(before)
        with torch.inference_mode():
            found = self._network(*map(torch.from_numpy, given))
        each = found if isinstance(found, tuple) else (found,)
        outputs: dict[str, Array] = {name: tensor.numpy() for name, tensor in zip(self._outputs, each, strict=False)}
        if before is not None:
            # The row of this step keeps `before`: what `begin` changes is another array.
            outputs[MEMORY], self._memories[split] = before, each[-1].numpy()
        return outputs
