"""The memory of a replay: a mapped segment or file with one or two rings, the pool and the anchor."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.protocol.errors import SharedMemoryError
from jurybox.protocol.segment import OWNER_LOCK, Segment, directory, segment_name, try_lock
from jurybox.training.replay.layout import Layout, PartLayout
from jurybox.training.replay.options import FULL_MODES

_LONGEST_NAME = 100


def check_name(where: str | Path) -> str | Path:
    """Validate the name of a replay.

    Raises:
        ValueError: the name is not valid.
    """
    if isinstance(where, Path):
        return where.absolute()
    if not where or "/" in where or "*" in where or len(where) > _LONGEST_NAME:
        raise ValueError(
            f"{where!r} names no replay: expected 1 to {_LONGEST_NAME} characters without '/' and '*' "
            "(a file to map is given as a pathlib.Path)"
        )
    return where


def path_of(where: str | Path) -> Path:
    return where if isinstance(where, Path) else directory() / segment_name(where, "replay")


def _make_segment(where: str | Path, size: int, *, allocate: bool) -> Segment:
    if isinstance(where, str):
        return Segment.create(segment_name(where, "replay"), size, allocate=allocate)
    try:
        fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        hint = "attach to it, or remove it first" if error.errno == errno.EEXIST else "expected a writable folder"
        raise SharedMemoryError(f"cannot make {where}: {error.strerror}; {hint}") from error
    try:
        try_lock(fd, OWNER_LOCK, shared=True)
        os.ftruncate(fd, size)
        if allocate:
            os.posix_fallocate(fd, 0, size)
        return Segment(where.name, fd, size, owned=False)
    except OSError as error:
        os.close(fd)
        where.unlink(missing_ok=True)
        raise SharedMemoryError(
            f"cannot make {where} of {size / 2**20:.1f} MiB: {error.strerror}; make room or ask for fewer rows"
        ) from error


@contextmanager
def new_segment(where: str | Path, size: int, *, allocate: bool = True) -> Iterator[Segment]:
    """New memory of `size` zeroed bytes, and nothing of it if the ``with`` block fails, which makes a replay of it.

    Args:
        allocate: allocate all pages now. False: writers call `Segment.allocate` first.

    Raises:
        SharedMemoryError: there is no room, or the name is taken.
    """
    segment = _make_segment(where, size, allocate=allocate)
    try:
        yield segment
    except BaseException:
        path_of(where).unlink(missing_ok=True)
        segment.close()
        raise


def join_segment(where: str | Path) -> tuple[Segment, bool]:
    """Map existing memory; also returns whether no other process has it (a file of dead processes).

    Raises:
        SharedMemoryError: there is none.
    """
    if isinstance(where, str):
        return Segment.attach(segment_name(where, "replay"), keep_alive=True), False
    try:
        fd = os.open(where, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SharedMemoryError(
            f"cannot open {where}: {error.strerror}; make it with Replay.create(Path(...))"
        ) from error
    try:
        alone = try_lock(fd, OWNER_LOCK)
        if not alone and not try_lock(fd, OWNER_LOCK, shared=True):
            raise SharedMemoryError(f"{where} is being opened by another process this very moment; try again")
        return Segment(where.name, fd, os.fstat(fd).st_size, owned=False), alone
    except BaseException:
        os.close(fd)
        raise


def share_segment(segment: Segment) -> None:
    """Allow other processes again, after `join_segment` found none."""
    try_lock(segment.fd, OWNER_LOCK, shared=True)


ANCHOR_MARK = 1 << 62


class Part:
    """The native ring and arrays over its memory.

    Attributes:
        ring: what adds and samples.
        memory: all bytes of the replay's memory.
        mark: added to the indices of its rows, so that they differ from those of other parts.
    """

    def __init__(
        self, segment: Segment, layout: Layout, place: PartLayout, *, mark: int, threads: int, seed: int, timeout: float
    ) -> None:
        def block(offset: int, size: int) -> npt.NDArray[np.uint8]:
            return segment.array(np.uint8, (size,), offset)

        capacity = place.capacity
        self.memory = block(0, segment.size)
        self.mark = mark
        self.layout = layout
        self.capacity = capacity
        self.slots = block(place.slots, capacity * layout.slot.size).reshape(capacity, layout.slot.size)
        self.links = block(place.links, capacity * 16).reshape(capacity, 16) if layout.episodes else None
        tree = block(place.tree, native.replay_tree_words(capacity) * 8) if layout.prioritized else None
        # The leaves come first in the tree's memory.
        self.leaves: npt.NDArray[np.uint64] | None = None if tree is None else tree[: capacity * 8].view(np.uint64)
        self.ring = native.ReplayRing(
            block(place.control, native.replay_control_bytes()),
            self.slots.reshape(-1),
            None if self.links is None else self.links.reshape(-1),
            tree,
            layout.native_fields(),
            threads,
            seed,
        )
        self.ring.timeout = timeout
        self.ring.alpha = layout.alpha
        names = list(layout.fields)
        if layout.episodes is not None:
            for side in ("terminated", "truncated"):
                name = getattr(layout.episodes, side)
                setattr(self.ring, side, -1 if name is None else names.index(name))

    @property
    def sequences(self) -> npt.NDArray[np.uint64]:
        """The sequence words of all slots: 2 t + 2 where row t is whole, odd while written, 0 where nothing is."""
        words: npt.NDArray[np.uint64] = self.slots[:, :8].view(np.uint64)[:, 0]
        return words

    def field_rows(self, name: str, first: int, rows: int) -> npt.NDArray[Any]:
        """The stored values of `rows` slots from slot `first` on, as an array that IS the slots."""
        spec = self.layout.fields[name]
        offset = self.layout.slot.offsets[name]
        return np.ndarray(
            (rows, *spec.stored_shape),
            spec.stored_dtype,
            self.slots[first : first + rows].data,
            offset,
            strides=(self.layout.slot.size, *packed_strides(spec.stored_shape, spec.stored_dtype.itemsize)),
        )


def open_parts(
    segment: Segment, layout: Layout, *, threads: int | None, seed: int | None, timeout: float
) -> list[Part]:
    """The rings of a formatted segment: the pool, then the anchor where there is one."""
    # Threads beyond four gain nothing on the machines we know: the memory is the bound.
    copiers = min(4, len(os.sched_getaffinity(0))) if threads is None else threads
    first = secrets.randbits(63) if seed is None else seed
    return [
        Part(
            segment,
            layout,
            place,
            mark=ANCHOR_MARK if number else 0,
            threads=copiers,
            seed=first + number,
            timeout=timeout,
        )
        for number, place in enumerate(layout.parts)
    ]


class Parts(Protocol):
    """The layout and the rings of a replay, for saving, loading and cursors."""

    @property
    def layout(self) -> Layout: ...

    @property
    def parts(self) -> Sequence[Part]:
        """The pool, and the anchor where there is one."""
        ...


def standing_of(part: Part) -> dict[str, int]:
    """The position of a ring, to continue it from a file, or after its processes."""
    ring = part.ring
    reserved, retried, _, _, sampled, _ = ring.counters()
    return {
        "reserved": reserved,
        "tail": ring.tail,
        "top_priority": ring.top_priority,
        "retried": retried,
        "sampled": sampled,
    }


def format_parts(segment: Segment, layout: Layout) -> None:
    """Write the description and empty control blocks into a new segment."""
    head = layout.head()
    segment.buffer[: len(head)] = head
    for number, place in enumerate(layout.parts):
        # The anchor keeps its rows: when it is full it drops new ones.
        full = "drop_newest" if number == 1 else layout.full
        limiter = layout.limiter if number == 0 else None
        least, most = limiter.bounds if limiter else (0.0, 0.0)
        native.replay_format(
            segment.array(np.uint8, (native.replay_control_bytes(),), place.control),
            place.capacity,
            layout.slot.size,
            FULL_MODES.index(full),
            limiter.samples_per_insert if limiter else 0.0,
            least,
            most,
            limiter.least_rows if limiter else 0,
        )


def packed_strides(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides: list[int] = []
    for size in reversed(shape):
        strides.append(item)
        item *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a replay since its creation, over all processes.

    Attributes:
        added: rows written, those of killed writers included.
        overwritten: rows that newer ones replaced (or that were discarded).
        dropped: rows that a full replay refused.
        retried: slots that writers skipped, because another writer, perhaps a killed one, held them.
        sampled: rows handed out.
        redrawn: discarded draws, because their row was being written or did not fit the request.
        stale_priorities: priorities of rows that were overwritten before.
    """

    added: int
    overwritten: int
    dropped: int
    retried: int
    sampled: int
    redrawn: int
    stale_priorities: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Counters:
        """The sums over a replay's parts."""
        reserved, retried, dropped, stale, sampled, redrawn = (
            sum(values) for values in zip(*(part.ring.counters() for part in parts), strict=True)
        )
        added = reserved - retried
        stored = sum(int(part.ring.size) for part in parts)
        return cls(added, max(0, added - stored), dropped, retried, sampled, redrawn, stale)
