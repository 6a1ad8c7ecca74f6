"""Whether the robots of a port can ever be answered with its model.

A port that cannot would start, and fail at the first observation of a robot.
"""

from __future__ import annotations

from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.spec import ModelSpec
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.robot_protocols import problem


def require_steerable(settings: Configuration, spec: ModelSpec) -> None:
    """Check a loaded model for each port of robots that uses it.

    Raises:
        SpecMismatch: the port's robots can never be answered; the message names it, and what to do.
    """
    for name, robot in settings.robots.items():
        if robot.model == spec.name and (why := problem(robot.speaks, spec)):
            raise SpecMismatch(f"[robots.{name}] can never be answered: {why}")
