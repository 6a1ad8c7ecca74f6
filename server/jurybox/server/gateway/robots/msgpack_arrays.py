"""A strict codec with size limits for msgpack with NumPy arrays, as robots send them.

The format is msgpack's (github.com/msgpack/msgpack, spec.md). Arrays are maps, in openpi's format
`{b"__ndarray__": true, b"data", b"dtype", b"shape"}` and `{b"__npgeneric__": true, b"data", b"dtype"}` (a single
number), in msgpack-numpy's, `{"nd": true, "type", "kind", "data", "shape"}` with keys of text or bytes, or in GR00T's,
`{"__ndarray_class__": true, "as_npy"}`, a .npy file.

It uses no library: libraries allocate what a header claims (an array of 2^32 elements, a thousand nested lists) before
it can be checked, and the clients' own decoders interpret eight bytes of dtype "O" as a pointer.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Code, ProtocolMismatch, plain
from jurybox.server.gateway.npy import npy_head

MOST_ITEMS = 10_000  # values in one message, including keys; an observation has some tens
MOST_DEPTH = 16
_MOST_AXES = 16
_MOST_AXIS = 1 << 31
_DTYPE = re.compile(r"[<>|=](?:(b1|[iu][1248]|f[248])|U(\d{1,6}))", re.ASCII)
_LAST_CHARACTER = 0x10FFFF


class Malformed(ProtocolMismatch):
    """A message is not valid; the text names the place and what was expected."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Code.MALFORMED)


def unpackb(data: bytes | bytearray | memoryview) -> Any:
    """Decode one message.

    Maps become dicts with str keys. Arrays become NumPy arrays in the native byte order, read-only views of `data`
    where possible. NumPy scalars become Python numbers, and arrays of text become `<U` arrays.

    Raises:
        Malformed: the data is not msgpack, is truncated or followed by other bytes; has anything else (extension types,
            other keys, duplicate keys, dtypes of objects, structures, dates or complex numbers, data whose size does
            not fit dtype and shape); has more than MOST_ITEMS values; or nests maps and lists deeper than MOST_DEPTH.
    """
    reader = _MsgpackReader(memoryview(data).cast("B"))
    value = reader.value(0)
    if reader.at != len(reader.data):
        raise Malformed(f"{len(reader.data) - reader.at} bytes follow the message: expected none")
    return _whole(value)


class _MsgpackReader:
    """The decoder of one message; `at` is the index of the next byte."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0
        self._items = 0

    def value(self, depth: int) -> Any:
        """Decode and return the next value."""
        self._items += 1
        if self._items > MOST_ITEMS:
            raise Malformed(f"a message has more than {MOST_ITEMS} values: send numbers in arrays")
        kind = self._take(1)[0]
        if kind < 0x80:
            return kind
        if kind >= 0xE0:
            return kind - 0x100
        if kind < 0x90:
            return self._map(kind & 15, depth + 1)
        if kind < 0xA0:
            return self._list(kind & 15, depth + 1)
        if kind < 0xC0:
            return self._text(kind & 31)
        if (known := _NUMBERS.get(kind)) is not None:
            return known.unpack(self._take(known.size))[0]
        if (sized := _SIZED.get(kind)) is not None:
            read, length = sized
            size = int.from_bytes(self._take(length), "big")
            return read(self, size, depth + 1)
        if kind in _CONSTANTS:
            return _CONSTANTS[kind]
        raise Malformed(f"byte 0x{kind:02x} at {self.at - 1}: expected a number, text, bytes, list or map")

    def _take(self, size: int) -> memoryview:
        end = self.at + size
        if end > len(self.data):
            raise Malformed(f"the message ends at {len(self.data)} bytes, inside a value: expected {end}")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def _text(self, size: int, _: int = 0) -> str:
        try:
            return str(self._take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise Malformed(f"text before byte {self.at} is not UTF-8: {error.reason}") from error

    def _bytes(self, size: int, _: int = 0) -> memoryview:
        return self._take(size)

    def _list(self, size: int, depth: int) -> list[Any]:
        self._room(size, depth)
        return [_whole(self.value(depth)) for _ in range(size)]

    def _map(self, size: int, depth: int) -> Any:
        self._room(2 * size, depth)
        found: dict[str, Any] = {}
        marked = False
        for _ in range(size):
            key = self.value(depth)
            if isinstance(key, memoryview):
                marked = True
                key = str(key[:200], "utf-8", "replace")
            elif not isinstance(key, str):
                raise Malformed(f"a key of {type(key).__name__} before byte {self.at}: expected text")
            if key in found:
                raise Malformed(f"duplicate key {plain(key, 80)!r} in a map")
            found[key] = self.value(depth)
        if "__ndarray__" in found or "__npgeneric__" in found:
            return _array(found) if "__ndarray__" in found else _number(found)
        if "__ndarray_class__" in found:
            return _of_npy(found)
        if "nd" in found and "type" in found:
            return _of_msgpack_numpy(found)
        if marked:
            raise Malformed(f"keys of bytes in a map that is not an array ({_keys(found)}): expected text")
        return {key: _whole(value) for key, value in found.items()}

    def _room(self, least: int, depth: int) -> None:
        """Check the size in a header before allocation: each value takes at least one byte."""
        if depth > MOST_DEPTH:
            raise Malformed(f"maps and lists are nested deeper than {MOST_DEPTH}")
        if least > len(self.data) - self.at or least > MOST_ITEMS:
            raise Malformed(f"a list or map of {least} values at byte {self.at}: the message has no room for them")


_NUMBERS = {0xCA + i: struct.Struct(f">{kind}") for i, kind in enumerate("fdBHIQbhiq")}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# By the first byte: the method that reads a value whose size follows, and the number of bytes of this size.
_SIZED: dict[int, tuple[Callable[[_MsgpackReader, int, int], Any], int]] = {
    first + i: (read, length)
    for read, first, lengths in (
        (_MsgpackReader._bytes, 0xC4, (1, 2, 4)),
        (_MsgpackReader._text, 0xD9, (1, 2, 4)),
        (_MsgpackReader._list, 0xDC, (2, 4)),
        (_MsgpackReader._map, 0xDE, (2, 4)),
    )
    for i, length in enumerate(lengths)
}


def _whole(value: Any) -> Any:
    """Return a copy of bytes that are not an array's data; any other value as it is."""
    return bytes(value) if isinstance(value, memoryview) else value


def _shown(value: Any) -> str:
    """Return a value as text for an error message; for large values only the type."""
    return plain(repr(value[:80]) if isinstance(value, str) else value, 80) if _small(value) else type(value).__name__


def _small(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _keys(found: dict[str, Any]) -> str:
    return ", ".join(plain(key[:40]) for key in sorted(found)[:10]) or "nothing"


def _dtype(name: Any) -> np.dtype[Any]:
    if isinstance(name, memoryview):  # msgpack-numpy writes text or bytes
        name = str(name, "ascii", "replace")
    if not isinstance(name, str) or not _DTYPE.fullmatch(name):
        raise Malformed(f"dtype {_shown(name)}: expected numbers, bool or text, such as '<f4', '|u1', '|b1', '<U5'")
    return np.dtype(name)


def _array(found: dict[str, Any], marker: str = "__ndarray__", dtype_key: str = "dtype") -> NDArray[Any]:
    if found.get(marker) is not True or not {"data", "shape", dtype_key} <= found.keys():
        raise Malformed(f"an array with the keys {_keys(found)}: expected data, {dtype_key} and shape")
    return array_of(found["data"], found[dtype_key], found["shape"])


def array_of(data: Any, dtype_name: Any, shape: Any) -> NDArray[Any]:
    """Return an array of numbers, bool or text in the native byte order, a read-only view of `data` where possible.

    Args:
        data: a memoryview of bytes, in C order.
        dtype_name: as NumPy's `dtype.str`.
        shape: a list of sizes.

    Raises:
        Malformed: something else came, or the data have not exactly the size of dtype and shape.
    """
    dtype = _dtype(dtype_name)
    if (
        not isinstance(shape, list)
        or len(shape) > _MOST_AXES
        or not all(type(size) is int and 0 <= size < _MOST_AXIS for size in shape)
    ):
        raise Malformed(
            f"shape {_shown(shape)} of an array: expected a list of at most {_MOST_AXES} sizes of 0 and more"
        )
    if not isinstance(data, memoryview) or not dtype.itemsize or len(data) != math.prod(shape) * dtype.itemsize:
        came = f"{len(data)} bytes" if isinstance(data, memoryview) else type(data).__name__
        raise Malformed(f"{dtype.str} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes: came {came}")
    if dtype.kind == "U":
        _require_characters(data, dtype)
    elif dtype.kind == "b":
        _require_bools(data)
    try:
        array: NDArray[Any] = np.ndarray(shape, dtype, data if len(data) else None)
    except (ValueError, OverflowError) as error:  # with a size of 0 the product does not limit the other sizes
        raise Malformed(f"shape {shape} of an array: {error}") from error
    array.flags.writeable = False
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def _of_msgpack_numpy(found: dict[str, Any]) -> Any:
    if found["nd"] is True:
        if found.get("kind") is not None and bytes(_text_bytes(found["kind"])):
            raise Malformed("an array of a structured or an object dtype: expected numbers or text")
        return _array(found, "nd", "type")
    if found["nd"] is not False or "data" not in found:
        raise Malformed(f"an array with the keys {_keys(found)}: expected nd, type and data")
    return _array(found | {"nd": True, "shape": []}, "nd", "type").item()


def _of_npy(found: dict[str, Any]) -> NDArray[Any]:
    file = found.get("as_npy")
    if found["__ndarray_class__"] is not True or not isinstance(file, memoryview):
        raise Malformed(f"an array with the keys {_keys(found)}: expected as_npy, a .npy file")
    try:
        head = npy_head(file)
    except ValueError as error:
        raise Malformed(str(error)) from error
    if not head.fortran:
        return array_of(file[head.start :], head.dtype, head.shape)
    array = array_of(file[head.start :], head.dtype, head.shape[::-1]).T
    array.flags.writeable = False
    return array


def _text_bytes(value: Any) -> bytes | memoryview:
    return value.encode() if isinstance(value, str) else value if isinstance(value, memoryview) else b"?"


def _number(found: dict[str, Any]) -> Any:
    """Return a NumPy scalar or text as a Python value."""
    if found["__npgeneric__"] is not True or not {"data", "dtype"} <= found.keys():
        raise Malformed(f"a NumPy number with the keys {_keys(found)}: expected data and dtype")
    dtype, value = _dtype(found["dtype"]), found["data"]
    match dtype.kind:
        case "b":
            fits = isinstance(value, bool)
        case "U":
            fits = isinstance(value, str)
        case "f":
            fits = type(value) in (int, float)
        case _:
            limits = np.iinfo(dtype)
            fits = type(value) is int and limits.min <= value <= limits.max
    if not fits:
        raise Malformed(f"a NumPy number of dtype {dtype.str}: the value {_shown(value)} does not fit")
    return value


def _require_characters(data: memoryview, dtype: np.dtype[Any]) -> None:
    characters = np.frombuffer(data, dtype.str[0] + "u4") if len(data) else np.empty(0, "u4")
    surrogates = (characters >= 0xD800) & (characters <= 0xDFFF)
    if len(characters) and (int(characters.max()) > _LAST_CHARACTER or bool(surrogates.any())):
        raise Malformed("an array of text has an invalid Unicode character")


def _require_bools(data: memoryview) -> None:
    if len(data) and int(np.frombuffer(data, np.uint8).max()) > 1:
        raise Malformed("an array of bool has bytes other than 0 and 1")


def packb(value: Any) -> bytes:
    """Encode one message: None, bool, int, float, str, bytes, lists, tuples, dicts, and arrays in openpi's format.

    Raises:
        TypeError: a value has another type, or an array is not of numbers, bool or text.
        OverflowError: an integer does not fit in 64 bits.
    """
    parts: list[bytes | memoryview] = []
    _put(value, parts)
    return b"".join(parts)


def _put(value: Any, parts: list[bytes | memoryview]) -> None:
    if value is None or value is True or value is False:
        parts.append(b"\xc0" if value is None else b"\xc3" if value else b"\xc2")
    elif isinstance(value, np.ndarray):
        _put(_array_map(value), parts)
    elif isinstance(value, np.generic):
        _put({b"__npgeneric__": True, b"data": value.item(), b"dtype": _sendable(value.dtype)}, parts)
    elif isinstance(value, int):
        _put_int(value, parts)
    elif isinstance(value, float):
        parts.append(struct.pack(">Bd", 0xCB, value))
    elif isinstance(value, str):
        data = value.encode("utf-8", "replace")
        parts += (_head(len(data), 0xA0, 32, (0xD9, 0xDA, 0xDB)), data)
    elif isinstance(value, (bytes, bytearray, memoryview)):
        view = memoryview(value).cast("B")
        parts += (_head(len(view), 0, 0, (0xC4, 0xC5, 0xC6)), view)
    elif isinstance(value, (list, tuple)):
        parts.append(_head(len(value), 0x90, 16, (0, 0xDC, 0xDD)))
        for item in value:
            _put(item, parts)
    elif isinstance(value, Mapping):
        parts.append(_head(len(value), 0x80, 16, (0, 0xDE, 0xDF)))
        for key, item in value.items():
            _put(key, parts)
            _put(item, parts)
    else:
        raise TypeError(f"a {type(value).__name__} cannot be sent: expected numbers, text, bytes, arrays, lists, dicts")


def _array_map(array: NDArray[Any]) -> dict[bytes, Any]:
    whole = np.ascontiguousarray(array)
    dtype = _sendable(array.dtype)
    data = whole.reshape(-1).view(np.uint8).data if whole.size else b""
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": list(array.shape)}


def _sendable(dtype: np.dtype[Any]) -> str:
    if not _DTYPE.fullmatch(dtype.str):
        raise TypeError(f"an array of {dtype} cannot be sent: expected numbers, bool or text")
    return dtype.str


def _put_int(value: int, parts: list[bytes | memoryview]) -> None:
    if -32 <= value < 128:
        parts.append(struct.pack(">b", value))
    elif 0 <= value < 1 << 64:
        parts.append(struct.pack(">BQ", 0xCF, value))
    elif -(1 << 63) <= value < 0:
        parts.append(struct.pack(">Bq", 0xD3, value))
    else:
        raise OverflowError(f"{value} has more than 64 bits")


def _head(size: int, small: int, below: int, codes: tuple[int, int, int]) -> bytes:
    """Return the header of text, bytes, a list or a map: type and size."""
    if size < below:
        return bytes((small | size,))
    if size < 1 << 8 and codes[0]:
        return struct.pack(">BB", codes[0], size)
    if size < 1 << 16:
        return struct.pack(">BH", codes[1], size)
    return struct.pack(">BI", codes[2], size)
