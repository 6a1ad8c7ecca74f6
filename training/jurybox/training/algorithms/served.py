"""The policy of any algorithm as a model that the server's engines load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms.base import Algorithm
from jurybox.training.algorithms.registry import make
from jurybox.training.spaces import MASK, MEMORY, REMEMBERED

__all__ = ["policy", "raw_network"]


def raw_network(algorithm: Algorithm, seed: int = 0) -> nn.Module:
    """Create the acting network of an algorithm for the environment's own observations, one argument an input."""
    algorithm.raw = True
    network: nn.Module = algorithm.seeded(algorithm.network, seed)
    return network


def policy(algorithm: str, settings: Mapping[str, Any], spec: Mapping[str, Any]) -> ServedModel:
    """The acting network of an algorithm, from the environment's own observation to its outputs, all float32.

    A recurrent one has a state, "memory": it is asked through sessions, one for each environment. Its memory after a
    step is an output, too, so that who writes rows for a replay, or goes on after a failure of the server, has it.

    Args:
        algorithm, settings, spec: arguments of `algorithms.make`. The module of an algorithm of your own is imported.
    """
    made = make(algorithm, settings, spec)
    given = {leaf.name: TensorSpec(leaf.dtype, leaf.shape) for leaf in made.spec.inputs}
    if made.spec.masked:
        given[MASK] = TensorSpec("bool", (made.spec.action.size,))
    outputs = {name: TensorSpec("float32", shape) for name, shape in made.outputs.items()}
    if not made.remembers:
        return ServedModel(raw_network(made), given, outputs)
    memory = TensorSpec("float32", (made.remembers,))
    return ServedModel(_Remembering(raw_network(made)), given, {**outputs, REMEMBERED: memory}, state={MEMORY: memory})


class _Remembering(nn.Module):
    """A recurrent network that returns its next memory twice: as an output, and as the next state.

    Its tensors have the names that they have in the network, since those are published.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.network(*given)
        return *found, found[-1]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the network's."""
        state: dict[str, Any] = self.network.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Take the network's."""
        return self.network.load_state_dict(*args, **kwargs)
