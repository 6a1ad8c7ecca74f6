"""An actor's end of a weights channel: the newest weights as arrays, without a server and without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import ProtocolMismatch, Refused, ServerGone, SpecMismatch, Timeout
from jurybox.protocol.forks import Closing
from jurybox.protocol.locks import seconds
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.channel import decode_extra

# Native waits are cut into slices, so that Ctrl-C is handled.
_SLICE_SECONDS = 0.1
_LOOK_SECONDS = 0.001  # between two checks whether the engines have caught up

State = dict[str, npt.NDArray[Any]]


class Weights(NamedTuple):
    """One publication: arrays by name, its version and its extra."""

    state: State
    version: int
    extra: dict[str, Any]


class WeightsReader(Closing):
    """Reads publications from a channel. There may be many readers in any processes; none blocks the publisher.

    Threads may share a reader, and a forked child may use its parent's.

    Args:
        channel: the channel to read from. The caller closes it, unless the reader `owns` it.
        max_lag: the number of versions that answers may be behind, from the model's settings; 0: any number.
        in_use: returns the oldest version that engines answer with; None for a bare channel.
        owner_lives: returns whether a process can still publish; if not, reading and waiting raise `ServerGone`. None
            for a bare channel, which its reader may outlive.
        owns: whether the reader closes the channel.

    Attributes:
        held_back: how often `wait_until_fresh` had to wait; `held_back_seconds`: the total time.
        tries: the number of copies that the last `read` of any thread took; more than one if a publisher overtook it.
        age_seconds: the age of the last publication read, at the time of reading.
    """

    def __init__(
        self,
        channel: WeightsChannel,
        max_lag: int = 0,
        in_use: Callable[[], int] | None = None,
        owner_lives: Callable[[], bool] | None = None,
        owns: bool = False,
    ) -> None:
        self.channel = channel
        self.max_lag = max_lag
        self.held_back = 0
        self.held_back_seconds = 0.0
        self._in_use = in_use
        self.layout = channel.layout
        self.tries = 0
        self.age_seconds = 0.0
        self._owner_lives = owner_lives
        self._owns = owns
        self._looked = 0.0  # when the owner was last checked
        # Memory for reading. A call takes one out and puts it back, so that no two use the same one, also if a signal
        # handler reads within a read of its thread.
        self._scratch: list[_Scratch] = []

    @property
    def newest(self) -> int:
        """The newest version; 0 when nothing has been published yet."""
        return self.channel.newest

    def newer_than(self, seen: int) -> bool:
        """Return whether there is a version newer than `seen` (0: any). Usually takes one load from shared memory.

        Raises:
            ServerGone: there is none, and no process can publish one any more.
        """
        if self.channel.newest > seen:
            return True
        if self._owner_lives is not None and time.monotonic() - self._looked > _SLICE_SECONDS:
            self.require_owner()
        return False

    def wait_newer_than(self, seen: int, timeout: float = 10.0) -> bool:
        """Wait until there is a version newer than `seen`; return False if there is none after `timeout` seconds.

        Raises:
            ServerGone: no process can publish one any more.
        """
        end = time.monotonic() + seconds(timeout)
        while not self.channel.slots.wait_newer(seen, min(_SLICE_SECONDS, max(0.0, end - time.monotonic()))):
            self.require_owner()
            if time.monotonic() >= end:
                return False
        return True

    def lag(self, version: int | None = None) -> int:
        """Return how many versions `version` is behind the newest; None: the version that engines answer with.

        Raises:
            Refused: `version` is None, and the reader belongs to a bare channel without engines.
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
        """Wait while the engines' answers lag too far behind the publications.

        It takes two loads from shared memory if there is nothing to wait for.

        Args:
            timeout: seconds.
            max_lag: the number of versions they may be behind; default: the model's `max_lag`, where 0 is any number.

        Returns:
            False if they were still too far behind after `timeout`.

        Raises:
            Refused: the reader belongs to a bare channel.
            ServerGone: the server is gone.
        """
        most = self.max_lag if max_lag is None else max_lag
        if (max_lag is None and most == 0) or self.lag() <= most:
            return True
        timeout = seconds(timeout)
        self.held_back += 1
        began = time.monotonic()
        try:
            while (fresh := self.lag() <= most) is False and time.monotonic() - began < timeout:
                if time.monotonic() - self._looked > _SLICE_SECONDS:
                    self.require_owner()
                time.sleep(_LOOK_SECONDS)
        finally:
            self.held_back_seconds += time.monotonic() - began
        return fresh

    def buffers(self) -> State:
        """Return arrays for `read(out=...)`, one per tensor, in one block of memory; their contents are arbitrary."""
        return self.layout.views(np.empty(self.layout.nbytes, np.uint8))

    def read(self, *, timeout: float = 1.0, out: State | None = None) -> Weights:
        """Read the newest publication: a dict of arrays, its version and its extra.

        Args:
            timeout: seconds to wait for a first publication, or in a snapshot channel for the publisher to finish.
            out: C-contiguous arrays to fill, with the layout's names, shapes and dtypes, or an earlier `state`;
                default: new arrays. After an error their contents are arbitrary.

        Returns:
            ``(state, version, extra)``. bfloat16 and float8 tensors are arrays of ml_dtypes' dtypes. Where that package
            is missing, pass uint16 and uint8 arrays as `out`, which get their bits.

        Raises:
            Timeout: no complete publication could be read in time; the message states the reason.
            SpecMismatch: `out` does not match the layout.
            ServerGone: the owner of the channel is gone; there will be no newer publications.
            Refused: the channel was closed in this process.
            ProtocolMismatch: shared memory contains no valid publication; another process has overwritten it.
            DtypeMissing: tensors are bfloat16 or float8, and ml_dtypes is not installed.
        """
        if out is None:
            flat = np.empty(self.layout.nbytes, np.uint8)
            state = self.layout.views(flat)
            version, extra = self.read_bytes(flat, timeout=timeout)
            return Weights(state, version, decode_extra(extra))
        own = self._take_scratch()
        own.parts[:, 0] = self._addresses(out)
        version, extra = self._read_parts(own, own.parts, timeout)
        self._scratch.append(own)
        return Weights(out, version, decode_extra(extra))

    def read_flat(self, out: npt.NDArray[np.uint8], *, timeout: float = 1.0) -> tuple[int, dict[str, Any]]:
        """Do the same as `read`, into ``layout.nbytes`` bytes in the slot's layout (see `layout.views`).

        Raises the errors of `read`.
        """
        version, extra = self.read_bytes(out, timeout=timeout)
        return version, decode_extra(extra)

    def read_bytes(self, out: npt.NDArray[np.uint8], *, timeout: float = 1.0) -> tuple[int, bytes]:
        """Do the same as `read_flat`, with the extra still encoded: `decode_extra` may refuse it.

        Raises the errors of `read`.
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
        own = self._take_scratch()
        own.whole[0, 0] = out.__array_interface__["data"][0]
        came = self._read_parts(own, own.whole, timeout)
        self._scratch.append(own)
        return came

    def close(self) -> None:
        """Close the channel if this reader owns it. May be called again."""
        if self._owns:
            self.channel.close()

    def _take_scratch(self) -> _Scratch:
        try:
            return self._scratch.pop()
        except IndexError:  # at first, or other calls have all of it
            return _Scratch(self.layout, self.channel.extra_bytes)

    def _read_parts(
        self, own: _Scratch, parts: npt.NDArray[np.uint64], timeout: float, verify: bool = True
    ) -> tuple[int, bytes]:
        self.require_owner()
        end, copies, buffer = time.monotonic() + seconds(timeout), 0, own.extra
        while True:
            slice_ = min(_SLICE_SECONDS, max(0.0, end - time.monotonic()))
            version, extra_bytes, published_ns, tries = self.channel.slots.read(parts, buffer, slice_, verify)
            copies += tries
            if version:
                self.tries, self.age_seconds = copies, (time.monotonic_ns() - published_ns) / 1e9
                return version, buffer[:extra_bytes].tobytes()
            if not tries:
                raise ProtocolMismatch(
                    f"weights channel {self.channel.name} is damaged: what it calls its newest version is no "
                    "publication, somebody else than a publisher has written there; publish again, or load the model "
                    "anew"
                )
            self.require_owner()
            if time.monotonic() >= end:
                raise self._timeout(timeout, copies)

    def require_owner(self) -> None:
        """Raise ServerGone if the owner is gone, Refused if the channel was closed in this process."""
        self.channel.require_open()
        if self._owner_lives is None:
            return
        if not self._owner_lives():
            raise ServerGone(
                f"the owner of weights channel {self.channel.name} is gone, or holds this model no longer, and nothing "
                "newer will come: connect again and take a new reader"
            )
        self._looked = time.monotonic()

    def _timeout(self, timeout: float, copies: int) -> Timeout:
        name = self.channel.name
        if self.channel.newest == 0:
            return Timeout(
                f"nothing has been published on weights channel {name} within {timeout:g} s: is its learner running?"
            )
        if self.channel.mode == "snapshot":
            return Timeout(
                f"weights channel {name} was being written for {timeout:g} s ({copies} tries); it has one slot, so "
                "readers wait for its publisher (and for the next one, where that was killed); publish less often, "
                "or take 'double_buffer'"
            )
        return Timeout(
            f"the publisher of weights channel {name} overtook all {copies} tries in {timeout:g} s: it publishes "
            "twice while this process copies once; publish less often, or give this process more of a processor"
        )

    def _addresses(self, out: Mapping[str, npt.NDArray[Any]]) -> list[int]:
        addresses = []
        for place in self.layout.places.values():
            array = out.get(place.name)
            if (
                array is None
                or array.shape != place.shape
                or array.dtype.name not in (place.dtype, place.stored.name)
                or not array.dtype.isnative
            ):
                got = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
                raise SpecMismatch(f"out[{place.name!r}]: expected {place}, got {got}; see buffers()")
            if not (array.flags.c_contiguous and array.flags.writeable):
                raise SpecMismatch(f"out[{place.name!r}] is not C-contiguous and writable; see buffers()")
            addresses.append(array.__array_interface__["data"][0])
        return addresses


class _Scratch:
    """Memory that a call of `read` needs: the addresses of the tensors, and the extra."""

    def __init__(self, layout: WeightsLayout, extra_bytes: int) -> None:
        self.parts = layout.parts()
        self.whole = np.array([[0, 0, layout.nbytes, 0, 0]], np.uint64)
        self.extra = np.zeros(extra_bytes, np.uint8)
