"""What acts asks of a policy: the outputs of its network, computed in this process or by the plan's server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from jurybox.training.algorithms.base import Array, Arrays

NEWEST, PAST = "newest", "pool:"  # who plays an agent: the newest policy, a past one ("pool:17"), else a bot


class PolicyClient(ABC):
    """A policy with the newest published weights, or slightly older ones."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Version of the weights of the last outputs."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Learner updates that had been made before those weights were published."""

    @property
    @abstractmethod
    def extra(self) -> Mapping[str, Any]:
        """What was published beside the newest weights that this process knows."""

    @abstractmethod
    def submit(self, observation: Arrays, who: str = NEWEST, split: int = 0) -> Callable[[], Arrays]:
        """Ask for the network's outputs; the function that is returned waits for them, and gives them.

        Args:
            observation: n observations as the environments gave them, (n, ...) by input.
            who: the newest policy, or a past one.
            split: of requests for the newest policy that overlap, each has a number of its own.

        Returns:
            Gives outputs (n, ...) by name; of a recurrent policy also "memory", what it remembered before.

        Raises:
            KeyError: there is no such policy.
        """

    def begin(self, environment: int, split: int = 0) -> None:  # noqa: B027 (most remember nothing)
        """An episode begins in an environment, a row of what is asked with that split: a recurrent policy forgets."""

    def memory(self, split: int = 0) -> Array | None:
        """What a recurrent policy remembers of a split's environments, (n, numbers); None: nothing yet, or ever."""
        return None

    def remember(self, memory: Array, split: int = 0) -> None:
        """Go on with what `memory` returned."""
        raise NotImplementedError(f"{type(self).__name__} remembers nothing")

    def outputs(self, observation: Arrays) -> Arrays:
        """Return the newest network's outputs, see `submit`."""
        return self.submit(observation)()

    def close(self) -> None:  # noqa: B027 (some have nothing)
        """Free resources."""
