"""JSON with NumPy arrays as json_numpy writes them, with limits; and the form that C++ clients of GR00T send.

{"__numpy__": BASE64, "dtype": "|u1", "shape": [8, 6, 3]}       json_numpy; a number has the shape []
{"__ndarray__": BASE64, "dtype": "uint8", "shape": [8, 6, 3]}   from C++, with the dtype's name
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.errors import ProtocolMismatch, SpecMismatch
from jurybox.server.gateway.dialects.json_dialects import read
from jurybox.server.gateway.robots.msgpack_arrays import MOST_DEPTH, MOST_ITEMS, Malformed, array_of

_NUMPY, _NDARRAY = "__numpy__", "__ndarray__"
_NAMED = ("bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)), "float32", "float64")


def loads(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Arrays become read-only NumPy arrays, and lists of lists of numbers arrays, too.

    Raises:
        Malformed: it is no JSON object; an array's data have not the size of dtype and shape; it has more than
            MOST_ITEMS values; or nests objects deeper than MOST_DEPTH.
    """
    try:
        given = read(body, _few)
    except (ProtocolMismatch, SpecMismatch) as error:
        raise Malformed(str(error)) from error
    found: dict[str, Any] = {key: _value(value, 1) for key, value in given.items()}
    return found


def dumps(value: Any) -> bytes:
    """Write None, bool, numbers, text, lists, dicts and arrays as JSON."""
    return json.dumps(value, default=_written).encode()


def dumps_rows(array: NDArray[Any]) -> bytes:
    """Write an array as the list of its rows, each an array: `dumps(list(array))` in a tenth of the time."""
    data, size = array.tobytes(), array.nbytes // max(1, len(array))
    rest = f'", "dtype": "{array.dtype.str}", "shape": {list(array.shape[1:])}}}'.encode()
    texts = [binascii.b2a_base64(data[i * size : (i + 1) * size], newline=False) for i in range(len(array))]
    return b"[" + b", ".join([b'{"__numpy__": "' + text + rest for text in texts]) + b"]"


def _few(body: bytes) -> None:
    if body.count(b",") > MOST_ITEMS:
        raise Malformed(f"a message has more than {MOST_ITEMS} values: send numbers in arrays (json_numpy)")


def _value(value: Any, depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise Malformed(f"objects and lists are nested deeper than {MOST_DEPTH}")
    if type(value) is dict:
        if _NUMPY in value or _NDARRAY in value:
            return _array(value)
        return {key: _value(one, depth + 1) for key, one in value.items()}
    if type(value) is list and any(type(one) in (list, dict) for one in value):
        return _list([_value(one, depth + 1) for one in value])
    return value


def _list(values: list[Any]) -> Any:
    """Return a list of (lists of) numbers as an array; any other list as it is."""
    try:
        array = np.array(values)
    except (ValueError, OverflowError):  # sizes differ
        return values
    return array if array.dtype.kind in "biuf" else values


def _array(found: Mapping[str, Any]) -> NDArray[Any]:
    marker = _NUMPY if _NUMPY in found else _NDARRAY
    text, dtype = found[marker], found.get("dtype")
    if type(text) is not str:
        raise Malformed(f"{marker!r}: expected base64, came {type(text).__name__}")
    try:
        data = native.base64_decoded(text)
        if data is None:
            data = base64.b64decode(text, validate=True)  # which says what is wrong
    except (binascii.Error, ValueError) as error:
        raise Malformed(f"{marker!r} is not base64: {error}") from error
    name = np.dtype(dtype).str if dtype in _NAMED else dtype
    return array_of(memoryview(data), name, found.get("shape"))


def _written(value: Any) -> Any:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"a {type(value).__name__} cannot be sent: expected numbers, text, arrays, lists, dicts")
    data = np.ascontiguousarray(value).tobytes()
    return {_NUMPY: base64.b64encode(data).decode(), "dtype": value.dtype.str, "shape": list(value.shape)}
