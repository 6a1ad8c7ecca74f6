"""Loads saved replays: on all cores, with checksums of all chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from jurybox.protocol.errors import SpecMismatch
from jurybox.protocol.segment import Segment
from jurybox.training.replay.archive import Archive, ItemKind, Record
from jurybox.training.replay.layout import Layout
from jurybox.training.replay.part import Part, Parts, check_name, format_parts, new_segment, standing_of

Loaded = TypeVar("Loaded", bound=Parts)

_ENDED = np.uint64(2**64 - 1)
_BATCH_BYTES = 8 << 20
_HIGHEST_UNLESS_SAID = 1 << 24  # 1.0


def load(
    path: Path, name: str | Path, opened: Callable[[Segment, Layout, str | Path], Loaded], *, recover: bool
) -> Loaded:
    """Create replay `name` from the file at `path`.

    Args:
        opened: makes the replay object of its memory, layout and place.
        recover: load the undamaged part of a damaged or truncated file, instead of refusing it.

    Raises:
        Damaged: the file is not what was written; the message names the chunk.
        SharedMemoryError: there is no room, or the name is taken.
    """
    archive = Archive(path, recover=recover)
    try:
        layout, where = archive.layout, check_name(name)
        # Allocating a page costs more than filling it: every thread allocates the pages that it fills.
        with new_segment(where, layout.segment_bytes, allocate=False) as segment:
            end = 0
            for place in layout.parts:
                segment.allocate(end, place.slots - end)
                end = place.slots + place.capacity * layout.slot.size
                segment.allocate(end, place.end - end)
            format_parts(segment, layout)
            replay = opened(segment, layout, where)
            _fill(replay, archive, segment)
        return replay
    finally:
        archive.close()


def restore(replay: Parts, path: Path, *, recover: bool, replacing: Callable[[], None] = lambda: None) -> None:
    """Replace the rows of a replay by those of the file at `path`; no process may write or sample meanwhile.

    Args:
        replacing: called once the file is known to be of such a replay, before the first row is replaced.

    Raises:
        Damaged: the file is not what was written; with recover=False it is then left half restored, without rows.
        SpecMismatch: the file's replay has other fields, capacity or options.
    """
    archive = Archive(path, recover=recover)
    try:
        if archive.layout.as_json() != replay.layout.as_json():
            raise SpecMismatch(
                f"{path} holds {archive.layout.as_json()}, this replay is {replay.layout.as_json()}; use Replay.load"
            )
        replacing()
        for part in replay.parts:
            part.sequences[:] = 0
            part.ring.adopt(0, 0, 0, 0, 0)
        try:
            _fill(replay, archive, None)
        except BaseException:
            for part in replay.parts:
                part.sequences[:] = 0
            raise
    finally:
        archive.close()


def put_in_order(replay: Parts) -> None:
    """Repair a replay whose processes are all gone: unfinished rows are dropped."""
    for part in replay.parts:
        unfinished = part.sequences % np.uint64(2) == 1
        part.sequences[unfinished] = 0
        _settle(part, standing_of(part), damaged=False)


def _fill(replay: Parts, archive: Archive, bare: Segment | None) -> None:
    """Copy an archive's records to their slots; `bare`: the memory, if its slots are not allocated yet."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="replay-load") as pool:
        placing: list[Future[list[Record]]] = []

        def wait() -> None:
            for future in placing:
                for record in future.result():
                    archive.damaged(record)
            placing.clear()

        try:
            for batch in _batches(archive.records()):
                if batch:
                    placing.append(pool.submit(_place, replay, archive, batch, bare))
                else:  # records of an incremental save follow those they replace
                    wait()
            wait()
        finally:
            for future in placing:
                future.cancel()
    if bare is not None:
        bare.allocate(0, bare.size)
    counters = archive.commit["parts"] if archive.commit is not None else None
    for number, part in enumerate(replay.parts):
        _settle(part, counters[number] if counters is not None else None, bool(archive.lost))


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Batches of neighbouring records with the same codec; [] for a commit."""
    batch: list[Record] = []
    size = 0
    for record in records:
        closed = record.kind is ItemKind.COMMIT
        if batch and (closed or size + record.raw_bytes > _BATCH_BYTES or record.is_native != batch[0].is_native):
            yield batch
            batch, size = [], 0
        if closed:
            yield []
            continue
        batch.append(record)
        size += record.raw_bytes
    if batch:
        yield batch


def _place(replay: Parts, archive: Archive, records: list[Record], bare: Segment | None) -> list[Record]:
    """Copy records to their slots; returns the damaged ones."""
    targets = [_target(replay, record) for record in records]
    fitting = [(record, at) for record, at in zip(records, targets, strict=True) if at is not None]
    damaged = [record for record, at in zip(records, targets, strict=True) if at is None]
    if fitting:
        damaged += archive.bring(
            [record for record, _ in fitting], [at for _, at in fitting], replay.parts[0].memory, bare
        )
    return damaged


def _target(replay: Parts, record: Record) -> int | None:
    """The byte of the replay's memory at which a record belongs; None: it does not fit this replay."""
    if record.part >= len(replay.parts):
        return None
    place = replay.layout.parts[record.part]
    match record.kind:
        case ItemKind.ROWS:
            begin, size = place.slots, replay.layout.slot.size
        case ItemKind.LINKS:
            begin, size = place.links, 16
        case _:
            begin, size = place.tree, 8  # the leaves come first in it
    if (
        begin == 0
        or record.first + record.rows > place.capacity
        or record.raw_bytes != record.rows * size
        or (record.codec == 0 and record.raw_bytes != record.stored_bytes)
    ):
        return None
    return begin + record.first * size


def _settle(part: Part, counters: dict[str, int] | None, damaged: bool) -> None:
    """Set counters, priorities and links to fit the rows."""
    sequences = part.sequences
    tickets = (sequences[sequences != 0] // np.uint64(2)) - np.uint64(1)
    newest = int(tickets.max()) + 1 if len(tickets) else 0
    kept = ("reserved", "tail", "top_priority", "retried", "sampled")
    reserved, *rest = (0 if counters is None else counters[name] for name in kept)
    part.ring.adopt(max(newest, reserved), *rest)
    if part.leaves is not None:
        written = sequences != 0
        part.leaves[~written] = 0
        if damaged:
            part.leaves[written & (part.leaves == 0)] = _HIGHEST_UNLESS_SAID
        part.ring.rebuild_sums()
    if part.links is not None:
        # The writers of these episodes are gone: a row without a next row never gets one.
        after = part.links.view(np.uint64)[:, 1]
        open_ended = after == 0
        named = ~open_ended & (after != _ENDED)
        next_slot = ((after[named] - np.uint64(1)) % np.uint64(part.capacity)).astype(np.int64)
        missing = sequences[next_slot] != after[named] * np.uint64(2)
        after[open_ended] = _ENDED
        after[np.flatnonzero(named)[missing]] = _ENDED
