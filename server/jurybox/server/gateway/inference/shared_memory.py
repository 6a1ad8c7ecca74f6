"""The system-shared-memory extension: tensors in POSIX shared memory that a client created and registered.

Registration makes the gateway open files of its user. Therefore it is off until a setting gives a prefix for the names
of regions; other shared memory of the user cannot be registered.

Regions are read and written through their file and never mapped: if a client shrinks one, the request fails, whereas
access to a mapping would end this process (SIGBUS).
"""

from __future__ import annotations

import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Code, Refused, plain
from jurybox.protocol.row_frames import split_strings
from jurybox.protocol.spec import TensorSpec
from jurybox.server.gateway.inference.parameters import Place
from jurybox.server.gateway.inference.tensors import InputData, malformed
from jurybox.server.security.access import OWN_PREFIX

_POSIX = Path("/dev/shm")  # where shm_open(3) keeps its objects; JURYBOX_SHM_DIR applies only to our own files
_KEY = re.compile(r"/?[^/\0]{1,254}")
_MOST_NAMED = 255  # characters of a region's name, which is kept when its request is answered
_MOST_REGIONS = 256  # each in POSIX shared memory is an open file; a process may have about a thousand


@dataclass(frozen=True, slots=True)
class Registered:
    """A registered region."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Region(Registered):
    """A registered region of shared memory; `fd` is open while it is registered."""

    key: str
    offset: int
    fd: int


R = TypeVar("R", bound="Registered")


class Registry(Generic[R]):
    """Registered regions by name: the common base for POSIX shared memory and device memory.

    Args:
        kind: the name of a region in error messages.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._regions: dict[str, R] = {}

    def status(self, name: str = "") -> list[R]:
        """Return the named region; without a name, all. Raises Refused (code MODEL_NOT_FOUND) if it is unknown."""
        return [self._named(name)] if name else list(self._regions.values())

    def _require_free(self, name: str) -> None:
        if not 0 < len(name) <= _MOST_NAMED:
            raise Refused(f"a region's name has 1 to {_MOST_NAMED} characters, {len(name)} came", Code.MALFORMED)
        if name in self._regions:
            raise Refused(f"region {name!r} is registered already: unregister it first", Code.MALFORMED)

    def _require_room(self) -> None:
        if len(self._regions) >= _MOST_REGIONS:
            raise Refused(f"{_MOST_REGIONS} regions are registered: unregister those not needed", Code.BUSY)

    def _chosen(self, name: str) -> list[str]:
        """Return the name in a list; without a name, all names; an empty list if the name is unknown."""
        return [name] if name in self._regions else [] if name else list(self._regions)

    def check(self, place: Place, size: int, tensor: str) -> None:
        """Check that `size` bytes fit into the region.

        Raises:
            Refused: no such region. ProtocolMismatch (code MALFORMED): the place is outside of it or too small.
        """
        region = self._named(place.region)
        if place.offset + place.size > region.size:
            raise malformed(
                f"tensor {tensor!r}: bytes {place.offset} to {place.offset + place.size} of region {region.name!r} "
                f"were asked for, it has {region.size}"
            )
        if place.size < size:
            raise malformed(f"tensor {tensor!r} has {size} bytes, {place.size} of region {region.name!r} were given")

    def _named(self, name: str) -> R:
        if name not in self._regions:
            there = ", ".join(sorted(self._regions)[:20]) or "none"
            raise Refused(
                f"no {self._kind} {plain(name, 80)!r} is registered; there are: {there}", Code.MODEL_NOT_FOUND
            )
        return self._regions[name]


class Regions(Registry[Region]):
    """The registered regions, shared by all transports.

    Args:
        prefix: the required prefix of the regions' names; empty: none can be registered.

    Attributes:
        allowed: whether regions can be registered.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__("region")
        self._prefix = prefix
        self.allowed = bool(prefix)

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Register a region.

        Raises:
            Refused: the shared memory does not exist, is not permitted or too small, or the name is taken.
        """
        if not self.allowed:
            raise Refused(
                "shared memory is off here. To accept it from clients, set server.shared_memory_prefix to the prefix "
                "of their regions' names, on a server whose HTTP and gRPC listen on loopback alone"
            )
        self._require_free(name)
        self._require_room()
        fd = self._open(key)
        try:
            there = os.fstat(fd).st_size
            if size < 1 or offset < 0 or offset + size > there:
                raise Refused(
                    f"region {name!r}: bytes {offset} to {offset + size} were asked for, {key!r} has {there}",
                    Code.MALFORMED,
                )
        except BaseException:
            os.close(fd)
            raise
        self._regions[name] = Region(name, size, key, offset, fd)

    def unregister(self, name: str = "") -> None:
        """Unregister a region; without a name, all. An unknown name is ignored."""
        for chosen in self._chosen(name):
            os.close(self._regions.pop(chosen).fd)

    def read(self, place: Place, shape: tuple[int, ...], dtype: np.dtype[Any], tensor: str) -> NDArray[Any]:
        """Read a copy of the tensor. Raises the errors of `check`, and ProtocolMismatch if the region was shrunk."""
        size = math.prod(shape) * dtype.itemsize
        if place.size != size:
            raise malformed(f"tensor {tensor!r} has {size} bytes, {place.size} were given in shared memory")
        self.check(place, size, tensor)  # before the allocation: a declared shape could exhaust the memory
        array = np.empty(shape, dtype)
        region = self._named(place.region)
        left, at = array.reshape(-1).view(np.uint8).data, region.offset + place.offset
        while left:  # one call reads at most 2 GiB
            if not (size := os.preadv(region.fd, [left], at)):
                raise self._shrunk(region)
            left, at = left[size:], at + size
        return array

    def write(self, place: Place, array: NDArray[Any], tensor: str) -> None:
        """Write a tensor. Raises the errors of `read`, and Refused (code BUSY) if the memory is full."""
        self.check(place, array.nbytes, tensor)
        region = self._named(place.region)
        at = region.offset + place.offset
        if os.fstat(region.fd).st_size < at + array.nbytes:  # writing would extend the file again
            raise self._shrunk(region)
        left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        try:
            while left:  # one call writes at most 2 GiB, and less if the memory is full
                size = os.pwritev(region.fd, [left], at)
                left, at = left[size:], at + size
        except OSError as error:
            raise Refused(
                f"tensor {tensor!r} cannot be written to region {region.name!r}: {error.strerror}. A region takes "
                f"memory of {_POSIX} when it is first written: free some, or fill regions before they are registered",
                Code.BUSY,
            ) from error

    def close(self) -> None:
        """Unregister all regions."""
        self.unregister()

    def _open(self, key: str) -> int:
        """Open the file of a key; it must belong to this user and have the prefix."""
        if plain(key) != key or not _KEY.fullmatch(key) or key.lstrip("/") in (".", ".."):
            raise Refused(f"key {key!r}: expected a name as shm_open(3) takes it, such as '/my_input'", Code.MALFORMED)
        name = key.removeprefix("/")
        if not name.startswith(self._prefix) or name.startswith(OWN_PREFIX):
            raise Refused(f"{key!r} may not be registered: expected a name that begins with {self._prefix!r}")
        try:
            fd = os.open(_POSIX / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise Refused(
                f"shared memory {key!r} cannot be opened in {_POSIX}: {error.strerror}; the client creates it, on "
                "this host and as the server's user",
                Code.MALFORMED,
            ) from error
        found = os.fstat(fd)
        # Files of other users must not be written, nor files with a second link: they may be other files of this user.
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_nlink != 1:
            os.close(fd)
            raise Refused(f"{key!r} is not shared memory of the server's user with this name only")
        return fd

    def _shrunk(self, region: Region) -> Exception:
        return malformed(f"region {region.name!r} has been shrunk since it was registered: register it again")


class RegionData(InputData):
    """The source of an input in a registered region."""

    def __init__(self, regions: Regions, place: Place, name: str) -> None:
        self._regions, self._place, self._name = regions, place, name

    def elements(self, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
        """Return the elements as an array. Raises the errors of `Regions.read`."""
        return self._regions.read(self._place, shape, spec.numpy_dtype, self._name)

    def strings(self, n: int, spec: TensorSpec) -> list[bytes]:
        """Return the elements as n byte strings.

        Raises:
            Error (SPEC_MISMATCH): a length prefix is wrong. Any error of `Regions.read`.
        """
        if self._place.size > (most := n * (spec.capacity + 4)):
            raise malformed(f"tensor {self._name!r} has at most {most} bytes, {self._place.size} were given")
        data = self._regions.read(self._place, (self._place.size,), np.dtype(np.uint8), self._name)
        return split_strings(f"input {self._name!r}", data, n, spec.capacity)
