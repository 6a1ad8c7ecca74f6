"""`ServedModel`, the return value of a model factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from jurybox.protocol import TensorSpec
from jurybox.protocol.spec import ModelSpec

if TYPE_CHECKING:
    import torch

__all__ = ["RowErrors", "ServedModel"]

Collate = Literal["list", "pad"] | Callable[[list[dict[str, Any]]], Mapping[str, Any]]


@dataclass(slots=True)
class ServedModel:
    """A module with its inputs and outputs.

    The module is called with one argument for each input, then one for each part of the state: by name if its `forward`
    has parameters with those names, otherwise by position in this order. It returns the outputs, then the next state:
    as a tensor (if there is only one), a tuple in order, or a dict. Tensors have n rows and are on the engine's device.
    The module is called in inference mode.

    `collate` determines how the module receives an input whose rows differ in size:

    - "list": a list of n tensors of different shapes, or of n bytes;
    - "pad": one tensor with the rows padded with zeros to the largest, and `NAME_lengths`, int64 of shape (n, k), where
      k is the number of sizes that differ ((n,) if it is one); bytes as uint8. Rows of similar size are batched
      together, so that the share of padding stays below `max_padding`;
    - a callable: it gets a list of n dicts (inputs by name) and returns the keyword arguments.

    When a model is put to sleep, its parameters, buffers and state are moved to host memory, and back when it is woken.
    A module that holds more memory on the device defines the methods `sleep()` and `wake()`, which must then move all
    of it; each may return the number of bytes.

    Outputs whose rows differ in size are lists of n tensors, or of n bytes or str.

    Example:
        ServedModel(net, {"text": TensorSpec("bytes", capacity=400)}, {"score": TensorSpec("float32")}, collate="pad")

    Attributes:
        module: the network, or another `torch.nn.Module`.
        inputs: the dtype and the shape of ONE row for each input, in order.
        outputs: the same for each output.
        example: optional; ``example(n)`` returns n rows of every input as a dict, for warm-up and self-test. Without
            it, zeros are used, and a few small rows for inputs that differ in size. Its rows should differ from each
            other: with `deterministic`, different batch sizes are compared on them.
        state: the tensors that are kept on the device for every session, by name.
        initial_state: the state of a new session: by name, a tensor of the shape in `state`; default: zeros.
        collate: how the module receives rows that differ in size.
        max_padding: the maximum share of padding in a batch, for collate="pad".
        max_elements: the maximum number of elements of inputs that differ in size in one batch, including padding; 0:
            unlimited.
    """

    module: torch.nn.Module
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    example: Callable[[int], Mapping[str, Any]] | None = field(default=None)
    state: Mapping[str, TensorSpec] = field(default_factory=dict)
    initial_state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    collate: Collate = "list"
    max_padding: float = 0.5
    max_elements: int = 0

    def spec(self, name: str) -> ModelSpec:
        """Return the spec of a model with this name."""
        return ModelSpec(name, dict(self.inputs), dict(self.outputs), dict(self.state))


@dataclass(frozen=True, slots=True)
class RowErrors:
    """The return value of a module when single rows failed: the reasons by row, and the outputs of all rows.

    The sender of a failed row gets RowFailed with the reason; the other senders get their answers.

    Example:
        return RowErrors({3: "not a JPEG"}, {"score": scores})

    Attributes:
        errors: the reasons, by the number of the row in the batch.
        outputs: the outputs of all n rows as the module returns them otherwise; those of failed rows are ignored.
    """

    errors: Mapping[int, str]
    outputs: Any
