"""Rows that lie in device memory of clients: opened once, read and written where they are.

A client binds rows of its lane to places in memory that it exported. From then on a ticket for these rows means
those places, and the rows in the arena mean nothing. What is bound is let go of between two batches, so nothing
computes with it any more; with its lease at the latest. A row of a lease that has anything bound, and is not bound
itself, is refused: what stands in the arena there is nobody's input.
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

from jurybox.protocol.device_memory import Driver, driver
from jurybox.protocol.errors import Error, Refused, said
from jurybox.protocol.spec import TensorSpec
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.channel import SLOTS, WeightsClaim


class Binding:
    """Rows of a lease and where they lie.

    Attributes:
        inputs, outputs: tensors on the device by name, (rows, *row shape), views of the client's memory.
        event: of the client's, after which its inputs are there; 0: they are there when the ticket comes.
        broken: why they cannot be used; empty: they can.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        self.first, self.rows = int(order["first"]), int(order["rows"])
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.event = 0
        self.broken = ""
        self.handles: list[bytes] = []

    def part(self, tensors: Mapping[str, torch.Tensor], name: str, first: int, rows: int) -> torch.Tensor:
        """Of one tensor the rows of a ticket."""
        at = first - self.first
        return tensors[name][at : at + rows]


class PublishedOnDevice:
    """A weights channel's publications where the learner keeps them on the device, as tensors by slot and name.

    Args:
        channel: whose publisher may share its device memory.
        device: of the engine.
    """

    def __init__(self, channel: WeightsChannel, device: torch.device) -> None:
        self._channel = channel
        self._device = device
        self._generation = 0
        self._driver: Driver | None = None
        self._pointers: list[int] = []
        self._slots: list[dict[str, torch.Tensor]] = []

    def tensors(self, claim: WeightsClaim) -> Mapping[str, torch.Tensor] | None:
        """The claimed publication; None where it is not on the device, or cannot be reached from this one.

        What was copied from it is of the claimed version if the channel holds the claim afterwards.
        """
        record = self._channel.device[0]
        generation = int(record["generation"])
        if not generation or int(record["versions"][claim.slot]) != claim.version:
            return None
        if generation != self._generation:
            self._open(generation)
        return self._slots[claim.slot] if self._slots else None

    def close(self) -> None:
        """Let go of the memory; nothing copies from it any more."""
        self._slots = []
        pointers, self._pointers = self._pointers, []
        for pointer in pointers:
            assert self._driver is not None
            with contextlib.suppress(Error):
                self._driver.close(pointer)

    def _open(self, generation: int) -> None:
        """Open what a publisher has exported; another one exports anew."""
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
                    raise Refused(f"{size} bytes are there, the weights take {layout.nbytes}")
                array = self._driver.array(pointer, (layout.nbytes,), np.dtype(np.uint8))
                flat = torch.as_tensor(array, device=self._device)
                slots.append(layout.tensors(flat))
        except Error:  # of another device, or its learner is gone: the host has the same weights
            self.close()
            return
        self._slots = slots


class DeviceRegions:
    """What clients have bound, of all models of an engine; the loop's thread alone touches it.

    Args:
        device: of the engine.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bound: dict[int, list[Binding]] = {}  # by lease
        self._open: dict[tuple[int, bytes], tuple[int, int]] = {}  # lease and handle: pointer, and how often it is used

    def __bool__(self) -> bool:
        return bool(self._bound)

    @functools.cached_property
    def driver(self) -> Driver:
        """The device's driver."""
        return driver(self._device.index or 0)

    def bind(self, order: Mapping[str, Any]) -> None:
        """Open what an order names.

        Args:
            order: lease, first, rows; inputs and outputs, each [name, dtype, shape, handle (hexadecimal), offset].

        Raises:
            Refused: a handle that the driver does not know, or with less memory than its rows take. The rows stay
                bound, and tickets for them are refused: what lies in the arena is not what their client sent.
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
        """Let go of what was bound from a row on; no batch with it is under way."""
        bindings = self._bound.get(lease, [])
        for binding in [each for each in bindings if each.first == first]:
            bindings.remove(binding)
            self._release(lease, binding)
        if not bindings:
            self._bound.pop(lease, None)

    def forget(self, lease: int) -> None:
        """A lease has ended, and no batch of it is under way."""
        for binding in self._bound.pop(lease, []):
            self._release(lease, binding)

    def of(self, tickets: NDArray[Any]) -> list[Binding | None] | None:
        """Where each ticket's rows lie, None for the arena; None in all where all of them lie there.

        Raises:
            Refused: rows of a lease that has others bound, or of memory that could not be opened.
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
                raise Refused(
                    found.broken if found else f"rows {first} to {first + rows} are not bound to device memory"
                )
            places.append(found)
        return places

    def close(self) -> None:
        """Let go of everything."""
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
        array = self.driver.array(pointer + offset, shape, dtype)
        return torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.as_tensor(array, device=self._device)

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
