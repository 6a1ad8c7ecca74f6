"""What a model factory returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jurybox.protocol import TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class ServedModel:
    """A module and the contract it keeps.

    Attributes:
        module: called as ``module(**inputs)`` with one tensor of n rows per input, on the engine's device, in
            inference mode. Returns a tensor (one output), a tuple (outputs in order) or a dict, n rows each.
        inputs: the shape of ONE row and the dtype of every input, in order.
        outputs: the same of every output.
        example: optional, ``example(n)`` gives n rows of every input as a dict of tensors, for warm-up and
            self-test; without it zeros are used.
    """

    module: torch.nn.Module
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    example: Callable[[int], Mapping[str, Any]] | None = field(default=None)
