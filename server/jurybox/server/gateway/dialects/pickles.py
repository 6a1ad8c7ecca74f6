"""Parse pickles of plain data without unpickling: import nothing, call nothing, and check sizes before allocation.

An allow-list of classes in `pickle.Unpickler.find_class` is not enough. A NumPy array of dtype object interprets the
bytes of the stream as pointers. Nine bytes with a large memo index make the C unpickler allocate half a gigabyte before
any class is looked up. A few hundred bytes of shared references represent lists of 10^9 elements. So this is a separate
parser, for the opcodes of plain data (https://peps.python.org/pep-3154/, pickletools). Its memo is a dict, and its
"classes" are names that it compares. Everything else raises an error with its name.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pickletools import opcodes  # only their names; it reads no pickle here
from types import MappingProxyType
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Code, ProtocolMismatch, plain


class NotPlain(ProtocolMismatch):
    """A pickle that is not plain data, or exceeds the limits; the message names what is refused."""

    code = Code.MALFORMED


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a stream.

    Attributes:
        opcodes: opcodes in the stream.
        marks: marks open at once.
        values: values in the result; a shared one counts as often as it occurs.
        depth: nested containers in the result.
        repeated: bytes of text, byte strings and arrays in the result beyond the length of the stream. Only shared
            values make a result larger than its stream.
    """

    opcodes: int = 1 << 16
    marks: int = 64
    values: int = 250_000
    depth: int = 16
    repeated: int = 8 << 20


LIMITS: Final = Limits()
_NEWEST = 5  # protocol
_LONGEST_INTEGER = 16  # bytes
_LONGEST_NAME = 80  # of a global in the text form
_DIMENSIONS = 4  # of an array


@dataclass(frozen=True, slots=True)
class Name:
    """A global that a stream may name, and the function, if it is one, that stands in for it.

    Attributes:
        name: for messages.
        takes: arguments of a call; -1: it is never called.
        make: returns what the call would return.
    """

    name: str
    takes: int = -1
    make: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a class that the caller named, read as its attributes.

    Attributes:
        module, name: of the class; nothing is imported.
        fields: its attributes.
    """

    module: str
    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Class:
    module: str
    name: str


@dataclass(slots=True, eq=False)
class _PickledObject:
    of: _Class
    state: dict[Any, Any] | None = None


@dataclass(slots=True, eq=False)
class _Dtype:
    kind: str  # "U15", "f8"
    order: str = ""  # "<", ">" or "|"; empty until BUILD sets it

    def made(self) -> np.dtype[Any]:
        if not self.order:
            raise NotPlain("the pickle uses a dtype before it sets its byte order")
        return np.dtype(self.order + self.kind)


@dataclass(slots=True, eq=False)
class Array:
    """An array of a stream; None until its contents are there."""

    value: NDArray[Any] | None = None


# Text, booleans, integers and floating-point numbers of fixed size: nothing that contains pointers.
_KIND = re.compile(r"U[1-9][0-9]{0,6}|b1|[iu][1248]|f[248]")
# (dtype, version, order, subdtype, names, fields, itemsize, alignment, flags): numpy/core/src/multiarray/descriptor.c
_DTYPE_STATE = 8


class _PickleReader:
    """Parses one stream."""

    def __init__(
        self,
        data: bytes | bytearray | memoryview,
        limits: Limits,
        classes: Collection[tuple[str, str]],
        names: Mapping[tuple[str, str], Name],
    ) -> None:
        self._data = memoryview(data).cast("B")
        self._classes = classes
        self._globals = names
        self._size = len(self._data)
        self._limits = limits
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []  # indices into the stack
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        data, size, actions = self._data, self._size, _OPCODES
        for _ in range(self._limits.opcodes):
            if self._at >= size:
                raise NotPlain(f"the pickle ends after {size} bytes without STOP: it is truncated")
            opcode = data[self._at]
            self._at += 1
            if opcode == _STOP:
                break
            action = actions.get(opcode)
            if action is None or (opcode == _NEWOBJ and not self._classes):
                name = _NAMES.get(opcode)
                what = f"opcode {name}" if name else f"byte {opcode:#04x}, which is no opcode,"
                raise NotPlain(f"the pickle has {what} at {self._at - 1}: refused, plain data has none")
            action(self)
        else:
            raise NotPlain(f"the pickle has more than {self._limits.opcodes} opcodes")
        if len(self._stack) != 1 or self._marks or self._at != size:
            raise NotPlain(
                f"the pickle stops with {len(self._stack)} values, {len(self._marks)} marks and {size - self._at} "
                "bytes left: expected one value and nothing after it"
            )
        return _Result(self._limits, self._limits.repeated + size).of(self._stack[0], 0)

    def take(self, n: int) -> memoryview:
        if n > self._size - self._at:
            raise NotPlain(f"the pickle claims {n} bytes at {self._at}, {self._size - self._at} are there")
        self._at += n
        return self._data[self._at - n : self._at]

    def number(self, n: int) -> int:
        return int.from_bytes(self.take(n), "little")

    def line(self) -> str:
        end = bytes(self._data[self._at : self._at + _LONGEST_NAME + 1]).find(b"\n")
        if end < 0:
            raise NotPlain(f"the pickle names a global of more than {_LONGEST_NAME} characters at {self._at}")
        return str(self.take(end + 1)[:-1], "utf-8", "replace")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise NotPlain(f"the pickle takes a value at {self._at} where it has put none")
        return self._stack.pop()

    def top(self, kind: type) -> Any:
        value = self.pop()
        self.push(value)
        if type(value) is not kind:
            raise NotPlain(f"the pickle fills a {type(value).__name__.strip('_')} at {self._at} as a {kind.__name__}")
        return value

    def since_mark(self) -> list[Any]:
        if not self._marks:
            raise NotPlain(f"the pickle refers to a mark at {self._at} where none is set")
        at = self._marks.pop()
        values = self._stack[at:]
        del self._stack[at:]
        return values

    def mark(self) -> None:
        if len(self._marks) >= self._limits.marks:
            raise NotPlain(f"the pickle has more than {self._limits.marks} open marks: it is nested too deep")
        self._marks.append(len(self._stack))

    def memoize(self, at: int) -> None:
        value = self.pop()
        self.push(value)
        self._memo[at] = value

    def memoize_next(self) -> None:
        self.memoize(len(self._memo))

    def get(self, at: int) -> None:
        if at not in self._memo:
            raise NotPlain(f"the pickle gets value {at} of its memo, which was never put there")
        self.push(self._memo[at])

    def protocol(self) -> None:
        if (version := self.number(1)) > _NEWEST:
            raise NotPlain(f"the pickle is of protocol {version}, expected at most {_NEWEST}")

    def frame(self) -> None:
        if (size := self.number(8)) > self._size - self._at:
            raise NotPlain(f"the pickle claims a frame of {size} bytes, {self._size - self._at} are there")

    def text(self, digits: int) -> None:
        try:
            self.push(str(self.take(self.number(digits)), "utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise NotPlain(f"the pickle has text that is not UTF-8 at {self._at}") from error

    def byte_string(self, digits: int) -> None:
        self.push(bytes(self.take(self.number(digits))))

    def real(self) -> None:
        self.push(struct.unpack(">d", self.take(8))[0])

    def signed(self) -> None:
        self.push(int.from_bytes(self.take(4), "little", signed=True))

    def long(self) -> None:
        if (size := self.number(1)) > _LONGEST_INTEGER:
            raise NotPlain(f"the pickle has an integer of {size} bytes, expected at most {_LONGEST_INTEGER}")
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def appends(self) -> None:
        values = self.since_mark()
        self.top(list).extend(values)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self._fill([key, value])

    def set_items(self) -> None:
        self._fill(self.since_mark())

    def _fill(self, pairs: list[Any]) -> None:
        into = self.top(dict)
        if len(pairs) % 2:
            raise NotPlain(f"the pickle has a key without a value at {self._at}")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # No other keys: hashing nested tuples can take practically forever.
            if type(key) is not str and type(key) is not int:
                raise NotPlain(
                    f"the pickle has a {type(key).__name__.strip('_')} as a key: expected text or an integer"
                )
            into[key] = value

    def tuple_of(self, n: int) -> None:
        values = [self.pop() for _ in range(n)]
        self.push(tuple(reversed(values)))

    def tuple_since_mark(self) -> None:
        self.push(tuple(self.since_mark()))

    def global_of_text(self) -> None:
        self._global(self.line(), self.line())

    def global_of_stack(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise NotPlain(f"the pickle names a global at {self._at} with something other than text")
        self._global(module, name)

    def _global(self, module: str, name: str) -> None:
        known: Name | _Class | None = self._globals.get((module, name))
        if (module, name) in self._classes:
            known = _Class(module, name)
        if known is None:
            raise NotPlain(
                f"the pickle names {plain(module, 80)}.{plain(name, 80)}: refused, nothing is imported or called here"
            )
        self.push(known)

    def reduce(self) -> None:
        arguments, called = self.pop(), self.pop()
        if type(called) is not Name or type(arguments) is not tuple:
            raise NotPlain(f"the pickle calls a {type(called).__name__.strip('_')} at {self._at} (REDUCE): refused")
        if called.make is None or len(arguments) != called.takes:
            odd(called.name)
        self.push(called.make(*arguments))

    def new_object(self) -> None:
        arguments, of = self.pop(), self.pop()
        if type(of) is not _Class or arguments != ():
            raise NotPlain(f"the pickle makes an object of a {type(of).__name__.strip('_')} (NEWOBJ): refused")
        self.push(_PickledObject(of))

    def build(self) -> None:
        state, made = self.pop(), self.pop()
        if type(made) is _PickledObject and type(state) is dict and made.state is None:
            made.state = state
            self.push(made)
            return
        if type(state) is not tuple:
            raise NotPlain(f"the pickle sets a state that is no tuple at {self._at} (BUILD): refused")
        if type(made) is _Dtype:
            _tell_order(made, state)
        elif type(made) is Array and made.value is None:
            made.value = _array_of_state(state)
        else:
            raise NotPlain(f"the pickle sets the state of a {type(made).__name__.strip('_')} (BUILD): refused")
        self.push(made)


def odd(name: str) -> NoReturn:
    """Refuse a call with arguments that are not those of plain data."""
    raise NotPlain(f"the pickle calls {name} with arguments that no plain data has: refused")


def _dtype(kind: Any, align: Any, copy: Any) -> _Dtype:
    # Error messages quote only text: the representation of nested tuples can take practically forever.
    if type(kind) is not str or type(align) is not bool or type(copy) is not bool:
        odd("dtype")
    if not _KIND.fullmatch(kind):
        raise NotPlain(f"the pickle has an array of dtype {plain(kind, 40)!r}: expected text (U) or numbers")
    return _Dtype(kind)


def _tell_order(made: _Dtype, state: tuple[Any, ...]) -> None:
    if made.order or len(state) < _DTYPE_STATE or type(state[1]) is not str or state[1] not in ("<", ">", "|"):
        odd("BUILD of a dtype")
    if any(part is not None for part in state[2:5]):
        raise NotPlain("the pickle has an array with fields: expected text (U) or numbers")
    made.order = state[1]


def _reconstruct(kind: Any, shape: Any, _code: Any) -> Array:
    if type(kind) is not Name or kind.name != "ndarray" or shape != (0,):
        odd("_reconstruct")
    return Array()


def _array_of_state(state: tuple[Any, ...]) -> NDArray[Any]:
    if len(state) != 5 or state[0] != 1 or type(state[3]) is not bool:
        odd("BUILD of an array")
    return _filled(state[2], state[1], state[4], "F" if state[3] else "C")


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Array:
    return Array(_filled(dtype, shape, data, order))


def _scalar(dtype: Any, data: Any) -> Any:
    return _filled(dtype, (), data, "C").item()


def _filled(dtype: Any, shape: Any, data: Any, order: Any) -> NDArray[Any]:
    """Return an array over the bytes of the stream, without a copy."""
    if type(dtype) is not _Dtype or type(data) is not bytes or type(shape) is not tuple or order not in ("C", "F"):
        odd("an array")
    if len(shape) > _DIMENSIONS or any(type(size) is not int or not 0 <= size < 1 << 40 for size in shape):
        raise NotPlain(
            f"the pickle has an array of {len(shape)} sizes: expected at most {_DIMENSIONS}, each below 2^40"
        )
    made = dtype.made()
    items = math.prod(shape)
    if items * made.itemsize != len(data) or (not items and len(shape) > 1):
        raise NotPlain(
            f"the pickle has an array of {made.str} and shape {shape}: expected {items * made.itemsize} bytes, "
            f"{len(data)} came"
        )
    if made.kind == "U" and items and np.frombuffer(data, made.byteorder + "u4").max() > 0x10FFFF:
        raise NotPlain("the pickle has an array of text with an invalid character")
    return np.frombuffer(data, made).reshape(shape, order=order)


def _encode(text: Any, codec: Any) -> bytes:
    if type(text) is not str or codec != "latin1":
        odd("encode")
    try:
        return bytes(text, "latin-1")
    except UnicodeEncodeError as error:
        raise NotPlain("the pickle has bytes written as text that is not Latin-1") from error


_GLOBALS: Final = {
    ("numpy", "ndarray"): Name("ndarray"),
    ("numpy", "dtype"): Name("dtype", 3, _dtype),
    ("_codecs", "encode"): Name("encode", 2, _encode),
    ("__builtin__", "bytes"): Name("bytes", 0, lambda: b""),
} | {
    (f"numpy.{core}.{module}", name.name): name
    for core in ("core", "_core")  # NumPy 1 and 2
    for module, name in (
        ("multiarray", Name("_reconstruct", 3, _reconstruct)),
        ("multiarray", Name("scalar", 2, _scalar)),
        ("numeric", Name("_frombuffer", 4, _from_buffer)),
    )
}


class _Result:
    """The copier of a parsed value. It accepts only plain values, and counts shared ones as often as they occur."""

    def __init__(self, limits: Limits, room: int) -> None:
        self._limits = limits
        self._values = limits.values
        self._room = room

    def of(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if depth > self._limits.depth:
            raise NotPlain(f"the pickle holds containers more than {self._limits.depth} deep, or one in itself")
        self._count(1, 0)
        if kind is str or kind is bytes:
            self._count(0, len(value))
            return value
        if kind is list or kind is tuple:
            return kind([self.of(item, depth + 1) for item in value])
        if kind is dict:
            return {key: self.of(item, depth + 1) for key, item in value.items() if self._count(0, len(str(key)))}
        if kind is _PickledObject and value.state is not None:
            return Instance(value.of.module, value.of.name, self.of(value.state, depth + 1))
        if kind is Array and value.value is not None:
            array = value.value
            text = array.dtype.kind == "U"
            self._count(array.size if text else 0, array.nbytes)
            return array.tolist() if text else array
        if kind not in _PLAIN:
            raise NotPlain(f"the pickle holds a {kind.__name__.strip('_').lower()} as a value: refused")
        return value

    def _count(self, values: int, size: int) -> bool:
        self._values -= values
        self._room -= size
        if self._values < 0:
            raise NotPlain(f"the pickle would result in more than {self._limits.values} values")
        if self._room < 0:
            raise NotPlain("the pickle refers to the same bytes over and over: its result would be too large")
        return True


_PLAIN = (int, float, bool, type(None))

_STOP, _NEWOBJ = ord("."), 0x81
_OPCODES: Final[dict[int, Callable[[_PickleReader], None]]] = {
    0x80: _PickleReader.protocol,
    0x95: _PickleReader.frame,
    ord("("): _PickleReader.mark,
    0x94: _PickleReader.memoize_next,
    ord("q"): lambda reader: reader.memoize(reader.number(1)),
    ord("r"): lambda reader: reader.memoize(reader.number(4)),
    ord("h"): lambda reader: reader.get(reader.number(1)),
    ord("j"): lambda reader: reader.get(reader.number(4)),
    ord("}"): lambda reader: reader.push({}),
    ord("s"): _PickleReader.set_item,
    ord("u"): _PickleReader.set_items,
    ord("]"): lambda reader: reader.push([]),
    ord("a"): _PickleReader.append,
    ord("e"): _PickleReader.appends,
    ord(")"): lambda reader: reader.push(()),
    0x85: lambda reader: reader.tuple_of(1),
    0x86: lambda reader: reader.tuple_of(2),
    0x87: lambda reader: reader.tuple_of(3),
    ord("t"): _PickleReader.tuple_since_mark,
    0x8C: lambda reader: reader.text(1),
    ord("X"): lambda reader: reader.text(4),
    0x8D: lambda reader: reader.text(8),
    ord("C"): lambda reader: reader.byte_string(1),
    ord("B"): lambda reader: reader.byte_string(4),
    0x8E: lambda reader: reader.byte_string(8),
    0x96: lambda reader: reader.byte_string(8),  # a bytearray is returned as bytes
    ord("J"): _PickleReader.signed,
    ord("K"): lambda reader: reader.push(reader.number(1)),
    ord("M"): lambda reader: reader.push(reader.number(2)),
    0x8A: _PickleReader.long,
    ord("G"): _PickleReader.real,
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("c"): _PickleReader.global_of_text,
    0x93: _PickleReader.global_of_stack,
    ord("R"): _PickleReader.reduce,
    ord("b"): _PickleReader.build,
    _NEWOBJ: _PickleReader.new_object,
}
_NAMES: Final = {ord(opcode.code): opcode.name for opcode in opcodes}  # of all opcodes, for error messages


def loads(
    data: bytes | bytearray | memoryview,
    limits: Limits = LIMITS,
    classes: Collection[tuple[str, str]] = (),
    names: Mapping[tuple[str, str], Name] = MappingProxyType({}),
) -> Any:
    """Parse a pickle of protocol 2 to 5.

    Args:
        data: the stream, from the first byte to STOP.
        limits: limits of the stream and the result.
        classes: module and name of classes whose objects are returned as an `Instance`.
        names: further functions, by module and name, and what is made of their arguments (`torch_pickles`).

    Returns:
        None, bool, int, float, str, bytes, list, tuple and dict (with str and int keys). A bytearray is returned as
        bytes, a NumPy array of text as (nested) lists of str, one of numbers as a read-only array over the stream's
        bytes, and a NumPy scalar as a Python one.

    Raises:
        NotPlain: the stream has anything else; the message names it.

    >>> loads(dumps({"images": [], "only_strict": True}))
    {'images': [], 'only_strict': True}
    """
    return _PickleReader(data, limits, classes, {**_GLOBALS, **names} if names else _GLOBALS).read()


def dumps(value: Any) -> bytes:
    """Pickle None, bool, int, float, str, list, tuple and dict with protocol 2, which every Python can read.

    Raises:
        TypeError: a value has another type; subclasses and NumPy scalars count as other types.
    """
    return b"\x80\x02" + written(value) + b"."


def written(value: Any) -> bytes:
    """Return what `dumps` writes between the stream's first bytes and its last, for a part of a larger stream."""
    parts: list[bytes] = []
    _write(value, parts)
    return b"".join(parts)


def _write(value: Any, parts: list[bytes]) -> None:
    kind = type(value)
    if kind is float:
        parts.append(b"G" + struct.pack(">d", value))
    elif kind is str:
        text = value.encode("utf-8", "surrogatepass")
        parts.append(b"X" + struct.pack("<I", len(text)) + text)
    elif value is None or kind is bool:
        parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif kind is int:
        written = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(written) > 255:
            raise TypeError(f"an integer of {len(written)} bytes is no plain value: expected at most 255")
        parts.append(b"\x8a" + bytes([len(written)]) + written)
    elif kind in (list, tuple):
        parts.append(b"(" if kind is tuple else b"](")
        for item in value:
            _write(item, parts)
        parts.append(b"t" if kind is tuple else b"e")
    elif kind is dict:
        parts.append(b"}(")
        for key, item in value.items():
            _write(key, parts)
            _write(item, parts)
        parts.append(b"u")
    else:
        raise TypeError(f"{kind.__name__} is no plain value: expected None, bool, int, float, str, list, tuple or dict")
