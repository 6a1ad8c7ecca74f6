"""The heads of .npy files (numpy.org/neps/nep-0001-npy-format.html), read without evaluating them.

NumPy evaluates a head as a Python literal, and unpickles an array of objects if it is told to. This reads only heads of
numbers, bool and text, by their form.
"""

from __future__ import annotations

import io
import re
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_MAGIC = b"\x93NUMPY"
_LENGTHS = {1: 2, 2: 4, 3: 4}  # bytes of the head's length, by version
_MOST = 10_000  # bytes of a head
_SIZE = rb"\d{1,18}"
_HEAD = re.compile(
    rb"\{ *'descr': *'([^'\\]{1,20})' *, *'fortran_order': *(True|False) *, *'shape': *"
    rb"\( *((?:" + _SIZE + rb" *, *)*(?:" + _SIZE + rb")?) *\) *,? *\} *\n?"
)


class NpyHead(NamedTuple):
    """The head of a file.

    Attributes:
        dtype: NumPy's `dtype.str`; it is not checked.
        shape: of the array.
        fortran: whether the data are in Fortran order.
        start: where the data begin.
    """

    dtype: str
    shape: list[int]
    fortran: bool
    start: int


def npy_head(file: memoryview) -> NpyHead:
    """Read the head of a file. Raises ValueError: it is another, or of an array of structures."""
    version = file[6] if len(file) > 8 and bytes(file[:6]) == _MAGIC else 0
    if version not in _LENGTHS:
        raise ValueError("the file does not begin as a .npy file")
    begin = 8 + _LENGTHS[version]
    size = int.from_bytes(file[8:begin], "little")
    found = _HEAD.fullmatch(bytes(file[begin : begin + size])) if size <= min(_MOST, len(file) - begin) else None
    if found is None:
        raise ValueError("the head of the .npy file is not that of an array of numbers or text")
    shape = [int(one) for one in found[3].split(b",") if one.strip()]
    return NpyHead(found[1].decode("latin-1"), shape, found[2] == b"True", begin + size)


def npy_file(array: NDArray[np.generic]) -> bytes:
    """Return an array of numbers, bool or text as a .npy file in C order."""
    file = io.BytesIO()
    npy.write_array(file, np.ascontiguousarray(array).reshape(array.shape), version=(1, 0), allow_pickle=False)
    return file.getvalue()
