"""The client: what env workers and learners import. NumPy, ZeroMQ and protobuf, never torch."""

from jurybox.client.model import Model
from jurybox.client.publisher import Publisher
from jurybox.client.rows import Rows
from jurybox.client.server import Server, connect
from jurybox.client.ticket import Reply, Ticket
from jurybox.client.weights_reader import WeightsReader
from jurybox.protocol.errors import (
    Busy,
    Error,
    ModelFailed,
    ModelNotFound,
    ProtocolMismatch,
    Refused,
    ServerGone,
    SharedMemoryError,
    SpecMismatch,
    Timeout,
)

__all__ = [
    "Busy",
    "Error",
    "Model",
    "ModelFailed",
    "ModelNotFound",
    "ProtocolMismatch",
    "Publisher",
    "Refused",
    "Reply",
    "Rows",
    "Server",
    "ServerGone",
    "SharedMemoryError",
    "SpecMismatch",
    "Ticket",
    "Timeout",
    "WeightsReader",
    "connect",
]
