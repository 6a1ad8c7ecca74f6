"""The three roles of a training. An algorithm is written once, as these objects; two drivers run them.

A role is made by the callable that its `RoleSpec.make` names: ``make(seat, **settings)``. What it needs of the run it
takes from its `Seat`: replays, weights, a seed, a place to report. It never starts a process, opens shared memory or
waits on its own: the driver does, so that it can be counted, shown, and ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from jurybox.client.weights_reader import WeightsReader
from jurybox.training.runtime.seat import Seat


class Role:
    """What the three have in common."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def save(self) -> dict[str, Any]:
        """Everything that going on needs, random states included: JSON-able values, arrays, CPU tensors; nested.

        Called between two steps. What cannot be kept (a physics engine in the midst of an episode) is to be begun anew
        here, so that the run which goes on does the same as one that is resumed: for an actor that is ending the
        episodes of its replay streams (`Streams.end`), and resetting environments that cannot tell their state.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `save` gave, before the first step. Tensors come back as NumPy arrays, tuples as lists."""

    def close(self) -> None:
        """Free what the role holds beside memory."""


class Actor(Role, ABC):
    """Acts in environments and writes what happens into replays."""

    @abstractmethod
    def step(self) -> int:
        """One step (of all its environments, if it has several); gives the environment steps made.

        They count when this returns. Whoever is killed inside has made none. Episodes that ended are reported with
        ``seat.episode(...)``.
        """


class Learner(Role, ABC):
    """Samples, improves, and has something to publish."""

    def ready(self) -> bool:
        """Whether a step can be made, the pace aside: enough rows, say. Asked before every step."""
        return True

    @abstractmethod
    def step(self) -> None:
        """One optimiser step; it counts when this returns. Numbers worth a look go to ``seat.metrics(...)``."""

    def publication(self) -> tuple[Any, dict[str, Any] | None]:
        """What to publish: a module, state_dict or dict of arrays of the channel's layout, and the extra with it."""
        raise NotImplementedError(f"{type(self).__name__} publishes nothing: leave RoleSpec.publishes empty")

    def adopt(self, published: WeightsReader) -> None:
        """Go on from the newest publication, which a predecessor left that died; the optimiser may begin anew.

        Called after `restore`, and only in a life after the first.
        """


class Evaluator(Role, ABC):
    """Says how good the newest weights are. It has no state: `save` is not asked, chance comes from ``seat.seed``."""

    @abstractmethod
    def evaluate(self) -> Mapping[str, float]:
        """Numbers by name, of the weights as they are now. May take long; a sign of life is ``seat.alive()``."""
