"""What a role saved, as a file: JSON and raw arrays under a checksum. Nothing in it is ever unpickled."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.weights.extra import decode, encode
from jurybox.training.runlog import write_atomically

_MAGIC = b"jbstate1"


class StateDamaged(RuntimeError):
    """A state file is cut, changed, or none."""


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state: JSON-able values and arrays, nested. CPU tensors are written as the arrays they are.

    Raises:
        SpecMismatch: something in it is neither; the message says where.
    """
    content = encode(state)
    write_atomically(path, _MAGIC + hashlib.sha256(content).digest() + content)


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote; arrays come as NumPy arrays, tuples as lists.

    Raises:
        StateDamaged: the file is not what was written, or is not there.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateDamaged(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error
    content = data[len(_MAGIC) + 32 :]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(content).digest() != data[len(_MAGIC) : len(_MAGIC) + 32]:
        raise StateDamaged(f"{path} is damaged: take an earlier checkpoint")
    try:
        return decode(content)
    except ProtocolMismatch as error:
        raise StateDamaged(f"{path} is damaged: {error}") from error
