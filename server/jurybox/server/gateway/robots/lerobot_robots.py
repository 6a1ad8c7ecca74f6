"""What is kept for each of LeRobot's robots: its episode, its features, and the one observation that waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.errors import Refused
from jurybox.server.gateway.robots.lerobot_features import RobotFeatures
from jurybox.server.gateway.robots.lerobot_messages import Observed
from jurybox.server.gateway.robots.policy import RobotEpisode
from jurybox.server.security.limits import Charge

_GONE = 60.0  # seconds without a call after which a robot is gone; connections that tell their end need none
_NEAR = 1.0  # distance of states below which an observation is left out, unless the robot waits for its actions
_MOST_STEPS = 4096  # of answered observations that are remembered


class LeRobotRobot:
    """What is kept for a connection. An observation waits until its actions are asked for, or a newer one comes.

    Attributes:
        account: what it holds.
        held: what is closed when it has gone.
        lock: held while its episode begins.
        most: steps of an answer at most.
        heard: when it called last, s of the monotonic clock.
        told: whether the end of its connection is told.
        came: set while an observation waits.
    """

    def __init__(self, account: native.Account) -> None:
        self.account = account
        self.held = AsyncExitStack()
        self.lock = asyncio.Lock()
        self.episode: RobotEpisode | None = None
        self.most = 0
        self.heard = time.monotonic()
        self.told = False
        self._asks = False
        self.came = asyncio.Event()
        self._features: RobotFeatures | None = None
        self._waiting: tuple[Observed, Charge] | None = None
        self.begin()

    @property
    def features(self) -> RobotFeatures:
        """Its features. Raises Refused: it has not told them."""
        if self._features is None:
            raise Refused("expected SendPolicyInstructions before observations")
        return self._features

    @features.setter
    def features(self, features: RobotFeatures) -> None:
        self._features = features

    def begin(self) -> None:
        """Forget what was observed and answered. Raises Refused: its actions are asked for meanwhile."""
        self._require_one()
        self.drop()
        self._answered: dict[int, None] = {}  # timesteps
        self._last: NDArray[np.float32] | None = None  # the state that was answered last

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Note that its actions are asked for. Raises Refused: they are already."""
        self._require_one()
        self._asks = True
        try:
            yield
        finally:
            self._asks = False

    def _require_one(self) -> None:
        if self._asks:
            raise Refused(
                "this connection waits for actions already, and a connection is one robot: robots of one process share "
                "gRPC's connection, run a process for each"
            )

    def drop(self) -> None:
        """Drop the observation that waits."""
        if (waiting := self.take()) is not None:
            waiting[1].give()

    def keep(self, found: Observed, charge: Charge) -> bool:
        """Let an observation wait, in place of another one. Return false if it needs no answer.

        That is, if it is answered already, or nearly the one that was answered last. Raises SpecMismatch.
        """
        state = self.features.state(found.values)
        last = self._last
        like = last is not None and state.size > 0 and float(np.linalg.norm(state - last)) < _NEAR
        if not found.must_go and (found.timestep in self._answered or like):
            return False
        self.drop()
        self._waiting = found, charge
        self.came.set()
        return True

    def take(self) -> tuple[Observed, Charge] | None:
        """Return the observation that waits, and what it holds."""
        waiting, self._waiting = self._waiting, None
        self.came.clear()
        return waiting

    def answering(self, found: Observed) -> None:
        """Note that an observation is being answered."""
        self._answered[found.timestep], self._last = None, self.features.state(found.values)
        if len(self._answered) > _MOST_STEPS:
            del self._answered[next(iter(self._answered))]

    def failed(self, found: Observed) -> None:
        """Note that it has no answer: the next one gets one, though it may be the same."""
        self._answered.pop(found.timestep, None)
        self._last = None


class LeRobotRobots:
    """The robots of a door, by their connections.

    Args:
        budget: that of the process.
        door: one of the doors of `limits`.
    """

    def __init__(self, budget: native.Budget, door: int) -> None:
        self._budget, self._door = budget, door
        self._robots: dict[str, LeRobotRobot] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def of(self, context: Any, *, new: bool = False) -> LeRobotRobot:
        """Return the robot of a call. Raises Refused: its connection is unknown, and not `new`."""
        peer, now = context.peer(), time.monotonic()
        robot = self._robots.get(peer)
        if robot is None and new:
            for other in [other for other, one in self._robots.items() if not one.told and now - one.heard > _GONE]:
                self._gone(other)
            account = getattr(context, "account", None) or native.Account(self._budget, self._door)
            robot = self._robots[peer] = LeRobotRobot(account)
            farewells: dict[str, Callable[[], None]] | None = getattr(context, "farewells", None)
            if farewells is not None:
                robot.told = True
                farewells["robot"] = lambda: self._gone(peer)
        if robot is None:
            raise Refused("expected Ready before any other call of a connection")
        robot.heard = now
        return robot

    async def close(self) -> None:
        """End all robots."""
        for peer in list(self._robots):
            self._gone(peer)
        await asyncio.gather(*self._ending)

    def _gone(self, peer: str) -> None:
        if (robot := self._robots.pop(peer, None)) is not None:
            robot.drop()
            task = asyncio.create_task(robot.held.aclose())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
