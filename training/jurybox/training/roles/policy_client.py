"""What acts asks of a policy: the outputs of its network, computed in this process or by the plan's server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from jurybox.training.algorithms.base import Arrays

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
            Gives outputs (n, ...) by name.

        Raises:
            KeyError: there is no such policy.
        """

    def outputs(self, observation: Arrays) -> Arrays:
        """Return the newest network's outputs, see `submit`."""
        return self.submit(observation)()

    def close(self) -> None:  # noqa: B027 (some have nothing)
        """Free resources."""
