"""Rows in messages: what of a model's columns crosses a network, a frame each, without the room they do not use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.arena import LOAD, STORE, Columns
from jurybox.protocol.errors import Code, Error
from jurybox.protocol.spec import TensorSpec

Kind = Literal["inputs", "outputs"]


def packed(columns: Columns, kind: Kind, first: int, rows: int, *, failed: bool = False) -> list[Any]:
    """The frames of n rows: each tensor's bytes, before those of variable size their extents; copies, but of arrays
    that lie in one piece.

    Inputs of a model with state have a frame of arena.SESSION behind them, and the state that some of them load. Behind
    outputs is the state that is left for its client; behind those of a request with failed rows the reasons.
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
        frames.append(np.ascontiguousarray(columns.reasons[first:end]))
    return frames


def size(columns: Columns, kind: Kind, first: int, rows: int) -> int:
    """Bytes that `packed` would give, reasons and state not counted."""
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
    """Write frames of `packed` to n rows; nothing is written where one does not fit.

    Raises:
        Error: (SPEC_MISMATCH) what was expected and what came.
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


def _tensors(columns: Columns, kind: Kind) -> Iterator[tuple[str, TensorSpec, NDArray[Any], NDArray[Any] | None]]:
    specs = columns.spec.inputs if kind == "inputs" else columns.spec.outputs
    slots = columns.inputs if kind == "inputs" else columns.outputs
    extents = columns.input_extents if kind == "inputs" else columns.output_extents
    for name, spec in specs.items():
        yield name, spec, slots[name], extents.get(name)


def _counts(columns: Columns, kind: Kind, name: str, sizes: NDArray[Any]) -> list[int]:
    """Elements of each row. Raises Error (SPEC_MISMATCH) where a size is none, or beyond the capacity."""
    spec = (columns.spec.inputs if kind == "inputs" else columns.spec.outputs)[name]
    counts = elements(spec, sizes)
    if (wrong := np.flatnonzero(counts < 0)).size:
        i = int(wrong[0])
        raise _mismatch(f"{kind[:-1]} {name!r}, row {i}: sizes {sizes[i].tolist()} came, expected {spec}")
    return [int(count) for count in counts]


def elements(spec: TensorSpec, sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Elements of rows of these extents (n, k), -1 where one is negative or more than the capacity; never overflows."""
    fixed = 1
    for size_ in spec.shape:
        fixed *= max(size_, 1)
    bounded = np.clip(sizes, -1, spec.capacity + 1).astype(np.float64)
    product = bounded.prod(axis=1) * fixed
    wrong = (sizes < 0).any(axis=1) | (product > spec.capacity)
    return np.where(wrong, -1, product).astype(np.int64)


def _array(what: str, frame: memoryview, like: NDArray[Any]) -> NDArray[Any]:
    if len(frame) != like.nbytes:
        raise _mismatch(
            f"{what}: {len(frame)} bytes came, {len(like)} rows of {like.dtype}{list(like.shape[1:])} "
            f"have {like.nbytes}"
        )
    return np.frombuffer(frame, like.dtype).reshape(like.shape)


def _mismatch(message: str) -> Error:
    return Error(message, Code.SPEC_MISMATCH)
