"""The contract between Jurybox's parts. Imports numpy and protobuf, nothing else."""

from jurybox.protocol.errors import Code
from jurybox.protocol.spec import ModelSpec, TensorSpec

__all__ = ["Code", "ModelSpec", "TensorSpec"]
