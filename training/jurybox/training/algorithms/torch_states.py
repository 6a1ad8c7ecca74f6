"""Common to the algorithms: perceptrons, and states as trees of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = [
    "as_tensors", "optimiser_state", "perceptron", "restore_optimiser", "restore_states", "states_of",
]  # fmt: skip


def perceptron(
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    last_gain: float | None = None,
) -> nn.Sequential:
    """Linear layers with activations in between: (n, inputs) to (n, outputs).

    Args:
        hidden: widths of the hidden layers.
        last_gain: weights begin orthogonal, with gain sqrt(2), and this one in the last layer; biases at 0. None:
            torch's own start.
    """
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_linear(inputs, width, None if last_gain is None else 2**0.5), activation()]
        inputs = width
    return nn.Sequential(*layers, _linear(inputs, outputs, last_gain))


def _linear(inputs: int, outputs: int, gain: float | None) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


def as_tensors(tree: Any) -> Any:
    """The same tree of dicts and lists with tensors for its NumPy arrays, as `checkpoints.read_state` gives them.

    The tensors of read-only arrays are copies; the others share memory with the arrays.
    """
    if isinstance(tree, Mapping):
        return {name: as_tensors(part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [as_tensors(part) for part in tree]
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree if tree.flags.writeable else tree.copy())
    return tree


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimiser's parameters, by their number as a string; its settings are not in it."""
    remembered = optimiser.state_dict()["state"]
    return {str(number): dict(values) for number, values in remembered.items()}


def restore_optimiser(optimiser: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore what `optimiser_state` returned, into an optimiser of the same parameters; arrays may be NumPy's."""
    whole = optimiser.state_dict()
    whole["state"] = {int(number): as_tensors(values) for number, values in copy.deepcopy(state).items()}
    optimiser.load_state_dict(whole)


Part = nn.Module | torch.optim.Optimizer | torch.Generator


def states_of(parts: Mapping[str, Part]) -> dict[str, Any]:
    """The states of a learner's modules, optimisers and generators, by their names. Tensors are not copied."""
    return {name: _state_of(part) for name, part in parts.items()}


def _state_of(part: Part) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    return optimiser_state(part) if isinstance(part, torch.optim.Optimizer) else dict(part.state_dict())


def restore_states(parts: Mapping[str, Part], state: Mapping[str, Any]) -> None:
    """Restore what `states_of` returned, into parts of the same shapes; its arrays may be NumPy's."""
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            restore_optimiser(part, state[name])
        elif isinstance(part, torch.Generator):
            part.set_state(as_tensors(state[name]).cpu())
        else:
            part.load_state_dict(as_tensors(state[name]))
