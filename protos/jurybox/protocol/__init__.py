"""The contract between Jurybox's parts. Imports numpy and protobuf, nothing else."""

from jurybox.protocol.errors import (
    Busy,
    Code,
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
from jurybox.protocol.spec import ModelSpec, TensorSpec

__all__ = [
    "Busy",
    "Code",
    "Error",
    "ModelFailed",
    "ModelNotFound",
    "ModelSpec",
    "ProtocolMismatch",
    "Refused",
    "ServerGone",
    "SharedMemoryError",
    "SpecMismatch",
    "TensorSpec",
    "Timeout",
]
