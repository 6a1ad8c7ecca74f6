"""The layout of a replay's segment: a description in JSON, then the parts.

A segment is ``magic, length, JSON``, then for each part a control block, slots, links and a sum tree, each at its own
page. A slot is a sequence word and the fields of one row side by side: a drawn row is one run of memory, so a small
row costs one or two cache misses for any number of fields.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

import numpy as np

from jurybox import native
from jurybox.protocol.errors import ProtocolMismatch, SpecMismatch
from jurybox.training.replay.options import FULL_MODES, Episodes, Field, FullMode, RateLimiter, Windows

MAGIC = b"JBREPLAY"
VERSION = 1
_HEAD = struct.Struct("<8sII")
_PAGE = 4096
_SEQUENCE_BYTES = 8
_MOST_FIELDS = 64
# Fields of at least this size start at a cache line: copies to aligned memory are up to a tenth faster.
_LARGE = 1024


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Offsets of the fields in a slot, and the slot's size."""

    offsets: dict[str, int]
    size: int

    @classmethod
    def of(cls, fields: dict[str, Field]) -> SlotLayout:
        offsets: dict[str, int] = {}
        at = _SEQUENCE_BYTES
        for name, spec in fields.items():
            align = 64 if spec.stored_bytes >= _LARGE else 8 if spec.stored_bytes >= 8 else spec.stored_dtype.itemsize
            if spec.stored == "sparse":
                align = max(align, 4)
            at = -(-at // align) * align
            offsets[name] = at
            at += spec.stored_bytes
        line = -(-at // 64) * 64
        # Whole cache lines where that costs at most an eighth: a row then never touches one line more than it must.
        return cls(offsets, line if line - at <= at // 8 else -(-at // 8) * 8)


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One ring of the segment: offsets in bytes; 0 where there is no such block."""

    capacity: int
    control: int
    slots: int
    links: int
    tree: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout that all processes of a replay share.

    Attributes:
        slot: places of the fields in a row. parts: the pool, then the anchor where there is one. Both follow from the
            other attributes.
    """

    capacity: int
    fields: dict[str, Field]
    prioritized: bool = False
    alpha: float = 0.6
    full: FullMode = "overwrite"
    episodes: Episodes | None = None
    anchor: int = 0
    limiter: RateLimiter | None = None
    slot: SlotLayout = field(init=False)
    parts: list[PartLayout] = field(init=False)

    def __post_init__(self) -> None:
        if self.capacity < 1 or self.anchor < 0:
            raise ValueError(f"capacity={self.capacity} must be at least 1 and anchor={self.anchor} at least 0")
        if not 0 < len(self.fields) <= _MOST_FIELDS:
            raise ValueError(f"a row has 1 to {_MOST_FIELDS} fields, came {len(self.fields)}")
        if self.full not in FULL_MODES:
            raise ValueError(f"full={self.full!r} is unknown: expected one of {', '.join(FULL_MODES)}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} must be between 0 and 1")
        object.__setattr__(self, "slot", SlotLayout.of(self.fields))
        parts: list[PartLayout] = []
        at = _pages(len(self.head()))
        for capacity in (self.capacity, self.anchor) if self.anchor else (self.capacity,):
            control, at = at, at + _pages(native.replay_control_bytes())
            slots, at = at, at + _pages(capacity * self.slot.size)
            links, at = (at, at + _pages(capacity * 16)) if self.episodes else (0, at)
            tree, at = (at, at + _pages(native.replay_tree_words(capacity) * 8)) if self.prioritized else (0, at)
            parts.append(PartLayout(capacity, control, slots, links, tree, at))
        object.__setattr__(self, "parts", parts)

    def as_json(self) -> dict[str, Any]:
        document = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        document |= {
            name: each and astuple(each) for name, each in (("episodes", self.episodes), ("limiter", self.limiter))
        }
        return {**document, "fields": {name: asdict(spec) for name, spec in self.fields.items()}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        named = {name: Field(**spec) for name, spec in data["fields"].items()}
        episodes = Episodes(*data["episodes"]) if data["episodes"] else None
        limiter = RateLimiter(*data["limiter"]) if data["limiter"] else None
        return cls(**{**data, "fields": named, "episodes": episodes, "limiter": limiter})

    def head(self) -> bytes:
        text = json.dumps(self.as_json()).encode()
        return _HEAD.pack(MAGIC, VERSION, len(text)) + text

    @property
    def segment_bytes(self) -> int:
        return self.parts[-1].end

    @classmethod
    def read(cls, buffer: memoryview, name: str) -> Layout:
        """The layout that a segment's head describes.

        Raises:
            ProtocolMismatch: it is no replay, or one of another version.
        """
        if len(buffer) < _HEAD.size:
            raise ProtocolMismatch(f"{name} is no replay: it is only {len(buffer)} bytes long")
        magic, version, length = _HEAD.unpack_from(buffer)
        if magic != MAGIC:
            raise ProtocolMismatch(f"{name} is no replay: expected it to begin with {MAGIC!r}, found {bytes(magic)!r}")
        if version != VERSION:
            raise ProtocolMismatch(
                f"replay {name} has layout version {version}, this release reads version {VERSION}; "
                "use the same release of jurybox on both ends"
            )
        layout = cls.from_json(json.loads(bytes(buffer[_HEAD.size : _HEAD.size + length])))
        if layout.segment_bytes > len(buffer):
            raise ProtocolMismatch(f"replay {name} is {len(buffer)} bytes long, its head says {layout.segment_bytes}")
        return layout

    def check(self, windows: Windows) -> Episodes:
        """Return the episodes that windows are within. Raises SpecMismatch: the rows have no such windows."""
        if self.episodes is None:
            raise SpecMismatch("this replay does not know its episodes: make it with episodes=Episodes(...)")
        for name in (*windows.next, *windows.stacked):
            if name not in self.fields:
                raise SpecMismatch(f"there is no field {name!r}; expected some of {', '.join(self.fields)}")
        if windows.length and self.fields.keys() == set(windows.next):
            raise SpecMismatch("a sequence has a field beside those of next: expected one that marks its transitions")
        if windows.n_step and self.episodes.reward is None:
            raise SpecMismatch(
                "n-step returns need to know the reward: make the replay with episodes=Episodes(reward=...)"
            )
        return self.episodes

    def native_fields(self) -> list[tuple[str, np.dtype[Any], list[int], int, int, int, float, int]]:
        """The fields for the native ring."""
        return [
            (
                name,
                spec.numpy_dtype,
                list(spec.shape),
                self.slot.offsets[name],
                spec.stored_bytes,
                int(spec.codec),
                spec.scale,
                spec.nonzero or 0,
            )
            for name, spec in self.fields.items()
        ]


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
