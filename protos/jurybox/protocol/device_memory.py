"""GPU memory that processes of one host share: CUDA's interprocess handles, through the driver's library.

Neither this module nor the wire format needs torch: a handle is 64 bytes that the driver creates and opens. It uses the
device's primary context, as torch does, so that torch's streams and tensors can be used with this memory.

If the variable `_JURYBOX_FAKE_DEVICE` names a folder, files in it replace device memory, with the same calls, errors
and lifetimes. So the protocol can be tested without a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import secrets
import struct
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Refused, Timeout

HANDLE = 64  # bytes of a handle, of memory or of an event
FAKE = "_JURYBOX_FAKE_DEVICE"
# The driver takes smaller allocations from a block and shares the whole block (CUDA C++ Programming Guide,
# "Interprocess Communication"), including other data of this process.
_BLOCK = 2 << 20


class Driver(Protocol):
    """The operations on a device. Pointers, events and streams are those of the driver, as integers."""

    fake: bool

    def allocate(self, size: int) -> int:
        """Allocate device memory. Raises Refused if there is too little."""

    def free(self, pointer: int) -> None:
        """Free memory of `allocate`. No other process may have it open."""

    def extent(self, pointer: int) -> tuple[int, int]:
        """Return begin and size in bytes of the allocation that contains a pointer. Raises Refused if there is none."""

    def export(self, pointer: int) -> bytes:
        """Return a handle of the allocation that begins at `pointer`, for other processes."""

    def open(self, handle: bytes) -> int:
        """Map memory that another process exported. Raises Refused if the handle or its memory cannot be used."""

    def close(self, pointer: int) -> None:
        """Unmap memory of `open`."""

    def event(self) -> int:
        """Create an event that other processes can wait for."""

    def export_event(self, event: int) -> bytes:
        """Return a handle of an event, for other processes."""

    def open_event(self, handle: bytes) -> int:
        """Open an event of another process. Raises Refused."""

    def record(self, event: int, stream: int) -> None:
        """Record the event after the work queued on the stream so far."""

    def wait(self, event: int, stream: int) -> None:
        """Make work queued on the stream from now on wait for the event's last record."""

    def destroy_event(self, event: int) -> None:
        """Release an event."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Queue a copy on the device."""

    def synchronize(self, stream: int) -> None:
        """Wait for all work queued on a stream."""

    def array(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array on the device for torch, CuPy and others, without a copy (`__cuda_array_interface__`)."""


class DeviceArray:
    """An array in device memory for `torch.as_tensor`, `cupy.asarray` and others. It does not keep the memory alive.

    Attributes:
        shape, dtype, pointer: shape, dtype and address of the array.
    """

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.pointer, self.shape, self.dtype = pointer, shape, dtype
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (pointer, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }


def as_tensor(torch: Any, array: Any, pointer: int, device: Any) -> Any:
    """Return an array of `Driver.array`, which begins at `pointer`, as a tensor on a device, without a copy.

    Args:
        torch: the module, which is not imported here.

    Raises:
        Refused: the memory is on another device: torch refuses it, or silently copies it.
    """
    try:
        tensor = torch.as_tensor(array, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Refused(f"torch cannot use memory at {pointer:#x} on {device}: {error}") from error
    if tensor.numel() and tensor.data_ptr() != pointer:
        raise Refused(f"the memory at {pointer:#x} is not on {device}")
    return tensor


def page_lock(torch: Any, address: int, size: int, device: Any) -> int:
    """Lock host memory, so that a device can access it by DMA (cudaHostRegister); return CUDA's status, 0 if it did.

    Args:
        torch: the module, which is not imported here.
    """
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(address, size, 0))
    if status:  # it is also this thread's last error, which torch would take for that of the next kernel
        if hasattr(runtime, "cudaGetLastError"):
            runtime.cudaGetLastError()
        else:
            with contextlib.suppress(RuntimeError):  # so this kernel takes it, and torch clears what it raises
                torch.ones(1, device=device)
    return status


class CudaDriver(Driver):
    """A device, through the driver's library libcuda.so.1.

    Args:
        device: its index among the visible devices.

    Raises:
        Refused: there is no driver, or no such device.
    """

    fake = False

    def __init__(self, device: int) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Refused(f"no CUDA driver on this host ({error}): send rows through host memory") from error
        self._call("cuInit", ctypes.c_uint(0))
        handle, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := int(getattr(self._cuda, name)(*arguments)):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
            raise Refused(f"{name} gave {status} ({(text.value or b'unknown').decode()})")

    def _here(self, name: str, *arguments: Any) -> None:
        """Call a function with the context current in this thread."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def allocate(self, size: int) -> int:
        pointer, whole = ctypes.c_uint64(), -(-size // _BLOCK) * _BLOCK
        self._here("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(whole))
        return pointer.value

    def free(self, pointer: int) -> None:
        self._here("cuMemFree_v2", ctypes.c_uint64(pointer))

    def extent(self, pointer: int) -> tuple[int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._here("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
        return base.value, size.value

    def export(self, pointer: int) -> bytes:
        handle = (ctypes.c_char * HANDLE)()
        self._here("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle.raw)

    def open(self, handle: bytes) -> int:
        pointer = ctypes.c_uint64()
        lazily = ctypes.c_uint(1)  # peers' access
        self._here("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _struct(handle), lazily)
        return pointer.value

    def close(self, pointer: int) -> None:
        self._here("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def event(self) -> int:
        event = ctypes.c_void_p()
        self._here("cuEventCreate", ctypes.byref(event), ctypes.c_uint(2 | 4))  # no timing, interprocess
        return int(event.value or 0)

    def export_event(self, event: int) -> bytes:
        handle = (ctypes.c_char * HANDLE)()
        self._here("cuIpcGetEventHandle", ctypes.byref(handle), ctypes.c_void_p(event))
        return bytes(handle.raw)

    def open_event(self, handle: bytes) -> int:
        event = ctypes.c_void_p()
        self._here("cuIpcOpenEventHandle", ctypes.byref(event), _struct(handle))
        return int(event.value or 0)

    def record(self, event: int, stream: int) -> None:
        self._here("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, event: int, stream: int) -> None:
        self._here("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def destroy_event(self, event: int) -> None:
        self._here("cuEventDestroy_v2", ctypes.c_void_p(event))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        places = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._here("cuMemcpyDtoDAsync_v2", *places, ctypes.c_size_t(size), ctypes.c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        self._here("cuStreamSynchronize", ctypes.c_void_p(stream))

    def array(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        return DeviceArray(pointer, shape, dtype)


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE)]


def _struct(handle: bytes) -> _Handle:
    """Return a handle as the structure that the driver expects by value."""
    if len(handle) != HANDLE:
        raise Refused(f"{len(handle)} bytes came as a handle of device memory, it has {HANDLE}")
    return _Handle.from_buffer_copy(handle)


# ---- files instead of a device


_FAKE = struct.Struct("<8s16sI36x")  # magic, name, exporting process; 64 bytes like CUDA's
_WAIT = 10.0  # seconds that the fake stream waits for an event
assert _FAKE.size == HANDLE


class FakeDriver(Driver):
    """Files instead of device memory; an address is that of the file's mapping in this process.

    As with CUDA, a process cannot open its own exports, and memory that its owner frees while another process has it
    open remains until that process closes it. Unlike with CUDA, later use is an error: `array` refuses it.
    """

    fake = True

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._maps: dict[int, tuple[mmap.mmap, str]] = {}  # by address: memory, and the name of its file
        self._own: set[int] = set()

    def allocate(self, size: int) -> int:
        name = secrets.token_hex(8)
        with (self._folder / name).open("xb") as file:
            file.truncate(size)
        pointer = self._mapped(name)
        self._own.add(pointer)
        return pointer

    def free(self, pointer: int) -> None:
        _, name = self._found(pointer)
        self._own.discard(pointer)
        del self._maps[pointer]  # unmapped with its last array
        (self._folder / name).unlink(missing_ok=True)

    def extent(self, pointer: int) -> tuple[int, int]:
        for base, (memory, _) in self._maps.items():
            if base <= pointer < base + len(memory):
                return base, len(memory)
        raise Refused(f"{pointer:#x} is no device memory of this process")

    def export(self, pointer: int) -> bytes:
        return _FAKE.pack(b"fakemem", self._found(pointer)[1].encode(), os.getpid())

    def open(self, handle: bytes) -> int:
        return self._opened(handle, b"fakemem")

    def close(self, pointer: int) -> None:
        self._found(pointer)
        del self._maps[pointer]

    def event(self) -> int:
        """See `Driver.event`. The file counts the records, and those that are complete."""
        return self.allocate(16)

    def export_event(self, event: int) -> bytes:
        return _FAKE.pack(b"fakeevt", self._found(event)[1].encode(), os.getpid())

    def open_event(self, handle: bytes) -> int:
        return self._opened(handle, b"fakeevt")

    def record(self, event: int, stream: int) -> None:
        """See `Driver.record`. Work is complete at once, except on stream 1, where `complete` completes it."""
        counts = self._counts(event)
        counts[0] += 1
        if stream != 1:
            counts[1] = counts[0]

    def complete(self, event: int) -> None:
        """Complete the work recorded so far."""
        counts = self._counts(event)
        counts[1] = counts[0]

    def wait(self, event: int, stream: int) -> None:
        counts = self._counts(event)
        recorded, until = counts[0], time.monotonic() + _WAIT
        while counts[1] < recorded:
            if time.monotonic() > until:
                raise Timeout(f"an event of a client did not happen within {_WAIT:.0f} s")
            time.sleep(0.001)

    def destroy_event(self, event: int) -> None:
        if event in self._own:
            self.free(event)
        else:
            self.close(event)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        one = np.dtype(np.uint8)
        self.array(target, (size,), one)[:] = self.array(source, (size,), one)

    def synchronize(self, stream: int) -> None:
        pass

    def array(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        base, size = self.extent(pointer)
        flat = np.frombuffer(self._maps[base][0], np.uint8, size)[pointer - base :]
        return flat[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)

    def _counts(self, event: int) -> NDArray[np.uint64]:
        return self.array(event, (2,), np.dtype(np.uint64))

    def _mapped(self, name: str) -> int:
        with (self._folder / name).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        pointer = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._maps[pointer] = memory, name
        return pointer

    def _found(self, pointer: int) -> tuple[mmap.mmap, str]:
        if pointer not in self._maps:
            raise Refused(f"{pointer:#x} is no device memory of this process")
        return self._maps[pointer]

    def _opened(self, handle: bytes, kind: bytes) -> int:
        if len(handle) != HANDLE:
            raise Refused(f"{len(handle)} bytes came as a handle of device memory, it has {HANDLE}")
        magic, name, maker = _FAKE.unpack(handle)
        if magic.rstrip(b"\0") != kind or not name.isalnum():
            raise Refused("the driver knows no such handle")
        if maker == os.getpid():
            raise Refused("a process cannot open what it exported itself")
        try:
            return self._mapped(name.decode())
        except OSError as error:
            raise Refused("the memory of that handle is gone") from error


def driver(device: int = 0) -> Driver:
    """Return the driver of a device, by its index among the visible ones. Raises Refused if there is none."""
    return _driver(device, os.environ.get(FAKE, ""))


@functools.cache
def _driver(device: int, fake: str) -> Driver:
    return FakeDriver(fake) if fake else CudaDriver(device)
