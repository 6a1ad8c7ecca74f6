"""The weights of several modules of one architecture as one tensor per name, and one forward over all of them.

`torch.func.functional_call` under `torch.vmap` (pytorch.org, "Model ensembling") turns the modules' products into
batched ones. On the CPU matrices are kept as they are multiplied, inputs first, and shown to the module transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_MATRIX = 2


class Stack:
    """Weights of n modules: `tensors` by name, (n, *shape), and the version each of them holds.

    Args:
        module: any of them; says names, shapes and dtypes, and where the weights lie.
        members: n.
    """

    def __init__(self, module: torch.nn.Module, members: int) -> None:
        self.versions = [0] * members
        self.tensors = {
            name: _allocated(members, tensor.detach()) for name, tensor in module.state_dict(keep_vars=True).items()
        }

    def row(self, member: int) -> dict[str, torch.Tensor]:
        """Views of one module's weights."""
        return {name: tensor[member] for name, tensor in self.tensors.items()}

    def fill(self, member: int, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy one module's weights in, cast to what the module computes with."""
        for name, tensor in self.tensors.items():
            tensor[member].copy_(state[name].detach(), non_blocking=True)
        self.versions[member] = version


def _allocated(members: int, tensor: torch.Tensor) -> torch.Tensor:
    shape = (members, *tensor.shape)
    if tensor.is_cpu and tensor.dim() == _MATRIX and tensor.is_floating_point():
        # A layer multiplies by the transpose: stored so, the batched product reads its matrices along their rows.
        return torch.empty((members, *reversed(tensor.shape)), dtype=tensor.dtype).mT
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)


class StackedForward:
    """Calls a module with a stack's weights.

    Args:
        module: of the architecture; its own weights are not used.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._call = torch.vmap(self._one, randomness="error")

    def __call__(self, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> Any:
        """Outputs as the module gives them, (n, rows, *shape) each.

        Args:
            weights: by name, (n, *shape).
            inputs: by name, (n, rows, *shape).
        """
        return self._call(dict(weights), dict(inputs))

    def _one(self, weights: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> Any:
        return torch.func.functional_call(self._module, weights, kwargs=inputs, tie_weights=False)
