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

    The module is called with one argument for each input, then one for each part of the state: by name where its
    `forward` has parameters of those names, else by position, in this order. It gives the outputs and then the next
    state: a tensor (where there is one), a tuple in order, or a dict. Tensors have n rows and are on the engine's
    device; the call is in inference mode.

    An input whose rows differ in size reaches the module as `collate` says:

    - "list": a list of n tensors of their own shapes, or of n bytes;
    - "pad": one tensor, rows padded with zeros to the largest, and `NAME_lengths`, int64 (n, k), k the number of sizes
      that differ ((n,) where it is one); bytes as uint8. Rows of like size are put together, so that padding stays
      below `max_padding` of what is computed;
    - a callable: gets a list of n dicts (inputs by name), gives the keyword arguments.

    Parameters, buffers and state of a model that is put to sleep go to host memory, and back when it is woken. A module
    that holds more on the device has the methods `sleep()` and `wake()`, which then move all of it; each may give the
    number of bytes.

    Outputs whose rows differ in size are lists of n tensors, or of n bytes or str.

    Example:
        ServedModel(net, {"text": TensorSpec("bytes", capacity=400)}, {"score": TensorSpec("float32")}, collate="pad")

    Attributes:
        module: the network, or another `torch.nn.Module`.
        inputs: of every input the dtype and the shape of ONE row, in order.
        outputs: the same of every output.
        example: optional, ``example(n)`` gives n rows of every input as a dict, for warm-up and self-test; without it
            zeros are used, and of what differs in size a few small rows. Let its rows differ: with `deterministic`
            batch sizes are compared on them.
        state: what is kept on the device for every session, by name.
        initial_state: what a session begins with, one tensor of `state`'s shape by name; without it zeros.
        collate: how rows that differ in size reach the module.
        max_padding: the largest share of padding in a batch, of collate="pad".
        max_elements: the most elements of inputs that differ in size in one batch, padding included; 0: any number.
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
        """The spec of a model of this name."""
        return ModelSpec(name, dict(self.inputs), dict(self.outputs), dict(self.state))


@dataclass(frozen=True, slots=True)
class RowErrors:
    """The return value of a module where single rows failed: reasons by row, and the outputs of all rows.

    The sender of a row that failed gets RowFailed with the reason, its neighbours their answers.

    Example:
        return RowErrors({3: "not a JPEG"}, {"score": scores})

    Attributes:
        errors: the reason, by the number of the row in the batch.
        outputs: as the module gives them otherwise, n rows; what stands in failed rows is not used.
    """

    errors: Mapping[int, str]
    outputs: Any
