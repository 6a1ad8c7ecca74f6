"""An actor's end of a weights channel: the newest weights as arrays, without a server and without torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import ProtocolMismatch, Refused, ServerGone, SpecMismatch, Timeout
from jurybox.protocol.forks import Closing
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.channel import decode_extra

# Native waits are cut into slices, so that Ctrl-C is heard.
_SLICE_SECONDS = 0.1
_LOOK_SECONDS = 0.001  # between two looks whether the engines have caught up

State = dict[str, npt.NDArray[Any]]


class Weights(NamedTuple):
    """One publication: arrays by name, its version and its extra."""

    state: State
    version: int
    extra: dict[str, Any]


class WeightsReader(Closing):
    """Reads whole publications from a channel. Any number of readers, in any processes; none blocks the publisher.

    Threads may share a reader, and a forked child may go on with its parent's.

    Args:
        channel: to read from. It stays the caller's to close, unless the reader `owns` it.
        max_lag: versions that answers may be behind, as the model's settings say; 0: any number.
        in_use: returns the oldest version that engines answer with; None for a bare channel.
        owner_lives: returns whether anybody can still publish; where not, who asks or waits for weights gets
            `ServerGone`. None for a bare channel, which its reader may outlive.
        owns: the channel is this reader's to close.

    Attributes:
        held_back: how often `wait_until_fresh` had to wait; `held_back_seconds`: for how long in all.
        tries: copies that the last `read` needed, in whatever thread; more than one where a publisher overtook it.
        age_seconds: how old the last publication read was when it was read.
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
        self._looked = 0.0  # when the owner was last looked at
        self._own = _Scratch(self.layout, channel.extra_bytes)

    @property
    def newest(self) -> int:
        """The newest version; 0 when nothing has been published yet."""
        return self.channel.newest

    def newer_than(self, seen: int) -> bool:
        """Whether there is a version newer than `seen` (0: any). One load from shared memory, as a rule.

        Raises:
            ServerGone: there is none, and nobody is left to publish one.
        """
        if self.channel.newest > seen:
            return True
        if self._owner_lives is not None and time.monotonic() - self._looked > _SLICE_SECONDS:
            self.require_owner()
        return False

    def wait_newer_than(self, seen: int, timeout: float = 10.0) -> bool:
        """Sleep until there is a version newer than `seen`; False when `timeout` seconds passed first.

        Raises:
            ServerGone: nobody is left to publish one.
        """
        end = time.monotonic() + timeout
        while not self.channel.slots.wait_newer(seen, min(_SLICE_SECONDS, max(0.0, end - time.monotonic()))):
            self.require_owner()
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
        """Wait while the engines' answers lag too far behind the publications.

        Costs two loads from shared memory where nothing has to be waited for.

        Args:
            timeout: seconds.
            max_lag: versions they may be behind; the model's `max_lag` without it, where 0 means any number.

        Returns:
            False when they still were too far behind after `timeout`.

        Raises:
            Refused: the reader is of a bare channel.
            ServerGone: the server is gone.
        """
        most = self.max_lag if max_lag is None else max_lag
        if (max_lag is None and most == 0) or self.lag() <= most:
            return True
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
            ServerGone: who owns the channel is gone; what was read before may be used, but nothing newer will come.
            Refused: the channel was closed here.
            ProtocolMismatch: what lies in shared memory is no publication: somebody has written over it.
        """
        own = self._own
        if out is None:
            flat = np.empty(self.layout.nbytes, np.uint8)
            state, parts = self.layout.views(flat), own.whole
            parts[0, 0] = flat.__array_interface__["data"][0]
        else:
            state, parts = out, own.parts
            parts[:, 0] = self._addresses(out)
        version, extra = self._read_parts(parts, timeout)
        return Weights(state, version, decode_extra(extra))

    def read_flat(self, out: npt.NDArray[np.uint8], *, timeout: float = 1.0) -> tuple[int, dict[str, Any]]:
        """As `read`, into ``layout.nbytes`` bytes laid out as the slot is (`layout.views` gives the arrays).

        It raises what `read` raises.
        """
        version, extra = self.read_bytes(out, timeout=timeout)
        return version, decode_extra(extra)

    def read_bytes(self, out: npt.NDArray[np.uint8], *, timeout: float = 1.0) -> tuple[int, bytes]:
        """As `read_flat`, with the extra still encoded: `decode_extra` may refuse it.

        It raises what `read` raises.
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
        parts = self._own.whole
        parts[0, 0] = out.__array_interface__["data"][0]
        return self._read_parts(parts, timeout)

    def close(self) -> None:
        """Close the channel if this reader owns it. May be called again."""
        if self._owns:
            self.channel.close()

    def _read_parts(self, parts: npt.NDArray[np.uint64], timeout: float, verify: bool = True) -> tuple[int, bytes]:
        self.require_owner()
        end, copies, buffer = time.monotonic() + timeout, 0, self._own.extra
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
        """Raises ServerGone if the owner is gone, Refused if the channel was closed in this process."""
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


class _Scratch(threading.local):
    """Scratch memory of a read, one for each thread."""

    def __init__(self, layout: WeightsLayout, extra_bytes: int) -> None:
        self.parts = layout.parts()
        self.whole = np.array([[0, 0, layout.nbytes, 0, 0]], np.uint64)
        self.extra = np.zeros(extra_bytes, np.uint8)
