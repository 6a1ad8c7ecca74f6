"""Rows in the device memory of clients: opened once, then read and written in place.

A client binds rows of its lane to memory that it has exported. From then on a ticket for these rows uses that memory,
and the rows in the arena are unused. Bindings are released between two batches, when no batch uses them, and at the
latest with their lease. If a lease has any bindings, its unbound rows are refused, because their contents in the arena
are not valid input.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox.protocol.device_memory import Driver, as_tensor, driver
from jurybox.protocol.dtypes import BITS
from jurybox.protocol.errors import Error, Refused, said
from jurybox.protocol.spec import TensorSpec
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.channel import SLOTS, WeightsClaim
from jurybox.server.engine.batch_shapes import dtype_of


class Binding:
    """Rows of a lease that are bound to device memory.

    Attributes:
        inputs, outputs: tensors on the device by name, (rows, *row shape), views of the client's memory.
        event: the client's event that its inputs are ready after; 0: they are ready when the ticket arrives.
        broken: the reason why the memory cannot be used; empty if it can.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.first, self.rows = int(order["first"]), int(order["rows"])
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.event = 0
        self.broken = ""
        self.handles: list[bytes] = []

    def part(self, tensors: Mapping[str, torch.Tensor], name: str, first: int, rows: int) -> torch.Tensor:
        """Return a ticket's rows of one tensor."""
        at = first - self.first
        return tensors[name][at : at + rows]


class PublishedOnDevice:
    """A weights channel's publications in the learner's device memory, as tensors by slot and name.

    Args:
        channel: the weights channel; its publisher may share its device memory.
        device: the engine's device.
    """

    def __init__(self, channel: WeightsChannel, device: torch.device) -> None:
        self._channel = channel
        self._device = device
        self._generation = 0
        self._driver: Driver | None = None
        self._pointers: list[int] = []
        self._slots: list[dict[str, torch.Tensor]] = []

    def tensors(self, claim: WeightsClaim) -> Mapping[str, torch.Tensor] | None:
        """Return the claimed publication; None if it is not in device memory, or this device cannot access it.

        A copy of these tensors is of the claimed version only if the channel still holds the claim afterwards.
        """
        record = self._channel.device[0]
        generation = int(record["generation"])
        if not generation or int(record["versions"][claim.slot]) != claim.version:
            return None
        if generation != self._generation:
            self._open(generation)
        return self._slots[claim.slot] if self._slots else None

    def close(self) -> None:
        """Release the memory until `tensors` opens it again. No copy may still read from it."""
        self._generation, self._slots = 0, []
        pointers, self._pointers = self._pointers, []
        for pointer in pointers:
            assert self._driver is not None
            with contextlib.suppress(Error):
                self._driver.close(pointer)

    def _open(self, generation: int) -> None:
        """Open the memory that the publisher exported. A new publisher exports its own, under a new generation."""
        self.close()
        self._generation = generation
        record, layout = self._channel.device[0].copy(), self._channel.layout
        try:
            if self._driver is None:
                self._driver = driver(self._device.index or 0)
            slots = []
            for number in range(SLOTS[self._channel.mode]):
                pointer = self._driver.open(bytes(record["handles"][number]))
                self._pointers.append(pointer)
                base, size = self._driver.extent(pointer)
                if pointer - base + layout.nbytes > size:
                    raise Refused(f"the exported memory has {size} bytes, the weights take {layout.nbytes}")
                array = self._driver.array(pointer, (layout.nbytes,), np.dtype(np.uint8))
                slots.append(layout.tensors(as_tensor(torch, array, pointer, self._device)))
        except Error:  # on another device, or the learner is gone: the same weights are in host memory
            self.close()
            self._generation = generation  # it is not tried again
            return
        self._slots = slots


class RowsNotBound(Refused):
    """A ticket's rows are not in the device memory that it was sent for: its client errs, the model does not."""


class DeviceRegions:
    """The bindings of all clients, for all models of an engine. Only the loop's thread uses it.

    Args:
        device: the engine's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bound: dict[int, list[Binding]] = {}  # by lease
        self._open: dict[tuple[int, bytes], tuple[int, int]] = {}  # (lease, handle) -> (pointer, use count)

    def __bool__(self) -> bool:
        return bool(self._bound)

    @functools.cached_property
    def driver(self) -> Driver:
        """The driver of the engine's device."""
        return driver(self._device.index or 0)

    def bind(self, order: Mapping[str, Any]) -> None:
        """Open the memory and the event that an order names, and bind its rows to them.

        Args:
            order: lease, first and rows; inputs and outputs, lists of [name, dtype, shape, handle (hexadecimal),
                offset]; event, a handle (hexadecimal) or empty.

        Raises:
            Refused: the driver does not know a handle, or the memory is smaller than its rows. The rows stay bound,
                and tickets for them are refused, because the client's input is not in the arena.
        """
        binding = Binding(order)
        lease = int(order["lease"])
        self.unbind(lease, binding.first)
        self._bound.setdefault(lease, []).append(binding)
        try:
            for kind in ("inputs", "outputs"):
                for name, dtype, shape, handle, offset in order[kind]:
                    spec = TensorSpec(dtype, tuple(shape))
                    getattr(binding, kind)[name] = self._tensor(
                        binding, lease, name, spec, bytes.fromhex(handle), offset
                    )
            if order["event"]:
                binding.event = self.driver.open_event(bytes.fromhex(order["event"]))
        except Exception as error:
            self._release(lease, binding)
            binding.broken = f"device memory of rows {binding.first} and on cannot be used: {said(error)}"
            raise Refused(binding.broken) from error

    def unbind(self, lease: int, first: int) -> None:
        """Release the binding that begins at row `first`. No batch with its rows may be in flight."""
        bindings = self._bound.get(lease, [])
        for binding in [each for each in bindings if each.first == first]:
            bindings.remove(binding)
            self._release(lease, binding)
        if not bindings:
            self._bound.pop(lease, None)

    def forget(self, lease: int) -> None:
        """Release all bindings of a lease that has ended. No batch with its rows may be in flight."""
        for binding in self._bound.pop(lease, []):
            self._release(lease, binding)

    def of(self, tickets: NDArray[Any]) -> list[Binding | None] | None:
        """Return each ticket's binding, None for rows in the arena; return None alone if all rows are in the arena.

        Raises:
            RowsNotBound: the rows are not bound, but others of their lease are; or their memory could not be opened.
        """
        if not self._bound:
            return None
        leases = tickets["lease"].tolist()
        if not any(lease in self._bound for lease in leases):
            return None
        places: list[Binding | None] = []
        for lease, first, rows in zip(leases, tickets["first"].tolist(), tickets["rows"].tolist(), strict=True):
            if (bindings := self._bound.get(lease)) is None:
                places.append(None)
                continue
            found = next((b for b in bindings if b.first <= first and first + rows <= b.first + b.rows), None)
            if found is None or found.broken:
                raise RowsNotBound(
                    found.broken if found else f"rows {first} to {first + rows} are not bound to device memory"
                )
            places.append(found)
        return places

    def close(self) -> None:
        """Release all bindings."""
        for lease in list(self._bound):
            self.forget(lease)

    def _tensor(
        self, binding: Binding, lease: int, name: str, spec: TensorSpec, handle: bytes, offset: int
    ) -> torch.Tensor:
        pointer, used = self._open.get((lease, handle), (0, 0))
        if not used:
            pointer = self.driver.open(handle)
        self._open[lease, handle] = pointer, used + 1
        binding.handles.append(handle)
        base, size = self.driver.extent(pointer)
        shape, dtype = (binding.rows, *spec.shape), spec.numpy_dtype
        wanted = math.prod(shape) * dtype.itemsize
        at = pointer - base + offset
        if offset < 0 or at + wanted > size or (pointer + offset) % dtype.itemsize:
            raise Refused(
                f"tensor {name!r} takes {wanted} bytes from byte {offset} of a region that has {size}, aligned to "
                f"{dtype.itemsize}"
            )
        bits = np.dtype(BITS.get(dtype.name, dtype.name))  # the interface of arrays on a device knows no bfloat16
        array = self.driver.array(pointer + offset, shape, bits)
        tensor: torch.Tensor = as_tensor(torch, array, pointer + offset, self._device)
        return tensor if bits == dtype else tensor.view(dtype_of(spec))

    def _release(self, lease: int, binding: Binding) -> None:
        binding.inputs, binding.outputs = {}, {}
        event, binding.event = binding.event, 0
        if event:
            self.driver.destroy_event(event)
        for handle in binding.handles:
            pointer, used = self._open.pop((lease, handle))
            if used > 1:
                self._open[lease, handle] = pointer, used - 1
            else:
                self.driver.close(pointer)
        binding.handles = []
