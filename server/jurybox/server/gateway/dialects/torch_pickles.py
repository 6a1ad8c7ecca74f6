"""Tensors of torch in pickles, read as NumPy arrays without torch.

A tensor is pickled as a call of `torch._utils._rebuild_tensor_v2` with its offset, size and stride in a storage. The
storage is a byte string in torch's format from before its zip files: three pickles of constants, one that names dtype
and size, one with its key, then the number of elements (int64) and the elements. The pickles are a fixed pattern of
opcodes, so they are compared with it instead of parsed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from jurybox.protocol.errors import plain
from jurybox.server.gateway.dialects.pickles import Array, Name, NotPlain, odd

_DTYPES: Final = {
    "Float": "<f4", "Double": "<f8", "Half": "<f2", "BFloat16": "<u2", "Bool": "?",
    "Byte": "u1", "Char": "i1", "Short": "<i2", "Int": "<i4", "Long": "<i8",
}  # fmt: skip
_DIMENSIONS = 5
_NUMBER = rb"(?:K.|M..|J....|\x8a[\x00-\x10].{0,16}?)"  # an integer
_HEAD = re.compile(
    rb"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\."  # a magic number
    rb"\x80\x02M\xe9\x03\."  # the version of the format, 1001
    rb"\x80\x02\}q\x00\(X\x10\x00\x00\x00protocol_versionq\x01M\xe9\x03X\x0d\x00\x00\x00little_endianq\x02\x88"
    rb"X\x0a\x00\x00\x00type_sizesq\x03\}q\x04\(X\x05\x00\x00\x00shortq\x05K\x02X\x03\x00\x00\x00intq\x06K\x04"
    rb"X\x04\x00\x00\x00longq\x07K[\x04\x08]uu\."
    rb"\x80\x02\(X\x07\x00\x00\x00storageq\x00ctorch\n([A-Za-z0-9]{1,20})Storage\nq\x01"
    rb"X.\x00\x00\x00([0-9]{1,20})q\x02X.\x00\x00\x00[a-z]{1,8}(?::[0-9]{1,3})?q\x03" + _NUMBER + rb"Ntq\x04Q\."
    rb"\x80\x02\]q\x00X.\x00\x00\x00\2q\x01a\.",
    re.DOTALL,
)
_MOST_HEAD = 512  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    """The elements of a storage, (n,), over the bytes of the stream."""

    elements: NDArray[Any]
    bfloat16: bool


def _storage(data: Any) -> _Storage:
    if type(data) is not bytes:
        odd("torch's _load_from_bytes")
    head = _HEAD.match(data[:_MOST_HEAD])
    if head is None:
        raise NotPlain("the pickle has a tensor's storage in a form that torch does not write: refused")
    kind = head[1].decode()
    if kind not in _DTYPES:
        raise NotPlain(f"the pickle has a tensor of torch.{plain(kind)}Storage: expected numbers or bool")
    dtype, at = np.dtype(_DTYPES[kind]), head.end() + 8
    count = struct.unpack("<q", data[head.end() : at])[0] if len(data) >= at else -1
    if count < 0 or count * dtype.itemsize != len(data) - at:
        raise NotPlain(f"the pickle has a tensor's storage of {count} elements in {len(data) - at} bytes")
    return _Storage(np.frombuffer(data, dtype, offset=at), kind == "BFloat16")


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any) -> Array:
    """Return what `_rebuild_tensor_v2` would: a view of a storage; one of bfloat16 as float32."""
    numbers = (offset, *size, *stride) if type(size) is tuple and type(stride) is tuple else ()
    if (
        type(storage) is not _Storage
        or not numbers
        or any(type(one) is not int or not 0 <= one < 1 << 40 for one in numbers)
        or len(size) != len(stride)
        or type(grad) is not bool
        or hooks != {}
    ):
        odd("torch's _rebuild_tensor_v2")
    if len(size) > _DIMENSIONS:
        raise NotPlain(f"the pickle has a tensor of {len(size)} sizes: expected at most {_DIMENSIONS}")
    elements, items = storage.elements, math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if items else 0
    if not items and len(size) > 1:
        raise NotPlain("the pickle has an empty tensor of several sizes: refused")
    if items > len(elements) or last >= max(1, len(elements)):
        raise NotPlain(f"the pickle has a tensor of {items} elements in a storage of {len(elements)}: refused")
    strides = [step * elements.itemsize for step in stride]
    # A copy of at most the storage's size, unless the elements lie in this order.
    array = np.ascontiguousarray(as_strided(elements[offset:], size, strides, writeable=False)).reshape(size)
    if storage.bfloat16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return Array(array)


# For `pickles.loads`.
TENSORS: Final[Mapping[tuple[str, str], Name]] = MappingProxyType(
    {
        ("torch._utils", "_rebuild_tensor_v2"): Name("_rebuild_tensor_v2", 6, _tensor),
        ("torch.storage", "_load_from_bytes"): Name("_load_from_bytes", 1, _storage),
        ("collections", "OrderedDict"): Name("OrderedDict", 0, dict),
    }
)
