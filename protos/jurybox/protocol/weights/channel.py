"""The weights channel as a shared-memory segment: a head, the layout, and one or two slots.

Byte 0: the head (`_HEAD`). Byte 256: the words that synchronise processes (native/serving/weights_slots.hpp). Byte 512:
the publisher's process id, for messages only. Byte 1024: the handles of the same weights in device memory (`DEVICE`),
if the publisher shares it. Byte 4096: the layout as JSON. Then, on page boundaries, the slots: the weights in the
layout's order, then space for the extra.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jurybox.protocol import forks
from jurybox.protocol.errors import ProtocolMismatch, Refused, SharedMemoryError, SpecMismatch
from jurybox.protocol.segment import OWNER_LOCK, Maker, Segment
from jurybox.protocol.weights.layout import ALIGNMENT, WeightsLayout

try:
    from jurybox.native import WeightsClaim, WeightsSlots
except ModuleNotFoundError:  # on macOS and Windows, where weights are sent over gRPC and no channel is created
    WeightsClaim = WeightsSlots = None  # type: ignore[misc, assignment]

Mode = Literal["double_buffer", "snapshot"]
"""Two copies of the weights, so that nobody waits; or one, in half the memory, and readers wait while it is written."""
SLOTS: dict[str, int] = {"double_buffer": 2, "snapshot": 1}

# magic, protocol version, slots; bytes of layout, of weights, of the extra; first slot's byte, stride;
# the layout's SHA-256
_HEAD = struct.Struct("<8sIIQQQQQ32s")
_MAGIC = b"jbweight"
_PROTOCOL = 2
_CONTROL, _PUBLISHER, _DEVICE, _LAYOUT, _PAGE = 256, 512, 1024, 4096, 4096
# Device memory with a copy of each slot. The copy is valid if its version is that of the claim; `holds` tells whether
# it still was valid after it had been copied. Every publisher clears this record when it starts.
DEVICE = np.dtype([("generation", "<u8"), ("versions", "<u8", (2,)), ("handles", "u1", (2, 64))])
_MIB = 2**20
_LOOKS = 4  # consecutive contradictions between the words; more than a publisher can cause
_SKIPPED = 1000  # versions; more than can have been published since the last check
_UNREADABLE = 1, 0  # sequence and version of a slot that is restored: as if it was being written
_MAPPED = ("slots", "publisher_pid", "_data", "_words", "device")  # attributes that keep the memory mapped
PUBLISHER_LOCK = OWNER_LOCK + 1

__all__ = ["PUBLISHER_LOCK", "SLOTS", "Mode", "WeightsChannel", "WeightsClaim"]


class WeightsChannel(forks.Closing):
    """A mapped weights channel. Create it with `create` (the owner) or `attach` (other processes).

    A forked child may go on reading from its parent's channel; it owns nothing, and does not keep the owner alive.

    `Publisher` and `WeightsReader` are based on it. To copy weights in another way:

        claim = channel.claim()
        if claim.version > adopted:
            source = channel.slot(claim)          # uint8 view of layout.nbytes bytes: copy from it
            ...
            whole = channel.holds(claim)          # False: the publisher overwrote the slot, start again

    Attributes:
        name: the segment's name.
        layout: the layout of its tensors.
        mode: "double_buffer" (two slots without waits) or "snapshot" (one slot, readers wait for the writer).
        extra_bytes: the maximum size of a publication's extra.
        slots: the native slots.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.name = segment.name
        slots, layout_bytes, weights_bytes, self.extra_bytes, first, stride, digest = self._head()
        self.mode: Mode = "double_buffer" if slots == 2 else "snapshot"
        text = bytes(segment.buffer[_LAYOUT : _LAYOUT + layout_bytes])
        if hashlib.sha256(text).digest() != digest:
            raise ProtocolMismatch(f"{self.name}: the layout in it does not hash to {digest.hex()[:12]}; it is damaged")
        self.layout = WeightsLayout.from_json(text)
        if bytes.fromhex(self.layout.hash) != digest or self.layout.nbytes != weights_bytes:
            raise ProtocolMismatch(
                f"{self.name}: its layout takes {self.layout.nbytes} bytes, its head says {weights_bytes}: damaged"
            )
        memory = segment.array(np.uint8, (segment.size,))
        self.publisher_pid = segment.array(np.uint64, (1,), _PUBLISHER)
        self.device = segment.array(DEVICE, (1,), _DEVICE)
        self.slots = WeightsSlots(memory, _CONTROL, first, stride, weights_bytes, slots)
        self.slots.prefault()
        self._words = segment.array(np.uint64, (24,), _CONTROL)  # native/serving/weights_slots.hpp: WeightsControl
        self._kept: dict[int, bytes] = {}  # the owner's copies, by offset
        self._seen = self._unsound = 0
        self._data = [memory[first + i * stride : first + i * stride + weights_bytes] for i in range(slots)]
        self._keep_alive = False
        forks.register(self)

    @classmethod
    def create(
        cls,
        name: str,
        layout: WeightsLayout,
        mode: Mode = "double_buffer",
        extra_bytes: int = 65536,
        *,
        make: Maker = Segment.create,
    ) -> WeightsChannel:
        """Create the channel `name` (see `segment_name`); this process owns it until `close`.

        Args:
            name: the segment's name.
            layout: the layout of the weights, such as `WeightsLayout.of(state_dict)`.
            mode: "double_buffer", or "snapshot" for half the memory.
            extra_bytes: the maximum size of a publication's extra.
            make: creates the segment.

        Raises:
            SharedMemoryError: too little memory for the slots, or the name is taken by a living owner.
            ValueError: the mode is unknown.
        """
        if mode not in SLOTS:
            raise ValueError(f"mode {mode!r} of weights channel {name}: expected one of {', '.join(SLOTS)}")
        text, slots = layout.to_json(), SLOTS[mode]
        first = _up(_LAYOUT + len(text))
        stride = _up(layout.nbytes + extra_bytes)
        size = first + slots * stride
        try:
            segment = make(name, size)
        except SharedMemoryError as error:
            remedy = "; or take mode 'snapshot', which needs half" if slots == 2 else ""
            raise SharedMemoryError(
                f"no weights channel of {size / _MIB:.1f} MiB ({slots} x {stride / _MIB:.1f}): {error}{remedy}"
            ) from error
        try:
            segment.buffer[_LAYOUT : _LAYOUT + len(text)] = text
            digest = bytes.fromhex(layout.hash)
            head = (_PROTOCOL, slots, len(text), layout.nbytes, stride - layout.nbytes, first, stride, digest)
            _HEAD.pack_into(segment.buffer, 0, b"", *head)
            # The magic is written last: a process that attaches too early finds no channel instead of a wrong one.
            segment.buffer[: len(_MAGIC)] = _MAGIC
            channel = cls(segment)
            channel._kept = {0: bytes(segment.buffer[: _HEAD.size]), _LAYOUT: text}
            return channel
        except BaseException:
            segment.release()
            raise

    @classmethod
    def attach(cls, name: str, *, keep_alive: bool = False) -> WeightsChannel:
        """Map the existing channel `name`; with `keep_alive` it is not swept while this object is open.

        Raises:
            SharedMemoryError: there is no segment of that name.
            ProtocolMismatch: it is not a weights channel, or of another version.
        """
        segment = Segment.attach(name, keep_alive=keep_alive)
        try:
            channel = cls(segment)
        except BaseException:
            segment.close()
            raise
        channel._keep_alive = keep_alive
        return channel

    def _head(self) -> tuple[int, int, int, int, int, int, bytes]:
        buffer, size = self.segment.buffer, self.segment.size
        if size < _LAYOUT or bytes(buffer[: len(_MAGIC)]) != _MAGIC:
            raise ProtocolMismatch(f"shared memory {self.name} is no weights channel, or its owner is still making it")
        _, protocol, slots, layout_bytes, weights_bytes, extra, first, stride, digest = _HEAD.unpack_from(buffer)
        if protocol != _PROTOCOL:
            raise ProtocolMismatch(
                f"weights channel {self.name} has protocol version {protocol}, expected {_PROTOCOL}: "
                "use the same release at both ends"
            )
        fits = slots in SLOTS.values() and _LAYOUT + layout_bytes <= first and first + slots * stride == size
        if not fits or weights_bytes + extra != stride or first % _PAGE or stride % _PAGE or weights_bytes % ALIGNMENT:
            raise ProtocolMismatch(
                f"weights channel {self.name}: its head does not fit its {size} bytes; it is damaged"
            )
        return slots, layout_bytes, weights_bytes, extra, first, stride, digest

    def restore(self) -> bool:
        """Restore parts that another process has overwritten; return whether there were any.

        The owner calls it several times a second. It restores head and layout. If the words that synchronise publisher
        and readers are invalid, the slots may be damaged, too: then nothing can be read until the next publication,
        whose version is larger than any before.
        """
        damaged = False
        for at, kept in self._kept.items():
            if self.segment.buffer[at : at + len(kept)] != kept:
                self.segment.buffer[at : at + len(kept)] = kept
                damaged = True
        slots = self._slot_words
        newest = int(self._words[0])
        # The newest of two slots is never written to. A single one may be partly written, if its publisher was killed.
        sequence, version = map(int, slots[newest % len(slots)][:2])
        written = (version == newest // 2 and sequence % 2 == 0) or (sequence, version) == _UNREADABLE
        agree = newest == 0 or len(slots) == 1 or written
        agree |= int(self._words[0]) != newest  # a publication is in progress
        self._unsound = 0 if agree else self._unsound + 1
        if newest // 2 < self._seen or self._unsound >= _LOOKS:
            self._seen, self._unsound = self._seen + _SKIPPED, 0
            slots[:, :2] = _UNREADABLE
            self._words[0] = 2 * self._seen
            return True
        if agree:
            self._seen = newest // 2
        return damaged

    @property
    def newest(self) -> int:
        """The newest version; 0 if nothing has been published. One load from memory, without a system call."""
        return self.slots.newest

    @property
    def publications(self) -> int:
        """The number of publications since the channel was created or last restored; versions may skip numbers."""
        # Each publication makes its slot's sequence odd, then even again.
        return int((self._slot_words[:, 0] >> np.uint64(1)).sum())

    @property
    def _slot_words(self) -> npt.NDArray[np.uint64]:
        return self._words[8:].reshape(-1, 8)[: SLOTS[self.mode]]

    def claim(self) -> WeightsClaim:
        """Return the newest publication: version (0: nothing can be read now), slot, published_ns (monotonic)."""
        return self.slots.claim()

    def slot(self, claim: WeightsClaim) -> npt.NDArray[np.uint8]:
        """Return the claimed slot's ``layout.nbytes`` bytes in shared memory. Copy them, then check `holds`."""
        return self._data[claim.slot]

    def holds(self, claim: WeightsClaim) -> bool:
        """Return whether a copy made from the slot since `claim` is of the claimed version."""
        return self.slots.holds(claim)

    def writable_slot(self, number: int) -> npt.NDArray[np.uint8]:
        """Return slot `number` for its publisher to write."""
        return self._data[number]

    @property
    def closed(self) -> bool:
        """Whether the channel was closed in this process."""
        return self.segment.fd < 0

    def require_open(self) -> None:
        """Raise Refused if the channel was closed in this process."""
        if self.closed:
            raise _closed_here(self.name)

    def owner_lives(self) -> bool:
        """Return whether the channel's owner is alive; takes a system call.

        Raises:
            Refused: the channel was closed in this process.
        """
        self.require_open()
        return self.segment.owned or self.segment.owner_lives()

    def age_seconds(self, claim: WeightsClaim) -> float:
        """Return the seconds since the claimed version was published."""
        return (time.monotonic_ns() - claim.published_ns) / 1e9

    def close(self) -> None:
        """Close the segment; its owner also removes the name. Other processes can still read."""
        self.segment.release()
        for name in _MAPPED:
            vars(self).pop(name, None)

    def __getattr__(self, name: str) -> Any:
        """Raise Refused, because the channel was closed."""
        raise _closed_here(self.name) if name in _MAPPED else AttributeError(name)

    def _after_fork_in_child(self) -> None:
        self.segment.separate(hold=self._keep_alive)

    def __repr__(self) -> str:
        return f"WeightsChannel({self.name}, {self.mode}, version {self.newest}, {self.layout!r})"


def _closed_here(name: str) -> Refused:
    return Refused(f"weights channel {name} was closed here, with what it came from: connect or attach again")


def _up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


# The extra, which is published together with the weights: JSON-serialisable values and small arrays, as bytes.
#
# A length, then JSON in which every array is ``{"__array__": [dtype, shape, offset]}``, then the arrays' bytes. It is
# not a pickle, since other processes read it.


_LENGTH = struct.Struct("<I")
_ARRAY = "__array__"
_ALIGNMENT = 8
_DEEPEST = 64  # levels of lists and dicts; far below the interpreter's recursion limit
_DTYPE = re.compile(r"[<>|=][biufc][0-9]{1,2}")


def encode_extra(extra: Mapping[str, Any] | None) -> bytes:
    """Encode `extra`: None, bools, numbers, strings, lists, dicts with string keys, and arrays or tensors.

    Tuples are decoded as lists, and NumPy scalars as Python's. The encoding of None is empty.

    Raises:
        SpecMismatch: a value of another kind, or more than 64 levels; the message names its path.
    """
    if not extra:
        return b""
    tail = bytearray()
    packed = _pack(dict(extra), tail, "extra", 1)
    try:
        text = json.dumps(packed, separators=(",", ":")).encode()
    except ValueError as error:  # an integer with more digits than Python converts
        raise SpecMismatch(f"extra holds what JSON cannot say: {error}") from error
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text + bytes(tail)


def decode_extra(data: bytes) -> dict[str, Any]:
    """Decode what `encode_extra` returned; arrays are writable copies.

    Raises:
        ProtocolMismatch: `data` is not a valid extra.
    """
    if not data:
        return {}
    try:
        (length,) = _LENGTH.unpack_from(data)
        text, tail = data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} and no dict")
        used = [0]
        return {key: _unpack(item, tail, 2, used) for key, item in value.items()}
    except (struct.error, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolMismatch(f"expected an extra of {len(data)} bytes, got something else: {error}") from error


def all_finite(extra: Mapping[str, Any] | None) -> bool:
    """Return whether all numbers of `extra`, also those in arrays, are finite."""
    return extra is None or _finite(dict(extra))


def _finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_finite(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    array = _as_array(value)
    return array is None or array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a torch tensor, without importing torch
        return np.asarray(value.detach().cpu().numpy())
    return None


def _pack(value: Any, tail: bytearray, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise SpecMismatch(f"extra is more than {_DEEPEST} levels deep, or holds itself: {where[:200]}...")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str) or key == _ARRAY]
        if wrong:
            raise SpecMismatch(f"{where} has the key {wrong[0]!r}: expected strings other than {_ARRAY!r}")
        return {key: _pack(item, tail, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item, tail, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
    array = _as_array(value)
    if array is None or array.dtype.kind not in "biufc":
        kind = type(value).__name__ if array is None else f"array of {array.dtype}"
        raise SpecMismatch(f"{where} is a {kind}: expected what JSON can say, or an array of numbers or bools")
    if isinstance(value, np.generic) and array.dtype.kind != "c":
        return value.item()
    tail += b"\0" * (-len(tail) % _ALIGNMENT)
    packed = {_ARRAY: [array.dtype.str, list(array.shape), len(tail)]}
    tail += array.tobytes()
    return packed


def _unpack(value: Any, tail: bytes, depth: int, used: list[int]) -> Any:
    """Decode a value; `used` is one number, the bytes of the tail used so far, so that none is used twice."""
    if depth > _DEEPEST:
        raise ValueError(f"it is more than {_DEEPEST} levels deep")
    if isinstance(value, list):
        return [_unpack(item, tail, depth + 1, used) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY not in value:
        return {key: _unpack(item, tail, depth + 1, used) for key, item in value.items()}
    dtype, shape, offset = value[_ARRAY]
    # Only numbers, because NumPy interprets a dtype's text, and a negative size would mean "the rest".
    if not (isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
        raise ValueError(f"{dtype!r} is no dtype of numbers")
    if not all(type(size) is int and size >= 0 for size in (offset, *shape)) or offset < used[0]:
        raise ValueError(f"an array of shape {shape} at byte {offset}, {used[0]} are taken")
    flat = np.frombuffer(tail, np.dtype(dtype), math.prod(shape), offset)
    used[0] = offset + flat.nbytes
    return flat.reshape(shape).copy()
