"""The client, which environment workers and learners import. It needs NumPy, ZeroMQ and protobuf, never torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jurybox.client.model import Model
from jurybox.client.rows import Rows
from jurybox.client.server import Server, connect
from jurybox.client.sessions import Sessions
from jurybox.client.ticket import Reply, Ticket
from jurybox.protocol.errors import (
    Busy,
    Error,
    ModelFailed,
    ModelNotFound,
    ProtocolMismatch,
    Refused,
    RowFailed,
    ServerGone,
    SessionLost,
    SharedMemoryError,
    SpecMismatch,
    Timeout,
)

if TYPE_CHECKING:
    from jurybox.client.link import ModelDescription
    from jurybox.protocol.weights.publisher import Publisher
    from jurybox.protocol.weights.reader import WeightsReader

__all__ = [
    "Busy",
    "Error",
    "Model",
    "ModelDescription",
    "ModelFailed",
    "ModelNotFound",
    "ProtocolMismatch",
    "Publisher",
    "Refused",
    "Reply",
    "RowFailed",
    "Rows",
    "Server",
    "ServerGone",
    "SessionLost",
    "Sessions",
    "SharedMemoryError",
    "SpecMismatch",
    "Ticket",
    "Timeout",
    "WeightsReader",
    "connect",
]


_LATER = {
    "ModelDescription": "jurybox.client.link",
    "Publisher": "jurybox.protocol.weights.publisher",
    "WeightsReader": "jurybox.protocol.weights.reader",
}


def __getattr__(name: str) -> Any:
    """Import names that most clients do not use on first access."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
