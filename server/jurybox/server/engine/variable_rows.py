"""Inputs and outputs whose rows differ in size: extents, copies and padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.arena import Columns
from jurybox.protocol.dtypes import converted
from jurybox.protocol.errors import plain
from jurybox.protocol.row_frames import elements
from jurybox.protocol.spec import BYTES, TensorSpec
from jurybox.server.engine.batch_shapes import dtype_of
from jurybox.server.engine.modules import array_over, given_tensor, host_values, require_kept, tensor_over
from jurybox.server.engine.served import LARGE_ROW

_VIEWS = 256  # cached views of gathered rows


class VariableInput:
    """One input whose rows differ in size.

    Args:
        pads: whether the model accepts rows that are padded to the largest.
    """

    def __init__(self, name: str, spec: TensorSpec, columns: Columns, max_batch: int, *, pads: bool) -> None:
        self._spec, self._unit = spec, spec.unit
        self.extents = spec.extents
        self._slots = columns.inputs[name]
        self._tensor = tensor_over(self._slots)
        self._extents = columns.input_extents[name]
        self._read = np.zeros((max_batch, spec.extents), np.int64)
        self._read_tensor = torch.from_numpy(self._read if spec.extents > 1 else self._read[:, 0])
        self._lengths: dict[int, torch.Tensor] = {}
        # Padding is only appended to a row if it differs in its first size; otherwise it lies between the row's parts.
        self._pads = pads and spec.extents == 1 and spec.shape[:1] in ((), (-1,))
        self._in_place = spec.row_bytes >= LARGE_ROW
        self._staging = torch.empty(0, dtype=dtype_of(spec))
        self._staging_rows: NDArray[Any] = array_over(self._staging)
        self._views: dict[tuple[int, int, tuple[int, ...]], torch.Tensor] = {}
        self._places: NDArray[np.intp] = np.zeros(0, np.intp)
        self.sizes = self._read[:0]
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)

    def whole(self, tickets: NDArray[Any], rows: int, max_padding: float, max_elements: int) -> torch.Tensor | None:
        """Return a batch's rows as one padded tensor; None if they must be handled one by one.

        Large rows in consecutive slots are not copied, like those of a fixed shape.
        """
        while True:
            count, first = native.gather_variable(
                self._slots, self._extents, tickets, self._unit, self._pads, max_padding, max_elements, self._in_place,
                self._read, self._staging_rows,
            )  # fmt: skip
            if first >= 0 or count * rows <= len(self._staging_rows):
                break
            self._staging = torch.empty(max(count * rows, 2 * len(self._staging_rows)), dtype=self._staging.dtype)
            self._staging_rows = array_over(self._staging)
            self._views.clear()
        if not count:
            return None
        sizes = (count // self._unit,) if self.extents == 1 else tuple(self._read[0].tolist())
        view = self._views.get((first, rows, sizes))
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            flat = self._staging[: rows * count] if first < 0 else self._tensor[first : first + rows, :count]
            view = self._views[first, rows, sizes] = flat.view(rows, *self._spec.measured(sizes))
        return view

    def never_in_place(self) -> None:
        """Copy large rows, too, since forward writes to them."""
        self._in_place = False

    def lengths(self, rows: int) -> torch.Tensor:
        """Return the sizes of the rows that `whole` returned, int64 (n,) or (n, k)."""
        view = self._lengths.get(rows)
        if view is None:
            view = self._lengths[rows] = self._read_tensor[:rows]
        return view

    def read(self, tickets: NDArray[Any], rows: int, places: NDArray[np.intp]) -> None:
        """Copy the extents of a batch's rows, which are at `places`; only these copies are used from here on.

        `counts` is -1 for rows with invalid extents.
        """
        native.gather(self._extents, tickets, self._read)
        self.sizes = self._read[:rows]
        self.counts = elements(self._spec, self.sizes)
        self._places = places

    def costs_now(self, tickets: NDArray[Any], rows: int) -> NDArray[np.int64]:
        """Return the numbers of elements of tickets' rows, at least one each even if their extents are invalid."""
        read = np.empty((rows, self._spec.extents), np.int64)
        native.gather(self._extents, tickets, read)
        return np.maximum(elements(self._spec, read), 1)

    def padded(self, sizes: Sequence[int]) -> int:
        """Return the number of elements of a row of these sizes, at least one."""
        return max(1, self._unit * math.prod(sizes))

    def costs(self, group: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the numbers of elements of rows, at least one each."""
        return np.maximum(self.counts[group], 1)

    def rows(self, group: NDArray[np.intp]) -> list[Any]:
        """Return copies of rows, as bytes or tensors, because a client may change a row while it is computed."""
        if self._spec.dtype == BYTES:
            return [self._slots[self._places[row], : self.counts[row]].tobytes() for row in group]
        counts, places = self.counts[group], self._places[group]
        if len(group) and int(counts.min()) == int(counts.max()) and (self.sizes[group] == self.sizes[group[0]]).all():
            shape = self._spec.measured(self.sizes[group[0]].tolist())
            return list(tensor_over(self._slots[places, : counts[0]]).reshape(len(group), *shape).unbind())
        return [
            self._tensor[place, :count].clone().reshape(self._spec.measured(sizes))
            for place, count, sizes in zip(places.tolist(), counts.tolist(), self.sizes[group].tolist(), strict=True)
        ]


def padded(rows: list[Any], spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows as one tensor, padded with zeros, and their sizes, int64 (n,) or (n, k)."""
    if spec.dtype == BYTES:
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        most = max(int(lengths.max(initial=0)), 1)
        joined = np.frombuffer(b"".join(row.ljust(most, b"\0") for row in rows), np.uint8).copy()
        return torch.from_numpy(joined.reshape(len(rows), most)), torch.from_numpy(lengths)
    shapes = [row.shape for row in rows]
    axes = [axis for axis, size in enumerate(spec.shape) if size < 0]
    sizes = torch.tensor([[shape[axis] for axis in axes] for shape in shapes], dtype=torch.int64)
    lengths_ = sizes[:, 0] if len(axes) == 1 else sizes
    if all(shape == shapes[0] for shape in shapes):
        return torch.stack(rows), lengths_
    largest = [max(sizes_) for sizes_ in zip(*shapes, strict=True)]
    padded = torch.zeros((len(rows), *largest), dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        target = padded[i]
        for axis, size in enumerate(row.shape):
            target = target.narrow(axis, 0, size)
        target.copy_(row)
    return padded, lengths_


def flattened(spec: TensorSpec, value: Any) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Return a row of a variable output, flat, and its extents. Raises an error if it does not match the spec."""
    if spec.dtype == BYTES:
        if isinstance(value, str):
            value = value.encode("utf-8", "replace")
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise TypeError(f"a row of bytes came as {type(value).__name__}, expected bytes or str")
        array = np.frombuffer(bytes(value), np.uint8)
    elif isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        tensor = given_tensor(value)
        require_kept("it", tensor.dtype, dtype_of(spec))
        array = array_over(host_values(tensor, dtype_of(spec)))
    else:
        array = _of_numbers(spec, value)
    extents = spec.extents_of(array.shape)
    if extents is None:
        raise ValueError(f"shape {array.shape} came, the spec promises {spec}")
    return array.reshape(-1), extents


def _of_numbers(spec: TensorSpec, value: Any) -> NDArray[Any]:
    """Return Python's numbers, which have no dtype, in the spec's. Raises ValueError if it does not keep them.

    Floating-point numbers may be rounded, as in `torch.tensor`.
    """
    given = np.asarray(value)
    if given.dtype.kind in "biuf":
        array, wrong = converted(given, spec.numpy_dtype)
        if not wrong.any():
            return array
    raise ValueError(f"{plain(value, 80)} came, which {spec.dtype} does not keep")
