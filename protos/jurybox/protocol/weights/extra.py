"""What is published together with the weights: JSON-able values and small arrays, as bytes.

A length, then JSON in which every array is ``{"__array__": [dtype, shape, offset]}``, then the arrays' bytes.
No pickle: a channel is read by whoever may open it.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from jurybox.protocol.errors import ProtocolMismatch, SpecMismatch

_LENGTH = struct.Struct("<I")
_ARRAY = "__array__"
_ALIGNMENT = 8
_DEEPEST = 64  # lists and dicts within each other; far from where the interpreter itself gives up
_DTYPE = re.compile(r"[<>|=][biufc][0-9]{1,2}")


def encode(extra: Mapping[str, Any] | None) -> bytes:
    """Bytes of `extra`: None, bools, numbers, strings, lists, dicts with string keys, and arrays or tensors of them.

    Tuples come back as lists, NumPy scalars as Python's. Nothing at all is no bytes.

    Raises:
        SpecMismatch: a value of another kind, or more than 64 levels of them; the message names where it is.
    """
    if not extra:
        return b""
    tail = bytearray()
    packed = _pack(dict(extra), tail, "extra", 1)
    try:
        text = json.dumps(packed, separators=(",", ":")).encode()
    except ValueError as error:  # an integer of more digits than Python writes
        raise SpecMismatch(f"extra holds what JSON cannot say: {error}") from error
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text + bytes(tail)


def decode(data: bytes) -> dict[str, Any]:
    """The other way; arrays are copies, writable.

    Raises:
        ProtocolMismatch: these bytes are no extra, whatever they are.
    """
    if not data:
        return {}
    try:
        (length,) = _LENGTH.unpack_from(data)
        text, tail = data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} and no dict")
        used = [0]
        return {key: _unpack(item, tail, 2, used) for key, item in value.items()}
    except (struct.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolMismatch(f"expected an extra of {len(data)} bytes, got something else: {error}") from error


def all_finite(extra: Mapping[str, Any] | None) -> bool:
    """Whether every number of `extra`, in arrays or out of them, is finite."""
    return extra is None or _finite(dict(extra))


def _finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_finite(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    array = _as_array(value)
    return array is None or array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a torch tensor, without importing torch
        return np.asarray(value.detach().cpu().numpy())
    return None


def _pack(value: Any, tail: bytearray, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise SpecMismatch(f"extra is more than {_DEEPEST} levels deep, or holds itself: {where[:200]}...")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key == _ARRAY]
        if wrong:
            raise SpecMismatch(f"{where} has the key {wrong[0]!r}: expected strings other than {_ARRAY!r}")
        return {key: _pack(item, tail, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item, tail, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
    array = _as_array(value)
    if array is None or array.dtype.kind not in "biufc":
        kind = type(value).__name__ if array is None else f"array of {array.dtype}"
        raise SpecMismatch(f"{where} is a {kind}: expected what JSON can say, or an array of numbers or bools")
    if isinstance(value, np.generic) and array.dtype.kind != "c":
        return value.item()
    tail += b"\0" * (-len(tail) % _ALIGNMENT)
    packed = {_ARRAY: [array.dtype.str, list(array.shape), len(tail)]}
    tail += array.tobytes()
    return packed


def _unpack(value: Any, tail: bytes, depth: int, used: list[int]) -> Any:
    """`used`: one number, the byte of the tail up to which arrays have been taken: none is handed out twice."""
    if depth > _DEEPEST:
        raise ValueError(f"it is more than {_DEEPEST} levels deep")
    if isinstance(value, list):
        return [_unpack(item, tail, depth + 1, used) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY not in value:
        return {key: _unpack(item, tail, depth + 1, used) for key, item in value.items()}
    dtype, shape, offset = value[_ARRAY]
    # Nothing but numbers: NumPy parses a dtype's text as a program's, and a negative size would mean "the rest".
    if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
        raise ValueError(f"{dtype!r} is no dtype of numbers")
    if not all(type(size) is int and size >= 0 for size in (offset, *shape)) or offset < used[0]:
        raise ValueError(f"an array of shape {shape} at byte {offset}, {used[0]} are taken")
    flat = np.frombuffer(tail, np.dtype(dtype), math.prod(shape), offset)
    used[0] = offset + flat.nbytes
    return flat.reshape(shape).copy()
