"""What all doors for robots share: their model, counters and budget, and how observations are counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from jurybox import native
from jurybox.protocol.errors import Error, ModelFailed, said
from jurybox.protocol.scoreboard import NORMAL
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.robots.counters import PortCounters, RobotDelays
from jurybox.server.gateway.robots.policy import RobotPolicy
from jurybox.server.security.access import Access
from jurybox.server.security.doors import Doors
from jurybox.server.security.limits import Limited
from jurybox.server.security.pace import Turns

PATIENCE = 5.0  # seconds that a robot waits for a place
# By `speaks` of [robots.NAME]. A door is imported where there is one: some need gRPC.
_DOORS = {
    "openpi": "openpi:RobotServer",
    "act": "act:ActDoor",
    "gr00t": "gr00t:Gr00tDoor",
    "lerobot": "lerobot:LeRobotDoor",
}
_log = logging.getLogger("jurybox.gateway.robots")


class RobotDoor:
    """A port for robots, bound to one model. It listens from its construction on, and serves after `start`.

    Args:
        name: name of the table [robots.NAME].
        settings: settings of that table; see jurybox.server.settings.
        frontend: of the process.
        access: token, TLS, and size of the largest message.
        doors: after they have closed, new requests are refused.
        budget: that of the process; None: one of the door's own.
        turns: of the other doors, whose heavy work leaves time to robots.

    Attributes:
        bound: the address that it really listens on.
        counters: the counters of the port.
        ended: set when it has stopped to serve, also by itself.

    Raises:
        CannotListen, ValueError: the address cannot be bound.
    """

    bound: str

    def __init__(
        self,
        name: str,
        settings: Mapping[str, Any],
        frontend: Frontend,
        access: Access,
        doors: Doors | None = None,
        budget: native.Budget | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.name, self.settings = name, settings
        self.access = Access(max_message=access.max_message) if settings.get("unprotected") else access
        self.budget = budget or access.budget()
        self.turns = turns or Turns()
        self.doors = doors or Doors()
        self.counters = PortCounters()
        self.ended = asyncio.Event()
        self.policy = RobotPolicy(
            frontend,
            settings["model"],
            settings["clients"],
            settings["timeout"],
            self.counters,
            settings.get("priority", NORMAL),
        )

    @property
    def setting(self) -> str:
        """The setting of its address."""
        return f"robots.{self.name}.listen"

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        raise NotImplementedError

    def connections(self) -> list[Limited]:
        """Return the connections that `limits.Watch` looks after."""
        return []

    async def start(self) -> None:
        """Start serving. Raises OSError or ValueError if the TLS files cannot be used."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Close all connections and release the lane."""
        raise NotImplementedError

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Count a robot."""
        self.counters.opened += 1
        self.counters.connected += 1
        try:
            yield
        finally:
            self.counters.connected -= 1

    @contextlib.contextmanager
    def counted(self, delays: RobotDelays) -> Iterator[None]:
        """Count an observation that is answered meanwhile. Raises Error, also for what only a fault here can raise."""
        began = time.monotonic()
        try:
            yield
        except Error as error:
            self.counters.failed(error)
            raise
        except Exception as error:
            _log.error("robots.%s: a request failed: %s", self.name, said(error), exc_info=error)
            failure = ModelFailed(f"the gateway failed at this request ({said(error, 200)}); its log says more")
            self.counters.failed(failure)
            raise failure from error
        delays.answered(time.monotonic() - began, None)


def door(name: str, settings: Mapping[str, Any], *arguments: Any) -> RobotDoor:
    """Return the door for a table [robots.NAME]; see `RobotDoor`."""
    module, _, kind = _DOORS[settings.get("speaks", "openpi")].partition(":")
    made = getattr(import_module(f"jurybox.server.gateway.robots.{module}"), kind)
    opened: RobotDoor = made(name, settings, *arguments)
    return opened
