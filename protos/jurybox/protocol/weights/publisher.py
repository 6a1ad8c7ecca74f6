"""The learner's end of a weights channel."""

from __future__ import annotations

import os
import secrets
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol import forks
from jurybox.protocol.device_memory import Driver, as_tensor, page_lock
from jurybox.protocol.errors import Refused, ServerGone, SpecMismatch
from jurybox.protocol.locks import TimedLock
from jurybox.protocol.segment import try_lock
from jurybox.protocol.weights import TensorPlace, WeightsChannel, WeightsLayout
from jurybox.protocol.weights.channel import PUBLISHER_LOCK, all_finite, encode_extra
from jurybox.protocol.weights.layout import DTYPES, dtype_name

_LARGEST = 2**63 - 1  # a version shares a word with its slot's number
_LARGEST_STEP = 2**32
_NAMED = 8  # tensors that a message lists
_PATIENCE = 60.0  # seconds to wait for another thread's publication


def tensors_of(source: Any) -> Mapping[str, Any]:
    """Return the named tensors of a module (its ``state_dict()``), or a mapping of arrays or tensors itself.

    Raises:
        SpecMismatch: `source` is neither.
    """
    if hasattr(source, "state_dict"):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        raise SpecMismatch(
            f"expected a module, a state_dict or a dict of arrays to publish, got {type(source).__name__}; "
            "give a lone array a name: {'weight': array}"
        )
    return source


_COMPILED, _PARALLEL = "_orig_mod.", "module."  # what torch.compile and data parallelism add to names


def in_layout(tensors: Mapping[str, Any], layout: WeightsLayout, *, partial: bool = False) -> Mapping[str, Any]:
    """Return the tensors by the layout's names, if they have them behind the wrappers of torch.compile or DataParallel.

    `partial`: only a part of the layout's names may be there.

    Values of a state_dict that are no tensors, those of `get_extra_state`, are left away. Tensors that do not fit are
    returned as they came, for the error.
    """
    places = layout.places.keys()

    def fits(found: Mapping[str, Any]) -> bool:
        return found.keys() <= places if partial else found.keys() == places

    if fits(tensors):
        return tensors
    found = {name: tensor for name, tensor in tensors.items() if hasattr(tensor, "dtype")}
    for _ in range(2):  # either wrapper may be the outer one
        found = {name.replace(_COMPILED, ""): tensor for name, tensor in found.items()}
        if all(name.startswith(_PARALLEL) for name in found) and not fits(found):
            found = {name.removeprefix(_PARALLEL): tensor for name, tensor in found.items()}
    return found if fits(found) else tensors


class Publisher(forks.Closing):
    """Publishes the versions of a model's weights. A channel has one publisher at a time.

    A file lock ensures this. It is released when the publisher is closed or garbage-collected, and by the kernel when
    this process ends in any way; the next publisher continues after the newest complete version. Threads of one process
    may share a publisher. In a forked child the parent's publisher raises Refused. A signal handler or a destructor
    cannot publish within a publication (Refused); if it closes the publisher, the publication does so at its end.

    Args:
        channel: the channel to publish on. The caller closes it, unless the publisher `owns` it.
        driver: the driver of the device that publications come from. It keeps a copy of each slot on the device, from
            which engines on the same device copy the weights instead of from the host. This memory is freed when the
            process ends, since other processes may have it open.

    Raises:
        Refused: the channel has a living publisher.
    """

    def __init__(self, channel: WeightsChannel, *, owns: bool = False, driver: Driver | None = None) -> None:
        channel.require_open()
        self._driver = driver
        self.channel = channel
        self._owns = owns
        self._parts = channel.layout.parts()
        self._places = [
            (place, place.stored, (f"torch.{place.dtype}", f"torch.{place.stored.name}"))
            for place in channel.layout.places.values()
        ]
        self._turn = TimedLock(f"a publication to weights channel {channel.name}")
        self._closing = False
        self._pid = os.getpid()
        # A separate open file, so that two publishers on one channel object conflict as two processes would.
        self._place = place = _Place(os.open(f"/proc/self/fd/{channel.segment.fd}", os.O_RDWR | os.O_CLOEXEC))
        try:
            if not try_lock(place.fd, PUBLISHER_LOCK):
                raise Refused(
                    f"weights channel {channel.name} has a publisher, process {int(channel.publisher_pid[0])}: "
                    "one at a time; close that one first, or let it end"
                )
            channel.publisher_pid[0] = self._pid
            self.version = channel.slots.take_over()
            channel.device["generation"] = channel.device["versions"] = 0  # left by an earlier publisher
        except BaseException:
            place.close()
            raise
        forks.register(self)
        weakref.finalize(self, place.close)

    def publish(
        self,
        source: Any,
        extra: Mapping[str, Any] | None = None,
        *,
        check_finite: bool = False,
        version: int | None = None,
        partial: bool = False,
    ) -> int:
        """Publish weights and the extra atomically; return their version.

        CPU tensors are copied directly into the slot. Device tensors are gathered into one flat buffer on the device,
        and copied in one transfer. Never waits for readers.

        Args:
            source: a module, a state_dict, or a dict of NumPy arrays or torch tensors, with exactly the layout's names,
                shapes and dtypes. Names of torch.compile (`_orig_mod.`) and DataParallel (`module.`) are recognised.
                bfloat16 and float8 are torch tensors, arrays of ml_dtypes' dtypes, or uint16 and uint8 arrays of their
                bits.
            extra: JSON-serialisable values and small arrays that readers get together with these weights.
            check_finite: refuse NaN and infinities, also in `extra`.
            version: the version number, larger than the last one by 2**32 at most; default: the last one plus one.
            partial: `source` has only some of the layout's tensors, such as those of an adapter. The others keep their
                values of the version before, so readers and engines get a complete version, also those that missed
                some. The extra is not kept.

        Raises:
            SpecMismatch: the layout differs (the message names the difference), or `extra` is of a wrong kind or too
                large.
            Refused: a value is not finite, with `check_finite`; there is no complete version to add a part to: nothing
                was published, or (in snapshot mode) the last publisher was killed while writing; the version is not
                larger than the last one, or too large; the publisher was closed, or created before a fork, or is that
                of another device than the tensors'; or this is a signal handler or a destructor within another
                publication.
            Timeout: another thread's publication did not end.
            ServerGone: the owner of the channel is gone.
        """
        return self._published(source, extra, check_finite, version, _LARGEST_STEP, partial)

    def restore(self, source: Any, extra: Mapping[str, Any] | None, version: int) -> int:
        """Publish what was saved from an earlier channel under its version, which may be any number of steps ahead."""
        return self._published(source, extra, False, version, _LARGEST, False)

    def _published(
        self,
        source: Any,
        extra: Mapping[str, Any] | None,
        check_finite: bool,
        version: int | None,
        step: int,
        partial: bool,
    ) -> int:
        tensors = in_layout(tensors_of(source), self.channel.layout, partial=partial)
        packed = encode_extra(extra)
        if len(packed) > self.channel.extra_bytes:
            raise SpecMismatch(
                f"extra takes {len(packed)} bytes, weights channel {self.channel.name} has room for "
                f"{self.channel.extra_bytes}; publish less with the weights, or make the channel with more extra_bytes"
            )
        if check_finite and not all_finite(extra):
            raise Refused("extra holds NaN or infinity, and check_finite asks to refuse that; nothing was published")
        try:
            with self._turn.once(_PATIENCE):
                return self._publish(tensors, packed, check_finite, version, step, partial)
        finally:
            if self._closing:
                self.close()

    def _publish(
        self, tensors: Mapping[str, Any], extra: bytes, check: bool, version: int | None, step: int, partial: bool
    ) -> int:
        self._require_open()
        if not self.channel.owner_lives():
            raise ServerGone(
                f"the owner of weights channel {self.channel.name} is gone and nobody would read this: connect again "
                "and take a new publisher"
            )
        number = self._number(version, step)
        if partial:
            self._publish_part(tensors, extra, number, check)
        elif any(_on_device(tensor) for tensor in tensors.values()):
            self._publish_from_device(tensors, extra, number, check)
        else:
            self._publish_from_host(tensors, extra, number, check)
        self.version = number
        return number

    def _publish_from_host(self, tensors: Mapping[str, Any], extra: bytes, version: int, check: bool) -> None:
        kept = []  # contiguous copies, which must live until they are copied to the slot
        if len(tensors) != len(self._places):
            raise self._mismatch(tensors)
        for row, (place, stored, of_torch) in enumerate(self._places):
            tensor = tensors.get(place.name)
            located = None if tensor is None else _locate(tensor, place, stored, of_torch)
            if located is None:
                raise self._mismatch(tensors)
            address, keep = located
            kept.append(keep)
            self._parts[row, 0] = address
        self._write(self._parts, extra, version, check)

    def _publish_part(self, tensors: Mapping[str, Any], extra: bytes, version: int, check: bool) -> None:
        """Publish some tensors. The others are copied from the newest slot, or stay there if it is the only one.

        No other process writes to the slots, so the newest one stays what it is meanwhile.
        """
        if not tensors or not tensors.keys() <= self.channel.layout.places.keys():
            raise part_mismatch(self.channel.layout, self.channel.name, tensors)
        newest = self.channel.claim()
        if not newest.version:
            raise Refused(
                f"a part was to be published on {self.channel.name}, which has no complete version to take the other "
                "tensors from: publish all of them first"
            )
        whole = int(self.channel.slot(newest).__array_interface__["data"][0])
        kept, rows = [], []
        for row, (place, stored, of_torch) in enumerate(self._places):
            tensor = tensors.get(place.name)
            if tensor is None:
                self._parts[row, 0] = whole + place.offset
                if self.channel.mode == "double_buffer":
                    rows.append(row)
                continue
            located = _locate(tensor.cpu() if _on_device(tensor) else tensor, place, stored, of_torch)
            if located is None:
                raise part_mismatch(self.channel.layout, self.channel.name, tensors)
            self._parts[row, 0], keep = located
            kept.append(keep)
            rows.append(row)
        self._write(np.ascontiguousarray(self._parts[rows]), extra, version, check)

    def _write(self, parts: npt.NDArray[np.uint64], extra: bytes, version: int, check: bool) -> None:
        bad = self.channel.slots.publish(parts, extra, version, check)
        if bad >= 0:
            name = next(place.name for place, _, _ in self._places if place.offset == parts[bad, 1] and place.nbytes)
            raise Refused(
                f"tensor {name!r} holds NaN or infinity, and check_finite asks to refuse that; nothing was published"
            )

    def _publish_from_device(self, tensors: Mapping[str, Any], extra: bytes, version: int, check: bool) -> None:
        if WeightsLayout.of(tensors).difference(self.channel.layout):
            raise self._mismatch(tensors)
        first = next(tensor for tensor in tensors.values() if _on_device(tensor))
        stage = self._place.stage
        if stage is None or stage.device != first.device:
            self.close_stage()
            stage = self._place.stage = DeviceStage(self.channel, first.device, self._driver)
        stage.gather(tensors)
        if check and (bad := stage.not_finite()):
            raise Refused(
                f"tensor {bad!r} holds NaN or infinity, and check_finite asks to refuse that; nothing was published"
            )
        slot = self.channel.slots.begin()
        stage.transfer(slot, version)
        self.channel.slots.commit(slot, version, extra)

    def _number(self, version: int | None, step: int) -> int:
        newest, name = self.channel.newest, self.channel.name
        number = newest + 1 if version is None else version
        if number <= newest:
            raise Refused(
                f"version {number} was to be published on {name}, whose newest is {newest}: versions only grow"
            )
        if number > newest + step:
            raise Refused(
                f"version {number} was to be published on {name}, whose newest is {newest}: a version can be larger by "
                "2**32 at most, because all later ones are larger still"
            )
        if number > _LARGEST:
            raise Refused(f"version {number} was to be published on {name}: {_LARGEST} is the largest")
        return number

    def _mismatch(self, tensors: Mapping[str, Any]) -> SpecMismatch:
        return layout_mismatch(self.channel.layout, self.channel.name, tensors)

    def _require_open(self) -> None:
        if self._place.forked:
            raise Refused(
                f"this publisher of {self.channel.name} belongs to process {self._pid}, and was made before a fork; a "
                "child would publish alongside it: make a publisher in the process that learns"
            )
        if self._closing or self._place.fd < 0:
            raise Refused(f"this publisher of {self.channel.name} was closed; make another one")

    def close_stage(self) -> None:
        """Free the buffer on the device and undo the page-locking; the next publication from a device repeats both."""
        self._place.close_stage()

    def close(self) -> None:
        """Release the channel for another publisher. May be called again.

        A publication that is under way in this thread does it at its end.

        Raises:
            Timeout: another thread's publication did not end; it closes the publisher when it does.
        """
        self._closing = True
        if self._turn.mine:
            return
        with self._turn.within(_PATIENCE):
            self._place.close()
            if self._owns:
                self.channel.close()

    def _after_fork_in_child(self) -> None:
        self._turn.anew()  # a thread of the parent may have held the lock
        self._place.leave_to_parent()


class _Place:
    """The resources of a publisher: the open file with the lock, and page-locked memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.stage: DeviceStage | None = None
        self.forked = False

    def close_stage(self) -> None:
        if self.stage is not None and not self.forked:
            self.stage.close()
            self.stage = None

    def close(self) -> None:
        self.close_stage()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def leave_to_parent(self) -> None:
        """Leave lock and device buffer to the parent, in a forked child."""
        self.forked = True
        self.close()


def layout_mismatch(layout: WeightsLayout, channel: str, tensors: Mapping[str, Any]) -> SpecMismatch:
    """Return the error for tensors that do not match a channel's layout; it names the difference."""
    came = []
    for name, given in tensors.items():
        tensor = given if hasattr(given, "dtype") else np.asarray(given)
        place, dtype = layout.places.get(name), dtype_name(tensor)
        # Tensors passed as arrays of their bits are no difference.
        came.append((name, place.dtype if place and dtype == place.stored.name else dtype, tuple(tensor.shape)))
    return SpecMismatch(
        f"these weights don't fit weights channel {channel}: {layout.difference(WeightsLayout(came))}; "
        "publish what the model was made with, or make the model anew"
    )


def part_mismatch(layout: WeightsLayout, channel: str, tensors: Mapping[str, Any]) -> SpecMismatch:
    """Return the error for tensors that are no part of a channel's layout; it names the difference."""
    if not tensors:
        return SpecMismatch(f"a part of the weights of channel {channel} came without a tensor: expected one at least")
    known = [name for name in tensors if name in layout.places]
    if known:
        return layout_mismatch(layout.only(known), channel, tensors)
    return SpecMismatch(
        f"the weights of channel {channel} have no tensor {next(iter(tensors))!r}: expected some of "
        f"{', '.join(list(layout.places)[:_NAMED])}"
    )


def _on_device(tensor: Any) -> bool:
    device = getattr(tensor, "device", None)  # NumPy 2 arrays have one too: the string "cpu"
    return device is not None and getattr(device, "type", device) != "cpu"


def _locate(
    tensor: Any, place: TensorPlace, stored: np.dtype[Any], of_torch: tuple[str, ...]
) -> tuple[int, Any] | None:
    """Return the address of a CPU tensor's bytes, and the object that owns them; None if it does not match.

    `stored` is the dtype of an array, `of_torch` are the names of dtypes that a tensor may have.
    """
    if hasattr(tensor, "data_ptr"):
        if tuple(tensor.shape) != place.shape or str(tensor.dtype) not in of_torch:
            return None
        whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return int(whole.data_ptr()), whole
    if (
        type(tensor) is np.ndarray
        and tensor.dtype == stored
        and tensor.shape == place.shape
        and tensor.flags.c_contiguous
    ):
        return int(tensor.__array_interface__["data"][0]), tensor  # usually; the rest takes several times as long
    array = array_of(tensor, place)
    return None if array is None else (int(array.__array_interface__["data"][0]), array)


def array_of(values: Any, place: TensorPlace) -> npt.NDArray[Any] | None:
    """Return values as a contiguous array in the host's byte order; None if shape or dtype does not match."""
    array: npt.NDArray[Any] = np.ascontiguousarray(values).reshape(np.shape(values))
    if array.shape != place.shape or array.dtype.name not in (place.dtype, place.stored.name):
        return None
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


# Publication from a device: tensors are gathered there, then copied in one transfer.
#
# torch is never imported here: a caller that passes a tensor on a device has imported it already.


_SHARED: dict[tuple[bool, str, str], list[int]] = {}  # exported; freed at exit, since others may have it open


class DeviceStage:
    """A flat buffer on a device in a channel's layout, and the channel's slots as targets of its transfers.

    One transfer replaces one per tensor, each of which costs a launch and a synchronisation. The slots are page-locked
    if CUDA allows it, so that the device writes directly to shared memory.

    Args:
        channel: the channel with layout and slots.
        device: a ``torch.device``.
        driver: shares publications with other processes on the device; None: they are not shared.
    """

    def __init__(self, channel: WeightsChannel, device: Any, driver: Driver | None = None) -> None:
        self._torch = torch = sys.modules["torch"]
        self.device = device
        self._channel = channel
        places = channel.layout.places.values()
        self._flat = torch.empty(channel.layout.nbytes, dtype=torch.uint8, device=device)
        self._views = channel.layout.tensors(self._flat)
        self._floating = [place.name for place in places if DTYPES[place.dtype].width]
        self._targets = [
            torch.from_numpy(channel.writable_slot(number)) for number in range(1 + (channel.mode == "double_buffer"))
        ]
        self._shared = [] if driver is None else self._share(driver, len(self._targets))
        self._locked = [target for target in self._targets if self._page_lock(target)]

    def gather(self, tensors: Mapping[str, Any]) -> None:
        """Copy the tensors into the flat buffer, with as few kernels as torch allows."""
        with self._torch.no_grad():
            sources = [tensors[name].detach() for name in self._views]
            self._torch._foreach_copy_(list(self._views.values()), sources)

    def not_finite(self) -> str | None:
        """Return the name of the first gathered tensor with NaN or infinity, or None. Synchronises once."""
        if not self._floating:
            return None
        # float8 has no isfinite; float32 represents all of its values exactly.
        finite = [
            self._torch.isfinite(view.float() if view.element_size() == 1 else view).all()
            for view in (self._views[name] for name in self._floating)
        ]
        verdicts = self._torch.stack(finite).tolist()
        return next((name for name, good in zip(self._floating, verdicts, strict=True) if not good), None)

    def transfer(self, slot: int, version: int = 0) -> None:
        """Copy the flat buffer to slot `slot`, and to the slot's shared device memory if there is any; wait for it."""
        if self._shared:
            self._channel.device["versions"][0, slot] = 0
            self._shared[slot].copy_(self._flat)
        self._targets[slot].copy_(self._flat)  # after it on the same stream
        if self._shared:
            self._channel.device["versions"][0, slot] = version

    def _share(self, driver: Driver, slots: int) -> list[Any]:
        """Return exported device memory for each slot; stages of the same size share it.

        Raises:
            Refused: the driver's device is not that of the publications.
        """
        key = driver.fake, str(self.device), self._channel.name
        new = key not in _SHARED
        if new:
            _SHARED[key] = [driver.allocate(max(1, self._channel.layout.nbytes)) for _ in range(slots)]
        record = self._channel.device
        record["generation"] = 0
        shape, dtype = (self._channel.layout.nbytes,), np.dtype(np.uint8)
        try:
            tensors = [
                as_tensor(self._torch, driver.array(pointer, shape, dtype), pointer, self.device)
                for pointer in _SHARED[key]
            ]
        except Refused as error:
            if new:  # no other process has it open, since it was not exported
                for pointer in _SHARED.pop(key):
                    driver.free(pointer)
            raise Refused(
                f"the publisher's GPU is not {self.device}, which holds the published tensors: open it with that "
                f"device, or without one ({error})"
            ) from error
        for slot, pointer in enumerate(_SHARED[key]):
            record["handles"][0, slot] = np.frombuffer(driver.export(pointer), np.uint8)
        record["generation"] = secrets.randbits(62) | 1
        return tensors

    def close(self) -> None:
        """Undo the page-locking, which must happen before the memory is unmapped."""
        for target in self._locked:
            self._torch.cuda.cudart().cudaHostUnregister(target.data_ptr())
        self._locked.clear()

    def _page_lock(self, target: Any) -> bool:
        if self.device.type != "cuda" or target.numel() == 0:
            return False
        # Without page-locking (locked-memory limit, no support in the driver) transfers are only slower: they use
        # CUDA's internal page-locked buffer.
        return page_lock(self._torch, target.data_ptr(), target.numel(), self.device) == 0
