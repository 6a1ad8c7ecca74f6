"""What the next episodes are, where that depends on how earlier ones went: opponents, levels, orders. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from jurybox.training.replay import Field
from jurybox.training.runtime.role_context import RoleContext

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Task:
    """What an episode is.

    Attributes:
        players: by the name of an agent, who plays it where that is not the newest policy: "anchor:weak", "pool:17".
        label: what the row of its result is marked with, by which the curriculum knows the task again.
        anchor: whether its rows belong in the replay's anchor.
    """

    players: Mapping[str, str] = field(default_factory=dict)
    label: int = 0
    anchor: bool = False


class LearnerHandle(Protocol):
    """A learner, as its curriculum sees it."""

    @property
    def context(self) -> RoleContext:
        """Its context: folders, steps, the scoreboard."""

    def weights(self) -> dict[str, npt.NDArray[Any]]:
        """Return a copy of the acting network's state."""


class Curriculum(ABC):
    """Chooses the tasks of episodes. It lives in a learner and is published with its weights; actors draw from that.

    Args:
        context: the learner's. Arguments of a subclass's own are values of JSON.

    Class attributes:
        results: columns of an episode's result, beside the task's label.
    """

    results: ClassVar[Mapping[str, Field]] = {}

    def __init__(self, context: RoleContext) -> None:
        self.context = context

    @abstractmethod
    def published(self) -> dict[str, Any]:
        """What actors draw from and a successor goes on from, as values of JSON; part of every publication."""

    @staticmethod
    @abstractmethod
    def draw(published: Mapping[str, Any], rng: np.random.Generator) -> Task:
        """Draw the next episode's task, in an actor."""

    @abstractmethod
    def record(self, episodes: Arrays) -> None:
        """Take the results of episodes, (m,) each, in the order in which they ended."""

    def between_updates(self, learner: LearnerHandle) -> Mapping[str, float]:
        """Do what is due between two updates, such as a snapshot of the policy; return metrics."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, for checkpoints."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    @abstractmethod
    def load_published(self, published: Mapping[str, Any]) -> None:
        """Go on from what a killed predecessor published last."""

    def close(self) -> None:  # noqa: B027 (most have nothing)
        """Free resources."""


def columns(curriculum: type[Curriculum]) -> dict[str, Field]:
    """Return the fields of the replay that actors write the results of episodes to."""
    return {"label": Field((), "int64"), **curriculum.results}
