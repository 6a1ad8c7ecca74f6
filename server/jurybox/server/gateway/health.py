"""From a status document to health: live, ready, and if not, why."""

from __future__ import annotations

from typing import Any

from jurybox.protocol.errors import Error
from jurybox.server.gateway.source import StatusSource


async def reasons(source: StatusSource) -> list[str]:
    """Why the server should get no requests now, a silent one included; empty when it is ready."""
    try:
        return not_ready(await source.status())
    except Error as error:
        return [str(error)]


def not_ready(document: dict[str, Any]) -> list[str]:
    """Why the server should get no requests now; empty when it is ready.

    Ready means: it does not drain, at least one engine serves with a fresh heartbeat, every configured model is loaded,
    and none is in quarantine.
    """
    reasons = []
    state = document["server"]["state"]
    if state == "draining":
        reasons.append("the server is draining")
    elif state != "serving":
        reasons += [_engine(engine) for engine in document["engines"]] or ["there is no engine"]
    for model in document["models"]:
        # One that a client has just asked for is not missed by anybody before it has come.
        if model["state"] != "ready" and (model.get("configured", True) or model["state"] != "loading"):
            why = f": {model['reason']}" if model["reason"] else ""
            reasons.append(f"model {model['name']!r} is {model['state']}{why}")
    return reasons


def _engine(engine: dict[str, Any]) -> str:
    if engine["hung"]:
        return f"engine {engine['index']} hangs: its last heartbeat is {engine['heartbeat_age']:.1f} s old"
    return f"engine {engine['index']} is {engine['state']}, restarted {engine['restarts']} times"
