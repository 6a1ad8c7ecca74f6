"""Whether the robots of a port can ever be answered with its model.

A port that cannot would start, and fail at the first observation of a robot.
"""

from __future__ import annotations

from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.spec import ModelSpec
from jurybox.server.settings.config import Settings


def require_steerable(settings: Settings, spec: ModelSpec) -> None:
    """Check a loaded model for each port of robots that uses it.

    Raises:
        SpecMismatch: the port's robots can never be answered; the message names it, and what to do.
    """
    for name, robot in settings.robots.items():
        if robot.model == spec.name and (problem := _problem(robot.speaks, spec)):
            raise SpecMismatch(f"[robots.{name}] can never be answered: {problem}")


def _problem(speaks: str, spec: ModelSpec) -> str:
    match speaks:
        case "act" if spec.state:
            return (
                f"model {spec.name!r} keeps state, and requests of POST /act name no episode: expected a model without "
                "state, or a protocol whose connections are episodes (speaks = 'openpi' or 'gr00t')"
            )
    return ""
