"""Memory of a GPU that processes of one host share: CUDA's interprocess handles, by the driver's own library.

No torch here, and none on the wire: a handle is 64 bytes that the driver makes and the driver opens. The primary
context of a device is used, which is torch's, too, so that its streams and tensors may be mixed with what is made here.

Where the variable `_JURYBOX_FAKE_DEVICE` names a folder, files in it stand in for the device's memory: the same calls,
the same refusals, the same lifetimes. So the protocol is tested where there is no GPU.
"""

from __future__ import annotations

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
# The driver cuts smaller allocations out of a block, and shares all of it (CUDA C++ Programming Guide, "Interprocess
# Communication"): with it whatever else of this process lies there.
_BLOCK = 2 << 20


class Driver(Protocol):
    """What is asked of a device. Pointers, events and streams are the driver's, as integers."""

    fake: bool

    def allocate(self, size: int) -> int:
        """New device memory. Raises Refused where there is no room."""

    def free(self, pointer: int) -> None:
        """Free what `allocate` gave. Nobody else may have it open."""

    def extent(self, pointer: int) -> tuple[int, int]:
        """The allocation around a pointer: where it begins, and its bytes. Raises Refused: there is none."""

    def export(self, pointer: int) -> bytes:
        """A handle of the allocation that begins here, for other processes."""

    def open(self, handle: bytes) -> int:
        """Map what another process exported. Raises Refused: no such handle, or its memory is gone or out of reach."""

    def close(self, pointer: int) -> None:
        """Unmap what `open` gave."""

    def event(self) -> int:
        """A new event that other processes can wait for."""

    def export_event(self, event: int) -> bytes:
        """A handle of it."""

    def open_event(self, handle: bytes) -> int:
        """An event of another process. Raises Refused."""

    def record(self, event: int, stream: int) -> None:
        """The event happens when the stream has done what it was given so far."""

    def wait(self, event: int, stream: int) -> None:
        """What the stream is given from now on waits for what was recorded last."""

    def destroy_event(self, event: int) -> None:
        """Let go of an event."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Queue a copy on the device."""

    def synchronize(self, stream: int) -> None:
        """Wait for all that a stream was given."""

    def array(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """What torch, CuPy and others take as an array on the device, without a copy (`__cuda_array_interface__`)."""


class DeviceArray:
    """An array in device memory, for `torch.as_tensor`, `cupy.asarray` and others; it keeps nothing alive.

    Attributes:
        shape, dtype, pointer: of it.
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


class CudaDriver(Driver):
    """A device by libcuda.so.1, which comes with the driver.

    Args:
        device: its number among the visible ones.

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
        """A call with the context current in this thread."""
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
    """A handle as the driver takes it, by value."""
    if len(handle) != HANDLE:
        raise Refused(f"{len(handle)} bytes came as a handle of device memory, it has {HANDLE}")
    return _Handle.from_buffer_copy(handle)


# ---- files in place of a device


_FAKE = struct.Struct("<8s16sI36x")  # magic, name, process that made it; 64 bytes as CUDA's
_WAIT = 10.0  # seconds that the fake stream waits for an event
assert _FAKE.size == HANDLE


class FakeDriver(Driver):
    """Device memory that is files; an address of it is where this process has the file mapped.

    As with CUDA, a process cannot open what it exported itself, and memory that its owner freed while another has it
    open stays until that closes it. Unlike there, using it afterwards is an error: `array` refuses it.
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
        del self._maps[pointer]  # unmapped with the last array of it
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
        """As Driver.event. Its file counts what was recorded, and what of that has happened."""
        return self.allocate(16)

    def export_event(self, event: int) -> bytes:
        return _FAKE.pack(b"fakeevt", self._found(event)[1].encode(), os.getpid())

    def open_event(self, handle: bytes) -> int:
        return self._opened(handle, b"fakeevt")

    def record(self, event: int, stream: int) -> None:
        """As Driver.record: at once, unless the stream is 1, whose work is done when `complete` says so."""
        counts = self._counts(event)
        counts[0] += 1
        if stream != 1:
            counts[1] = counts[0]

    def complete(self, event: int) -> None:
        """What was recorded happens."""
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
    """The driver of a device, by its number among the visible ones. Raises Refused: there is none."""
    return _driver(device, os.environ.get(FAKE, ""))


@functools.cache
def _driver(device: int, fake: str) -> Driver:
    return FakeDriver(fake) if fake else CudaDriver(device)
