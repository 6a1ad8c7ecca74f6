"""The contract between Jurybox's parts. Imports numpy and protobuf, nothing else."""

from jurybox.protocol.spec import ModelSpec, TensorSpec

__all__ = ["ModelSpec", "TensorSpec"]
