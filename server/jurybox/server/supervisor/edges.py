"""The processes at the server's edges: the gateway for HTTP and gRPC, the relay for ZeroMQ from other hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurybox.server.config import ServerSettings
from jurybox.server.security.access import Access
from jurybox.server.supervisor.child import Child

_BOTH = {"address", "log_level", "log_format"}


def edges(settings: ServerSettings, listening: Mapping[str, str]) -> list[Child]:
    """Those that the settings ask for.

    Args:
        listening: where "http", "grpc" and "tcp" listen: as configured, later as they said; one that is started again
            takes the port it had, for its clients come back to that.
    """
    children = []
    if settings.http or settings.grpc:
        children.append(_gateway(settings, listening))
    if settings.tcp:
        children.append(_relay(settings, listening))
    return children


def _gateway(settings: ServerSettings, listening: Mapping[str, str]) -> Child:
    def configure() -> dict[str, Any]:
        given = settings.model_dump(mode="json", include=_BOTH)
        return {**given, "http": listening["http"], "grpc": listening["grpc"], **Access.of(settings).order()}

    return Child("gateway", "jurybox.server.gateway", configure)


def _relay(settings: ServerSettings, listening: Mapping[str, str]) -> Child:
    def configure() -> dict[str, Any]:
        given = settings.model_dump(mode="json", include=_BOTH | {"curve_key", "curve_clients"})
        return {**given, "tcp": listening["tcp"], "max_message": settings.max_message}

    return Child("relay", "jurybox.server.relay", configure)
