"""Rows in messages: one frame for each column of a model, without unused capacity.

Tensors of the Open Inference Protocol have one shape for all their rows. Byte strings are an exception: each is
preceded by its length. Other rows of different sizes are sent flat, one after another, with their sizes as text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.arena import LOAD, STORE, Columns
from jurybox.protocol.errors import Code, Error, plain
from jurybox.protocol.spec import TensorSpec

Kind = Literal["inputs", "outputs"]
MOST_ROWS = 1 << 16  # of variable size in one request of the Open Inference Protocol; each is a separate Python object
_LENGTH = struct.Struct("<I")
_DIGITS = 10  # digits of a size in text form


def packed(columns: Columns, kind: Kind, first: int, rows: int, *, failed: bool = False) -> list[Any]:
    """Return the frames of n rows: each tensor's bytes, preceded by the extents if its rows differ in size.

    Contiguous arrays are not copied. If the model has state, a frame of arena.SESSION and the state to load follow the
    inputs, and the state to return follows the outputs. With `failed`, the reasons of failed rows come last.
    """
    end = first + rows
    frames: list[Any] = []
    for name, _, slots, extents in _tensors(columns, kind):
        if extents is None:
            frames.append(np.ascontiguousarray(slots[first:end]))
            continue
        sizes = np.ascontiguousarray(extents[first:end])
        counts = _counts(columns, kind, name, sizes)
        frames += [sizes, b"".join(slots[first + i, :count].tobytes() for i, count in enumerate(counts))]
    if columns.sessions is not None:
        records = columns.sessions[first:end]
        if kind == "inputs":
            frames.append(np.ascontiguousarray(records))
        wanted = bool((records["flags"] & (LOAD if kind == "inputs" else STORE)).any())
        arrays = columns.state_in if kind == "inputs" else columns.state_out
        frames += [np.ascontiguousarray(array[first:end]) if wanted else b"" for array in arrays.values()]
    if failed:
        frames.append(reasons(columns, first, rows))
    return frames


class PlainFrames:
    """A faster `packed` and `unpack` for rows of fixed shapes without state.

    Valid as long as the columns' memory is mapped.
    """

    def __init__(self, columns: Columns, kind: Kind) -> None:
        self._columns, self._kind = columns, kind
        tensors = list(_tensors(columns, kind))
        self._slots: list[tuple[memoryview, int]] = []
        if columns.sessions is None and all(
            extents is None and slots.nbytes and slots.flags.c_contiguous for _, _, slots, extents in tensors
        ):
            self._slots = [
                (slots.reshape(-1).view(np.uint8).data, slots.nbytes // len(slots)) for _, _, slots, _ in tensors
            ]
        self.row_bytes = sum(size for _, size in self._slots)  # 0: the rows are not plain

    def __bool__(self) -> bool:
        return bool(self._slots)

    def close(self) -> None:
        """Release the memory."""
        self._slots = []

    def memory(self) -> list[tuple[NDArray[np.uint8], int]]:
        """Return each tensor's rows as bytes, and the number of bytes in a row."""
        return [(np.frombuffer(slots, np.uint8), size) for slots, size in self._slots]

    def copies(self, first: int, rows: int) -> list[bytes]:
        """Return the frames of n rows."""
        end = first + rows
        return [bytes(slots[first * size : end * size]) for slots, size in self._slots]

    def views(self, first: int, rows: int) -> list[memoryview]:
        """Return the memory of n rows, as `copies` does, without a copy."""
        end = first + rows
        return [slots[first * size : end * size] for slots, size in self._slots]

    def write(self, first: int, rows: int, frames: Sequence[Any]) -> None:
        """Write frames to n rows. Raises the errors of `unpack`."""
        if len(frames) == len(self._slots):
            for frame, (_, size) in zip(frames, self._slots, strict=True):
                if len(frame) != rows * size:
                    break
            else:
                for frame, (slots, size) in zip(frames, self._slots, strict=True):
                    slots[first * size : (first + rows) * size] = frame
                return
        unpack(self._columns, self._kind, first, rows, [memoryview(frame) for frame in frames])


def reasons(columns: Columns, first: int, rows: int) -> NDArray[np.uint8]:
    """Return the frame with the reasons of failed rows; the only frame if nothing was computed (SESSION_LOST)."""
    return np.ascontiguousarray(columns.reasons[first : first + rows])


def size(columns: Columns, kind: Kind, first: int, rows: int) -> int:
    """Return the size of `packed` in bytes, without reasons and state."""
    total = 0
    for name, spec, slots, extents in _tensors(columns, kind):
        if extents is None:
            total += slots[first : first + rows].nbytes
        else:
            counts = _counts(columns, kind, name, np.ascontiguousarray(extents[first : first + rows]))
            total += int(sum(counts)) * spec.numpy_dtype.itemsize
    return total


def unpack(
    columns: Columns, kind: Kind, first: int, rows: int, frames: Sequence[memoryview], *, failed: bool = False
) -> None:
    """Write frames of `packed` to n rows. All frames are checked before any is written.

    Raises:
        Error: (SPEC_MISMATCH) the frames do not match the spec.
    """
    end = first + rows
    expected = sum(2 if extents is not None else 1 for _, _, _, extents in _tensors(columns, kind)) + failed
    state = columns.state_in if kind == "inputs" else columns.state_out
    if columns.sessions is not None:
        expected += len(state) + (kind == "inputs")
    if len(frames) != expected:
        raise _mismatch(f"{len(frames)} frames came for {kind}, {expected} were expected")
    left = iter(frames)
    writes: list[tuple[NDArray[Any], NDArray[Any]]] = []
    ragged: list[tuple[NDArray[Any], list[int], NDArray[Any]]] = []
    for name, spec, slots, extents in _tensors(columns, kind):
        if extents is None:
            writes.append((slots[first:end], _array(f"{kind[:-1]} {name!r}", next(left), slots[first:end])))
            continue
        sizes = _array(f"extents of {name!r}", next(left), extents[first:end])
        counts = _counts(columns, kind, name, sizes)
        payload = next(left)
        if len(payload) != sum(counts) * spec.numpy_dtype.itemsize:
            raise _mismatch(f"{kind[:-1]} {name!r}: {len(payload)} bytes came, its extents say {sum(counts)} elements")
        writes.append((extents[first:end], sizes))
        ragged.append((slots, counts, np.frombuffer(payload, spec.numpy_dtype)))
    if columns.sessions is not None:
        if kind == "inputs":
            records = _array("sessions", next(left), columns.sessions[first:end])
            writes.append((columns.sessions[first:end], records))
        for name, array in state.items():
            if len(frame := next(left)):
                writes.append((array[first:end], _array(f"state {name!r}", frame, array[first:end])))
    if failed:
        writes.append((columns.reasons[first:end], _array("reasons", next(left), columns.reasons[first:end])))
    for target, values in writes:
        target[...] = values
    for slots, counts, flat in ragged:
        at = 0
        for i, count in enumerate(counts):
            slots[first + i, :count] = flat[at : at + count]
            at += count


def unpack_reasons(columns: Columns, first: int, rows: int, frames: Sequence[memoryview]) -> None:
    """Write the frame of `reasons` to n rows. Raises Error (SPEC_MISMATCH) if it does not match."""
    if len(frames) != 1:
        raise _mismatch(f"{len(frames)} frames came, one of reasons was expected")
    columns.reasons[first : first + rows] = _array("reasons", frames[0], columns.reasons[first : first + rows])


def _tensors(columns: Columns, kind: Kind) -> Iterator[tuple[str, TensorSpec, NDArray[Any], NDArray[Any] | None]]:
    specs = columns.spec.inputs if kind == "inputs" else columns.spec.outputs
    slots = columns.inputs if kind == "inputs" else columns.outputs
    extents = columns.input_extents if kind == "inputs" else columns.output_extents
    for name, spec in specs.items():
        yield name, spec, slots[name], extents.get(name)


def _counts(columns: Columns, kind: Kind, name: str, sizes: NDArray[Any]) -> list[int]:
    """Return the elements of each row. Raises Error (SPEC_MISMATCH) if a size is invalid or exceeds the capacity."""
    spec = (columns.spec.inputs if kind == "inputs" else columns.spec.outputs)[name]
    return checked_elements(f"{kind[:-1]} {name!r}", spec, sizes)


def checked_elements(what: str, spec: TensorSpec, sizes: NDArray[Any]) -> list[int]:
    """Do the same as `elements`. Raises Error (SPEC_MISMATCH) if a size is invalid or exceeds the capacity."""
    counts = elements(spec, sizes)
    if (wrong := np.flatnonzero(counts < 0)).size:
        i = int(wrong[0])
        raise _mismatch(f"{what}, row {i}: sizes {sizes[i].tolist()} came, expected {spec}")
    return counts.tolist()  # type: ignore[no-any-return]


def elements(spec: TensorSpec, sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return the elements of rows with extents (n, k); -1 if an extent is negative or exceeds the capacity."""
    bounded = np.clip(sizes, -1, spec.capacity + 1).astype(np.float64)
    # Sizes beside a size of 0 are checked, too: all rows may be padded to the largest of each size.
    wrong = (sizes < 0).any(axis=1) | (np.maximum(bounded, 1).prod(axis=1) * spec.unit > spec.capacity)
    return np.where(wrong, -1, bounded.prod(axis=1) * spec.unit).astype(np.int64)


def _array(what: str, frame: memoryview, like: NDArray[Any]) -> NDArray[Any]:
    if len(frame) != like.nbytes:
        raise _mismatch(
            f"{what}: {len(frame)} bytes came, {len(like)} rows of {like.dtype}{list(like.shape[1:])} "
            f"have {like.nbytes}"
        )
    return np.frombuffer(frame, like.dtype).reshape(like.shape)


def _mismatch(message: str) -> Error:
    return Error(message, Code.SPEC_MISMATCH)


def field_head(tag: int, size: int) -> bytes:
    """Return the bytes before a field of a protobuf message: its tag and the size of its content."""
    made = bytearray((tag,))
    while size > 127:
        made.append(size & 127 | 128)
        size >>= 7
    made.append(size)
    return bytes(made)


def joined_strings(rows: Sequence[bytes]) -> bytes:
    """Return the protocol's raw form of byte strings: each preceded by its length, four bytes, little-endian."""
    return b"".join(part for row in rows for part in (_LENGTH.pack(len(row)), row))


def split_strings(what: str, data: Any, n: int, most: int) -> list[bytes]:
    """The inverse of `joined_strings`.

    Args:
        what: the name of the tensor for error messages.
        n: the expected number of strings.
        most: the maximum length in bytes.

    Raises:
        Error: (SPEC_MISMATCH) a length prefix or the number of strings is wrong.
    """
    if n * _LENGTH.size > len(data):
        raise _mismatch(
            f"{what}: {n} byte strings were expected, {len(data)} bytes came: each has its length before it"
        )
    view, at, rows = memoryview(data).cast("B"), 0, []
    for i in range(n):
        if at + _LENGTH.size > len(view):
            raise _mismatch(f"{what}: the data ends before the length of byte string {i} of {n}")
        (size,) = _LENGTH.unpack_from(view, at)
        at += _LENGTH.size
        if size > most:
            raise _mismatch(f"{what}, row {i}: {size} bytes came, expected at most {most}")
        if size > len(view) - at:
            raise _mismatch(f"{what}, row {i}: its length says {size} bytes, {len(view) - at} are left")
        rows.append(view[at : at + size].tobytes())
        at += size
    if at != len(view):
        raise _mismatch(f"{what}: {len(view) - at} bytes came after the last of {n} byte strings")
    return rows


def extents_text(sizes: Sequence[Sequence[int]]) -> str:
    """Return the sizes of rows as text.

    >>> extents_text([(480, 640), (1, 1)])
    '480,640;1,1'
    """
    return ";".join(",".join(map(str, row)) for row in sizes)


def extents_of_text(what: str, text: str, spec: TensorSpec) -> tuple[list[tuple[int, ...]], list[int]]:
    """Parse the text of `extents_text`; also return the elements of each row. Raises Error (SPEC_MISMATCH)."""
    if len(text) > MOST_ROWS * spec.extents * (_DIGITS + 1) or (rows := text.count(";") + 1) > MOST_ROWS:
        raise _mismatch(f"{what}: extents of more than {MOST_ROWS} rows came: send fewer rows in a request")
    sizes = np.empty((rows, spec.extents), np.int64)
    for i, row in enumerate(text.split(";")):
        parts = row.split(",")
        if len(parts) != spec.extents or not all(
            part.isascii() and part.isdigit() and len(part) <= _DIGITS for part in parts
        ):
            raise _mismatch(
                f"{what}, row {i}: extents {plain(row, 40)!r} came, expected {spec.extents} whole numbers with commas "
                "between them, and semicolons between rows"
            )
        sizes[i] = [int(part) for part in parts]
    return [tuple(row) for row in sizes.tolist()], checked_elements(what, spec, sizes)
