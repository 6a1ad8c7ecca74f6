"""The file format of saved replays: a head, then records, each with its own checksums.

::

    head     "JBREPFIL", u32 version, u32 length, u32 CRC-32C of the JSON, JSON (layout, slot size and offsets)
    record   "JBRC", u32 kind, u32 part, u32 codec, u64 first slot, u64 rows, u64 raw bytes, u64 stored bytes,
             u32 CRC-32C of the payload, u32 CRC-32C of the 52 bytes before; then the payload

All numbers are little-endian. ROWS are whole slots as they lie in memory (sequence word first, so every row
carries its ticket), LINKS and PRIORITIES the arrays beside them. A COMMIT (JSON: the counters) closes one save:
later records of an incremental save replace earlier ones of the same slots, and records after the last commit are
ignored.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.protocol.errors import SharedMemoryError
from jurybox.protocol.segment import Segment
from jurybox.training.replay.layout import Layout
from jurybox.training.replay.options import Damaged

MAGIC = b"JBREPFIL"
VERSION = 1
_HEAD = struct.Struct("<8sIII")
_RECORD = struct.Struct("<4sIIIQQQQI")
_CHECK = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CHECK.size
_READ_AHEAD = 64 << 20
CODECS = ("none", "lz4", "zstd")
_NATIVE = 2  # the native core reads the first two
_DAMAGED, _NO_ROOM, _UNREADABLE = 1, 2, 3  # its status of a piece


class ItemKind(IntEnum):
    ROWS = 1
    LINKS = 2
    PRIORITIES = 3
    COMMIT = 4


_RECORD_MAGIC = b"JBRC"
_COMMIT_MAGIC = _RECORD_MAGIC + struct.pack("<I", ItemKind.COMMIT)
_LONGEST_COMMIT = 1 << 20  # a longer one is found by scanning the file


@dataclass(frozen=True, slots=True)
class Record:
    """One record's head, and where its payload begins."""

    kind: ItemKind
    part: int
    codec: int
    first: int
    rows: int
    raw_bytes: int
    stored_bytes: int
    checksum: int
    number: int = 0
    offset: int = 0

    @property
    def is_native(self) -> bool:
        """Whether the native core reads its codec."""
        return self.codec < _NATIVE

    @property
    def name(self) -> str:
        """Its name in error messages."""
        what = {ItemKind.ROWS: "rows", ItemKind.LINKS: "links", ItemKind.PRIORITIES: "priorities"}.get(self.kind)
        where = f"{what} of slots {self.first}..{self.first + self.rows - 1} of part {self.part}" if what else "commit"
        return f"chunk {self.number} ({where}, at byte {self.offset - RECORD_BYTES})"


@dataclass(slots=True)
class Saved:
    """The state of a save, for the next incremental one.

    Attributes:
        path: the file.
        rows: rows written by this save.
        bytes: size of the file.
        seconds: how long it took, fsync included.
    """

    path: Path
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    sequences: list[npt.NDArray[np.uint64]] = field(default_factory=list, repr=False)
    links: list[npt.NDArray[np.uint8] | None] = field(default_factory=list, repr=False)


def head_of(layout: Layout) -> bytes:
    text = json.dumps(
        {"layout": layout.as_json(), "slot_bytes": layout.slot.size, "offsets": layout.slot.offsets}
    ).encode()
    return _HEAD.pack(MAGIC, VERSION, len(text), native.crc32c(text)) + text


def record_head(kind: ItemKind, payload: Any, *, part: int, codec: int, first: int, rows: int, raw_bytes: int) -> bytes:
    stored = memoryview(payload).nbytes
    head = _RECORD.pack(_RECORD_MAGIC, kind, part, codec, first, rows, raw_bytes, stored, native.crc32c(payload))
    return head + _CHECK.pack(native.crc32c(head))


class Archive:
    """An opened file: its layout, its records, and its damage.

    Attributes:
        layout: of the saved replay.
        commit: the last commit's JSON; None where there is none (only with `recover`).
        lost: names of the chunks that are damaged or missing.
    """

    def __init__(self, path: Path, *, recover: bool) -> None:
        self.path = path
        self.lost: list[str] = []
        self._records: list[Record] | None = None
        self.commit: dict[str, Any] | None = None
        self._last = "the head"
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(self._fd).st_size
            if size < _HEAD.size:
                raise Damaged(f"{path} is no saved replay: it is only {size} bytes long")
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._map = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise
        self.data = memoryview(self._map)
        self._recover = recover
        self._readahead_end = 0
        try:
            self._begin = self._read_head()
            if recover or not self._ends_with_commit():
                self._records = self._scan(self._begin)
            if self.commit is None and not recover:
                raise Damaged(
                    f"{path} is cut off after {self._last}: no commit follows; recover=True loads what is whole"
                )
        except BaseException:
            os.close(self._fd)  # the mapping ends with the views that the error's frames hold
            raise

    def _read_head(self) -> int:
        magic, version, length, checksum = _HEAD.unpack_from(self.data)
        if magic != MAGIC:
            raise Damaged(
                f"{self.path} is no saved replay: expected it to begin with {MAGIC!r}, found {bytes(magic)!r}"
            )
        if version != VERSION:
            raise Damaged(f"{self.path} has format version {version}, this release reads version {VERSION}")
        text = self.data[_HEAD.size : _HEAD.size + length]
        if len(text) < length or native.crc32c(text) != checksum:
            raise Damaged(f"the head of {self.path} is damaged: its description does not match its checksum")
        description = json.loads(bytes(text))
        self.layout = Layout.from_json(description["layout"])
        if self.layout.slot.size != description["slot_bytes"] or self.layout.slot.offsets != description["offsets"]:
            raise Damaged(
                f"{self.path} lays out its rows in another way than this release; load it with the one that wrote it"
            )
        return int(_HEAD.size + length)

    def records(self) -> Iterator[Record]:
        """Iterate over all records up to the last commit, in order (with `recover`: up to the end).

        Records of a file that ends with its commit, which only a crash prevents, are checked while they are used, so
        that the disk is read once.

        Raises:
            Damaged: a record's head is corrupt.
        """
        if self._records is not None:
            yield from self._records
            return
        at, number = self._begin, 0
        while at < len(self.data):
            self._read_ahead(at)
            record = self._record(at, number)
            if record is None:
                raise self._head_damaged(at, number)
            yield record
            at, number = record.offset + record.stored_bytes, number + 1

    def _ends_with_commit(self) -> bool:
        """Whether the file ends with a whole commit, which is read then."""
        tail = max(self._begin, len(self.data) - _LONGEST_COMMIT)
        place = self._map.rfind(_COMMIT_MAGIC, tail)
        record = self._record(place, 0) if place >= 0 else None
        if record is None or record.offset + record.stored_bytes != len(self.data):
            return False
        payload = self.payload(record)
        if payload is None:
            return False
        self.commit = json.loads(bytes(payload))
        return True

    def _scan(self, at: int) -> list[Record]:
        records: list[Record] = []
        size, number, committed = len(self.data), 0, 0
        while at < size:
            self._read_ahead(at)
            record = self._record(at, number)
            if record is None:
                if not self._recover:
                    if self._commit_follows(at):
                        raise self._head_damaged(at, number)
                    break  # an unfinished save: what was committed before it counts
                self.lost.append(f"chunk {number} (at byte {at})")
                at = self._map.find(_RECORD_MAGIC, at + 1)
                if at < 0:
                    break
            else:
                records.append(record)
                self._last = record.name
                at = record.offset + record.stored_bytes
                if record.kind is ItemKind.COMMIT:
                    payload = self.payload(record)
                    if payload is not None:
                        self.commit, committed = json.loads(bytes(payload)), len(records)
            number += 1
        return records if self._recover else records[:committed]

    def _head_damaged(self, at: int, number: int) -> Damaged:
        return Damaged(
            f"{self.path}: the head of chunk {number} (at byte {at}) is damaged; recover=True loads the rest"
        )

    def _commit_follows(self, at: int) -> bool:
        """Whether a whole commit follows `at`: then the bytes there are damaged, not an unfinished save."""
        while (at := self._map.find(_COMMIT_MAGIC, at + 1)) >= 0:
            if self._record(at, 0) is not None:
                return True
        return False

    def _record(self, at: int, number: int) -> Record | None:
        """The record whose head is at byte `at`; None where its head is damaged or its payload runs over the end."""
        if at + RECORD_BYTES > len(self.data):
            return None
        head = self.data[at : at + _RECORD.size]
        magic, kind, part, codec, first, rows, raw_bytes, stored_bytes, payload_checksum = _RECORD.unpack(head)
        (checksum,) = _CHECK.unpack_from(self.data, at + _RECORD.size)
        if magic != _RECORD_MAGIC or native.crc32c(head) != checksum or kind not in tuple(ItemKind):
            return None
        offset = at + RECORD_BYTES
        record = Record(
            ItemKind(kind), part, codec, first, rows, raw_bytes, stored_bytes, payload_checksum, number, offset
        )
        return record if record.offset + record.stored_bytes <= len(self.data) else None

    def _read_ahead(self, at: int) -> None:
        """Ask the kernel to read ahead from byte `at`."""
        if self._readahead_end - at < _READ_AHEAD // 2:
            first, self._readahead_end = max(self._readahead_end, at), at + _READ_AHEAD
            os.posix_fadvise(self._fd, first, self._readahead_end - first, os.POSIX_FADV_WILLNEED)

    def bring(
        self, records: list[Record], targets: list[int], memory: npt.NDArray[np.uint8], bare: Segment | None
    ) -> list[Record]:
        """Read records to `targets` in `memory`, without the interpreter's lock; return the damaged ones.

        When recovering, a damaged record leaves its slots unchanged: they may hold whole rows of an earlier save.

        Args:
            records: one or more, all of them `is_native` or none.
            bare: the segment, if its pages are not allocated yet.

        Raises:
            SharedMemoryError: there is no room.
            OSError: the file cannot be read.
        """
        pieces = [
            (r.codec, r.offset, r.stored_bytes, r.raw_bytes, r.checksum, target)
            for r, target in zip(records, targets, strict=True)
        ]
        damaged: list[Record] = []
        if records[0].is_native:
            found = self._load_pieces(np.array(pieces, np.uint64), memory, bare)
            if _UNREADABLE in found:
                raise OSError(f"{self.path}: {records[found.index(_UNREADABLE)].name} cannot be read from the disk")
            return [record for record, outcome in zip(records, found, strict=True) if outcome == _DAMAGED]
        for record, target in zip(records, targets, strict=True):
            if bare is not None:
                bare.allocate(target, record.raw_bytes)
            payload = self.payload(record)
            if payload is None:
                damaged.append(record)
            else:
                memory[target : target + record.raw_bytes] = np.frombuffer(payload, np.uint8)
        return damaged

    def _load_pieces(
        self, pieces: npt.NDArray[np.uint64], memory: npt.NDArray[np.uint8], bare: Segment | None
    ) -> list[int]:
        file = np.frombuffer(self.data, np.uint8)
        fresh = None if bare is None else bare.fd
        found = native.replay_bring(self._fd, file, pieces, memory, fresh, self._recover)
        del file  # an error's frames hold no view of the file, which could then not be closed
        if _NO_ROOM in found:
            if bare is not None:
                bare.allocate(0, bare.size)  # its error says what is missing
            raise SharedMemoryError(f"there is no memory for the rows of {self.path}; make room or load fewer")
        return found

    def payload(self, record: Record) -> Any:
        """The record's bytes, decompressed; None where they do not match their checksum."""
        data = self.data[record.offset : record.offset + record.stored_bytes]
        if native.crc32c(data) != record.checksum:
            return None
        raw: Any = data
        if record.codec:  # zstd: the native core reads the other
            import zstandard

            try:
                raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=record.raw_bytes)
            except Exception:  # noqa: BLE001  (behind a right checksum it means a faulty writer)
                return None
        return raw if memoryview(raw).nbytes == record.raw_bytes else None

    def damaged(self, record: Record) -> None:
        """Record, or raise, that a record's payload is damaged."""
        self.lost.append(record.name)
        if not self._recover:
            raise Damaged(
                f"{self.path}: {record.name} is damaged: its checksum does not match; recover=True loads the rest"
            )

    def close(self) -> None:
        self.data.release()
        self._map.close()
        os.close(self._fd)
