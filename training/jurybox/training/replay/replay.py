"""Replay: a ring of transitions in shared memory that many processes fill and others sample, without a lock."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import Refused, SpecMismatch, Timeout
from jurybox.protocol.segment import Segment, directory, segment_name
from jurybox.training.replay.batch import Batch
from jurybox.training.replay.errors import NotEnoughRows
from jurybox.training.replay.field import Field
from jurybox.training.replay.layout import Layout
from jurybox.training.replay.options import FULL_MODES, Episodes, FullMode, RateLimiter, Windows
from jurybox.training.replay.part import ANCHOR_MARK, Part, format_parts
from jurybox.training.replay.reservation import Reservation
from jurybox.training.replay.stream import Streams

if TYPE_CHECKING:
    from jurybox.training.replay.archive import Saved
    from jurybox.training.replay.prefetch import Prefetch
    from jurybox.training.replay.save import BackgroundSave

_PLAIN = Windows()


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened to a replay since it was made, all processes together.

    Attributes:
        added: rows written, those of killed writers included.
        overwritten: rows that newer ones replaced (or that were discarded).
        dropped: rows that a full replay refused.
        retried: slots that were passed by, because another writer was in them or a killed one had been.
        sampled: rows handed out.
        redrawn: draws thrown away, because their row was being written or did not fit what was asked for.
        stale_priorities: priorities that came after their row was overwritten.
    """

    added: int
    overwritten: int
    dropped: int
    retried: int
    sampled: int
    redrawn: int
    stale_priorities: int


class Replay:
    """One replay as this process sees it. Make it with `create`, join it with `attach`, bring it back with `load`.

    Every method may be called from several threads at once, but rows of one episode stream come from one thread.
    A row costs its fields' stored sizes and a sequence word of 8 bytes.
    """

    def __init__(
        self, segment: Segment, layout: Layout, *, name: str, threads: int | None, seed: int | None, timeout: float
    ) -> None:
        self.name = name
        self.layout = layout
        self._segment: Segment | None = segment
        # Threads beyond four gain nothing on the machines we know: the memory is the bound.
        crew = min(4, len(os.sched_getaffinity(0))) if threads is None else threads
        first = secrets.randbits(63) if seed is None else seed
        self._parts = [
            Part(
                segment,
                layout,
                place,
                mark=ANCHOR_MARK if number else 0,
                threads=crew,
                seed=first + number,
                timeout=timeout,
            )
            for number, place in enumerate(layout.parts)
        ]
        self._pool = self._parts[0]
        self.saved: Saved | None = None
        # Bound native methods: a Python frame in between would double the price of a small row.
        self.add = self._pool.ring.add  # type: ignore[method-assign]
        self.extend = self._pool.ring.extend  # type: ignore[method-assign]

    # ---- coming and going

    @classmethod
    def create(
        cls,
        name: str,
        capacity: int,
        fields: Mapping[str, Field],
        *,
        prioritized: bool = False,
        alpha: float = 0.6,
        full: FullMode = "overwrite",
        episodes: Episodes | None = None,
        anchor: int = 0,
        limiter: RateLimiter | None = None,
        threads: int | None = None,
        seed: int | None = None,
        timeout: float = 10.0,
        populate: bool = False,
    ) -> Replay:
        """Make an empty replay of `capacity` rows in shared memory; it stays while any process has it open.

        Args:
            name: by which `attach` finds it; one user's replays have different names.
            fields: what a row is made of, in the order in which `add` is best called.
            prioritized: keep priorities (T. Schaul et al., 2016, proportional variant).
            alpha: how much priorities count, 0 to 1.
            full: what a full replay does with a new row: "overwrite" the oldest, "block" until rows are taken or
                discarded, "drop_newest".
            episodes: link rows to those before and after them.
            anchor: rows of a second part that nothing overwrites; see `anchor` and `sample`.
            limiter: hold writers and samplers together.
            threads: that copy large samples; None: one a core, four at most.
            seed: of this process's draws; None: from the operating system.
            timeout: seconds that add and sample wait, where something makes them wait.
            populate: touch all memory now, instead of when a row is first written (seconds for gigabytes).

        Raises:
            SharedMemoryError: there is no room, or the name is taken.
            ValueError: the description contradicts itself; the message says where.
        """
        _check_name(name)
        if capacity < 1 or anchor < 0:
            raise ValueError(f"capacity={capacity} must be at least 1 and anchor={anchor} at least 0")
        if not 0 < len(fields) <= 64:
            raise ValueError(f"a row has 1 to 64 fields, came {len(fields)}")
        if full not in FULL_MODES:
            raise ValueError(f"full={full!r} is unknown: expected one of {', '.join(FULL_MODES)}")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha} must be between 0 and 1")
        layout = Layout(capacity, dict(fields), prioritized, alpha, full, _checked(episodes, fields), anchor, limiter)
        segment = Segment.create(segment_name(name, "replay"), layout.segment_bytes)
        if populate:
            segment.populate()
        format_parts(segment, layout)
        return cls(segment, layout, name=name, threads=threads, seed=seed, timeout=timeout)

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        threads: int | None = None,
        seed: int | None = None,
        timeout: float = 10.0,
        populate: bool = False,
    ) -> Replay:
        """Open a replay that another process has made; `populate` maps all its pages now, not one by one later.

        Raises:
            SharedMemoryError: there is none of that name.
            ProtocolMismatch: it was made by a release with another layout.
        """
        _check_name(name)
        segment = Segment.attach(segment_name(name, "replay"), keep_alive=True)
        try:
            layout = Layout.read(segment.buffer, name)
            if populate:
                segment.populate()
            return cls(segment, layout, name=name, threads=threads, seed=seed, timeout=timeout)
        except BaseException:
            segment.close()
            raise

    def close(self) -> None:
        """Let go of the memory in this process. Arrays of reservations stay valid; the replay stays for others."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def unlink(self) -> None:
        """Remove the name: nobody can attach any more, and the memory is freed when the last process closes."""
        (directory() / segment_name(self.name, "replay")).unlink(missing_ok=True)

    def __enter__(self) -> Replay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        owned = self._segment is not None and self._segment.owned
        if owned:
            self.unlink()
        self.close()

    # ---- adding

    def add(self, **fields: Any) -> int:
        """Add one row. Values are numbers, NumPy arrays or CPU tensors of the fields' shapes, strided or not.

        Returns:
            The rows written: 1, or 0 where the replay is full and drops.

        Raises:
            SpecMismatch: a field is missing, unknown, or of another shape or kind of dtype.
            Timeout: full="block" or the rate limiter let nothing in for `timeout` seconds.
        """
        raise NotImplementedError  # every object has the native method in its place

    def extend(self, **fields: Any) -> int:
        """Add n rows, in order: every value has a leading dimension n. Returns the rows written; raises as `add`."""
        raise NotImplementedError  # every object has the native method in its place

    def reserve(self, rows: int) -> Reservation:
        """`rows` rows to be written in place: ``with replay.reserve(8) as r: r["observation"][:] = ...``."""
        return Reservation(self._pool, rows)

    def stream(self) -> Streams:
        """A writer of one env's episodes, apart from this object's own."""
        return Streams(self._pool, 1, group=False)

    def streams(self, n: int) -> Streams:
        """A writer for n envs side by side: `add` takes n rows, one for each env."""
        return Streams(self._pool, n, group=True)

    def end_episode(self) -> None:
        """The last row that this object's `add` or `extend` wrote was the last of its episode."""
        self._pool.ring.end_episode()

    @property
    def anchor(self) -> Streams:
        """The writer of the part that is kept for good (demonstrations, say); full, it drops what comes.

        Raises:
            Refused: the replay was made without one.
        """
        if len(self._parts) == 1:
            raise Refused("this replay has no anchor: make it with anchor=<rows>")
        return Streams(self._parts[1], 1, group=False)

    def discard(self, rows: int) -> int:
        """Give up the `rows` oldest rows, so that a full replay that blocks or drops takes new ones; how many went."""
        return int(self._pool.ring.discard(rows))

    # ---- sampling

    def batch(self, n: int, windows: Windows = _PLAIN, *, pinned: bool = False) -> Batch:
        """Memory for samples of n rows, to be used again and again; `pinned` page-locks it for copies to a GPU."""
        return Batch(self.layout, [part.ring for part in self._parts], n, windows, pinned=pinned)

    def sample(
        self,
        n: int,
        out: Batch | None = None,
        *,
        windows: Windows = _PLAIN,
        replace: bool = True,
        uniform: bool = False,
        beta: float = 0.4,
        anchor_ratio: float = 0.25,
    ) -> Batch:
        """Draw n rows, each of them whole: a row that is overwritten while it is copied is drawn anew.

        Args:
            out: a batch of `batch()`, filled and given back; None: a new one. Its own windows count.
            windows: what is handed out around each row.
            replace: False: no row twice.
            uniform: draw from a prioritized replay as if it were none.
            beta: strength of the importance weights, 0 to 1.
            anchor_ratio: part of the rows that come from the anchor, where there is one with rows in it.

        Raises:
            NotEnoughRows: the replay is empty, holds fewer rows than asked for without replacement, or none that
                fits the windows.
            Timeout: the rate limiter let nobody sample for `timeout` seconds.
        """
        batch = Batch(self.layout, [part.ring for part in self._parts], n, windows) if out is None else out
        prioritized = self.layout.prioritized and not uniform
        if prioritized and not replace:
            raise SpecMismatch("prioritized samples are drawn with replacement: give uniform=True with replace=False")
        if prioritized is False and batch.weights is not None:
            batch.weights[:n] = 1.0
        fixed = 0
        if len(self._parts) > 1:
            kept = self._parts[1]
            if kept.ring.size:
                fixed = n if not self._pool.ring.size else round(n * anchor_ratio)
                self._draw(1, batch, fixed, 0, replace=replace, prioritized=prioritized, beta=beta)
        if fixed < n or n == 0:
            self._draw(0, batch, n - fixed, fixed, replace=replace, prioritized=prioritized, beta=beta)
        return batch

    def _draw(
        self, number: int, batch: Batch, n: int, first: int, *, replace: bool, prioritized: bool, beta: float
    ) -> None:
        part = self._parts[number]
        status = part.ring.sample(batch.columns[number], n, first, replace, prioritized, beta, part.mark)
        if status == 0:
            return
        rows = part.ring.size
        if status < 0:
            raise Timeout(
                f"the rate limiter let no {n} rows be sampled within {part.ring.timeout} s ({part.ring.added} added); "
                "add more rows, or give a longer timeout"
            )
        if rows == 0:
            raise NotEnoughRows(f"replay {self.name} is empty: expected rows to sample {n} from; add some first")
        if not replace:
            raise NotEnoughRows(
                f"replay {self.name} cannot give {n} different rows: it holds {rows}, "
                "and fewer may fit or be whole; ask for fewer"
            )
        raise NotEnoughRows(
            f"replay {self.name} holds {rows} rows, and none could be handed out: each is being written, or its "
            "episode does not reach as far as the windows ask (the newest rows of running episodes never do)"
        )

    def update_priorities(self, indices: npt.NDArray[np.int64], errors: npt.ArrayLike) -> int:
        """Set the priorities of rows to (|error| + 1e-6) ** alpha, from any process, while others add and sample.

        Args:
            indices: (n,) of a batch.
            errors: (n,) TD errors.

        Returns:
            How many rows were still there; the others have been overwritten and are counted as stale.
        """
        values = np.ascontiguousarray(errors, np.float32)
        return sum(int(part.ring.update_priorities(indices, values, part.mark)) for part in self._parts)

    def prefetch(self, n: int, *, depth: int = 2, device: str | None = None, **options: Any) -> Prefetch:
        """The next batches, made ready on a thread; with device="cuda" already there. Options are `sample`'s."""
        from jurybox.training.replay.prefetch import Prefetch

        return Prefetch(self, n, depth=depth, device=device, options=options)

    def seed(self, seed: int) -> None:
        """Begin this process's draws anew: the same calls on the same rows draw the same."""
        for number, part in enumerate(self._parts):
            part.ring.seed(seed + number)

    # ---- files

    def save(self, path: str | Path, *, incremental: bool = False, codec: str = "lz4") -> Saved:
        """Write all rows to a file while writers go on; see `jurybox.training.replay.save`."""
        from jurybox.training.replay.save import save

        return save(self, Path(path), incremental=incremental, codec=codec)

    def save_in_background(self, path: str | Path, *, incremental: bool = False, codec: str = "lz4") -> BackgroundSave:
        """The same on a thread: ``.result()`` waits for it and raises what it raised."""
        from jurybox.training.replay.save import BackgroundSave

        return BackgroundSave(self, Path(path), incremental=incremental, codec=codec)

    @classmethod
    def load(
        cls, path: str | Path, name: str, *, recover: bool = False, threads: int | None = None, seed: int | None = None
    ) -> Replay:
        """Make a replay of what `save` wrote; see `jurybox.training.replay.load`."""
        from jurybox.training.replay.load import load

        return load(cls, Path(path), name, recover=recover, threads=threads, seed=seed)

    def restore(self, path: str | Path, *, recover: bool = False) -> None:
        """Put what `save` wrote into this replay, in the place of its rows; nobody else may use it meanwhile."""
        from jurybox.training.replay.load import restore

        restore(self, Path(path), recover=recover)

    # ---- looking

    @property
    def parts(self) -> list[Part]:
        """The pool, and the anchor where there is one."""
        return self._parts

    @property
    def capacity(self) -> int:
        """Rows that fit, anchor included."""
        return self.layout.capacity + self.layout.anchor

    @property
    def added(self) -> int:
        """Rows added since the replay was made, by all processes."""
        return sum(int(part.ring.added) for part in self._parts)

    def __len__(self) -> int:
        return sum(int(part.ring.size) for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self.layout.segment_bytes

    @property
    def counters(self) -> Counters:
        reserved, retried, dropped, stale, sampled, redrawn = (
            sum(values) for values in zip(*(part.ring.counters() for part in self._parts), strict=True)
        )
        added = reserved - retried
        return Counters(added, max(0, added - len(self)), dropped, retried, sampled, redrawn, stale)

    def repair(self) -> None:
        """Sum the priorities anew; for a replay at rest, after a process was killed in the midst of setting some."""
        for part in self._parts:
            part.ring.rebuild_sums()

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {spec.dtype}{list(spec.shape)}" for name, spec in self.layout.fields.items())
        return f"Replay({self.name!r}, {len(self)} of {self.capacity} rows, {fields})"


def _check_name(name: str) -> None:
    if not name or "/" in name or "*" in name or len(name) > 100:
        raise ValueError(f"{name!r} names no replay: expected 1 to 100 characters without '/' and '*'")


def _checked(episodes: Episodes | None, fields: Mapping[str, Field]) -> Episodes | None:
    """The episodes' field names, those left at their default only where there is such a field."""
    if episodes is None:
        return None
    default = Episodes()
    named: dict[str, str | None] = {}
    for side in ("terminated", "truncated", "reward"):
        name = getattr(episodes, side)
        if name is not None and name not in fields:
            if name != getattr(default, side):
                raise ValueError(
                    f"episodes: there is no field {name!r} for {side}; expected one of {', '.join(fields)}"
                )
            name = None
        if name is not None and (fields[name].shape or fields[name].stored is not None):
            raise ValueError(f"episodes: field {name!r} must be one number a row, stored as it is")
        named[side] = name
    return Episodes(**named)
