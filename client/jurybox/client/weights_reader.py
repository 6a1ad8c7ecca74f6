"""An actor's end of a weights channel: the newest weights as arrays, without a server and without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import Refused, SpecMismatch, Timeout
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.extra import decode

# Native waits are cut into slices, so that Ctrl-C is heard.
_SLICE_SECONDS = 0.1
_LOOK_SECONDS = 0.001  # between two looks whether the engines have caught up

State = dict[str, npt.NDArray[Any]]


class Weights(NamedTuple):
    """One whole publication: arrays by name, its version, and what was published with it."""

    state: State
    version: int
    extra: dict[str, Any]


class WeightsReader:
    """Reads whole publications from a channel. Any number of readers, in any processes; none disturbs the publisher.

    Args:
        channel: to read from. It stays the caller's to close.
        max_lag: versions that answers may be behind, as the model's settings say; 0: any number.
        in_use: gives the version that the engine answers with which is furthest behind; None for a bare channel.

    Attributes:
        held_back: how often `wait_until_fresh` had to wait; `held_back_seconds`: for how long in all.
        tries: copies that the last `read` needed; more than one where a publisher overtook it.
        age_seconds: how old the last publication read was when it was read.
    """

    def __init__(self, channel: WeightsChannel, max_lag: int = 0, in_use: Callable[[], int] | None = None) -> None:
        self.channel = channel
        self.max_lag = max_lag
        self.held_back = 0
        self.held_back_seconds = 0.0
        self._in_use = in_use
        self.layout = channel.layout
        self.tries = 0
        self.age_seconds = 0.0
        self._parts = self.layout.parts()
        self._whole = np.array([[0, 0, self.layout.nbytes, 0, 0]], np.uint64)
        self._extra = np.zeros(channel.extra_bytes, np.uint8)

    @property
    def newest(self) -> int:
        """The newest version; 0 when nothing has been published yet."""
        return self.channel.newest

    def newer_than(self, seen: int) -> bool:
        """Whether there is a version newer than `seen` (0: any). One load from shared memory."""
        return self.channel.newest > seen

    def wait_newer_than(self, seen: int, timeout: float = 10.0) -> bool:
        """Sleep until there is a version newer than `seen`; False when `timeout` seconds passed first."""
        end = time.monotonic() + timeout
        while not self.channel.slots.wait_newer(seen, min(_SLICE_SECONDS, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                return False
        return True

    def lag(self, version: int | None = None) -> int:
        """How many versions a row is behind that was computed with `version`; without one: what engines answer with.

        Raises:
            Refused: no version, and the reader is of a bare channel, which knows no engines.
        """
        if version is None:
            if self._in_use is None:
                raise Refused(
                    f"weights channel {self.channel.name} was opened without a server, so which version engines answer "
                    "with is not known: take the reader from server.weights(name), or say the version"
                )
            version = self._in_use()
        return max(0, self.channel.newest - version)

    def wait_until_fresh(self, timeout: float = 10.0, *, max_lag: int | None = None) -> bool:
        """Hold a collector back while the engines' answers are too far behind what has been published.

        Costs two loads from shared memory where nothing has to be waited for.

        Args:
            timeout: seconds.
            max_lag: versions they may be behind; the model's `max_lag` without it, where 0 means any number.

        Returns:
            False when they still were too far behind after `timeout`.

        Raises:
            Refused: the reader is of a bare channel.
        """
        most = self.max_lag if max_lag is None else max_lag
        if (max_lag is None and most == 0) or self.lag() <= most:
            return True
        self.held_back += 1
        began = time.monotonic()
        try:
            while (fresh := self.lag() <= most) is False and time.monotonic() - began < timeout:
                time.sleep(_LOOK_SECONDS)
        finally:
            self.held_back_seconds += time.monotonic() - began
        return fresh

    def buffers(self) -> State:
        """Arrays for `read(out=...)`, one per tensor, in one block of memory; their contents are arbitrary."""
        return self.layout.views(np.empty(self.layout.nbytes, np.uint8))

    def read(self, *, timeout: float = 1.0, out: State | None = None) -> Weights:
        """The newest publication, whole: a dict of arrays, its version, its extra.

        Args:
            timeout: seconds to wait for a first publication, or (in a snapshot channel) for the publisher to finish.
            out: arrays to fill, C-contiguous, with the layout's names, shapes and stored dtypes, or an earlier `state`;
                without it the arrays are new. On an error their contents are arbitrary.

        Returns:
            ``(state, version, extra)``. bfloat16 tensors are uint16 arrays of their bits;
            `jurybox.protocol.weights.widen` makes them float32.

        Raises:
            Timeout: nothing whole could be read in time; the message says why.
            SpecMismatch: `out` does not fit.
        """
        if out is None:
            flat = np.empty(self.layout.nbytes, np.uint8)
            state, parts = self.layout.views(flat), self._whole
            parts[0, 0] = flat.__array_interface__["data"][0]
        else:
            state, parts = out, self._parts
            parts[:, 0] = self._addresses(out)
        version, extra = self._read_parts(parts, timeout)
        return Weights(state, version, decode(extra))

    def read_flat(self, out: npt.NDArray[np.uint8], *, timeout: float = 1.0) -> tuple[int, dict[str, Any]]:
        """As `read`, into ``layout.nbytes`` bytes laid out as the slot is (`layout.views` gives the arrays).

        Raises:
            Timeout, SpecMismatch: as `read`.
        """
        if (
            out.dtype != np.uint8
            or out.shape != (self.layout.nbytes,)
            or not out.flags.c_contiguous
            or not out.flags.writeable
        ):
            raise SpecMismatch(
                f"expected a writable uint8[{self.layout.nbytes}] to read into, got {out.dtype}{list(out.shape)}"
            )
        self._whole[0, 0] = out.__array_interface__["data"][0]
        version, extra = self._read_parts(self._whole, timeout)
        return version, decode(extra)

    def _read_parts(self, parts: npt.NDArray[np.uint64], timeout: float, verify: bool = True) -> tuple[int, bytes]:
        end, self.tries = time.monotonic() + timeout, 0
        while True:
            slice_ = min(_SLICE_SECONDS, max(0.0, end - time.monotonic()))
            version, extra_bytes, published_ns, tries = self.channel.slots.read(parts, self._extra, slice_, verify)
            self.tries += tries
            if version:
                self.age_seconds = (time.monotonic_ns() - published_ns) / 1e9
                return version, self._extra[:extra_bytes].tobytes()
            if time.monotonic() >= end:
                raise self._timeout(timeout)

    def _timeout(self, timeout: float) -> Timeout:
        name = self.channel.name
        if self.channel.newest == 0:
            return Timeout(
                f"nothing has been published on weights channel {name} within {timeout:g} s: is its learner running?"
            )
        if self.channel.mode == "snapshot":
            return Timeout(
                f"weights channel {name} was being written for {timeout:g} s ({self.tries} tries); it has one slot, so "
                "readers wait for its publisher (and for the next one, where that was killed); publish less often, "
                "or take 'double_buffer'"
            )
        return Timeout(
            f"the publisher of weights channel {name} overtook all {self.tries} tries in {timeout:g} s: it publishes "
            "twice while this process copies once; publish less often, or give this process more of a processor"
        )

    def _addresses(self, out: Mapping[str, npt.NDArray[Any]]) -> list[int]:
        addresses = []
        for place in self.layout.places.values():
            array = out.get(place.name)
            if array is None or array.shape != place.shape or array.dtype != place.stored:
                got = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
                raise SpecMismatch(
                    f"out[{place.name!r}]: expected {place.stored}{list(place.shape)}, got {got}; see buffers()"
                )
            if not (array.flags.c_contiguous and array.flags.writeable):
                raise SpecMismatch(f"out[{place.name!r}] is not C-contiguous and writable; see buffers()")
            addresses.append(array.__array_interface__["data"][0])
        return addresses
