"""A lane's rows in this process's own memory, where the server's is out of reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Refused
from jurybox.protocol.spec import ModelSpec, TensorSpec


class RowsHere:
    """What Lane asks of an arena: arrays of shape (rows, *row shape) by name.

    What is written to them is copied into a message when a ticket is sent, and answers are copied to them.
    """

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        self.rows = rows
        self.inputs = _arrays(spec.inputs, rows)
        self.outputs = _arrays(spec.outputs, rows)

    def close(self) -> None:
        """Forget them; who still holds one of the arrays keeps it."""
        self.inputs, self.outputs = {}, {}


def _arrays(specs: Mapping[str, TensorSpec], rows: int) -> dict[str, NDArray[Any]]:
    return {name: np.zeros((rows, *tensor.shape), tensor.numpy_dtype) for name, tensor in specs.items()}


def out_of_reach(model: str) -> Refused:
    """The error for whoever asks for a weights channel over tcp://."""
    return Refused(
        f"the weights of {model!r} are not published over tcp://: connect with the server's grpc:// address, or "
        "with its ipc:// address on its host"
    )
